"""The cheapest visits that are still missing after some were made.

The program of torch_occ.mdp.limits.graves_lai asks for visits n, per log T, that rule out all
confusing tables. If x of them were made already, only

    min over m >= 0 of sum m(s,a) gap(s,a)   with   sum (x + m)(s,a) kl(mean, other)(s,a) >= 1

is still to be paid, where m satisfies the flow constraints. Nothing is missing if x itself rules
out every confusing table. `OSSB` solves this program again and again with empirical means, so
accuracy matters less than time.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.limits.excursions import Floats, excursions_of
from torch_occ.mdp.limits.families import Bernoulli
from torch_occ.mdp.limits.graves_lai import Program, checked, table_of
from torch_occ.mdp.limits.separation import Separation

#: Every confusing table can be ruled out by this much information per visit. Tables that are closer
#: ask for more than a million visits per log T; solvers drop coefficients below 1e-9.
_FAINTEST = 1e-6

#: The steps of bisection, fewer than those of `lower_bound`.
_COARSE, _FINE = 12, 20

#: The most linear programs.
_ROUNDS = 30


def missing_visits(
    mdp: LayeredMDP,
    mean: Tensor,
    observed: Tensor,
    *,
    tolerance: float = 0.03,
    budget: int = 2000,
) -> Tensor:
    """The cheapest visits, per log T, that complete the observed ones, `(S, A)`.

    Args:
        mean: means of Bernoulli losses, `(S, A)`.
        observed: visits of every pair, per log T, `(S, A)`.
        tolerance: the share of the information that may be missing in the end.
        budget: the most partial policies that one search examines. If it is reached, visits may be
            missing after those that are returned.

    Raises:
        ValueError: as `lower_bound`.
        ImportError: if SciPy is needed but not installed.
    """
    family = Bernoulli()
    mdp, mean = checked(mdp, mean, family)
    excursions = excursions_of(mdp, mean)
    x = observed.detach().cpu().double().numpy().ravel()[excursions.pairs]
    if not len(excursions.hidden):
        possible = excursions.gap < family.most(excursions.mean)
        information = np.maximum(family.information(excursions.mean, excursions.gap), _FAINTEST)
        n = np.divide(1.0, information, out=np.zeros_like(information), where=possible)
        return table_of(mdp, excursions, np.maximum(n - x, 0.0))
    separation = Separation(excursions, family, budget=budget, coarse=_COARSE, fine=_FINE)
    program = Program(excursions, separation, tolerance)
    return table_of(mdp, excursions, _complete(program, x))


def _complete(program: Program, x: Floats) -> Floats:
    """Add violated constraints until no table is missing much information."""
    m, cuts = np.zeros_like(x), np.zeros((0, len(x)))
    for _ in range(_ROUNDS):
        found = program.separation.search(x + m, 1.0 - program.tolerance)
        if found.least >= 1.0 - program.tolerance or not len(found.cuts):
            break
        strongest = found.cuts.max(1, keepdims=True)
        stronger = found.cuts * np.maximum(1.0, _FAINTEST / np.maximum(strongest, 1e-300))
        cuts = np.concatenate([cuts, stronger])
        m = program.cheapest(cuts, x)
    return m
