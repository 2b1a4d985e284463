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


# -- The terms of `lem:key_lemma_ftrl` at the checkpoints of a run, from what a certificate --------
#
# A checkpoint at episode t has numbers of two kinds.
#
# **Exact** numbers need only q_t, the loss estimates so far and the means of the losses so far:
# phi_H(q_opt) - phi_H(q_t) and its bound, the bounds on the stability at t, tilde q_t / q_t (to six
# digits), `lower_order`, the closed-form bounds, and q_opt. `stability_now` is the norm of the loss
# estimate at q_t, averaged over the losses of all episodes since the last checkpoint.
#
# **Interpolated** numbers are sums over all episodes so far. Their weights 1/eta_t - 1/eta_{t-1}
# and 8 eta_t are summed exactly. What depends on q_t is taken to be linear in log t between two
# checkpoints, and constant before the first. The second moments of the losses are those of the
# episodes between the two checkpoints. With a checkpoint in every episode the sums are exact.
#
# **Two comparators.** The paper's regret is max over policies of an expectation. A name without
# suffix uses the best policy of each seed for its own losses: the mean over seeds then estimates E
# max. A name that ends in `_shared` uses one policy for all seeds, the best one for the mean over
# seeds of the cumulative losses: this estimates max E, the regret of the paper. The two are equal
# if all seeds have the same means. Against an adaptive adversary they are not, and the bounds are
# proved for the shared comparator only.
#
# The bounds are about expectations, so compare means over seeds. They are proved for beta >= 64 L.
# For a smaller beta they rest on tilde q <= 2 q, which `smoothness_max` shows at checkpoints only.


#: Curves that exist a second time, with the suffix `_shared`.
_SHARED = (
    "regret",
    "penalty",
    "penalty_bound",
    "stability_bound",
    "bound_terms",
    "bound_lemmas",
)


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
    right = torch.stack(
        [norm_of_moments(mdp, q[-count:], inverse[-count:], moments), steps[-count:]]
    )
    # The same moments at the start of each interval. Before the first checkpoint q is constant.
    seen = moments[count + 1 - len(q) :]
    left = torch.stack([norm_of_moments(mdp, q[:-1], inverse[:-1], seen), steps[:-1]])
    left = torch.cat([right[:, : count - len(seen)], left], 1)

    ends = [0, *records.episode.tolist()][first:]
    weights = _interval_weights(ends, lambda t: 8 * parameters.eta(t)).to(q)  # (2, K)
    sums = (weights[0, :, None] * left + weights[1, :, None] * right).cumsum(1)
    if before is not None:
        sums = sums + before.unsqueeze(1)
    return {
        "stability": sums[0],
        "stability_first_step": sums[1],
        "stability_now": right[0],
        "stability_now_first_step": right[1],
    }


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
    limits = _limits(mdp, alpha, records.q, best, mappings)  # for each comparator, (2, C, N)
    of_penalty = running_weights(records.episode, parameters.eta_step)[first:].to(values)  # (K, C)
    of_stability = running_weights(records.episode, lambda t: 8 * parameters.eta(t))[first:]
    penalty = best_value * of_penalty.sum(-1, keepdim=True) - of_penalty @ values
    penalty_limit, stability_limit = (
        torch.stack([w @ limit[i] for w, limit in zip(weights, limits, strict=True)])
        for i, weights in enumerate((of_penalty, of_stability.to(values)))
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


def _limits(
    mdp: LayeredMDP, alpha: float, q: Tensor, best: Tensor, mappings: Tensor
) -> list[Tensor]:
    """The bounds of both lemmas at every q `(C, N, S, A)`, `(2, C, N)` for each comparator.

    The comparator changes rarely, so what was computed for the one before is used again.
    """
    found: list[Tensor] = []
    for i, mapping in enumerate(mappings):
        if i and torch.equal(mapping, mappings[i - 1]):
            found.append(found[-1])
        else:
            penalty = penalty_bound(mdp, q, best[i], mapping, alpha)
            found.append(torch.stack([penalty, stability_bound(mdp, q, mapping, alpha)]))
    return found


def running_weights(checkpoints: Tensor, rate: Callable[[Tensor], Tensor]) -> Tensor:
    """W `(C, C)` with sum_{t <= T_i} rate(t) f(t) = sum_j W_ij f(T_j).

    f is linear in log t between the checkpoints T_1 < T_2 < ..., and constant before the first.
    """
    ends = checkpoints.tolist()
    left, right = _interval_weights([0, *ends], rate)
    shifted = torch.nn.functional.pad(left[1:], (0, 1)).expand(len(ends), -1)
    return right.expand(len(ends), -1).tril() + shifted.tril(-1)


def _interval_weights(ends: list[int], rate: Callable[[Tensor], Tensor]) -> Tensor:
    """`interpolation_weights` of every interval between two `ends`, `(2, len(ends) - 1)`."""
    pairs = [
        interpolation_weights(a, b, rate(torch.arange(a + 1, b + 1, dtype=torch.float64)))
        for a, b in pairwise(ends)
    ]
    return torch.tensor(pairs, dtype=torch.float64).T


def interpolation_weights(start: int, end: int, weights: Tensor) -> tuple[float, float]:
    """(left, right) with sum_{start < t <= end} weights_t f(t) = left f(start) + right f(end).

    f is linear in log t; it is constant if start is 0.
    """
    if start == 0:
        return 0.0, float(weights.sum())
    t = torch.arange(start + 1, end + 1, dtype=weights.dtype)
    share = (t / start).log() / torch.tensor(end / start, dtype=weights.dtype).log()
    right = float(weights @ share)
    return float(weights.sum()) - right, right


# -- The regret bound of `lem:key_lemma_ftrl`, evaluated during a run: a callback for `simulate ----
#
# The certificate does its work at checkpoints. Between them the run adds up the means of the losses
# and their second moments E[loss_i loss_j]. Several checkpoints are evaluated together, at the
# latest a few seconds later. torch_occ.theory.certificates has the formulas and says which
# numbers are exact. Nothing is evaluated twice, and a saved run continues with its sums.


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
        """Every curve by its name, `(N, C)`, and `episodes` `(C,)`.

        It is empty until the first checkpoints are evaluated.
        """
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
        kept = {
            name.removeprefix(_KEPT): part
            for name, part in run.sums.items()
            if name.startswith(_KEPT)
        }
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
    shown = {
        name: over_seeds.get(name, torch.mean)(values, -1).tolist()
        for name, values in found.items()
    }
    closed = board.writer.file_writer is None  # after Ctrl-C the board has ended already
    for i, t in enumerate(episodes):
        values = [
            Summary.Value(tag=f"theory/{name}", simple_value=curve[i])
            for name, curve in shown.items()
        ]
        event_writer(board.writer).add_summary(Summary(value=values), t)
    if closed:
        board.writer.close()
