"""The regret bound, taken apart while a run goes on: a callback for `simulate`.

Nothing happens between checkpoints. What a checkpoint at episode t shows is of two kinds.

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

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_occ.callbacks import Callback, TensorBoard
from torch_occ.learners import FTRL
from torch_occ.mdp import LayeredMDP
from torch_occ.occupancy import occupancy, optimal_policy
from torch_occ.theory.bounds import adversarial_bound, lower_order
from torch_occ.theory.decomposition import tilde_nearby
from torch_occ.theory.hessian import hybrid
from torch_occ.theory.parameters import Parameters
from torch_occ.theory.penalty import penalty_bound
from torch_occ.theory.recursion import curvature, inverse_and_diagonal
from torch_occ.theory.stability import expected_norm, stability_bound, weighed

if TYPE_CHECKING:
    from torch_occ.simulate import Simulation

#: What the certificate must remember, under these names in `Simulation.sums`, so that a saved run continues with it.
_KEPT = ("theory/episodes", "theory/q", "theory/stability", "theory/total_mean")


class Certificate(Callback):
    """Penalty, stability, their bounds, the smoothness of the update and the running regret bound of `alg:main_alg`.

    Args:
        board: the TensorBoard callback of the same run, to log to it under `theory/*`; it must stand before this one in `callbacks`.

    `curves` holds the numbers of every checkpoint, one a seed; `docs/theory.md` lists them.
    """

    def __init__(self, board: TensorBoard | None = None) -> None:
        self.board = board
        self.begin()

    def begin(self) -> None:
        """Forget everything."""
        self.rows: dict[str, list[Tensor]] = {}
        self.episodes: list[int] = []
        self.q: list[Tensor] = []  # (N, S, A) each
        self.values: list[Tensor] = []  # (N,) each, phi_H(q)
        self.stability: list[Tensor] = []  # (2, N) each: the expected norm, and the bound of the first step
        self.last_mean: Tensor | None = None
        self.mapping: Tensor | None = None
        self.bounds: list[Tensor] = []  # (2, N) each: of the penalty and of the stability, for `mapping`
        self.penalty_weights: list[float] = []
        self.stability_weights: list[float] = []

    @property
    def curves(self) -> dict[str, Tensor]:
        """Every curve, `(N, C)`, and the episodes `(C,)`; nothing before the first checkpoint."""
        if not self.rows:
            return {}
        return {"episodes": torch.tensor(self.episodes[-len(self.rows["regret"]) :])} | {
            name: torch.stack(values, -1) for name, values in self.rows.items()
        }

    def on_start(self, run: Simulation) -> None:
        self.begin()
        self.parameters = Parameters.of(run.learner)
        if self.board is not None and self.board.writer is None:
            raise ValueError("board: the TensorBoard callback must stand before the certificate in `callbacks`")
        if run.t:
            self._restore(run)

    @torch.no_grad()
    def on_checkpoint(self, run: Simulation) -> None:
        mdp, alpha, q = run.mdp, self.parameters.alpha, run.q.clone()
        total = run.sums["total_mean"].clone()
        self.stability.append(self._stability_now(run, q, total))
        self.q.append(q)
        self.values.append(hybrid(mdp, q, alpha))
        self.last_mean = total
        self._add_weights(run.t)
        self.episodes.append(run.t)

        mapping = optimal_policy(mdp, total).policy
        best = occupancy(mdp, mapping)
        if self.mapping is not None and torch.equal(mapping, self.mapping):
            self.bounds.append(self._bounds(mdp, q, best, mapping))
        else:  # another comparator: every earlier episode is bounded anew
            self.bounds = list(self._bounds(mdp, torch.stack(self.q), best, mapping).unbind(1))
        self.mapping = mapping

        t = torch.tensor(float(run.t), dtype=q.dtype, device=q.device)
        values, stabilities = torch.stack(self.values), torch.stack(self.stability, 1)  # (C, N), (2, C, N)
        of_penalty, of_stability = (q.new_tensor(w) for w in (self.penalty_weights, self.stability_weights))
        best_value = hybrid(mdp, best, alpha)
        penalty = best_value * of_penalty.sum() - of_penalty @ values
        stability, first_step = of_stability @ stabilities
        bounded = torch.stack(self.bounds, 1)  # (2, C, N)
        penalty_limit, stability_limit = of_penalty @ bounded[0], of_stability @ bounded[1]
        rest = lower_order(mdp, self.parameters, t)
        ratio = self._smoothness(run, q)
        self._log(
            run,
            {
                "regret": run.curves["regret"][-1],
                "penalty": penalty,
                "penalty_bound": penalty_limit,
                "stability": stability,
                "stability_first_step": first_step,
                "stability_bound": stability_limit,
                "lower_order": rest.expand_as(penalty),
                "bound_terms": penalty + stability + rest,
                "bound_lemmas": penalty_limit + stability_limit + rest,
                "bound_adversarial": adversarial_bound(mdp, self.parameters, t).expand_as(penalty),
                "penalty_now": best_value - values[-1],
                "penalty_now_bound": bounded[0, -1],
                "stability_now": stabilities[0, -1],
                "stability_now_bound": bounded[1, -1],
                "smoothness_max": torch.where(mdp.actions, ratio, -torch.inf).amax((-2, -1)),
                "smoothness_min": torch.where(mdp.actions, ratio, torch.inf).amin((-2, -1)),
            },
        )

    def on_chunk(self, run: Simulation) -> None:
        if self.episodes:
            assert self.last_mean is not None
            kept = (torch.tensor(self.episodes), torch.stack(self.q), torch.stack(self.stability), self.last_mean)
            run.sums |= dict(zip(_KEPT, kept, strict=True))

    # -- parts --------------------------------------------------------------------------------------------------------------

    def _stability_now(self, run: Simulation, q: Tensor, total: Tensor) -> Tensor:
        """E |loss_estimate|^2 in the norm of the inverse Hessian of phi_H at q_t, and L sum N_k / q, `(2, N)`."""
        mdp, alpha = run.mdp, self.parameters.alpha
        before = 0.0 if self.last_mean is None else self.last_mean
        mean = ((total - before) / (run.t - (self.episodes[-1] if self.episodes else 0))).clamp(0, 1)
        inverse, R = inverse_and_diagonal(mdp, curvature(mdp, q, alpha))
        norm = expected_norm(mdp, q, inverse, mean, second_moment(mean, run.losses.noise))
        return torch.stack([norm, mdp.horizon * weighed(mdp, q, R).sum((-2, -1))])

    def _bounds(self, mdp: LayeredMDP, q: Tensor, best: Tensor, mapping: Tensor) -> Tensor:
        """The bounds of both lemmas at q, `(2, *batch)`."""
        alpha = self.parameters.alpha
        return torch.stack([penalty_bound(mdp, q, best, mapping, alpha), stability_bound(mdp, q, mapping, alpha)])

    def _smoothness(self, run: Simulation, q: Tensor) -> Tensor:
        """tilde q_t / q_t, `(N, S, A)`."""
        assert isinstance(run.learner, FTRL)
        total, t = run.learner.state["cumulative_loss"], torch.tensor(float(run.t), dtype=q.dtype, device=q.device)
        return tilde_nearby(run.learner.step, self.parameters, q, total, t) / q

    def _add_weights(self, t: int) -> None:
        last = self.episodes[-1] if self.episodes else 0
        for weights, rate in ((self.penalty_weights, self.parameters.eta_step), (self.stability_weights, self._eight_eta)):
            left, right = interpolation_weights(last, t, rate(torch.arange(last + 1, t + 1, dtype=torch.float64)))
            if weights:
                weights[-1] += left
            weights.append(right + (0.0 if weights else left))

    def _eight_eta(self, t: Tensor) -> Tensor:
        return 8 * self.parameters.eta(t)

    def _log(self, run: Simulation, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.rows.setdefault(name, []).append(value.clone())
        if self.board is not None:
            means = torch.stack([values[name].mean() for name in values if not name.startswith("smoothness")]).tolist()
            names = [name for name in values if not name.startswith("smoothness")]
            extremes = {"smoothness_max": float(values["smoothness_max"].max()), "smoothness_min": float(values["smoothness_min"].min())}
            shown = dict(zip(names, means, strict=True)) | extremes
            # One event for all of them, several times faster than add_scalar for each.
            from tensorboard.compat.proto.summary_pb2 import Summary

            values_of_event = [Summary.Value(tag=f"theory/{name}", simple_value=value) for name, value in shown.items()]
            self.board.writer.file_writer.add_summary(Summary(value=values_of_event), run.t)

    def _restore(self, run: Simulation) -> None:
        missing = [name for name in _KEPT if name not in run.sums]
        if missing:
            raise ValueError(
                f"save_to: the run that continues at episode {run.t + 1} was begun without the certificate, which needs every checkpoint; "
                "leave it out, or begin anew with another file"
            )
        times, q, stability, self.last_mean = (run.sums[name] for name in _KEPT)
        for t in times.tolist():
            self._add_weights(t)
            self.episodes.append(t)
        self.q, self.values, self.stability = list(q), list(hybrid(run.mdp, q, self.parameters.alpha)), list(stability)


def second_moment(mean: Tensor, noise: str) -> Tensor:
    """E[loss^2] of losses drawn by `LossProcess.draw`: m for a coin, m^2 + min(m, 1-m)^2 / 3 for the uniform one, m^2 without noise."""
    if noise == "bernoulli":
        return mean
    spread = torch.minimum(mean, 1 - mean).square() / 3 if noise == "uniform" else 0.0
    return mean.square() + spread


def interpolation_weights(start: int, end: int, weights: Tensor) -> tuple[float, float]:
    """sum over t = start+1..end of weights_t f(t) = left f(start) + right f(end), if f is linear in log t; f is constant if start is 0."""
    if start == 0:
        return 0.0, float(weights.sum())
    t = torch.arange(start + 1, end + 1, dtype=weights.dtype)
    share = (t / start).log() / torch.tensor(end / start, dtype=weights.dtype).log()
    right = float(weights @ share)
    return float(weights.sum()) - right, right
