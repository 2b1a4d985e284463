"""The terms of the regret bounds, evaluated during a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torch_occ._support.private import event_writer
from torch_occ.game.callbacks import Callback, TensorBoard
from torch_occ.game.history import comparator
from torch_occ.game.learners import FTRL
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, optimal_policy
from torch_occ.step.ftrl import FTRLStep
from torch_occ.theory.bounds import adversarial_bound, lower_order
from torch_occ.theory.curvatures import M_inverse, N_diagonal, all_N, curvature, hybrid
from torch_occ.theory.runs import tilde
from torch_occ.theory.statements import Parameters
from torch_occ.theory.terms import norm_of_moments, penalty_bound, stability_bound, weighed

if TYPE_CHECKING:
    from torch_occ.game.history import History
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
    """What is kept of C checkpoints for N seeds."""

    episode: Tensor  # (C,)
    q: Tensor  # (C, N, S, A), q_t
    estimated: Tensor  # (C, N, S, A), the sum of the loss estimates
    charged: Tensor  # (C, N, S, A), the sum of the means of the losses
    regret: Tensor  # (C, N)
    # E |estimate|^2 with the losses since the checkpoint before, at q_t and at the q of that
    # checkpoint; and the bound of `lem:stability_first_step` at both. (C, N) each.
    norm: Tensor
    norm_before: Tensor
    first_step: Tensor
    first_step_before: Tensor


def expected_norms(mdp: LayeredMDP, alpha: float, q: Tensor, moments: Tensor) -> list[Tensor]:
    """The last four fields of `Records`, `(K, N)` each.

    Args:
        q: those of K checkpoints, and of the one before, `(K + 1, N, S, A)`.
        moments: E[loss_i loss_j], averaged over the episodes since the checkpoint before,
            `(K, N, SA, SA)`.
    """
    curve = curvature(mdp, q, alpha)
    layers = all_N(mdp, curve)
    inverse = M_inverse(mdp, curve, layers)
    steps = mdp.horizon * weighed(mdp, q, N_diagonal(mdp, layers)).sum((-2, -1))
    ends = slice(1, None), slice(None, -1)
    norms = [norm_of_moments(mdp, q[end], inverse[end], moments) for end in ends]
    return norms + [steps[end] for end in ends]


def evaluate_curves(
    step: FTRLStep, parameters: Parameters, records: Records, first: int
) -> dict[str, Tensor]:
    """The curves of the K checkpoints from number `first` on, `(K, N)` each."""
    mdp, now = step.mdp, Records(*(part[first:] for part in records))
    t = now.episode.to(now.q)[:, None].expand_as(now.regret)
    rest = lower_order(mdp, parameters, t)
    ends = [0, *records.episode.tolist()]
    left, right = interval_weights(ends, lambda t: 8 * parameters.eta(t)).to(now.q).unsqueeze(-1)
    found = {
        "stability": (right * records.norm + left * records.norm_before).cumsum(0)[first:],
        "stability_first_step": (
            right * records.first_step + left * records.first_step_before
        ).cumsum(0)[first:],
        "stability_now": now.norm,
        "stability_now_first_step": now.first_step,
    }
    own = optimal_policy(mdp, now.charged).policy
    shared = optimal_policy(mdp, now.charged.mean(1)).policy.unsqueeze(1).expand_as(own)
    against = _against(mdp, parameters, records, own, found["stability"], rest)
    if torch.equal(own, shared):
        other = against | {"regret": now.regret}
    else:
        other = _against(mdp, parameters, records, shared, found["stability"], rest)
        spent = (occupancy(mdp, shared) * now.charged).sum((-2, -1))
        other["regret"] = now.regret + comparator(mdp, now.charged) - spent
    ratio = tilde(step, now.q, now.estimated, t) / now.q
    return (
        {"regret": now.regret, "lower_order": rest}
        | found
        | against
        | {f"{name}_shared": other[name] for name in _SHARED}
        | {
            "bound_adversarial": adversarial_bound(mdp, parameters, t),
            "smoothness_max": torch.where(mdp.actions, ratio, -torch.inf).amax((-2, -1)),
            "smoothness_min": torch.where(mdp.actions, ratio, torch.inf).amin((-2, -1)),
        }
    )


def _against(
    mdp: LayeredMDP,
    parameters: Parameters,
    records: Records,
    mappings: Tensor,
    stability: Tensor,
    rest: Tensor,
) -> dict[str, Tensor]:
    """Everything that depends on the comparator, `(K, N)` each; the mappings are `(K, N, S, A)`."""
    alpha, first = parameters.alpha, len(records.episode) - len(mappings)
    best = occupancy(mdp, mappings)
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
    weights = [
        running_weights(records.episode, rate)[first:].to(values) for rate in rates
    ]  # (K, C)
    penalty = best_value * weights[0].sum(-1, keepdim=True) - weights[0] @ values
    penalty_limit, stability_limit = (
        torch.stack([row @ limit[i] for row, limit in zip(weights[i], limits, strict=True)])
        for i in range(2)
    )
    last = torch.stack([limit[:, first + i] for i, limit in enumerate(limits)], 1)
    return {
        "penalty": penalty,
        "penalty_bound": penalty_limit,
        "stability_bound": stability_limit,
        "bound_terms": penalty + stability + rest,
        "bound_lemmas": penalty_limit + stability_limit + rest,
        "penalty_now": best_value - values[first:],
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
# E[loss_i loss_j]. Several checkpoints are evaluated together, at most so many:
TOGETHER = 16

#: Prefix of the certificate's entries in `Simulation.sums`, with which a saved run continues.
_KEPT = "theory/"


class Certificate(Callback):
    """Penalty, stability, their bounds and the smoothness of the update of `alg:main_alg`.

    `curves` has one number per seed and checkpoint under each name; docs/theory.md lists the names.

    Args:
        board: the TensorBoard callback of the same run, to log to it under `theory/*`. It must
            stand before the certificate in `callbacks`.

    Raises:
        ValueError: before the first episode, if the learner does not play `alg:main_alg`, if the
            board comes later in `callbacks`, or if a saved run was begun without a certificate.
    """

    def __init__(self, board: TensorBoard | None = None) -> None:
        self.board = board
        self._begin()

    def _begin(self) -> None:
        self.records: Records | None = None
        self.waiting: list[tuple[Tensor, ...]] = []  # checkpoints that are not yet among them
        self.total: Tensor | None = None  # the sum of second moments (N, SA, SA) of the records
        self.known: list[dict[str, Tensor]] = []  # the curves, a batch of checkpoints each

    @property
    def curves(self) -> dict[str, Tensor]:
        """Every curve by its name, `(N, C)`, and `episodes` `(C,)`, as far as it is evaluated."""
        if self.records is None:
            return {}
        names = self.known[0]
        joined = {name: torch.cat([part[name] for part in self.known]).T for name in names}
        return {"episodes": self.records.episode} | joined

    def on_start(self, run: Simulation) -> None:
        self._begin()
        self.parameters = Parameters.of(run.learner)
        if self.board is not None and self.board.writer is None:
            raise ValueError(
                "board: the TensorBoard callback must stand before the certificate in `callbacks`"
            )
        if run.t:
            self._restore(run)
        run.ask_for_second_moments()
        if self.total is None:
            self.total = run.sums["second_moment"].clone()

    def on_checkpoint(self, run: Simulation) -> None:
        estimated, regret = run.learner.state["cumulative_loss"], run.curves["regret"][-1]
        parts = (run.q, estimated, run.sums["total_mean"], regret, run.sums["second_moment"])
        self.waiting.append((torch.tensor(run.t), *(part.detach().clone() for part in parts)))
        if len(self.waiting) >= TOGETHER:
            self._evaluate(run)

    def on_chunk(self, run: Simulation) -> None:
        self._evaluate(run)
        self._to_board(TensorBoard.on_chunk, run)  # what is saved as evaluated must be on disk
        if self.records is not None:
            kept = self.records._asdict() | {"total": self.total}
            run.sums |= {f"{_KEPT}{name}": part for name, part in kept.items()}

    def on_end(self, run: Simulation, history: History) -> None:
        self._evaluate(run)

    @torch.no_grad()
    def _evaluate(self, run: Simulation) -> None:
        """Evaluate and log the checkpoints that have waited."""
        if not self.waiting:
            return
        assert self.total is not None
        parts = [torch.stack(x) for x in zip(*self.waiting, strict=True)]
        episode, q, *_, total = parts
        first, start, before = 0, episode.new_zeros(1), q[:1]  # q is constant before the first
        if self.records is not None:
            first, start, before = len(self.records.q), *(x[-1:] for x in self.records[:2])
        elapsed = torch.diff(episode, prepend=start)[:, None, None, None]
        moments = torch.diff(total, dim=0, prepend=self.total.unsqueeze(0)) / elapsed
        q = torch.cat([before, q])
        found = expected_norms(run.learner.mdp, self.parameters.alpha, q, moments)
        new = Records(*parts[:-1], *found)
        if self.records is not None:
            new = Records(*map(torch.cat, zip(self.records, new, strict=True)))
        self.records, self.total, self.waiting = new, total[-1], []
        self._add_curves(run, first)
        self._to_board(_log_scalars, self.known[-1], episode.tolist())

    def _add_curves(self, run: Simulation, first: int) -> None:
        assert isinstance(run.learner, FTRL)
        assert self.records is not None
        step = run.learner.step
        self.known.append(evaluate_curves(step, self.parameters, self.records, first))

    def _to_board(self, write: Callable[..., None], *arguments: Any) -> None:
        """Log, if there is a board. If its files fail, warn and go on without it."""
        if self.board is None:
            return
        try:
            write(self.board, *arguments)
        except OSError as error:
            self.board = None
            message = f"Certificate: {error}; its curves are not logged any more"
            warnings.warn(message, stacklevel=4)

    @torch.no_grad()
    def _restore(self, run: Simulation) -> None:
        sums = run.sums.items()
        kept = {name.removeprefix(_KEPT): x for name, x in sums if name.startswith(_KEPT)}
        if not {*Records._fields, "total"} <= {*kept}:
            raise ValueError(
                f"save_to: the run that continues at episode {run.t + 1} was begun without the "
                "certificate, which needs every checkpoint; leave it out, or begin anew with "
                "another file"
            )
        self.records, self.total = Records(*(kept[x] for x in Records._fields)), kept["total"]
        self._add_curves(run, 0)
        # A directory that has this run's log has these points; a fresh one has nothing.
        if self.board is not None and not self.board.known:
            self._to_board(_log_scalars, self.known[0], self.records.episode.tolist())


def _log_scalars(board: TensorBoard, found: dict[str, Tensor], episodes: list[int]) -> None:
    """Log means over seeds, and extremes of the smoothness; one event per checkpoint."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    over_seeds = {"smoothness_max": torch.amax, "smoothness_min": torch.amin}
    shown = {name: over_seeds.get(name, torch.mean)(x, -1).tolist() for name, x in found.items()}
    closed = board.writer.file_writer is None  # after Ctrl-C the board has ended already
    for i, t in enumerate(episodes):
        point = [Summary.Value(tag=f"theory/{n}", simple_value=x[i]) for n, x in shown.items()]
        event_writer(board.writer).add_summary(Summary(value=point), t)
    if closed:
        board.writer.close()
