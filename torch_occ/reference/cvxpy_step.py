"""The FTRL step in cvxpy, and as a layer of cvxpylayers.

The constraints E q = b are built from the transitions, and psi from the tables of its terms. No
code of Newton's method is used. The packages (`pip install torch-occ[reference]`) are imported when
they are used. It runs on the CPU, in double precision.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, util
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.choices import extra
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Composition, Regularizer
from torch_occ.regularizers.parameters import Frozen, fit
from torch_occ.regularizers.terms import Log, Power
from torch_occ.step.solution import Budgets

# -- the problem, from the tables alone --------------------------------------------------------

#: A convex function of an argument. An exponent p stands for x^p (-x^p for 0 < p < 1); the other
#: functions have names.
Atom = tuple[str, float | str]

#: q(s,a) log( q(s,a) / q(s) ): two terms of which only the sum is convex.
CONDITIONAL: Atom = ("pair given state", "x log x")


def atoms(regularizer: Regularizer, t: Tensor | float) -> dict[Atom, Tensor]:
    """psi_t as a combination of convex atoms with positive weights.

    Equal atoms are merged, and atoms of weight zero are left out. Products such as alpha / eta_t
    are computed in torch, because cvxpy's rules for parameters (DPP) forbid them. Autograd then
    passes the derivative in a weight on to alpha, gamma and t.

    Raises:
        TypeError: if a part of the regularizer has no table of terms.
        ValueError: if a term is not convex, or a parameter has one value per layer, state or pair.
    """
    for name, place in regularizer.places().items():
        raise ValueError(
            f"regularizer: {name} has one value per {place.kind}, and the statement in cvxpy has "
            "one weight per term; give a scalar"
        )
    weights: dict[Atom, Tensor] = {}
    nothing = torch.zeros((), dtype=torch.float64)
    composition = Composition(regularizer)
    for part, _ in composition.others:
        raise TypeError(
            f"{type(part).__name__} has no table of terms, so it cannot be stated in cvxpy; "
            "use a TabularRegularizer"
        )
    found = composition.weigh(composition.values(torch.as_tensor(t, dtype=torch.float64)))
    for term, given, p in zip(composition.terms, found.terms, found.exponents, strict=True):
        weight = nothing + fit(given, 0)
        function: float | str = "x log x"
        if term.function is Log:
            function, weight = "-log x", -weight
        if term.function is Power:
            function = float(torch.as_tensor(p).detach())
            weight = -weight if 0 < function < 1 else weight
        atom = term.argument, function
        weights[atom] = weights.get(atom, nothing) + weight
    state, pair = ("state", "x log x"), ("pair", "x log x")
    if bool((weights.get(state, nothing) < 0).any()):
        weights[CONDITIONAL] = -weights.pop(state)
        weights[pair] = weights.get(pair, nothing) - weights[CONDITIONAL]
    for (argument, function), weight in weights.items():
        if bool((weight < 0).any()):
            raise ValueError(
                f"the term {function} of {argument} is not convex with this sign, so psi cannot be "
                "stated in cvxpy"
            )
    return {atom: weight for atom, weight in weights.items() if bool((weight != 0).any())}


def gather(mdp: LayeredMDP, loss: Tensor) -> Tensor:
    """The loss on the N existing pairs, `(*batch, N)`."""
    if loss.shape[-2:] != mdp.actions.shape or not bool(loss[..., mdp.actions].isfinite().all()):
        raise ValueError(
            f"loss: expected finite values of shape (*batch, {mdp.num_states}, {mdp.num_actions}), "
            f"got {loss}"
        )
    return loss[..., mdp.actions]


def spread(mdp: LayeredMDP, x: Tensor) -> Tensor:
    """The inverse of `gather`: `(*batch, N)` -> `(*batch, S, A)`, zero on masked pairs."""
    place = (mdp.actions.flatten().cumsum(0) - 1).clamp(min=0).view(mdp.actions.shape)
    return torch.where(mdp.actions, x[..., place], 0.0)


def flow_constraints(mdp: LayeredMDP) -> tuple[Tensor, Tensor]:
    """The sparse matrix E `(S, N)` over the existing pairs, and b `(S,)`."""
    if mdp.batch_shape:
        raise ValueError(
            f"mdp: expected a single MDP, got a batch of shape {tuple(mdp.batch_shape)}"
        )
    state = mdp.actions.nonzero()[:, 0]
    number = mdp.actions.flatten().cumsum(0) - 1  # the index of each pair among the existing ones
    rows, columns = [state], [torch.arange(len(state))]
    values = [torch.ones(len(state), dtype=mdp.dtype)]
    for (here, there), layer in zip(
        pairwise(mdp.layer_slices), mdp.to_sparse().layers, strict=False
    ):
        entries = layer.tensor.detach()
        rows.append(there.start + entries.indices()[1])
        columns.append(number[here.start * mdp.num_actions + entries.indices()[0]])
        values.append(-entries.values())
    index, shape = torch.stack([torch.cat(rows), torch.cat(columns)]), (mdp.num_states, len(state))
    E = torch.sparse_coo_tensor(index, torch.cat(values), shape, check_invariants=False).coalesce()
    return E, torch.nn.functional.pad(
        mdp.initial.detach(), (0, mdp.num_states - mdp.layer_sizes[0])
    )


def state_in_cvxpy(
    mdp: LayeredMDP, which: Sequence[Atom], *, exact_powers: bool = False
) -> tuple[Any, Any, list[Any]]:
    """The step as a DPP problem.

    Powers other than 1/2 become second-order cones, with a nearby fraction as the exponent. With
    `exact_powers` they become power cones, which diffcp does not support.

    Returns:
        The problem, its variable q over the N existing pairs, and its parameters: the loss, and one
        weight per atom.
    """
    cp = require("cvxpy")
    scipy = require("scipy.sparse")
    E, b = flow_constraints(mdp)
    state = mdp.actions.nonzero()[:, 0]
    flows = scipy.csr_array((E.values().numpy(), tuple(E.indices().numpy())), shape=tuple(E.shape))
    sums = scipy.csr_array(
        (torch.ones(len(state)).double().numpy(), (state.numpy(), range(len(state)))),
        shape=tuple(E.shape),
    )
    siblings = sums.T @ sums  # pairs that share a state
    several = mdp.actions.sum(-1)[state] > 1
    neighbours = mdp.layer[state].bincount()[mdp.layer[state]]
    q, loss = cp.Variable(len(state)), cp.Parameter(len(state))
    weights = [cp.Parameter(nonneg=True) for _ in which]
    arguments = {
        "pair": q,
        "rest": (siblings - scipy.eye_array(len(state))).tocsr()[several.numpy()]
        @ q,  # not for the only action of a state
        "state": sums @ q,
        "complement": 1 - q[(neighbours > 1).numpy()],  # not for the only pair of a layer
    }

    def value(atom: Atom) -> Any:
        if atom == CONDITIONAL:
            return cp.sum(cp.rel_entr(q, siblings @ q))
        x, function = arguments[atom[0]], atom[1]
        if isinstance(function, float):
            power = (
                cp.sqrt(x) if function == 0.5 else cp.power(x, function, approx=not exact_powers)
            )
            return cp.sum(-power if 0 < function < 1 else power)
        return cp.sum(-cp.entr(x) if function == "x log x" else -cp.log(x))

    terms = [weight * value(atom) for weight, atom in zip(weights, which, strict=True)]
    return (
        cp.Problem(cp.Minimize(loss @ q + sum(terms)), [flows @ q == b.numpy()]),
        q,
        [loss, *weights],
    )


def clarabel(tolerance: float) -> dict[str, float]:
    """The options of Clarabel for one tolerance."""
    return dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), tolerance)


def solve_cvxpy(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    loss: Tensor,
    t: Tensor | float = 1.0,
    *,
    constraints: Budgets | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Solve the step with cvxpy; by default with Clarabel and tight tolerances.

    Args:
        constraints: budgets without a batch.
        options: options of `Problem.solve` that replace the defaults.

    Returns:
        q `(S, A)` and the multipliers v `(S,)`.
    """
    weights = atoms(regularizer, t)
    problem, q, parameters = state_in_cvxpy(mdp, list(weights), exact_powers=True)
    if constraints is not None:
        spent = gather(mdp, constraints.costs).detach().numpy() @ q
        limits = constraints.limits.detach().numpy()
        problem = type(problem)(problem.objective, [*problem.constraints, spent <= limits])
    scale = largest(weights)
    for parameter, given in zip(parameters, [gather(mdp, loss), *weights.values()], strict=True):
        parameter.value = (given.detach() / scale).numpy()
    with warnings.catch_warnings():
        # If Clarabel cannot certify the digits asked for, it returns its best point, and cvxpy
        # warns.
        warnings.filterwarnings("ignore", "Solution may be inaccurate", UserWarning)
        problem.solve(**({"solver": "CLARABEL", **clarabel(1e-14)} | options))
    # cvxpy adds y'(E q - b) to the objective, so v = -y.
    return spread(mdp, torch.as_tensor(q.value)), -scale * torch.as_tensor(
        problem.constraints[0].dual_value
    )


