"""The expected cost of the plan, and the likelihood of demonstrated trajectories."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.learning.demonstrations import arrivals, check_demonstrations
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_of
from torch_occ.regularizers.arguments import keep
from torch_occ.step.checks import check_like
from torch_occ.step.entropic import entropy_at
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.solution import Solution


def expected_cost(
    step: FTRLStep,
    loss: Tensor,
    cost: Tensor,
    t: Tensor | float = 1.0,
    *,
    warm_start: Tensor | None = None,
    mdp: LayeredMDP | None = None,
) -> Tensor:
    """Compute what the plan for predicted losses costs in truth, ⟨q, cost⟩ with q = step(loss, t).

    Args:
        loss: the predicted losses, `(*batch, S, A)`.
        cost: the true losses, `(*batch, S, A)`. Values on masked pairs are ignored.
        t, warm_start, mdp: as in `FTRLStep.solve`.

    Returns:
        One number per element, `(*batch,)`; differentiable in all of them.

    Raises:
        SolveError, TypeError, ValueError: as the step; also if the cost has another shape.
    """
    model = step.mdp if mdp is None else mdp
    if isinstance(cost, Tensor) and cost.is_floating_point():
        cost = cost.to(model.dtype)
    check_like("cost", cost, model)
    q = step(loss, t, warm_start=warm_start, mdp=mdp)
    return (q * keep("pair", model, cost, 0.0)).sum((-2, -1))


def negative_log_likelihood(
    step: FTRLStep,
    loss: Tensor,
    states: Tensor,
    actions: Tensor,
    t: Tensor | float = 1.0,
    *,
    warm_start: Tensor | None = None,
    mdp: LayeredMDP | None = None,
    transitions: bool = False,
) -> Tensor:
    """Compute the negative log-likelihood of demonstrated trajectories under the step's policy.

        - mean over trajectories of sum_k log pi(a_k | s_k),        pi(a | s) = q(s, a) / q(s)

    With `ConditionalEntropy`, minimizing it over the loss is maximum-causal-entropy inverse
    reinforcement learning (Ziebart, 2010). For entropies, log pi is computed from the multipliers
    of the step, so that it is finite even where pi underflows.

    Args:
        loss: the predicted losses, `(*batch, S, A)`.
        states: `(*batch, N, L)`, N trajectories per element: one state per layer, numbered over all
            layers as everywhere. Batch shapes broadcast.
        actions: `(*batch, N, L)`.
        t, warm_start, mdp: as in `FTRLStep.solve`.
        transitions: whether to add - log initial(s_0) - sum_k log P(s_{k+1} | s_k, a_k). These
            terms do not depend on the loss; they matter if the probabilities are learned.

    Returns:
        The mean over the N trajectories of each element, `(*batch,)`.

    Raises:
        ValueError: if the MDP cannot produce a trajectory; the message names the place. Inside
            transforms of torch.func values are not checked.
        TypeError: if states or actions are not tensors of integers.
        SolveError: as the step.
    """
    model = step.mdp if mdp is None else mdp
    check_demonstrations(model, states, actions)
    solution = step.solve(loss, t, warm_start=warm_start, mdp=mdp)
    logs = _log_policy(step, solution, loss.to(model.dtype), t, model).flatten(-2)
    index = states * model.num_actions + actions  # (*batch, N, L)
    batch = torch.broadcast_shapes(logs.shape[:-1], index.shape[:-2])
    index = index.expand(*batch, *index.shape[-2:])
    chosen = logs.expand(*batch, -1).gather(-1, index.flatten(-2)).view(index.shape)
    likelihood = chosen.sum(-1)
    if transitions:
        likelihood = likelihood + arrivals(model, states, actions).log().sum(-1)
    return -likelihood.mean(-1)


def _log_policy(
    step: FTRLStep, solution: Solution, loss: Tensor, t: Tensor | float, mdp: LayeredMDP
) -> Tensor:
    """Return log pi `(*batch, S, A)`; values on masked pairs are meaningless."""
    if step.in_logs and step.constraints is None:  # a softmax; see torch_occ.step.entropic
        episode = torch.as_tensor(t, dtype=mdp.dtype, device=mdp.device)
        weight = entropy_at(step.regularizer, episode).weight[..., None, None]
        Q = loss + flow_of(mdp).lookahead(solution.value)
        return torch.where(mdp.actions, -Q / weight, -torch.inf).log_softmax(-1)
    return keep("pair", mdp, solution.q, 1.0).log() - solution.q.sum(-1, keepdim=True).log()
