"""Independent answers: closed forms, and a dense Newton step.

@exact    () -> Exact, a problem and its regularizer with the answer in closed form
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.functional import hessian, jacobian
from zoo import Problem, bandit, contexts, joins, layers, tensor

import torch_occ as occ


class Exact(NamedTuple):
    problem: Problem
    regularizer: occ.Regularizer
    q: Tensor  # (S, A)


EXACT: dict[str, Callable[[], Exact]] = {}
exact = joins(EXACT)


# -- the dense oracle --------------------------------------------------------------------------


def flow_matrix(mdp: occ.LayeredMDP) -> Tensor:
    """E over the pairs that exist, `(S, pairs)`, entry by entry from its definition."""
    arrivals = torch.zeros(mdp.num_states, mdp.num_actions, mdp.num_states, dtype=mdp.dtype)
    for kernel, here, there in zip(
        mdp.transitions[:-1], mdp.layer_slices, mdp.layer_slices[1:], strict=False
    ):
        arrivals[here, :, there] = kernel
    return (torch.eye(mdp.num_states, dtype=mdp.dtype).unsqueeze(1) - arrivals)[mdp.actions].mT


def dense_newton(
    mdp: occ.LayeredMDP, psi: occ.Regularizer, loss: Tensor, t: Tensor | float, q: Tensor
) -> tuple[Tensor, Tensor]:
    """One undamped Newton step from q, and the multipliers, in dense differentiable operations.

    The unknowns are relative changes and every row has unit size, so that rare pairs count as much
    as common ones.
    """

    def objective(x: Tensor) -> Tensor:
        return (x * loss[mdp.actions]).sum() + psi((x @ spread).view_as(q), t, mdp)

    spread = torch.eye(q.numel(), dtype=q.dtype)[mdp.actions.flatten()]  # (pairs, S * A)
    x, E = q[mdp.actions], flow_matrix(mdp)
    source = torch.cat([mdp.initial, mdp.initial.new_zeros(mdp.num_states - mdp.layer_sizes[0])])
    top = torch.cat([hessian(objective, x, create_graph=True) * x, -E.mT], 1)
    bottom = torch.cat([E * x, E.new_zeros(len(E), len(E))], 1)
    rhs = torch.cat([-jacobian(objective, x, create_graph=True), source - E @ x])
    system = torch.cat([top, bottom])
    scale = system.detach().abs().amax(-1)
    relative, value = torch.linalg.solve(system / scale.unsqueeze(-1), rhs / scale).split(
        [len(x), len(E)]
    )
    return (x * (1 + relative) @ spread).view_as(q), value


# -- exact answers -----------------------------------------------------------------------------


def root(decreasing: Callable[[float], float], low: float, high: float) -> float:
    """Bisection to the last bit: low and high enclose the root."""
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if decreasing(middle) > 0 else (low, middle)
    return middle


def normalized(share: Callable[[Tensor], Tensor], loss: Tensor) -> Tensor:
    """q = share(loss - v) with v such that q sums to one, for a decreasing share."""
    offset = root(lambda offset: float(share(loss - loss.min() + offset).sum()) - 1, 1e-12, 1e12)
    return share(loss - loss.min() + offset)


@exact
def half_tsallis_bandit() -> Exact:
    """Tsallis-INF: eta_t = 2 / sqrt(t) is gamma = 1/2 here; q = 4 / (eta (loss - v))^2."""
    mdp, loss, t = bandit()
    eta = 2 / t**0.5
    q = normalized(lambda excess: 4 / (eta * excess) ** 2, loss[0])
    return Exact(
        Problem(mdp, loss, t), occ.jin_luo(mdp, alpha=0.0, beta=0.0, gamma=0.5), q.unsqueeze(0)
    )


@exact
def log_barrier_bandit() -> Exact:
    mdp, loss, t = bandit()
    return Exact(
        Problem(mdp, loss, t),
        occ.LogBarrier(0.7),
        normalized(lambda excess: 0.7 / excess, loss[0]).unsqueeze(0),
    )


@exact
def shannon_contexts() -> Exact:
    """Shannon at L = 1: exponential weights in each state, times its initial probability."""
    mdp, loss, t = contexts()
    q = mdp.initial.unsqueeze(-1) * (-0.8 * loss).softmax(-1)
    return Exact(Problem(mdp, loss, t), occ.Shannon() / occ.Constant(0.8), q)


@exact
def shannon_rare() -> Exact:
    """Two good actions, and one whose share is smaller than the rounding of theirs."""
    mdp = occ.LayeredMDP([torch.ones(1, 4, 1, dtype=torch.float64)])
    loss = tensor([[1.0, 1.0, 36.0, 401.0]])
    return Exact(Problem(mdp, loss, 1.0), occ.Shannon(), (-loss).softmax(-1))


@exact
def two_action_hybrid() -> Exact:
    """With two actions, the rest of an action is the other one: alpha only adds to 1/eta."""
    mdp = occ.LayeredMDP([torch.ones(1, 2, 1, dtype=torch.float64)])
    loss, weight = tensor([[2.0, 7.0]]), 2.0 * 1.6
    q = normalized(lambda excess: (weight / (2 * excess)) ** 2, loss[0])
    return Exact(
        Problem(mdp, loss, 4.0), occ.HybridTsallis(0.6) / occ.InverseSqrt(), q.unsqueeze(0)
    )


@exact
def soft_value_iteration() -> Exact:
    """ConditionalEntropy / eta: V(s) = - log sum_a exp(- eta (loss + E V(s'))) / eta."""
    (mdp, loss, t), eta = layers(), 0.1
    values, policies = torch.zeros(1, dtype=torch.float64), []
    for kernel, here in zip(reversed(mdp.transitions), reversed(mdp.layer_slices), strict=True):
        Q = loss[here] + kernel @ values
        values = -torch.logsumexp(-eta * Q, -1) / eta
        policies.insert(0, (-eta * Q).softmax(-1))
    state, q = mdp.initial, []
    for policy, kernel in zip(policies, mdp.transitions, strict=True):
        q.append(state.unsqueeze(-1) * policy)
        state = torch.einsum("sa,sap->p", q[-1], kernel)
    return Exact(Problem(mdp, loss, t), occ.ConditionalEntropy() / occ.Constant(eta), torch.cat(q))
