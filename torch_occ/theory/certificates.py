"""The terms of the regret bounds, evaluated during a run."""

from __future__ import annotations

import time
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
from torch_occ.theory.curvatures import curvature, hybrid, inverse_and_diagonal
from torch_occ.theory.penalty import penalty_bound
from torch_occ.theory.runs import tilde
from torch_occ.theory.stability import norm_of_moments, stability_bound, weighed
from torch_occ.theory.statements import Parameters

if TYPE_CHECKING:
    from torch_occ.game.history import History
    from torch_occ.game.simulate import Simulation


# -- The terms of `lem:key_lemma_ftrl` at the checkpoints of a run --------------------------------
#
# Numbers at one episode (`..._now`, smoothness, closed-form bounds) are exact. Sums over all
# episodes so far have exact weights 1/eta_t - 1/eta_{t-1} and 8 eta_t; what depends on q_t is taken
# to be linear in log t between two checkpoints, and constant before the first.
#
# A name without suffix uses the best policy of each seed for its own losses: the mean over seeds
# estimates E max. `_shared` uses one policy for all seeds, the best for their mean: max E, the
# regret of the paper. Against an adaptive adversary the two differ, and the bounds are proved for
# the shared comparator only. docs/theory.md says how to read them.


#: Curves that exist a second time, with the suffix `_shared`.
_SHARED = ("regret", "penalty", "penalty_bound", "stability_bound", "bound_terms", "bound_lemmas")


class Records(NamedTuple):
    """What is kept of C checkpoints for N seeds."""

    episode: Tensor  # (C,)
    q: Tensor  # (C, N, S, A), q_t
    estimated: Tensor  # (C, N, S, A), the sum of the loss estimates
    charged: Tensor  # (C, N, S, A), the sum of the means of the losses
    regret: Tensor  # (C, N)

    def since(self, first: int) -> Records:
        """The checkpoints from number `first` on."""
        return Records(*(part[first:] for part in self))


def evaluate_curves(
    step: FTRLStep,
    parameters: Parameters,
    records: Records,
    moments: Tensor,
    before: Tensor | None = None,
) -> dict[str, Tensor]:
    """The curves of the last K checkpoints from the records of all C, `(K, N)` each.

    Args:
        moments: E[loss_i loss_j], averaged over the episodes since the checkpoint before,
            `(K, N, SA, SA)`.
        before: `stability` and `stability_first_step` at checkpoint C - K, `(2, N)`; None if K = C.
    """
    mdp, first = step.mdp, len(records.episode) - len(moments)
    now = records.since(first)
    t = now.episode.to(now.q)[:, None].expand_as(now.regret)
    rest = lower_order(mdp, parameters, t)
    found = _stability(mdp, parameters, records, moments, before)
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


def _stability(
    mdp: LayeredMDP,
    parameters: Parameters,
    records: Records,
    moments: Tensor,
    before: Tensor | None,
) -> dict[str, Tensor]:
    """The stability and the bound of `lem:stability_first_step`: at the checkpoints, and summed."""
    count, first = len(moments), len(records.episode) - len(moments)
    q = records.q[max(first - 1, 0) :]  # with the checkpoint before, if there is one
    inverse, R = inverse_and_diagonal(mdp, curvature(mdp, q, parameters.alpha))
    steps = mdp.horizon * weighed(mdp, q, R).sum((-2, -1))
    now = norm_of_moments(mdp, q[-count:], inverse[-count:], moments)
    right = torch.stack([now, steps[-count:]])
    # The same moments at the start of each interval. Before the first checkpoint q is constant.
    seen = moments[count + 1 - len(q) :]
    left = torch.stack([norm_of_moments(mdp, q[:-1], inverse[:-1], seen), steps[:-1]])
    left = torch.cat([right[:, : count - len(seen)], left], 1)

    ends = [0, *records.episode.tolist()][first:]
    weights = interval_weights(ends, lambda t: 8 * parameters.eta(t)).to(q)  # (2, K)
    sums = (weights[0, :, None] * left + weights[1, :, None] * right).cumsum(1)
    if before is not None:
        sums = sums + before.unsqueeze(1)
    names = "stability", "stability_first_step"
    nows = "stability_now", "stability_now_first_step"
    return dict(zip((*names, *nows), (*sums, *right), strict=True))


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
# E[loss_i loss_j]. Several checkpoints are evaluated together. Nothing is evaluated twice.


