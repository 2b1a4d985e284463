"""Omega, the set of occupancy measures, and operations along its layers.

An occupancy measure is a `q >= 0` of shape `(*batch, S, A)` that satisfies the flow constraints
`E q = b`, one row per state (`eq:occupancy_measure_cond_2`):

    (E q)(s) = q(s) - sum_{s', a'} P(s | s', a') q(s', a'),        b = (initial, 0, ..., 0),

with q(s) = sum_a q(s, a). Everything else uses two recursions. For a (signed) policy p with
sum_a p(a | s) = 1, let P_p(s, s') = sum_a p(a | s) P(s' | s, a). Then

    forward:    u = source + P_p' u        backward:    v = reward + P_p v

are solved by one pass from the first layer to the last, or back.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ._support.constants import TIE
from torch_occ._support.private import values_are_hidden
from torch_occ.mdp.checks import as_tensor, broadcast, check_table, row_tolerance, unexpected
from torch_occ.mdp.layered import DENSE_STATES, LayeredMDP
from torch_occ.mdp.layers import DenseLayer


class LayeredFlow:
    """The transitions as linear operators, layer by layer; `in_order` is that of the layers."""

    def __init__(self, mdp: LayeredMDP, *, in_order: bool = False) -> None:
        self.mdp, self.in_order = mdp, in_order
        self.layers = mdp.layers[:-1]  # the last one leads to the end, which has no row in E

    def inflow(self, x: Tensor) -> Tensor:
        """P' x: `(*batch, S, A)` -> `(*batch, S)`, the mass that arrives in each state."""
        parts = self.mdp.split(x, -2)
        pairs = zip(self.layers, parts[:-1], strict=True)
        arrivals = [layer.arrive(part, self.in_order) for layer, part in pairs]
        return join([torch.zeros_like(parts[0][..., 0]), *arrivals], 1)

    def lookahead(self, v: Tensor) -> Tensor:
        """P v: `(*batch, S)` -> `(*batch, S, A)`, the expectation of v at the next state."""
        parts = self.mdp.split(v, -1)
        pairs = zip(self.layers, parts[1:], strict=True)
        ahead = [layer.ahead(part, self.in_order) for layer, part in pairs]
        end = torch.zeros_like(parts[-1]).unsqueeze(-1)
        return join([*ahead, end.expand(*parts[-1].shape, self.mdp.num_actions)], 2)

    def forward(self, policy: Tensor, source: Tensor) -> Tensor:
        """u = source + P_p' u. With source b, this is the state occupancy of the policy."""
        policies, sources = self.mdp.split(policy, -2), self.mdp.split(source, -1)
        u = [sources[0]]
        for k, layer in enumerate(self.layers):
            arrived = layer.arrive(policies[k] * u[k].unsqueeze(-1), self.in_order)
            u.append(sources[k + 1] + arrived)
        return join(u, 1)

    def backward(self, policy: Tensor, reward: Tensor) -> Tensor:
        """v = reward + P_p v. With the expected loss as reward, this is the value of the policy."""
        policies, rewards = self.mdp.split(policy, -2), self.mdp.split(reward, -1)
        v = [rewards[-1]]
        for k in reversed(range(len(self.layers))):
            ahead = self.layers[k].ahead(v[0], self.in_order)
            v.insert(0, rewards[k] + (policies[k] * ahead).sum(-1))
        return join(v, 1)


class DenseFlow:
    """The same operators with one `(S, A, S)` tensor, which is faster for small MDPs."""

    def __init__(self, mdp: LayeredMDP) -> None:
        self.mdp = mdp
        self.kernel = mdp.joint_transitions  # (*batch, S, A, S)
        whole = DenseLayer(self.kernel)  # one layer that leads to itself
        self.inflow, self.lookahead = whole.arrive, whole.ahead
        self.identity = torch.eye(mdp.num_states, dtype=mdp.dtype, device=mdp.device)

    def one_step(self, policy: Tensor) -> Tensor:
        """I - P_p `(*batch, S, S)`, unit upper triangular because states lead to later ones."""
        return self.identity - (policy.unsqueeze(-2) @ self.kernel).squeeze(-2)

    def forward(self, policy: Tensor, source: Tensor) -> Tensor:
        return _substitute(self.one_step(policy).mT, source, upper=False)

    def backward(self, policy: Tensor, reward: Tensor) -> Tensor:
        return _substitute(self.one_step(policy), reward, upper=True)