def largest(weights: Mapping[Atom, Tensor]) -> Tensor:
    """The largest weight, `()` or `(B,)`.

    Dividing the loss and all weights by it does not change q, and solvers are far more accurate
    with numbers near one.
    """
    return torch.stack(torch.broadcast_tensors(*weights.values())).detach().amax(0)


# -- as a layer --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Options with which cvxpylayers solves and differentiates."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)  # the layer's `solver_args`
    mode: str | None = None  # diffcp's method for derivatives; None is its default
    solver: str | None = None  # the backend; None is diffcp
    normalize: bool = False  # divide loss and weights by the largest weight first

    @property
    def missing(self) -> str:
        """Which package is missing and how to install it; empty if none is."""
        solver = "diffcp" if self.solver is None else self.solver.lower()
        method = (
            str(self.arguments.get("solve_method", "scs")).lower()
            if self.solver is None
            else solver
        )
        absent = [
            name
            for name in ("cvxpy", "cvxpylayers", solver, method)
            if util.find_spec(name) is None
        ]
        which = "reference" if self.solver is None else "benchmark"
        return f"{absent[0]} is not installed: pip install torch-occ[{which}]" if absent else ""

    @property
    def installed(self) -> bool:
        """Whether all packages that these settings need are installed."""
        return not self.missing


