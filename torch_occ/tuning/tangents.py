"""The run of importance-weighted FTRL with tangents, in forward mode and constant memory.

With the sampled actions held fixed, a parameter theta changes q_t and the cumulative loss estimate
Lhat together,

    dq_t  = -Pi_t ( dLhat + d grad psi_t(q_t) / d log theta ),
    dLhat <- dLhat - loss / q_t^2 dq_t  on the visited pairs,

and the probability of the sampled actions changes by d log pi(a | s) = dq(s,a) / q(s,a) - dq(s) /
q(s). This module plays in torch; torch_occ.tuning.compiled_tangents plays in kernels. Both only
play; torch_occ.tuning.metagradients computes estimates from their results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ._support.spacing import CHUNK
from torch_occ._support.streams import Purpose, uniforms
from torch_occ.game.estimators import Feedback
from torch_occ.game.losses import Stationary
from torch_occ.game.players.torch_player import TorchPlayer
from torch_occ.mdp.occupancy import interior_point, optimal_policy, policy_of
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.linearization import Linearization


class Stretch(NamedTuple):
    """n episodes of N seeds with P tangents."""

    cost: Tensor  # (N, n), <q_t, gaps>
    slope: Tensor  # (N, n, P), <dq_t, gaps>
    score: Tensor  # (N, n, P), the sum of d log pi over all previous episodes
    certified: Tensor  # (N, n), whether every step so far was certified


def play_in_torch(
    step: FTRLStep, losses: Stationary, episodes: int, seeds: Sequence[int]
) -> Iterator[Stretch]:
    """Play as `simulate` does, from the same random numbers; yield one episode at a time."""
    mdp, player = step.mdp, TorchPlayer(step.mdp)
    N, P = len(seeds), len(step.evaluator.names)
    gaps, mean = optimal_policy(mdp, losses.mean).gaps, losses.mean.expand(N, -1, -1)
    q = interior_point(mdp).expand(N, -1, -1).clone()
    cumulative_loss, tangent_loss = torch.zeros_like(q), q.new_zeros(P, *q.shape)
    score, certified = q.new_zeros(P, N), torch.ones(N, dtype=torch.bool, device=q.device)
    for t in range(1, episodes + 1):
        if (t - 1) % CHUNK == 0:
            numbers = uniforms(seeds, Purpose.EPISODES, [(t - 1) // CHUNK], (mdp.horizon, 3)).to(
                mdp.device, mdp.dtype
            )
        solution = step.solve(cumulative_loss, float(t), warm_start=q, check=False)
        q, certified = solution.q, certified & solution.converged
        now = torch.full((N,), float(t), dtype=q.dtype, device=q.device)
        # (P, N, S, A)
        tangent = -Linearization(step, q, now).apply(tangent_loss + _force(step, q, now))
        slope = (tangent * gaps).sum((-2, -1))
        yield Stretch(
            (q * gaps).sum((-2, -1))[:, None],
            slope.T[:, None],
            score.T[:, None],
            certified[:, None],
        )
        now_drawn = numbers[:, (t - 1) % CHUNK]
        feedback = player.walk(losses, policy_of(mdp, q), mean, None, now_drawn)
        score = score + _log_policy_tangent(feedback, q, tangent)
        visited = feedback.scatter(feedback.losses, q)
        safe = torch.where(mdp.actions, q, 1.0)
        cumulative_loss = cumulative_loss + visited / safe
        tangent_loss = tangent_loss - visited / safe**2 * tangent


def _force(step: FTRLStep, q: Tensor, t: Tensor) -> Tensor:
    """d grad psi_t(q) / d log theta for every parameter, `(P, N, S, A)`."""
    evaluator = step.evaluator
    bound = Linearization(step, q, t).setting

    def gradient(log_parameters: tuple[Tensor, ...]) -> Tensor:
        return bound.bind([t, *(x.exp() for x in log_parameters)]).gradient(q)

    logs = tuple(parameter.detach().log() for parameter in evaluator.own_parameters)
    columns = []
    for i in range(len(logs)):
        # Reverse mode twice gives forward mode, because psi's own gradient uses torch.func.grad.
        direction = tuple(
            torch.ones_like(x) if i == j else torch.zeros_like(x) for j, x in enumerate(logs)
        )
        columns.append(torch.func.jvp(gradient, (logs,), (direction,))[1])
    return torch.stack(columns)


def _log_policy_tangent(feedback: Feedback, q: Tensor, tangent: Tensor) -> Tensor:
    """d log pi of the sampled trajectory, `(P, N)`."""
    states = q.sum(-1).gather(-1, feedback.states)
    total = torch.zeros_like(tangent[..., 0, 0])
    for i, dq in enumerate(tangent):
        own = feedback.gather(dq) / feedback.gather(q)
        total[i] = (own - dq.sum(-1).gather(-1, feedback.states) / states).sum(-1)
    return total
