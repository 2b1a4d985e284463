"""The linear algebra of one Newton step: solve

    H dq = x + E' v,        E dq = r

for the step dq `(*batch, S, A)` and the multipliers v `(*batch, S)`, with H block-diagonal over states.

**One state** is reduced to its bordered inverse (R, p, kappa) by torch_occ.step.states.

**All states.** With B = (I - P_p)^-1, a sweep through the layers, Q = P' R P, the covariance of the next state under R, and du
the change of q(s), eliminating actions leaves

    kappa du = p'x + (I - P_p) v,        (I - P_p)' du = r + P'R x - Q v.

So M = I + K^(1/2) B' Q B K^(1/2) is all that remains to be factored: symmetric, every eigenvalue at least 1, and in practice at
most a few dozen whatever the scale of q. Small MDPs form it. Wide and sparse ones only ever apply it (torch_occ.step.iterative). Others
run through the layers as a Kalman filter does: Y_k is the covariance that reaches layer k, and kappa the information that it meets
there,

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
    """Factor once, solve many times."""

    def solve(self, x: Tensor, r: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(dq, v) for right-hand sides x `(*batch, S, A)` and r `(*batch, S)`.

        Args:
            guess: multipliers near v `(*batch, S)`, which Newton's method has. An iterative solver starts there, and stops when the
                error is small compared with the one that it began with.
        """
        ...


def factorize(hessian: Hessian, flow: Flow, q: Tensor, *, exact: bool = False) -> Factorization:
    """The cheapest way to solve the system of this Hessian, taken at q; `exact` if there will be no guess."""
    if isinstance(hessian, Full):
        return FullFactorization(hessian, flow.mdp)
    states = SeparableStates(hessian) if isinstance(hessian, Separable) else GeneralStates(hessian)
    if isinstance(flow, DenseFlow):
        return DenseFactorization(states, flow)
    if prefers_iterations(flow.mdp, q.shape[:-2].numel(), exact):
        return ConjugateGradients(states, flow, q.sum(-1))
    return LayeredFactorization(states, flow)


def is_convex(hessian: Hessian, mdp: LayeredMDP) -> Tensor:
    """Whether psi curves upwards along the changes of q that keep E q, as it must at a minimum, `(*batch,)`.

    For Hessians that are block-diagonal over states, each block must: R >= 0, and kappa >= 0 where q(s) is not given.
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
    """Whether conjugate gradients are expected to be faster than a factorization layer by layer, for a batch of so many elements.

    Sparse transitions leave no choice. For dense ones, a model of the time that was fitted to measurements with one thread (a factor
    of two either way costs little, since they meet at an angle); `experiments.wide --sections crossover` measures it again.
    """
    return mdp.is_sparse or _seconds_of_iterations(
        mdp, elements, exact
    ) < _seconds_of_factorization(mdp, elements)


def _seconds_of_factorization(mdp: LayeredMDP, elements: int) -> float:
    sizes, num_actions = mdp.layer_sizes, mdp.num_actions
    products = sum(2 * m * n * (num_actions * n + m + n) for m, n in pairwise(sizes)) + sum(
        4 * n**3 for n in sizes
    )
    return 0.08e-9 * products * elements + (0.4e-3 + 0.04e-3 * elements) * mdp.horizon


def _seconds_of_iterations(mdp: LayeredMDP, elements: int, exact: bool) -> float:
    entries = sum(layer.probabilities.numel() for layer in mdp.layers[:-1])
    shared = elements > 1 and not mdp.batch_shape  # then the products with P are matrix-matrix
    passes = 0.2e-9 * entries * elements if shared else 0.6e-9 * entries
    return (40 if exact else 15) * (
        passes + 12e-9 * mdp.num_pairs * elements + 0.04e-3 * mdp.horizon
    )


# -- all states -----------------------------------------------------------------------------------------------------------


class DenseFactorization:
    """Cholesky of M, formed as one S x S matrix."""

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
        free = self.root * _apply(self.B.mT, arrived)  # K^(1/2) du if q(s) could change for nothing
        held = torch.cholesky_solve(free.unsqueeze(-1), self.cholesky).squeeze(-1)
        v = _apply(self.B, self.root * held - mean)
        within = states.respond(x - flow.lookahead(v))
        du = _apply(self.B.mT, r + flow.inflow(within))
        return states.p * du.unsqueeze(-1) + within, v


class LayeredFactorization:
    """The same M factored layer by layer; never more than one layer's square at a time."""

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
        pull = []  # what layer k alone would make of v_k
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
    """LU of the whole system, for Hessians without structure."""

    def __init__(self, hessian: Full, mdp: LayeredMDP) -> None:
        exists = mdp.actions.flatten()
        # Scale pairs by their curvature and constraints to length one.
        curvature = torch.where(
            mdp.actions & (hessian.curvature > 0), hessian.curvature, 1.0
        ).flatten(-2)
        self.pair_scale = torch.where(exists, curvature.rsqrt(), 0.0)
        outflow = torch.eye(mdp.num_states, dtype=mdp.dtype, device=mdp.device).unsqueeze(-2)
        E = (outflow - mdp.joint_transitions).flatten(-3, -2).mT * self.pair_scale.unsqueeze(
            -2
        )  # (*batch, S, S*A)
        self.state_scale = E.norm(dim=-1).reciprocal()
        E = E * self.state_scale.unsqueeze(-1)
        H = self.pair_scale.unsqueeze(-1) * hessian.matrix * self.pair_scale.unsqueeze(-2)
        H = H + torch.diag(1.0 - exists.to(H.dtype))
        batch = broadcast(E.shape[:-2], H.shape[:-2])
        E, H = E.expand(*batch, *E.shape[-2:]), H.expand(*batch, *H.shape[-2:])
        system = torch.cat(
            [torch.cat([H, -E.mT], -1), torch.nn.functional.pad(E, (0, mdp.num_states))], -2
        )
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
        """Whether the constraints are responsible for all negative eigenvalues of the system, with -E' made E'."""
        num_states = self.state_scale.shape[-1]
        sign = torch.ones_like(self.system[..., 0, :])
        sign[..., -num_states:] = -1.0
        return has_inertia(self.system * sign.unsqueeze(-2), num_states)


def _apply(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)


def _filter(Y: Tensor, kappa: Tensor) -> Tensor:
    """(Y^-1 + K)^-1 for Y >= 0 and K = diag(kappa) >= 0, neither of which need be invertible."""
    root = kappa.sqrt()
    half = root.unsqueeze(-1) * Y  # K^(1/2) Y
    identity = torch.eye(Y.shape[-1], dtype=Y.dtype, device=Y.device)
    L = torch.linalg.cholesky_ex(identity + half * root.unsqueeze(-2)).L
    explained = torch.linalg.solve_triangular(L, half, upper=False)
    return Y - explained.mT @ explained
