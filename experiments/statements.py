"""The statements of the paper on random data, for experiments/theory.py and the tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import torch_occ as occ
from torch_occ import theory
from torch_occ.mdp.occupancy import flow_of
from torch_occ.theory import curvatures
from torch_occ.theory.statements import equality

# -- The definitions of the paper, against the closed forms of the package -------------------------
#
# A statement compares the largest relative difference with zero. Matrices are scaled by D first:
# D^-1/2 H D^-1/2 >= I and D^1/2 H^-1 D^1/2 <= I, so that every pair has the same weight. Every
# state needs all of at least two actions.


def recursive_hessian(mdp: occ.LayeredMDP, curve: curvatures.Curvature, k: int) -> Tensor:
    """M_k of `lem:def_M`, `eq:def_M`; `(*batch, U_{0:k}, U_{0:k})`."""
    if not bool(mdp.actions.all()) or mdp.num_actions == 1:
        raise ValueError("mdp: M_k is finite only if every state has all of at least two actions")
    c, d = (1 / part for part in curve)
    found = torch.diag_embed((c + d)[..., mdp.layer_slices[0], :].flatten(-2))
    for j in range(1, k + 1):
        before, here = found.shape[-1], mdp.layer_slices[j]
        c_j, d_j = (part[..., here, :].flatten(-2) for part in (c, d))
        own, step = torch.eye(d_j.shape[-1], dtype=c.dtype, device=c.device), curvatures.P(mdp, j)
        incoming = torch.cat([step, -own.expand(*step.shape[:-2], -1, -1)], -2)
        # P~_k has rows of zeros for the layers before k - 1.
        incoming = pad(incoming, (0, 0, before - step.shape[-2], 0))
        grown = pad(found, (0, len(own), 0, len(own))) + torch.diag_embed(pad(d_j, (before, 0)))
        found = grown + (incoming * c_j.unsqueeze(-2)) @ incoming.mT
    return found


def quadratic_form_of_hessian(
    mdp: occ.LayeredMDP, q: Tensor, w: Tensor, alpha: float
) -> theory.Statement:
    """`eq:quadratic_form`: the sum of squares equals w' H w; w `(*batch, S, A)`."""
    H, x = theory.hessian(mdp, q, alpha), w.flatten(-2).unsqueeze(-1)
    added = (x.abs().mT @ H.abs() @ x.abs())[..., 0, 0]  # sum of absolute values
    dense = (x.mT @ H @ x)[..., 0, 0]
    form = theory.quadratic_form(mdp, q, w, alpha)
    return equality("eq:quadratic_form", dense, form, mdp.num_pairs**2, added)


def hessian_by_layers(mdp: occ.LayeredMDP, q: Tensor, alpha: float) -> theory.Statement:
    """`lem:def_M`: H = M_{L-1}."""
    curve = curvatures.curvature(mdp, q, alpha)
    root = curve.d_inverse.flatten(-2).sqrt()
    expected = curvatures.scale(theory.hessian(mdp, q, alpha), root)
    found = curvatures.scale(recursive_hessian(mdp, curve, mdp.horizon - 1), root)
    error = _largest_entry(found - expected) / _largest_entry(expected)
    return equality("lem:def_M", error, 0.0, mdp.num_pairs, 1.0)


def inverse_by_layers(
    mdp: occ.LayeredMDP, q: Tensor, alpha: float
) -> tuple[theory.Statement, theory.Statement]:
    """`lem:M_inverse` and `eq:def_N`, each in its worst layer k.

    M_k times its Woodbury inverse is the identity, relative to |M_k|, and N_k is
    D_k^-1 - D_k^-1 W_k D_k^-1, with W_0 = (C_0^-1 + D_0^-1)^-1.
    """
    curve = curvatures.curvature(mdp, q, alpha)
    layers, products, blocks = curvatures.all_N(mdp, curve), [], []
    for k, here in enumerate(mdp.layer_slices):
        d_inverse = curve.d_inverse[..., : here.stop, :].flatten(-2)
        matrix = curvatures.scale(recursive_hessian(mdp, curve, k), d_inverse.sqrt())
        inverse = curvatures.scale(
            curvatures.M_inverse(mdp, curve, layers[: k + 1]), d_inverse.rsqrt()
        )
        error = matrix @ inverse - torch.eye(matrix.shape[-1], dtype=q.dtype, device=q.device)
        products.append(_largest_entry(error) / torch.linalg.matrix_norm(matrix))
        own, c_inverse = (part[..., here, :].flatten(-2) for part in reversed(curve))
        weight = torch.diag_embed(1 / (own + c_inverse))
        if k:
            weight = curvatures.W(mdp, curve, k, layers[k - 1])
        identity = torch.eye(own.shape[-1], dtype=q.dtype, device=q.device)
        defined = identity - curvatures.scale(weight, own.sqrt())
        blocks.append(_largest_entry(curvatures.scale(layers[k], own.rsqrt()) - defined))
    product, block = (torch.stack(x).amax(0) for x in (products, blocks))
    return (
        equality("lem:M_inverse", product, 0.0, mdp.num_pairs, 1.0),
        equality("eq:def_N", block, 0.0, mdp.num_pairs, 1.0),
    )


