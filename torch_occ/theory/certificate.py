"""The regret bound, taken apart while a run goes on: a callback for `simulate`.

Nothing happens between checkpoints, and at a checkpoint only q_t and what was estimated and charged so far are kept; several checkpoints
are evaluated together, at the latest a few seconds later. What a checkpoint at episode t shows is of two kinds.

**Exact**, from q_t, the estimates so far and the means of the losses: phi_H(q_opt) - phi_H(q_t) and its bound; the conditional
expectation of |loss_estimate_t|^2 in the norm of the inverse Hessian of phi_H, and its bounds; tilde q_t / q_t (to six digits);
`lower_order`; the closed-form bounds; and q_opt, the best policy for the first t episodes. Where the means of the losses change, their
average since the last checkpoint stands for the mean at t.

**Interpolated**: sums over all episodes so far. Their weights 1/eta_t - 1/eta_{t-1} and 8 eta_t are summed exactly; what they multiply is
taken to be linear in log t from one checkpoint to the next, and constant before the first. With a checkpoint in every episode the sums
are exact.

The bounds are about expectations: compare means over seeds. They are proved for beta >= 64 L; for less they rest on tilde q <= 2 q, which
`smoothness_max` shows at the checkpoints only.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torch_occ._support.private import event_writer
from torch_occ.game.callbacks import Callback, TensorBoard
from torch_occ.game.learners import FTRL
from torch_occ.game.losses import Noise, mean_square
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, optimal_policy
from torch_occ.step.ftrl import FTRLStep
from torch_occ.theory.bounds import adversarial_bound, lower_order
from torch_occ.theory.decomposition import tilde
from torch_occ.theory.hessian import hybrid
from torch_occ.theory.parameters import Parameters
from torch_occ.theory.penalty import penalty_bound
from torch_occ.theory.recursion import curvature, inverse_and_diagonal
from torch_occ.theory.stability import expected_norm, stability_bound, weighed

if TYPE_CHECKING:
    from torch_occ.game.history import History
    from torch_occ.game.simulation import Simulation

#: Checkpoints evaluated together at most, and seconds that the first of them may wait.
TOGETHER, PATIENCE = 16, 2.0

#: Where the records stand in `Simulation.sums`, so that a saved run continues with them.
_KEPT = "theory/"


class Records(NamedTuple):
    """What is kept of C checkpoints: all that their evaluation needs."""

    episode: Tensor  # (C,)
    q: Tensor  # (C, N, S, A), q_t
    estimated: Tensor  # (C, N, S, A), the sum of the loss estimates
    charged: Tensor  # (C, N, S, A), the sum of the means of the losses
    regret: Tensor  # (C, N)

    def since(self, first: int) -> Records:
        return Records(*(part[first:] for part in self))


class Certificate(Callback):
    """Penalty, stability, their bounds, the smoothness of the update and the running regret bound of `alg:main_alg`.

    Args:
        board: the TensorBoard callback of the same run, to log to it under `theory/*`; it must stand before this one in `callbacks`.

    `curves` holds the numbers of every checkpoint, one a seed; `docs/theory.md` lists them.
    """

    def __init__(self, board: TensorBoard | None = None) -> None:
        self.board = board
        self._begin()

    def _begin(self) -> None:
        self.records: list[Records] = []  # one checkpoint each
        self.known: list[dict[str, Tensor]] = []  # their curves, a batch of checkpoints each
        self.evaluated, self.since = 0, 0.0

    @property
    def curves(self) -> dict[str, Tensor]:
        """Every curve, `(N, C)`, and the episodes `(C,)`; nothing before the first checkpoints are evaluated."""
        if not self.known:
            return {}
        joined = {name: torch.cat([part[name] for part in self.known]).movedim(0, -1) for name in self.known[0]}
        return {"episodes": torch.cat([record.episode for record in self.records[: self.evaluated]])} | joined

    def on_start(self, run: Simulation) -> None:
        self._begin()
        self.parameters = Parameters.of(run.learner)
        if self.board is not None and self.board.writer is None:
            raise ValueError("board: the TensorBoard callback must stand before the certificate in `callbacks`")
        if run.t:
            self._restore(run)

    def on_checkpoint(self, run: Simulation) -> None:
        if len(self.records) == self.evaluated:
            self.since = time.monotonic()
        parts = (run.q, run.learner.state["cumulative_loss"], run.sums["total_mean"], run.curves["regret"][-1])
        self.records.append(Records(torch.tensor([run.t]), *(part.detach().clone().unsqueeze(0) for part in parts)))
        if len(self.records) - self.evaluated >= TOGETHER or run.t == run.episodes:
            self._evaluate(run)

    def on_chunk(self, run: Simulation) -> None:
        if len(self.records) > self.evaluated and time.monotonic() - self.since > PATIENCE:
            self._evaluate(run)
            self._to_board(TensorBoard.on_chunk, run)  # what is saved as evaluated must be on disk
        if self.records and len(run.sums.get(f"{_KEPT}episode", ())) < len(self.records):
            kept = _join(self.records)._asdict() | {"evaluated": torch.tensor(self.evaluated)}
            run.sums |= {f"{_KEPT}{name}": part for name, part in kept.items()}
        elif self.records:
            run.sums[f"{_KEPT}evaluated"] = torch.tensor(self.evaluated)

    def on_end(self, run: Simulation, history: History) -> None:
        if len(self.records) > self.evaluated:  # after Ctrl-C
            self._evaluate(run)

    @torch.no_grad()
    def _evaluate(self, run: Simulation, silent: int = 0) -> None:
        """Evaluate what has waited, and log it but for the first `silent` checkpoints of all."""
        assert isinstance(run.learner, FTRL)
        first = self.evaluated
        found = evaluate(run.learner.step, self.parameters, _join(self.records), run.losses.noise, self._norms())
        self.known.append(found)
        self.evaluated = len(self.records)
        episodes = [int(record.episode) for record in self.records[first:]]
        self._to_board(_log, found, episodes, silent - first)

    def _to_board(self, write: Callable[..., None], *arguments: Any) -> None:
        """Log, if there is a board; when its files fail, warn, and go on without."""
        if self.board is None:
            return
        try:
            write(self.board, *arguments)
        except OSError as error:
            self.board = None
            warnings.warn(f"Certificate: {error}; its curves are not logged any more", stacklevel=4)

    def _norms(self) -> Tensor | None:
        """What `evaluate` has found of the stability so far, `(2, C, N)`."""
        names = ("stability_now", "stability_now_first_step")
        return torch.stack([torch.cat([part[name] for part in self.known]) for name in names]) if self.known else None

    def _restore(self, run: Simulation) -> None:
        names = Records._fields
        if any(f"{_KEPT}{name}" not in run.sums for name in names):
            raise ValueError(
                f"save_to: the run that continues at episode {run.t + 1} was begun without the certificate, which needs every checkpoint; "
                "leave it out, or begin anew with another file"
            )
        kept = Records(*(run.sums[f"{_KEPT}{name}"] for name in names))
        self.records = [Records(*(part[i : i + 1] for part in kept)) for i in range(len(kept.episode))]
        # What the log has already; a fresh directory has nothing.
        logged = int(run.sums[f"{_KEPT}evaluated"]) if self.board is None or self.board.known else 0
        self._evaluate(run, silent=logged)


def _join(records: list[Records]) -> Records:
    return Records(*(torch.cat(parts) for parts in zip(*records, strict=True)))


def _log(board: TensorBoard, found: dict[str, Tensor], episodes: list[int], skip: int) -> None:
    """Means over seeds (and extremes of the smoothness), all curves of a checkpoint in one event."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    over_seeds = {"smoothness_max": torch.amax, "smoothness_min": torch.amin}
    shown = {name: over_seeds.get(name, torch.mean)(values, -1).tolist() for name, values in found.items()}
    closed = board.writer.file_writer is None  # after Ctrl-C the board has ended already
    for i, t in enumerate(episodes):
        if i >= skip:
            event = Summary(value=[Summary.Value(tag=f"theory/{name}", simple_value=values[i]) for name, values in shown.items()])
            event_writer(board.writer).add_summary(event, t)
    if closed:
        board.writer.close()