#: Checkpoints are evaluated together: at most this many, and at least every so many seconds.
TOGETHER, EVALUATE_EVERY = 16, 2.0

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
        self.records: list[Records] = []  # one checkpoint each
        # The sum of second moments (N, SA, SA) at the last evaluated checkpoint and those since.
        self.totals: list[Tensor] = []
        self.known: list[dict[str, Tensor]] = []  # the curves, a batch of checkpoints each
        self.evaluated, self.since, self.unsaved = 0, 0.0, False

    @property
    def curves(self) -> dict[str, Tensor]:
        """Every curve by its name, `(N, C)`, and `episodes` `(C,)`, as far as it is evaluated."""
        if not self.known:
            return {}
        episodes = torch.cat([record.episode for record in self.records[: self.evaluated]])
        joined = {name: curve.movedim(0, -1) for name, curve in self._joined().items()}
        return {"episodes": episodes} | joined

    def _joined(self) -> dict[str, Tensor]:
        """Every curve, `(C, N)`."""
        return {name: torch.cat([part[name] for part in self.known]) for name in self.known[0]}

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
        if not self.totals:
            self.totals = [run.sums["second_moment"].clone()]

    def on_checkpoint(self, run: Simulation) -> None:
        if len(self.records) == self.evaluated:
            self.since = time.monotonic()
        estimated, regret = run.learner.state["cumulative_loss"], run.curves["regret"][-1]
        parts = (run.q, estimated, run.sums["total_mean"], regret)
        kept = (part.detach().clone().unsqueeze(0) for part in parts)
        self.records.append(Records(torch.tensor([run.t]), *kept))
        self.totals.append(run.sums["second_moment"].clone())
        self.unsaved = True
        if len(self.records) - self.evaluated >= TOGETHER or run.t == run.episodes:
            self._evaluate(run)

    def on_chunk(self, run: Simulation) -> None:
        if len(self.records) > self.evaluated and time.monotonic() - self.since > EVALUATE_EVERY:
            self._evaluate(run)
            self._to_board(TensorBoard.on_chunk, run)  # what is saved as evaluated must be on disk
        if self.unsaved:
            kept = _join(self.records)._asdict() | {"totals": torch.stack(self.totals)}
            if self.known:
                kept |= {f"curves/{name}": curve for name, curve in self._joined().items()}
            run.sums |= {f"{_KEPT}{name}": part for name, part in kept.items()}
            self.unsaved = False

    def on_end(self, run: Simulation, history: History) -> None:
        if len(self.records) > self.evaluated:  # after Ctrl-C
            self._evaluate(run)

    @torch.no_grad()
    def _evaluate(self, run: Simulation) -> None:
        """Evaluate and log the checkpoints that have waited."""
        assert isinstance(run.learner, FTRL)
        records, first = _join(self.records), self.evaluated
        start = records.episode[first - 1 : first] if first else torch.tensor([0])
        elapsed = torch.diff(records.episode[first:], prepend=start)
        moments = torch.diff(torch.stack(self.totals), dim=0) / elapsed[:, None, None, None]
        names = ("stability", "stability_first_step")
        before = torch.stack([self.known[-1][name][-1] for name in names]) if first else None
        found = evaluate_curves(run.learner.step, self.parameters, records, moments, before)
        self.known.append(found)
        self.totals, self.evaluated = self.totals[-1:], len(self.records)
        self._to_board(_log_scalars, found, records.episode[first:].tolist())

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

    def _restore(self, run: Simulation) -> None:
        sums = run.sums.items()
        kept = {name.removeprefix(_KEPT): x for name, x in sums if name.startswith(_KEPT)}
        if not {*Records._fields, "totals"} <= {*kept}:
            raise ValueError(
                f"save_to: the run that continues at episode {run.t + 1} was begun without the "
                "certificate, which needs every checkpoint; leave it out, or begin anew with "
                "another file"
            )
        records = Records(*(kept[name] for name in Records._fields))
        count = len(records.episode)
        self.records = [Records(*(part[i : i + 1] for part in records)) for i in range(count)]
        self.totals, self.since = list(kept["totals"]), time.monotonic()
        self.evaluated = count + 1 - len(self.totals)
        if self.evaluated:
            prefix = "curves/"
            curves = {n.removeprefix(prefix): x for n, x in kept.items() if n.startswith(prefix)}
            self.known = [curves]
            # A directory that has this run's log has these points; a fresh one has nothing.
            if self.board is not None and not self.board.known:
                self._to_board(_log_scalars, curves, records.episode[: self.evaluated].tolist())


def _join(records: list[Records]) -> Records:
    return Records(*(torch.cat(parts) for parts in zip(*records, strict=True)))


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