def both_definitions(mdp: occ.LayeredMDP, q: Tensor, w: Tensor, alpha: float) -> theory.Statement:
    """`eq:hybrid` and `eq:hybrid_alternative` have the same second derivative along a tangent w.

    w `(*batch, S, A)` is tangent to Omega. With q(s) = sum_a q(s,a), w' H w is

        sum_{s,a} w^2 / (4 q^(3/2)) + alpha (w(s) - w(s,a))^2 / (4 (q(s) - q(s,a))^(3/2)).
    """
    rest, others = q @ mdp.other_actions, w @ mdp.other_actions
    own = w.square() / (4 * q**1.5) + alpha * others.square() / (4 * rest**1.5)
    # Inflow and outflow of w differ by rounding, which the curvature of the rest magnifies.
    moved = (flow_of(mdp).inflow(w.abs()) + w.abs().sum(-1)).unsqueeze(-1)
    scale = (own + alpha * others.abs() * moved / (2 * rest**1.5)).sum((-2, -1))
    form = theory.quadratic_form(mdp, q, w, alpha)
    return equality("eq:hybrid_alternative", form, own.sum((-2, -1)), mdp.num_pairs, scale)


def tangent(mdp: occ.LayeredMDP, q: Tensor, w: Tensor) -> Tensor:
    """A direction inside Omega made from any w `(*batch, S, A)`.

    In every state the most likely action of q loses what w gives to the others. The change of the
    inflow of later states is passed on with the policy of q.
    """
    policy, likeliest = occ.policy_of(mdp, q), q.argmax(-1, keepdim=True)
    others = torch.scatter(w, -1, likeliest, 0.0)
    moved = others.scatter(-1, likeliest, -others.sum(-1, keepdim=True))
    arriving = torch.einsum("...sa,...sat->...t", moved, mdp.joint_transitions)
    flowing = torch.einsum("...s,...st->...t", arriving, occ.mdp.reachability(mdp, policy))
    return moved + policy * flowing.unsqueeze(-1)


def _largest_entry(matrix: Tensor) -> Tensor:
    return matrix.abs().amax((-2, -1))


# -- The statements on random data -----------------------------------------------------------------


class Data(NamedTuple):
    """The data of the statements; q is the occupancy of `policy`, and the mappings are one-hot."""

    q: Tensor  # (*batch, S, A)
    policy: Tensor  # (*batch, S, A)
    mapping: Tensor  # (*batch, S, A)
    other: Tensor  # (*batch, S, A)
    mean: Tensor  # (*batch, S, A), of the losses
    second_moment: Tensor  # (*batch, S, A)


def draw_data(mdp: occ.LayeredMDP, generator: torch.Generator) -> Data:
    """Draw data: policies from uniform to deterministic, and losses that are fixed or Bernoulli."""
    policy = draw_policy(mdp, generator)
    mean = uniform(policy.shape, generator).to(mdp.dtype) ** 2
    # The loss is either its mean or a coin with that mean.
    coins = uniform((*mdp.batch_shape, 1, 1), generator) < 0.5
    mapping, other = draw_mapping(mdp, generator), draw_mapping(mdp, generator)
    q, moment = occ.occupancy(mdp, policy), torch.where(coins, mean, mean.square())
    return Data(q, policy, mapping, other, mean, moment)


def draw_policy(mdp: occ.LayeredMDP, generator: torch.Generator) -> Tensor:
    """A random policy `(*batch, S, A)`, mixed with a share between 1e-10 and 1 of the uniform."""
    shape = (*mdp.batch_shape, mdp.num_states, mdp.num_actions)
    temperature = 10 ** (2 * uniform((*mdp.batch_shape, 1, 1), generator) - 1)
    scores = torch.where(mdp.actions, uniform(shape, generator) * 10 / temperature, -torch.inf)
    share = 10 ** (-10 * uniform((*mdp.batch_shape, 1, 1), generator))
    mixed = (1 - share) * scores.to(mdp.dtype).softmax(-1) + share * occ.uniform_policy(mdp)
    return mixed / mixed.sum(-1, keepdim=True)