DEFAULT = Settings("default")
LSMR = Settings("lsmr", mode="lsmr")
MOREAU = Settings("Moreau", solver="MOREAU")
ACCURATE_SCS = Settings(
    "accurate SCS", {"eps": 1e-10, "max_iters": 200_000}, mode="dense", normalize=True
)
ACCURATE_CLARABEL = Settings(
    "accurate Clarabel",
    {"solve_method": "Clarabel", **clarabel(1e-12)},
    mode="dense",
    normalize=True,
)
ALL_SETTINGS = (DEFAULT, LSMR, MOREAU, ACCURATE_SCS, ACCURATE_CLARABEL)


class CvxpyLayer(Frozen):
    """The step by cvxpylayers: `layer(loss, t)` -> q.

    It is differentiable in the loss, in t and in the regularizer's parameters. Exponents are fixed
    at construction and get no gradient. Neither does the parameter of a term whose weight is zero
    at construction.
    """

    fixed: ClassVar = dict.fromkeys(
        ("mdp", "regularizer", "settings", "atoms", "layer"), "make a new CvxpyLayer"
    )

    def __init__(
        self, mdp: LayeredMDP, regularizer: Regularizer, settings: Settings = ACCURATE_CLARABEL
    ) -> None:
        super().__init__()
        self.mdp, self.regularizer, self.settings = mdp, regularizer, settings
        self.atoms = list(atoms(regularizer, 1.0))
        problem, q, parameters = state_in_cvxpy(mdp, self.atoms)
        layer = require("cvxpylayers.torch").CvxpyLayer
        self.layer = layer(
            problem, parameters, [q], solver=settings.solver, solver_args=dict(settings.arguments)
        )

    def forward(self, loss: Tensor, t: Tensor | float = 1.0) -> Tensor:
        """loss `(S, A)` or `(B, S, A)`; t and the parameters are scalars or `(B,)`."""
        weights = atoms(self.regularizer, t)
        scale = largest(weights) if self.settings.normalize else torch.ones(())
        inputs = [
            gather(self.mdp, loss) / scale.unsqueeze(-1),
            *(weights[atom] / scale for atom in self.atoms),
        ]
        # Without a gradient to compute, diffcp would pass the mode to the solver, which rejects it.
        differentiable = torch.is_grad_enabled() and any(given.requires_grad for given in inputs)
        (q,) = self.layer(
            *inputs,
            solver_args={"mode": self.settings.mode}
            if self.settings.mode and differentiable
            else {},
        )
        return spread(self.mdp, q)


