"""The linear system of one Newton step: solve

    H dq = x + E' v,        E dq = r

for the step dq `(*batch, S, A)` and the multipliers v `(*batch, S)`. H is block-diagonal over
states, except for joint regularizers.

**One state.** torch_occ.step.states eliminates the actions of a state and leaves (R, p, kappa).

**All states.** Let du be the change of q(s), K = diag(kappa), P_p the transition matrix under p,
and Q = P' R P the covariance of the next state under R. Eliminating the actions leaves

    kappa du = p'x + (I - P_p) v,        (I - P_p)' du = r + P'R x - Q v.

With B = (I - P_p)^-1, which is a sweep through the layers, only the matrix

    M = I + K^(1/2) B' Q B K^(1/2)

has to be factored. It is symmetric. Its eigenvalues are at least 1, and in practice at most a few
dozen, whatever the scale of q. There are three methods:

- Small MDPs form M and factor it.
- Wide and sparse MDPs only apply M, in conjugate gradients (torch_occ.step.iterative).
- Others proceed layer by layer, as in a Kalman filter. Y_k is the covariance that arrives in layer
  k, and K_k the information there:

      Yhat_k = (Y_k^-1 + K_k)^-1,        Y_{k+1} = Q_{k+1} + P_p' Yhat_k P_p.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import DenseFlow, Flow, LayeredFlow
from torch_occ.mdp.validation import broadcast
from torch_occ.regularizers.hessians import Full, Hessian, Separable
from torch_occ.step.iterative import ConjugateGradients
from torch_occ.step.states import GeneralStates, SeparableStates, States, has_inertia


class Factorization(Protocol):
    """A factored system, which solves for many right-hand sides."""

    def solve(self, x: Tensor, r: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Solve for right-hand sides x `(*batch, S, A)` and r `(*batch, S)`.

        Args:
            guess: multipliers close to v, `(*batch, S)`, from the last Newton step. An iterative
                solver starts from them, and stops when the error is small compared with the first
                one. The others ignore them.

        Returns:
            (dq, v).
        """
        ...


def factorize(hessian: Hessian, flow: Flow, q: Tensor, *, exact: bool = False) -> Factorization:
    """Factor the system by the method that is expected to be fastest.

    Args:
        hessian: the Hessian of psi at q.
        exact: whether systems will be solved to rounding, without a guess.
    """
    if isinstance(hessian, Full):
        return FullFactorization(hessian, flow.mdp)
    states = SeparableStates(hessian) if isinstance(hessian, Separable) else GeneralStates(hessian)
    if isinstance(flow, DenseFlow):
        return DenseFactorization(states, flow)
    if prefers_iterations(flow.mdp, q.shape[:-2].numel(), exact):
        return ConjugateGradients(states, flow, q.sum(-1))
    return LayeredFactorization(states, flow)


def is_convex(hessian: Hessian, mdp: LayeredMDP) -> Tensor:
    """Return whether H is positive semidefinite on the null space of E, `(*batch,)`.

    This is necessary at a minimum. Hessians that are block-diagonal over states are checked block
    by block: R >= 0 in every state, and kappa >= 0 in states after the first layer, where q(s) can
    change.
    """
    if isinstance(hessian, Full):
        return FullFactorization(hessian, mdp).is_convex()
    if isinstance(hessian, Separable) and all(
        bool((x >= 0).all()) for x in (hessian.d, hessian.w, hessian.c)
    ):
        return torch.ones_like(hessian.c[..., 0], dtype=torch.bool)
    states = SeparableStates(hessian) if isinstance(hessian, Separable) else GeneralStates(hessian)
    within, between = states.curves_upwards()
    return within.all(-1) & between[..., mdp.layer_sizes[0] :].all(-1)


def prefers_iterations(mdp: LayeredMDP, elements: int, exact: bool) -> bool:
    """Return whether conjugate gradients are expected to be faster than `LayeredFactorization`.

    Sparse transitions always use conjugate gradients. For dense ones, the times are predicted by
    models that were fitted to measurements with one thread. Near the crossover both methods take
    similar times, so an error of a factor of two costs little. `experiments.wide --sections
    crossover` measures the times again.

    Args:
        elements: the number of elements in the batch.
        exact: whether systems will be solved to rounding, without a guess.
    """
    if mdp.is_sparse:
        return True
    return _seconds_of_iterations(mdp, elements, exact) < _seconds_of_factorization(mdp, elements)