def draw_mapping(mdp: occ.LayeredMDP, generator: torch.Generator) -> Tensor:
    """A random action in every state, one-hot, `(*batch, S, A)`."""
    scores = uniform((*mdp.batch_shape, mdp.num_states, mdp.num_actions), generator)
    best = torch.where(mdp.actions, scores, -1.0).argmax(-1, keepdim=True)
    return (best == torch.arange(mdp.num_actions, device=mdp.device)).to(mdp.dtype)


def draw_trajectory(mdp: occ.LayeredMDP, q: Tensor, generator: torch.Generator) -> Tensor:
    """The pairs that an episode under q visits, 0 or 1, `(*batch, S, A)`."""
    policy, visited = occ.policy_of(mdp, q), []
    arriving = mdp.initial.expand(*q.shape[:-2], -1)
    for kernel, here in zip(mdp.transitions, mdp.layer_slices, strict=True):
        weights = (arriving.unsqueeze(-1) * policy[..., here, :]).flatten(-2)
        flat = weights.reshape(-1, weights.shape[-1])
        index = torch.multinomial(flat, 1, generator=generator)
        chosen = torch.zeros_like(flat).scatter(-1, index, 1.0).view_as(weights)  # one-hot
        visited.append(chosen.unflatten(-1, (-1, mdp.num_actions)))
        arriving = torch.einsum("...sa,...sat->...t", visited[-1], kernel)
    return torch.cat(visited, -2)


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers between 0 and 1."""
    return torch.rand(shape, dtype=torch.float64, generator=generator, device=generator.device)


def survey(
    mdp: occ.LayeredMDP,
    generator: torch.Generator,
    *,
    parameters: theory.Parameters | None = None,
    count: int = 20,
) -> Iterator[theory.Statement]:
    """The statements on freshly drawn data, one set for each MDP of the batch.

    Runs have `count` episodes. By default alpha and gamma are drawn between 0.1 and 10, and beta
    is 64 L, as the lemmas ask.
    """
    if parameters is None:
        alpha, gamma = (10 ** (2 * float(uniform((), generator)) - 1) for _ in range(2))
        parameters = theory.Parameters(alpha, 64.0 * mdp.horizon, gamma)
    data = draw_data(mdp, generator)
    yield from occupancy_statements(mdp, data, generator, parameters)
    yield from hessian_statements(mdp, data, generator, parameters)
    yield from run_statements(mdp, data, generator, parameters, count)
    yield from condition_statements(mdp, data, generator)


def occupancy_statements(
    mdp: occ.LayeredMDP, data: Data, generator: torch.Generator, parameters: theory.Parameters
) -> Iterator[theory.Statement]:
    """The statements about occupancy measures, which bound the theory.penalty."""
    (q, policy, mapping, other, *_), alpha = data, parameters.alpha
    weight = uniform((*mdp.batch_shape, 1, 1), generator)
    yield theory.convex_combine(mdp, q, occ.occupancy(mdp, mapping), weight)
    yield from theory.state_reach_probability(mdp, policy)
    # Any g, and an f between nothing and the most that the condition allows.
    g = q * uniform(q.shape, generator)
    f = theory.induction_equality(mdp, policy, g) * uniform((*mdp.batch_shape, 1), generator)
    yield from theory.induction(mdp, policy, f, g)
    yield from theory.sqrt_diff(mdp, policy, mapping)
    yield from theory.sqrt_diff_2(mdp, mapping, other)
    yield theory.penalty_decomposition(mdp, q, other, alpha)
    yield theory.penalty_term_1(mdp, policy, other, mapping, alpha)
    yield theory.bound_on_penalty(mdp, q, other, mapping, alpha)
    t = 10 ** (6 * uniform(mdp.batch_shape, generator))
    best = occ.occupancy(mdp, other)
    yield theory.cauchy_schwarz(mdp, theory.bounds.summands(q, best, mapping, t))
    yield theory.theorem_summand(mdp, parameters, q, best, mapping, t)


def hessian_statements(
    mdp: occ.LayeredMDP, data: Data, generator: torch.Generator, parameters: theory.Parameters
) -> Iterator[theory.Statement]:
    """The statements about the Hessian, which bound the theory.stability."""
    q, mapping, alpha = data.q, data.mapping, parameters.alpha
    curve = curvatures.curvature(mdp, q, alpha)
    w = (uniform(q.shape, generator) * 2 - 1) * q
    yield quadratic_form_of_hessian(mdp, q, w, alpha)
    yield both_definitions(mdp, q, tangent(mdp, q, w), alpha)
    yield hessian_by_layers(mdp, q, alpha)
    yield from inverse_by_layers(mdp, q, alpha)
    for k in range(mdp.horizon):
        w = uniform((*mdp.batch_shape, mdp.layer_sizes[k], mdp.num_actions), generator) * 2 - 1
        # Divided by q as the estimates are, so that rare pairs count.
        yield theory.H_and_N(mdp, curve, k, w / q[..., mdp.layer_slices[k], :])
        yield from theory.N_properties(mdp, curve, k)
    d = mdp.num_states
    root = uniform((*mdp.batch_shape, d, d), generator) - 0.3
    w = uniform((*mdp.batch_shape, d), generator) ** 4
    yield theory.terms.quadratic_form_diagonal(root @ root.mT, w)
    yield theory.stability_first_step(mdp, q, alpha, data.mean, data.second_moment)
    first, between, every = theory.layer_recursion(mdp, q, mapping, alpha)
    yield from (first, every, *([between] if mdp.horizon > 1 else []))
    yield theory.stability_second_step(mdp, q, mapping, alpha)
    yield from theory.bound_on_stability(mdp, q, mapping, alpha, data.mean, data.second_moment)
    # Halfway between q and another measure, entries may fall to a half and no further.
    p = (q + occ.occupancy(mdp, draw_policy(mdp, generator))) / 2
    t = torch.tensor(float(10 ** (6 * uniform((), generator))), dtype=q.dtype)
    yield theory.close_hessian(mdp, q, p, parameters, t)


def play_run(
    mdp: occ.LayeredMDP,
    parameters: theory.Parameters,
    mean: Tensor,
    count: int,
    generator: torch.Generator,
) -> theory.runs.Trajectory:
    """`alg:main_alg` on a batch of MDPs for `count` episodes, with Bernoulli losses."""
    step = occ.FTRLStep(mdp, parameters.regularizer(mdp))
    total, occupancies, estimates = torch.zeros_like(mean), [], []
    warm: Tensor | None = None
    with torch.no_grad():
        for t in range(1, count + 1):
            q = warm = step.solve(total, float(t), warm_start=warm).q
            losses = (uniform(mean.shape, generator) < mean).to(mean.dtype)
            estimate = draw_trajectory(mdp, q, generator) * losses / q
            total = total + estimate
            occupancies.append(q)
            estimates.append(estimate)
    return theory.runs.Trajectory(torch.stack(occupancies), torch.stack(estimates))


def run_statements(
    mdp: occ.LayeredMDP,
    data: Data,
    generator: torch.Generator,
    parameters: theory.Parameters,
    count: int,
) -> Iterator[theory.Statement]:
    """The analysis of FTRL along a short run."""
    run = play_run(mdp, parameters, data.mean, count, generator)
    best = occ.occupancy(mdp, occ.optimal_policy(mdp, data.mean).policy)
    u = theory.runs.comparator_point(run.q[0], best, count)
    found = theory.decompose(mdp, parameters, run, u)
    t = torch.arange(1, count + 1, dtype=run.q.dtype).view(-1, *(1,) * len(mdp.batch_shape))
    yield from theory.smooth_update(mdp, run.q, found.tilde_q)
    yield from theory.step_length(mdp, run.q, found.tilde_q, parameters, t)
    yield found.short_estimate()
    yield found.simple_decomposition()
    yield found.bound_stability()
    yield from found.bound_penalty()
    yield found.key_lemma()
    yield from theory.proper_comparator(mdp, run.q[0], best, count * data.mean, parameters, count)


def condition_statements(
    mdp: occ.LayeredMDP, data: Data, generator: torch.Generator
) -> Iterator[theory.Statement]:
    """The self-bounding condition, for losses of which an adversary corrupts some."""
    count = 8
    yield theory.performance_difference(mdp, data.q, data.mean)
    plan = occ.optimal_policy(mdp, data.mean)
    clean = data.mean.expand(count, *data.mean.shape)
    strength = uniform((count, *mdp.batch_shape, 1, 1), generator) ** 4
    losses = clean + strength * (uniform(clean.shape, generator) - clean)
    spent = theory.corruption(mdp, losses, clean)
    best = occ.occupancy(mdp, occ.optimal_policy(mdp, losses.sum(0)).policy)
    played = torch.stack([occ.occupancy(mdp, draw_policy(mdp, generator)) for _ in range(count)])
    regret = ((played - best) * losses).sum((0, -2, -1))
    yield theory.self_bounding_condition(regret, played.sum(0), plan.gaps, plan.policy, spent)
    yield theory.opt_implicit_bound(mdp, best, plan.gaps, plan.policy, count, spent)
