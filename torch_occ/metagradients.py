"""Gradients of the regret through the run itself, in the logarithms of the regularizer's parameters, and what they are worth.

A learner with bandit feedback depends on its parameters in two ways: its q_t moves, and so do the actions that it samples. Holding the
sampled actions fixed and differentiating everything else is the **pathwise** estimator, sum_t <dq_t, gaps>: biased. The **unbiased** one
adds the score,

    sum_t ( <q_t, gaps> - baseline_t ) sum_{tau < t} d log pi_tau(a_tau | s_tau),

with the mean of the other seeds as the baseline. Both carry a handful of tangents along the run (forward mode), in memory that does not
grow with T. `finite_differences` with common random numbers is the reference.

All of them fail in long runs: a visit multiplies the tangent of Lhat by 1 + Pi loss/q^2, so that the standard error explodes with T, which
is reported and not hidden. docs/meta_tuning.md shows where each one stops being usable, and torch_occ.forecast is what to use beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.episodes import TorchPlayer
from torch_occ.estimators import Feedback
from torch_occ.ftrl import FTRLStep
from torch_occ.learners import FTRL
from torch_occ.linearization import Linearization
from torch_occ.losses import Stationary
from torch_occ.mdp import LayeredMDP
from torch_occ.occupancy import interior_point, optimal_policy
from torch_occ.regularizers import Regularizer
from torch_occ.simulate import log_spaced, simulate
from torch_occ.streams import CHUNK, Purpose, uniforms


class Estimate(NamedTuple):
    """A gradient of the expected regret at C episodes, from N seeds."""

    samples: Tensor  # (N, C, parameters), one estimate a seed; those of the unbiased estimator share baselines

    @property
    def mean(self) -> Tensor:
        """`(C, parameters)`."""
        return self.samples.mean(0)

    @property
    def standard_error(self) -> Tensor:
        """Of the mean, `(C, parameters)`."""
        return self.samples.std(0) / len(self.samples) ** 0.5


class Gradients(NamedTuple):
    """Two estimates from one run, in the logarithms of the parameters `names`."""

    names: tuple[str, ...]
    episodes: Tensor  # (C,)
    regret: Tensor  # (N, C)
    pathwise: Estimate
    unbiased: Estimate
    certified: Tensor  # (N,), whether every step was; others have NaN as their samples


class _Game(NamedTuple):
    """What `TorchPlayer.walk` asks of a run."""

    q: Tensor
    losses: Stationary


@torch.no_grad()
def run_gradients(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Stationary,
    episodes: int,
    seeds: Sequence[int],
    *,
    checkpoints: Sequence[int] | None = None,
) -> Gradients:
    """Play importance-weighted FTRL as `simulate` does, from the same random numbers, with the tangents of q and Lhat carried along."""
    if len(seeds) < 2:
        raise ValueError(f"seeds: a leave-one-out baseline needs at least two, got {len(seeds)}")
    step, player = FTRLStep(mdp, regularizer), TorchPlayer(mdp)
    names, parameters = step.evaluator.names, step.evaluator.own_parameters
    if any(parameter.dim() for parameter in parameters):
        raise ValueError("regularizer: expected scalar parameters")
    wanted = sorted(set(log_spaced(episodes) if checkpoints is None else checkpoints))
    N, P = len(seeds), len(names)
    gaps, mean = optimal_policy(mdp, losses.mean).gaps, losses.mean.expand(N, -1, -1)
    q = interior_point(mdp).expand(N, -1, -1).clone()
    cumulative_loss, tangent_loss = torch.zeros_like(q), torch.zeros(P, *q.shape, dtype=q.dtype)
    regret, certified = q.new_zeros(N), torch.ones(N, dtype=torch.bool)
    score, pathwise, scored = (q.new_zeros(P, N) for _ in range(3))
    curves: dict[str, list[Tensor]] = {"regret": [], "pathwise": [], "unbiased": []}
    for t in range(1, episodes + 1):
        if (t - 1) % CHUNK == 0:
            numbers = uniforms(seeds, Purpose.EPISODES, [(t - 1) // CHUNK], (mdp.horizon, 3)).to(mdp.device, mdp.dtype)
        solution = step.solve(cumulative_loss, float(t), warm_start=q, check=False)
        if not bool(solution.converged.all()):
            again = step.solve(cumulative_loss, float(t), check=False)
            solution = solution.merge(again, again.converged & ~solution.converged)
        q, certified = solution.q, certified & solution.converged
        now = torch.full((N,), float(t), dtype=q.dtype)
        tangent = -Linearization(step, q, now).apply(tangent_loss + _force(step, q, now))  # (P, N, S, A)
        cost = (q * gaps).sum((-2, -1))
        baseline = (cost.sum() - cost) / (N - 1)
        regret = regret + cost
        pathwise = pathwise + (tangent * gaps).sum((-2, -1))
        scored = scored + (cost - baseline) * score
        feedback = player.walk(_Game(q, losses), mean, None, numbers[:, (t - 1) % CHUNK])  # type: ignore[arg-type]
        score = score + _log_policy_tangent(feedback, q, tangent)
        visited = feedback.scatter(feedback.losses, q)
        safe = torch.where(mdp.actions, q, 1.0)
        cumulative_loss = cumulative_loss + visited / safe
        tangent_loss = tangent_loss - visited / safe**2 * tangent
        if t in wanted:
            for name, value in (("regret", regret[None]), ("pathwise", pathwise), ("unbiased", pathwise + scored)):
                curves[name].append(torch.where(certified, value, torch.nan).T.clone())
    samples = {name: torch.stack(parts, 1) for name, parts in curves.items()}
    estimates = (Estimate(samples["pathwise"]), Estimate(samples["unbiased"]))
    return Gradients(names, torch.tensor(wanted), samples["regret"].squeeze(-1), *estimates, certified)


def _force(step: FTRLStep, q: Tensor, t: Tensor) -> Tensor:
    """d grad psi_t(q) / d log theta for every parameter, `(P, N, S, A)`."""
    evaluator = step.evaluator
    bound = Linearization(step, q, t).setting

    def gradient(log_parameters: tuple[Tensor, ...]) -> Tensor:
        return bound.bind([t, *(x.exp() for x in log_parameters)]).gradient(q)

    logs = tuple(parameter.detach().log() for parameter in evaluator.own_parameters)
    columns = []
    for i in range(len(logs)):
        # Twice in reverse is forward: psi's own gradient is taken by torch.func.grad inside.
        direction = tuple(torch.ones_like(x) if i == j else torch.zeros_like(x) for j, x in enumerate(logs))
        columns.append(torch.func.jvp(gradient, (logs,), (direction,))[1])
    return torch.stack(columns)


def _log_policy_tangent(feedback: Feedback, q: Tensor, tangent: Tensor) -> Tensor:
    """d log pi of the trajectory that was sampled, `(P, N)`."""
    states = q.sum(-1).gather(-1, feedback.states)
    total = torch.zeros_like(tangent[..., 0, 0])
    for i, dq in enumerate(tangent):
        own = feedback.gather(dq) / feedback.gather(q)
        total[i] = (own - dq.sum(-1).gather(-1, feedback.states) / states).sum(-1)
    return total


def finite_differences(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    losses: Stationary,
    episodes: int,
    seeds: Sequence[int],
    *,
    step: float = 0.05,
    checkpoints: Sequence[int] | None = None,
) -> Estimate:
    """The gradient in the logarithms of the parameters by central differences of simulated regret, with common random numbers."""
    if not step > 0:
        raise ValueError(f"step: expected a positive number, got {step}")
    columns = []
    for _, parameter in regularizer.named_parameters():
        kept, sides = parameter.detach().clone(), []
        try:
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.copy_(kept * torch.tensor(sign * step, dtype=kept.dtype).exp())
                sides.append(simulate(mdp, FTRL(mdp, regularizer), losses, episodes, seeds, checkpoints=checkpoints).regret)
        finally:
            with torch.no_grad():
                parameter.copy_(kept)
        columns.append((sides[0] - sides[1]) / (2 * step))
    return Estimate(torch.stack(columns, -1))