def _seconds_of_factorization(mdp: LayeredMDP, elements: int) -> float:
    sizes, num_actions = mdp.layer_sizes, mdp.num_actions
    products = sum(2 * m * n * (num_actions * n + m + n) for m, n in pairwise(sizes))
    products += sum(4 * n**3 for n in sizes)
    return 0.08e-9 * products * elements + (0.4e-3 + 0.04e-3 * elements) * mdp.horizon


def _seconds_of_iterations(mdp: LayeredMDP, elements: int, exact: bool) -> float:
    entries = sum(layer.probabilities.numel() for layer in mdp.layers[:-1])
    shared = elements > 1 and not mdp.batch_shape  # then the products with P are matrix-matrix
    passes = 0.2e-9 * entries * elements if shared else 0.6e-9 * entries
    iteration = passes + 12e-9 * mdp.num_pairs * elements + 0.04e-3 * mdp.horizon
    return (40 if exact else 15) * iteration


# -- all states ------------------------------------------------------------------------------------


class DenseFactorization:
    """Cholesky factorization of M as one S x S matrix."""

    def __init__(self, states: States, flow: DenseFlow) -> None:
        self.states, self.flow = states, flow
        self.B = torch.linalg.solve_triangular(
            flow.one_step(states.p), flow.identity, upper=True, unitriangular=True
        )
        self.Q = states.covariance(flow.kernel)
        self.root = states.kappa.sqrt()
        reach = self.B * self.root.unsqueeze(-2)
        self.cholesky = torch.linalg.cholesky_ex(flow.identity + reach.mT @ self.Q @ reach).L

    def solve(self, x: Tensor, r: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        states, flow = self.states, self.flow
        mean = (states.p * x).sum(-1)
        arrived = r + flow.inflow(states.respond(x)) + _apply(self.Q, _apply(self.B, mean))
        free = self.root * _apply(self.B.mT, arrived)  # K^(1/2) du if kappa were zero
        held = torch.cholesky_solve(free.unsqueeze(-1), self.cholesky).squeeze(-1)
        v = _apply(self.B, self.root * held - mean)
        within = states.respond(x - flow.lookahead(v))
        du = _apply(self.B.mT, r + flow.inflow(within))
        return states.p * du.unsqueeze(-1) + within, v


class LayeredFactorization:
    """Factorization of M layer by layer; the largest matrix has the width of one layer."""

    def __init__(self, states: States, flow: LayeredFlow) -> None:
        self.states, self.flow = states, flow
        sizes = flow.mdp.layer_slices
        self.kappas = flow.mdp.split(states.kappa, -1)
        self.means = flow.mdp.split(states.p, -2)
        self.steps: list[Tensor] = []  # P_p of layer k, (*batch, S_k, S_{k+1})
        self.gains: list[Tensor] = []  # Yhat_k, (*batch, S_k, S_k)
        Y = states.p.new_zeros(sizes[0].stop, sizes[0].stop)
        for k in range(flow.mdp.horizon):
            if k:
                kernel, policy = flow.layers[k - 1].dense, self.means[k - 1]
                self.steps.append((policy.unsqueeze(-2) @ kernel).squeeze(-2))
                carried = self.steps[-1].mT @ self.gains[-1] @ self.steps[-1]
                Y = states.covariance(kernel, sizes[k - 1]) + carried
            self.gains.append(_filter(Y, self.kappas[k]))

    def solve(self, x: Tensor, r: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        states, flow, split = self.states, self.flow, self.flow.mdp.split
        means = split((states.p * x).sum(-1), -1)
        arrivals = split(r + flow.inflow(states.respond(x)), -1)
        pull = []  # v_k from the layers up to k, without the later ones
        m = arrivals[0]
        for k, (kappa, gain, mean) in enumerate(zip(self.kappas, self.gains, means, strict=True)):
            pull.append(kappa * m - mean)
            if k + 1 < len(means):
                m = arrivals[k + 1] + _apply(self.steps[k].mT, m - _apply(gain, pull[k]))
        values: list[Tensor] = []
        for k in reversed(range(len(means))):
            y = pull[k] + _apply(self.steps[k], values[0]) if values else pull[k]
            values.insert(0, y - self.kappas[k] * _apply(self.gains[k], y))
        v = torch.cat(values, -1)
        within = states.respond(x - flow.lookahead(v))
        sources = split(r + flow.inflow(within), -1)
        du = [sources[0]]
        for k, step in enumerate(self.steps):
            du.append(sources[k + 1] + _apply(step.mT, du[k]))
        return states.p * torch.cat(du, -1).unsqueeze(-1) + within, v


class FullFactorization:
    """LU factorization of the whole system, for Hessians without structure."""

    def __init__(self, hessian: Full, mdp: LayeredMDP) -> None:
        exists = mdp.actions.flatten()
        # Scale pairs by their curvature, and the rows of E to length one.
        curved = mdp.actions & (hessian.curvature > 0)
        curvature = torch.where(curved, hessian.curvature, 1.0).flatten(-2)
        self.pair_scale = torch.where(exists, curvature.rsqrt(), 0.0)
        outflow = torch.eye(mdp.num_states, dtype=mdp.dtype, device=mdp.device).unsqueeze(-2)
        E = (outflow - mdp.joint_transitions).flatten(-3, -2).mT  # (*batch, S, S*A)
        E = E * self.pair_scale.unsqueeze(-2)
        self.state_scale = E.norm(dim=-1).reciprocal()
        E = E * self.state_scale.unsqueeze(-1)
        H = self.pair_scale.unsqueeze(-1) * hessian.matrix * self.pair_scale.unsqueeze(-2)
        H = H + torch.diag(1.0 - exists.to(H.dtype))
        batch = broadcast(E.shape[:-2], H.shape[:-2])
        E, H = E.expand(*batch, *E.shape[-2:]), H.expand(*batch, *H.shape[-2:])
        upper, lower = torch.cat([H, -E.mT], -1), torch.nn.functional.pad(E, (0, mdp.num_states))
        system = torch.cat([upper, lower], -2)
        self.system = system
        self.lu, self.pivots, _ = torch.linalg.lu_factor_ex(system)
        self.pairs = tuple(mdp.actions.shape)

    def solve(self, x: Tensor, r: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scaled = (self.pair_scale * x.flatten(-2), self.state_scale * r)
        batch = broadcast(*(part.shape[:-1] for part in scaled))
        rhs = torch.cat([part.expand(*batch, part.shape[-1]) for part in scaled], -1)
        solution = torch.linalg.lu_solve(self.lu, self.pivots, rhs.unsqueeze(-1)).squeeze(-1)
        dq, v = solution.split([self.pair_scale.shape[-1], self.state_scale.shape[-1]], -1)
        return (self.pair_scale * dq).unflatten(-1, self.pairs), self.state_scale * v

    def is_convex(self) -> Tensor:
        """Return whether H is positive semidefinite on the null space of E, `(*batch,)`.

        This holds if the symmetric system, with E' in place of -E', has exactly one negative
        eigenvalue per constraint.
        """
        num_states = self.state_scale.shape[-1]
        sign = torch.ones_like(self.system[..., 0, :])
        sign[..., -num_states:] = -1.0
        return has_inertia(self.system * sign.unsqueeze(-2), num_states)


def _apply(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def _filter(Y: Tensor, kappa: Tensor) -> Tensor:
    """Return (Y^-1 + K)^-1 for Y >= 0 and K = diag(kappa) >= 0; both may be singular."""
    root = kappa.sqrt()
    half = root.unsqueeze(-1) * Y  # K^(1/2) Y
    identity = torch.eye(Y.shape[-1], dtype=Y.dtype, device=Y.device)
    L = torch.linalg.cholesky_ex(identity + half * root.unsqueeze(-2)).L
    explained = torch.linalg.solve_triangular(L, half, upper=False)
    return Y - explained.mT @ explained
