"""The terms of the regret bounds, evaluated during a run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torch_occ.game.callbacks import Callback
from torch_occ.game.history import comparator
from torch_occ.game.learners import FTRL
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, optimal_policy
from torch_occ.theory.bounds import adversarial_bound, lower_order
from torch_occ.theory.curvatures import M_inverse, N_diagonal, all_N, curvature, hybrid
from torch_occ.theory.runs import tilde
from torch_occ.theory.statements import Parameters
from torch_occ.theory.terms import norm_of_moments, penalty_bound, stability_bound, weighed

if TYPE_CHECKING:
    from torch_occ.game.simulate import Simulation


# -- The terms of `lem:key_lemma_ftrl` at the checkpoints of a run --------------------------------
#
# Numbers at one episode (`..._now`, smoothness, closed-form bounds) are exact. Sums over all
# episodes so far have exact weights 1/eta_t - 1/eta_{t-1} and 8 eta_t; what depends on q_t is taken
# to be linear in log t between two checkpoints, and constant before the first.

#: Curves that exist a second time, with the suffix `_shared`: against one policy for all seeds, the
#: best for their mean, in place of the best one of each seed. docs/theory.md has the difference.
_SHARED = ("regret", "penalty", "penalty_bound", "stability_bound", "bound_terms", "bound_lemmas")


class Records(NamedTuple):
    """What is kept of C checkpoints for N seeds, `(C, N)` unless a comment says otherwise."""

    episode: Tensor  # (C,)
    q: Tensor  # (C, N, S, A), q_t
    charged: Tensor  # (C, N, S, A), the sum of the means of the losses
    regret: Tensor
    # E |estimate|^2 with the losses since the checkpoint before, at the q of that checkpoint and at
    # q_t; and the bound of `lem:stability_first_step` at both.
    norm_before: Tensor
    norm: Tensor
    first_step_before: Tensor
    first_step: Tensor
    # The extremes of tilde q_t / q_t over pairs.
    smoothness_max: Tensor
    smoothness_min: Tensor


def _against(
    mdp: LayeredMDP,
    parameters: Parameters,
    records: Records,
    mappings: Tensor,
    stability: Tensor,
    rest: Tensor,
) -> dict[str, Tensor]:
    """Everything that depends on the comparator, `(C, N)` each; the mappings are `(C, N, S, A)`."""
    alpha, best = parameters.alpha, occupancy(mdp, mappings)
    best_value, values = hybrid(mdp, best, alpha), hybrid(mdp, records.q, alpha)
    limits: list[Tensor] = []  # the bounds of both lemmas, (2, C, N) for each comparator
    for i, mapping in enumerate(mappings):
        if i and torch.equal(mapping, mappings[i - 1]):  # the comparator changes rarely
            limits.append(limits[-1])
        else:
            bound = penalty_bound(mdp, records.q, best[i], mapping, alpha)
            other = stability_bound(mdp, records.q, mapping, alpha)
            limits.append(torch.stack([bound, other]))
    rates = parameters.eta_step, lambda t: 8 * parameters.eta(t)
    weights = [running_weights(records.episode, rate).to(values) for rate in rates]  # (C, C)
    penalty = best_value * weights[0].sum(-1, keepdim=True) - weights[0] @ values
    penalty_limit, stability_limit = (
        torch.stack([row @ limit[i] for row, limit in zip(weights[i], limits, strict=True)])
        for i in range(2)
    )
    last = torch.stack([limit[:, i] for i, limit in enumerate(limits)], 1)
    spent = (best * records.charged).sum((-2, -1))
    return {
        "regret": records.regret + comparator(mdp, records.charged) - spent,
        "penalty": penalty,
        "penalty_bound": penalty_limit,
        "stability_bound": stability_limit,
        "bound_terms": penalty + stability + rest,
        "bound_lemmas": penalty_limit + stability_limit + rest,
        "penalty_now": best_value - values,
        "penalty_now_bound": last[0],
        "stability_now_bound": last[1],
    }


def running_weights(checkpoints: Tensor, rate: Callable[[Tensor], Tensor]) -> Tensor:
    """W `(C, C)` with sum_{t <= T_i} rate(t) f(t) = sum_j W_ij f(T_j)."""
    ends = checkpoints.tolist()
    left, right = interval_weights([0, *ends], rate)
    shifted = torch.nn.functional.pad(left[1:], (0, 1)).expand(len(ends), -1)
    return right.expand(len(ends), -1).tril() + shifted.tril(-1)


def interval_weights(ends: list[int], rate: Callable[[Tensor], Tensor]) -> Tensor:
    """left and right, `(2, len(ends) - 1)`, of every interval from one of the `ends` to the next:

        sum_{start < t <= end} rate(t) f(t) = left f(start) + right f(end).

    f is linear in log t; it is constant if start is 0.
    """
    found = []
    for start, end in pairwise(ends):
        t = torch.arange(start + 1, end + 1, dtype=torch.float64)
        weights = rate(t)
        if not start:
            found.append((0.0, float(weights.sum())))
            continue
        logs = (t / start).log()
        right = float(weights @ (logs / logs[-1]))
        found.append((float(weights.sum()) - right, right))
    return torch.tensor(found, dtype=torch.float64).T


# -- A callback that evaluates them ----------------------------------------------------------------
#
# Between checkpoints the run adds up the means of the losses and their second moments
# E[loss_i loss_j].

#: Prefix of the certificate's entries in `Simulation.sums`, with which a saved run continues.
_KEPT = "theory/"


class Certificate(Callback):
    """Penalty, stability, their bounds and the smoothness of the update of `alg:main_alg`.

    `curves` has one number per seed and checkpoint under each name; docs/theory.md lists the names.

    A TensorBoard callback of the same run logs them, under `theory/*`.

    Raises:
        ValueError: before the first episode, if the learner does not play `alg:main_alg`, or if a
            saved run was begun without a certificate.
    """

    def __init__(self) -> None:
        self.rows: list[Records] = []  # one for each checkpoint, without the axis of C

    @property
    @torch.no_grad()
    def curves(self) -> dict[str, Tensor]:
        """Every curve by its name, `(N, C)`, and `episodes` `(C,)`, at the checkpoints so far."""
        if not self.rows:
            return {}
        mdp, parameters, records = self.mdp, self.parameters, self._records()
        t = records.episode.to(records.q)[:, None].expand_as(records.regret)
        rest, ends = lower_order(mdp, parameters, t), [0, *records.episode.tolist()]
        left, right = interval_weights(ends, lambda t: 8 * parameters.eta(t)).to(t).unsqueeze(-1)
        stability = (right * records.norm + left * records.norm_before).cumsum(0)
        first_step = (right * records.first_step + left * records.first_step_before).cumsum(0)
        own = optimal_policy(mdp, records.charged).policy
        shared = optimal_policy(mdp, records.charged.mean(1)).policy.unsqueeze(1).expand_as(own)
        found = other = _against(mdp, parameters, records, own, stability, rest)
        if not torch.equal(own, shared):
            other = _against(mdp, parameters, records, shared, stability, rest)
        found["regret"] = records.regret
        found |= {f"{name}_shared": other[name] for name in _SHARED}
        found |= {
            "lower_order": rest,
            "stability": stability,
            "stability_first_step": first_step,
            "stability_now": records.norm,
            "stability_now_first_step": records.first_step,
            "bound_adversarial": adversarial_bound(mdp, parameters, t),
            "smoothness_max": records.smoothness_max,
            "smoothness_min": records.smoothness_min,
        }
        return {"episodes": records.episode} | {name: x.T for name, x in found.items()}

    def _records(self) -> Records:
        return Records(*map(torch.stack, zip(*self.rows, strict=True)))

    def on_start(self, run: Simulation) -> None:
        self.mdp, self.parameters = run.learner.mdp, Parameters.of(run.learner)
        names = [f"{_KEPT}{name}" for name in (*Records._fields, "total")]
        if run.t and not {*names} <= {*run.sums}:
            raise ValueError(
                f"save_to: the run that continues at episode {run.t + 1} was begun without the "
                "certificate, which needs every checkpoint; leave it out, or begin anew with "
                "another file"
            )
        run.ask_for_second_moments()
        run.monitors.append(self.monitor)
        if run.t:
            *kept, self.total = (run.sums[name] for name in names)
            self.rows = [Records(*parts) for parts in zip(*kept, strict=True)]
        else:  # `total` is that up to the last checkpoint
            self.rows, self.total = [], run.sums["second_moment"].clone()

    @torch.no_grad()
    def on_checkpoint(self, run: Simulation) -> None:
        assert isinstance(run.learner, FTRL)
        q, total, alpha = run.q.clone(), run.sums["second_moment"].clone(), self.parameters.alpha
        start, before = (self.rows[-1].episode, self.rows[-1].q) if self.rows else (0, q)
        moments, both = (total - self.total) / (run.t - start), torch.stack([before, q])
        curve = curvature(self.mdp, both, alpha)
        layers = all_N(self.mdp, curve)
        norms = norm_of_moments(self.mdp, both, M_inverse(self.mdp, curve, layers), moments)
        bounds = weighed(self.mdp, both, N_diagonal(self.mdp, layers)).sum((-2, -1))
        ratio = tilde(run.learner.step, q, run.learner.state["cumulative_loss"], run.t) / q
        above, below = (torch.where(self.mdp.actions, sign * ratio, -torch.inf) for sign in (1, -1))
        extremes = above.amax((-2, -1)), -below.amax((-2, -1))
        kept = torch.tensor(run.t), q, run.sums["total_mean"].clone(), run.curves["regret"][-1]
        parts = [*kept, *norms, *(self.mdp.horizon * bounds), *extremes]
        self.rows.append(Records(*parts))
        self.total = total

    def on_chunk(self, run: Simulation) -> None:
        if self.rows:
            kept = self._records()._asdict() | {"total": self.total}
            run.sums |= {f"{_KEPT}{name}": part for name, part in kept.items()}

    def monitor(self, after: int) -> dict[int, dict[str, float]]:
        """Means over seeds, and extremes of the smoothness, by episode, after one of them."""
        if not self.rows or int(self.rows[-1].episode) <= after:
            return {}
        over_seeds = {"smoothness_max": torch.amax, "smoothness_min": torch.amin}
        curves = self.curves
        episodes = curves.pop("episodes").tolist()
        shown = {x: over_seeds.get(x, torch.mean)(curves[x], 0).tolist() for x in curves}
        points = {t: {f"theory/{x}": shown[x][i] for x in shown} for i, t in enumerate(episodes)}
        return {t: point for t, point in points.items() if t > after}
