"""The statements of the paper on random data.

The tests check that all statements hold; experiments/theory.py shows how tight each one is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, optimal_policy, policy_of
from torch_occ.step.ftrl import FTRLStep
from torch_occ.theory import bounds, curvatures, penalty, runs, stability
from torch_occ.theory.statements import Parameters, Statement


class Data(NamedTuple):
    """The data of the statements; q is the occupancy of `policy`, and the mappings are one-hot."""

    q: Tensor  # (*batch, S, A)
    policy: Tensor  # (*batch, S, A)
    mapping: Tensor  # (*batch, S, A)
    other: Tensor  # (*batch, S, A)
    mean: Tensor  # (*batch, S, A), of the losses
    second_moment: Tensor  # (*batch, S, A)


def draw_data(mdp: LayeredMDP, generator: torch.Generator) -> Data:
    """Draw data: policies from uniform to deterministic, and losses that are fixed or Bernoulli."""
    shape = (*mdp.batch_shape, mdp.num_states, mdp.num_actions)
    policy = draw_policy(mdp, generator)
    mean = _uniform(shape, generator).to(mdp.dtype) ** 2
    # The loss is either its mean or a coin with that mean.
    coins = _uniform((*mdp.batch_shape, 1, 1), generator) < 0.5
    return Data(
        occupancy(mdp, policy),
        policy,
        draw_mapping(mdp, generator),
        draw_mapping(mdp, generator),
        mean,
        torch.where(coins, mean, mean.square()),
    )


def draw_policy(mdp: LayeredMDP, generator: torch.Generator) -> Tensor:
    """A random policy `(*batch, S, A)`, mixed with a share between 1e-10 and 1 of the uniform."""
    shape = (*mdp.batch_shape, mdp.num_states, mdp.num_actions)
    temperature = 10 ** (2 * _uniform((*mdp.batch_shape, 1, 1), generator) - 1)
    scores = torch.where(mdp.actions, _uniform(shape, generator) * 10 / temperature, -torch.inf)
    share = 10 ** (-10 * _uniform((*mdp.batch_shape, 1, 1), generator))
    available = mdp.actions.to(mdp.dtype)
    uniform = available / available.sum(-1, keepdim=True)
    mixed = (1 - share) * scores.to(mdp.dtype).softmax(-1) + share * uniform
    return mixed / mixed.sum(-1, keepdim=True)


def draw_mapping(mdp: LayeredMDP, generator: torch.Generator) -> Tensor:
    """A random action in every state, one-hot, `(*batch, S, A)`."""
    scores = _uniform((*mdp.batch_shape, mdp.num_states, mdp.num_actions), generator)
    best = torch.where(mdp.actions, scores, -1.0).argmax(-1, keepdim=True)
    return (best == torch.arange(mdp.num_actions, device=mdp.device)).to(mdp.dtype)


def draw_trajectory(mdp: LayeredMDP, q: Tensor, generator: torch.Generator) -> Tensor:
    """The pairs that an episode under q visits, 0 or 1, `(*batch, S, A)`."""
    policy, visited = policy_of(mdp, q), []
    arriving = mdp.initial.expand(*q.shape[:-2], -1)
    for kernel, here in zip(mdp.transitions, mdp.layer_slices, strict=True):
        weights = (arriving.unsqueeze(-1) * policy[..., here, :]).flatten(-2)
        flat = weights.reshape(-1, weights.shape[-1])
        index = torch.multinomial(flat, 1, generator=generator)
        chosen = torch.zeros_like(flat).scatter(-1, index, 1.0).view_as(weights)  # one-hot
        visited.append(chosen.unflatten(-1, (-1, mdp.num_actions)))
        arriving = torch.einsum("...sa,...sat->...t", visited[-1], kernel)
    return torch.cat(visited, -2)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=generator, device=generator.device)


def survey(
    mdp: LayeredMDP,
    generator: torch.Generator,
    *,
    parameters: Parameters | None = None,
    count: int = 20,
) -> Iterator[Statement]:
    """The statements on freshly drawn data, one set for each MDP of the batch.

    Runs have `count` episodes. By default alpha and gamma are drawn between 0.1 and 10, and beta
    is 64 L, as the lemmas ask.
    """
    if parameters is None:
        alpha, gamma = (10 ** (2 * float(_uniform((), generator)) - 1) for _ in range(2))
        parameters = Parameters(alpha, 64.0 * mdp.horizon, gamma)
    data = draw_data(mdp, generator)
    yield from occupancy_statements(mdp, data, generator, parameters)
    yield from hessian_statements(mdp, data, generator, parameters)
    yield from run_statements(mdp, data, generator, parameters, count)
    yield from condition_statements(mdp, data, generator)


def occupancy_statements(
    mdp: LayeredMDP, data: Data, generator: torch.Generator, parameters: Parameters
) -> Iterator[Statement]:
    """The statements about occupancy measures, which bound the penalty."""
    (q, policy, mapping, other, *_), alpha = data, parameters.alpha
    weight = _uniform((*mdp.batch_shape, 1, 1), generator)
    yield penalty.convex_combine(mdp, q, occupancy(mdp, mapping), weight)
    yield from penalty.state_reach_probability(mdp, policy)
    # Any g, and an f between nothing and the most that the condition allows.
    g = q * _uniform(q.shape, generator)
    f = penalty.induction_equality(mdp, policy, g) * _uniform((*mdp.batch_shape, 1), generator)
    yield from penalty.induction(mdp, policy, f, g)
    yield from penalty.sqrt_diff(mdp, policy, mapping)
    yield from penalty.sqrt_diff_2(mdp, mapping, other)
    yield penalty.penalty_decomposition(mdp, q, other, alpha)
    yield penalty.penalty_term_1(mdp, policy, other, mapping, alpha)
    yield penalty.bound_on_penalty(mdp, q, other, mapping, alpha)
    t = 10 ** (6 * _uniform(mdp.batch_shape, generator))
    best = occupancy(mdp, other)
    yield bounds.cauchy_schwarz(mdp, bounds.summands(q, best, mapping, t))
    yield bounds.theorem_summand(mdp, parameters, q, best, mapping, t)


def hessian_statements(
    mdp: LayeredMDP, data: Data, generator: torch.Generator, parameters: Parameters
) -> Iterator[Statement]:
    """The statements about the Hessian, which bound the stability."""
    q, mapping, alpha = data.q, data.mapping, parameters.alpha
    curve = curvatures.curvature(mdp, q, alpha)
    w = (_uniform(q.shape, generator) * 2 - 1) * q
    yield curvatures.quadratic_form_of_hessian(mdp, q, w, alpha)
    yield curvatures.both_definitions(mdp, q, curvatures.tangent(mdp, q, w), alpha)
    yield curvatures.hessian_by_layers(mdp, q, alpha)
    yield from curvatures.inverse_by_layers(mdp, q, alpha)
    for k in range(mdp.horizon):
        w = _uniform((*mdp.batch_shape, mdp.layer_sizes[k], mdp.num_actions), generator) * 2 - 1
        # Divided by q as the estimates are, so that rare pairs count.
        yield stability.H_and_N(mdp, curve, k, w / q[..., mdp.layer_slices[k], :])
        yield from stability.N_properties(mdp, curve, k)
    d = mdp.num_states
    root = _uniform((*mdp.batch_shape, d, d), generator) - 0.3
    w = _uniform((*mdp.batch_shape, d), generator) ** 4
    yield stability.quadratic_form_diagonal(root @ root.mT, w)
    yield stability.stability_first_step(mdp, q, alpha, data.mean, data.second_moment)
    first, between, every = stability.layer_recursion(mdp, q, mapping, alpha)
    yield from (first, every, *([between] if mdp.horizon > 1 else []))
    yield stability.stability_second_step(mdp, q, mapping, alpha)
    yield from stability.bound_on_stability(mdp, q, mapping, alpha, data.mean, data.second_moment)
    # Halfway between q and another measure, entries may fall to a half and no further.
    p = (q + occupancy(mdp, draw_policy(mdp, generator))) / 2
    t = torch.tensor(float(10 ** (6 * _uniform((), generator))), dtype=q.dtype)
    yield runs.close_hessian(mdp, q, p, parameters, t)


def play_run(
    mdp: LayeredMDP, parameters: Parameters, mean: Tensor, count: int, generator: torch.Generator
) -> runs.Trajectory:
    """`alg:main_alg` on a batch of MDPs for `count` episodes, with Bernoulli losses."""
    step = FTRLStep(mdp, parameters.regularizer(mdp))
    total, occupancies, estimates = torch.zeros_like(mean), [], []
    warm: Tensor | None = None
    with torch.no_grad():
        for t in range(1, count + 1):
            q = warm = step.solve(total, float(t), warm_start=warm).q
            losses = (_uniform(mean.shape, generator) < mean).to(mean.dtype)
            estimate = draw_trajectory(mdp, q, generator) * losses / q
            total = total + estimate
            occupancies.append(q)
            estimates.append(estimate)
    return runs.Trajectory(torch.stack(occupancies), torch.stack(estimates))


def run_statements(
    mdp: LayeredMDP, data: Data, generator: torch.Generator, parameters: Parameters, count: int
) -> Iterator[Statement]:
    """The analysis of FTRL along a short run."""
    run = play_run(mdp, parameters, data.mean, count, generator)
    best = occupancy(mdp, optimal_policy(mdp, data.mean).policy)
    u = runs.comparator_point(run.q[0], best, count)
    found = runs.decompose(mdp, parameters, run, u)
    t = torch.arange(1, count + 1, dtype=run.q.dtype).view(-1, *(1,) * len(mdp.batch_shape))
    yield from runs.smooth_update(mdp, run.q, found.tilde_q)
    yield from runs.step_length(mdp, run.q, found.tilde_q, parameters, t)
    yield found.short_estimate()
    yield found.simple_decomposition()
    yield found.bound_stability()
    yield from found.bound_penalty()
    yield found.key_lemma()
    yield from runs.proper_comparator(mdp, run.q[0], best, count * data.mean, parameters, count)


def condition_statements(
    mdp: LayeredMDP, data: Data, generator: torch.Generator
) -> Iterator[Statement]:
    """The self-bounding condition, for losses of which an adversary corrupts some."""
    count = 8
    yield bounds.performance_difference(mdp, data.q, data.mean)
    plan = optimal_policy(mdp, data.mean)
    clean = data.mean.expand(count, *data.mean.shape)
    strength = _uniform((count, *mdp.batch_shape, 1, 1), generator) ** 4
    losses = clean + strength * (_uniform(clean.shape, generator) - clean)
    spent = bounds.corruption(mdp, losses, clean)
    best = occupancy(mdp, optimal_policy(mdp, losses.sum(0)).policy)
    played = torch.stack([occupancy(mdp, draw_policy(mdp, generator)) for _ in range(count)])
    regret = ((played - best) * losses).sum((0, -2, -1))
    yield bounds.self_bounding_condition(regret, played.sum(0), plan.gaps, plan.policy, spent)
    yield bounds.opt_implicit_bound(mdp, best, plan.gaps, plan.policy, count, spent)