# -- the numbers ----------------------------------------------------------------------------------------------------------


def evaluate(step: FTRLStep, parameters: Parameters, records: Records, noise: Noise, known: Tensor | None = None) -> dict[str, Tensor]:
    """The curves of some checkpoints from the records of all, `(K, N)` each.

    `known` `(2, C - K, N)` has `stability_now` and `stability_now_first_step` of the checkpoints before them: no work is done twice.
    """
    mdp, alpha = step.mdp, parameters.alpha
    first = 0 if known is None else known.shape[1]
    t = records.episode.to(records.q)
    now, t_now = records.since(first), t[first:, None]
    best_policy = optimal_policy(mdp, now.charged).policy
    best = occupancy(mdp, best_policy)
    best_value, values = hybrid(mdp, best, alpha), hybrid(mdp, records.q, alpha)
    norms = _stability(mdp, alpha, records, noise, first)
    norms = norms if known is None else torch.cat([known, norms], 1)  # (2, C, N)
    limits = _limits(mdp, alpha, records.q, best, best_policy)  # for each of the K checkpoints, (2, C, N)

    of_penalty = running_weights(records.episode, parameters.eta_step)[first:].to(t)  # (K, C)
    of_stability = running_weights(records.episode, lambda t: 8 * parameters.eta(t))[first:].to(t)
    penalty = best_value * of_penalty.sum(-1, keepdim=True) - of_penalty @ values
    stability, first_step = of_stability @ norms
    penalty_limit = torch.stack([weights @ limit[0] for weights, limit in zip(of_penalty, limits, strict=True)])
    stability_limit = torch.stack([weights @ limit[1] for weights, limit in zip(of_stability, limits, strict=True)])
    rest = lower_order(mdp, parameters, t_now).expand_as(penalty)
    ratio = tilde(step, now.q, now.estimated, t_now.expand_as(penalty)) / now.q
    last = torch.stack([limit[:, first + i] for i, limit in enumerate(limits)], 1)
    return {
        "regret": now.regret,
        "penalty": penalty,
        "penalty_bound": penalty_limit,
        "stability": stability,
        "stability_first_step": first_step,
        "stability_bound": stability_limit,
        "lower_order": rest,
        "bound_terms": penalty + stability + rest,
        "bound_lemmas": penalty_limit + stability_limit + rest,
        "bound_adversarial": adversarial_bound(mdp, parameters, t_now).expand_as(penalty),
        "penalty_now": best_value - values[first:],
        "penalty_now_bound": last[0],
        "stability_now": norms[0, first:],
        "stability_now_first_step": norms[1, first:],
        "stability_now_bound": last[1],
        "smoothness_max": torch.where(mdp.actions, ratio, -torch.inf).amax((-2, -1)),
        "smoothness_min": torch.where(mdp.actions, ratio, torch.inf).amin((-2, -1)),
    }