def require(module: str) -> Any:
    """Import an optional package; the error says how to install it."""
    with extra("reference", f"torch_occ.reference needs {module.partition('.')[0]}"):
        return import_module(module)


# -- The Kullback-Leibler projection in cvxpy, with one variable per (s, a, s') --------------------
#
# The constraints are stated as in the definition; nothing is eliminated. It is slow and independent
# of torch_occ.step.projection, and checks it.


def project_cvxpy(
    mdp: LayeredMDP,
    q: Tensor,
    transitions: Sequence[Tensor],
    lower: Sequence[Tensor],
    upper: Sequence[Tensor],
    loss: Tensor,
    learning_rate: float,
    **options: Any,
) -> tuple[tuple[Tensor, ...], float]:
    """Project with cvxpy; by default with Clarabel and tight tolerances.

    The arguments are those of `KLProjection.solve`, without a batch.

    Args:
        options: options of `Problem.solve` that replace the defaults.

    Returns:
        q(s,a,s') of every layer, `(S_k, A, S_{k+1})`, and the smallest value of
        learning_rate ⟨q, loss⟩ + KL(q || reference).
    """
    cp = require("cvxpy")
    inflow: Any = mdp.initial.numpy()
    variables, constraints, objective = [], [], 0
    parts = zip(
        *(mdp.split(q, -2), mdp.split(loss, -2), mdp.split(mdp.actions, -2)),
        *(transitions, lower, upper),
        strict=True,
    )
    for weight, cost, mask, p, low, high in parts:
        pairs = mask.nonzero()  # (m, 2), the existing pairs
        reference = (weight.unsqueeze(-1) * p)[mask].numpy()  # (m, n)
        x = cp.Variable(reference.shape)
        total = cp.sum(x, axis=1)
        across = cp.reshape(total, (len(pairs), 1), order="C") @ np.ones((1, p.shape[-1]))
        states = (pairs[:, :1] == torch.arange(len(mask))).double().numpy().T  # (S_k, m)
        constraints += [states @ total == inflow]
        constraints += [x >= cp.multiply(low[mask].numpy(), across)]
        constraints += [x <= cp.multiply(high[mask].numpy(), across)]
        objective += learning_rate * (cost[mask].numpy() @ total)
        # What is impossible under the reference is zero; its upper bound says so.
        possible = reference > 0
        divergence = cp.kl_div(x, np.where(possible, reference, 1.0))
        objective += cp.sum(cp.multiply(possible, divergence))
        inflow = cp.sum(x, axis=0)
        variables.append((x, mask))
    problem = cp.Problem(cp.Minimize(objective), constraints)
    with warnings.catch_warnings():
        # If Clarabel cannot certify the digits asked for, it returns its best point, and cvxpy
        # warns.
        warnings.filterwarnings("ignore", "Solution may be inaccurate", UserWarning)
        # With its usual steps of 0.99 Clarabel stalls at errors of up to 1e-7 in some problems.
        tight = {"solver": "CLARABEL", "max_step_fraction": 0.95, **clarabel(1e-13)}
        problem.solve(**(tight | options))
    found = []
    for x, mask in variables:
        whole = torch.zeros(*mask.shape, x.shape[1], dtype=torch.float64)
        whole[mask] = torch.as_tensor(x.value)
        found.append(whole)
    return tuple(found), float(problem.value)