Flow = DenseFlow | LayeredFlow


def flow_of(mdp: LayeredMDP, elements: int = 32) -> Flow:
    """The flow that is faster for this MDP and a batch of `elements` elements."""
    small = mdp.num_states <= (DENSE_STATES if elements <= 4 else DENSE_STATES // 2)
    return DenseFlow(mdp) if small and not mdp.is_sparse else LayeredFlow(mdp)


def _substitute(triangle: Tensor, x: Tensor, upper: bool) -> Tensor:
    x = x.unsqueeze(-1)
    return torch.linalg.solve_triangular(triangle, x, upper=upper, unitriangular=True).squeeze(-1)


def join(parts: list[Tensor], event_dims: int) -> Tensor:
    """Concatenate layers whose batch shapes may still differ."""
    split = [x.shape[: x.dim() - event_dims] for x in parts]
    batch = broadcast(*split)
    pairs = zip(parts, split, strict=True)
    same = [x if own == batch else x.expand(*batch, *x.shape[len(own) :]) for x, own in pairs]
    return torch.cat(same, -event_dims)


# -- the constraints ---------------------------------------------------------------------------


def flow_source(mdp: LayeredMDP) -> Tensor:
    """b: the initial distribution in the first layer, zero elsewhere, `(*batch, S)`."""
    return torch.nn.functional.pad(mdp.initial, (0, mdp.num_states - mdp.layer_sizes[0]))


def flow_residual(mdp: LayeredMDP, q: Tensor) -> Tensor:
    """E q - b, `(*batch, S)`; zero exactly on the affine hull of Omega. The product is fast."""
    return q @ q.new_ones(q.shape[-1]) - flow_of(mdp).inflow(q) - flow_source(mdp)


def flow_adjoint(mdp: LayeredMDP, value: Tensor) -> Tensor:
    """E' v = v(s) - E[v(s') | s, a], `(*batch, S, A)`.

    As a loss this is potential-based shaping; it leaves every policy's regret unchanged.
    """
    return torch.where(mdp.actions, value.unsqueeze(-1) - flow_of(mdp).lookahead(value), 0.0)


# -- policies ----------------------------------------------------------------------------------


def uniform_policy(mdp: LayeredMDP) -> Tensor:
    """Every available action with the same probability, `(S, A)`."""
    available = mdp.actions.to(mdp.dtype)
    return available / available.sum(-1, keepdim=True)


def occupancy(mdp: LayeredMDP, policy: Tensor, *, in_order: bool = False) -> Tensor:
    """The occupancy measure q^pi of a policy, `(*batch, S, A)`.

    Only nonnegative numbers are added, so every entry has a small relative error.

    Args:
        in_order: take sums in the order of their entries, so that the bits are the same in every
            batch. It is slower.

    Raises:
        ValueError: if its shape is wrong, or the numbers of a state are no distribution.
    """
    policy = check_table("policy", as_tensor(policy), mdp)
    if not values_are_hidden():
        plain, tolerance = policy.detach(), math.sqrt(row_tolerance(policy.dtype))
        plain = torch.where(mdp.actions, plain, -plain.abs())  # masked actions have probability 0
        fine = ((plain.sum(-1) - 1).abs() <= tolerance) & (plain.amin(-1) >= -tolerance)
        for *batch, state in (~fine).nonzero()[:1].tolist():
            element = f"batch element {tuple(batch)}, " if batch else ""
            place, found = f"policy: {element}{mdp.locate(state)}", policy[*batch, state].tolist()
            raise unexpected(place, "probabilities of its actions that sum to 1", found)
    flow = LayeredFlow(mdp, in_order=True) if in_order else flow_of(mdp)
    return flow.forward(policy, flow_source(mdp)).unsqueeze(-1) * policy


def policy_of(mdp: LayeredMDP, q: Tensor) -> Tensor:
    """The policy pi(a | s) = q(s, a) / q(s), `(*batch, S, A)`; uniform where q(s) = 0."""
    q = check_table("q", as_tensor(q), mdp)
    state = q.sum(-1, keepdim=True)
    return torch.where(state > 0, q / torch.where(state > 0, state, 1.0), uniform_policy(mdp))


def interior_point(mdp: LayeredMDP) -> Tensor:
    """The occupancy measure of the uniform policy: positive on every reachable pair.

    Runs begin here, so it is computed in order.
    """
    return occupancy(mdp, uniform_policy(mdp), in_order=True)


def reachability(mdp: LayeredMDP, policy: Tensor) -> Tensor:
    """p^pi(s' | s), `(*batch, S, S)`: the probability of visiting s' after s.

    It is one on the diagonal, and zero for earlier states s'.
    """
    identity = torch.eye(mdp.num_states, dtype=mdp.dtype, device=mdp.device)
    # The state that the pass starts from is one more batch dimension, after those of the MDP.
    rows = (layer.probabilities.unsqueeze(-1 - layer.event_dims) for layer in mdp.layers)
    spread = mdp.with_probabilities(mdp.initial.unsqueeze(-2), *rows)
    source = identity.expand(*policy.shape[:-2], *identity.shape)
    return flow_of(spread).forward(policy.unsqueeze(-3), source)


# -- planning ----------------------------------------------------------------------------------


def tie_in(dtype: torch.dtype) -> float:
    """The relative difference that counts as a tie: `TIE`, or more in low precision."""
    return max(TIE, 32 * torch.finfo(dtype).eps)


def likeliest(mdp: LayeredMDP, q: Tensor) -> Tensor:
    """A 0-1 mask `(*batch, S, A)` of the action of largest q in each state; the first of ties."""
    tied = mdp.actions & (q >= (1 - tie_in(q.dtype)) * q.amax(-1, keepdim=True))
    return _first(tied).to(q.dtype)


def cheapest(mdp: LayeredMDP, Q: Tensor) -> Tensor:
    """A 0-1 mask `(*batch, S, A)` of the action of smallest Q in each state; the first of ties.

    Numbers below 1 are compared absolutely, since losses are of that size. Q is infinite on masked
    pairs.
    """
    best = Q.amin(-1, keepdim=True)
    # If the smallest Q is -inf, it is tied with itself.
    limit = best + tie_in(Q.dtype) * best.abs().clamp(1.0, torch.finfo(Q.dtype).max)
    return _first(mdp.actions & (limit >= Q)).to(Q.dtype)


def _first(true: Tensor) -> Tensor:
    """Keep only the first True along the last dimension."""
    return true & (true.cumsum(-1) == 1)


class Plan(NamedTuple):
    """The optimal policy for a loss, with its values and gaps."""

    policy: Tensor  # (*batch, S, A), deterministic: the first of the minimizing actions
    value: Tensor  # (*batch, S)
    Q: Tensor  # (*batch, S, A), infinite on masked pairs
    gaps: Tensor  # (*batch, S, A): Q(s, a) - min_a' Q(s, a'), zero on masked pairs


def optimal_policy(mdp: LayeredMDP, loss: Tensor, *, in_order: bool = False) -> Plan:
    """The optimal policy for a loss, by backward induction.

    The paper writes the gap as Q(s, a) - min_{a' != a} Q(s, a'), which would be negative at the
    optimal action. We read it as Q(s, a) - min_{a'} Q(s, a'), as `eq:self_bounding_constraint`
    requires.

    Args:
        loss: `(*batch, S, A)`.
        in_order: take sums in the order of their entries, so that the bits are the same in every
            batch. It is slower.
    """
    loss = check_table("loss", as_tensor(loss), mdp)
    losses, masks = mdp.split(loss, -2), mdp.split(mdp.actions, -2)
    values: list[Tensor] = []
    Qs: list[Tensor] = []
    for k in reversed(range(mdp.horizon)):
        Q = losses[k] + mdp.layers[k].ahead(values[0], in_order) if values else losses[k]
        if mdp.missing["pair"] is not None:
            Q = torch.where(masks[k], Q, torch.inf)
        Qs.insert(0, Q)
        values.insert(0, Q.amin(-1))
    value, Q = join(values, 1), join(Qs, 2)
    best = Q.argmin(-1, keepdim=True) == torch.arange(mdp.num_actions, device=mdp.device)
    gaps = torch.where(mdp.actions, Q - value.unsqueeze(-1), 0.0)
    return Plan(best.to(loss.dtype), value, Q, gaps)