def _stability(mdp: LayeredMDP, alpha: float, records: Records, noise: Noise, first: int) -> Tensor:
    """E |loss_estimate|^2 in the norm of the inverse Hessian of phi_H at q_t, and L sum N_k / q, of the last checkpoints, `(2, K, N)`."""
    charged, elapsed = (torch.diff(x, dim=0, prepend=torch.zeros_like(x[:1]))[first:] for x in (records.charged, records.episode))
    mean, q = (charged / elapsed[:, None, None, None]).clamp(0, 1), records.q[first:]
    inverse, R = inverse_and_diagonal(mdp, curvature(mdp, q, alpha))
    norm = expected_norm(mdp, q, inverse, mean, mean_square(mean, noise))
    return torch.stack([norm, mdp.horizon * weighed(mdp, q, R).sum((-2, -1))])


def _limits(mdp: LayeredMDP, alpha: float, q: Tensor, best: Tensor, mappings: Tensor) -> list[Tensor]:
    """For each comparator, the bounds of both lemmas at every q `(C, N, S, A)`: `(2, C, N)`. The comparator changes rarely."""
    found: list[Tensor] = []
    for i, mapping in enumerate(mappings):
        if i and torch.equal(mapping, mappings[i - 1]):
            found.append(found[-1])
        else:
            found.append(torch.stack([penalty_bound(mdp, q, best[i], mapping, alpha), stability_bound(mdp, q, mapping, alpha)]))
    return found


def running_weights(checkpoints: Tensor, rate: Callable[[Tensor], Tensor]) -> Tensor:
    """W `(C, C)` with sum_{t <= T_i} rate(t) f(t) = sum_j W_ij f(T_j), if f is linear in log t between the checkpoints T_1 < T_2 < ..."""
    ends = checkpoints.tolist()
    pairs = [
        interpolation_weights(a, b, rate(torch.arange(a + 1, b + 1, dtype=torch.float64))) for a, b in zip([0, *ends], ends, strict=False)
    ]
    left, right = torch.tensor(pairs, dtype=torch.float64).T
    return right.expand(len(ends), -1).tril() + torch.nn.functional.pad(left[1:], (0, 1)).expand(len(ends), -1).tril(-1)


def interpolation_weights(start: int, end: int, weights: Tensor) -> tuple[float, float]:
    """sum over t = start+1..end of weights_t f(t) = left f(start) + right f(end), if f is linear in log t; f is constant if start is 0."""
    if start == 0:
        return 0.0, float(weights.sum())
    t = torch.arange(start + 1, end + 1, dtype=weights.dtype)
    share = (t / start).log() / torch.tensor(end / start, dtype=weights.dtype).log()
    right = float(weights @ share)
    return float(weights.sum()) - right, right
