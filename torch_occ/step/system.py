"""The blocks of the Newton system: one state, with its actions eliminated.

The rest of the MDP needs only the inverse of the bordered block,

    [ H_s  1 ]^-1     [ R_s     p_s    ]
    [ 1'   0 ]     =  [ p_s'  -kappa_s ]

R x is the response of the actions to x at constant q(s) (R >= 0, R 1 = 0). p divides a change of
q(s) among the actions (sum p = 1, a signed policy). kappa >= 0 is the curvature in q(s). For
separable terms, with D = d + w, a = sum 1/D and e = 1 - sum w/D,

    R x = (x - (sum x/D) / a) / D,    p = (e/a + w) / D,    kappa = c + sum w d / D + e^2 / a.

This costs O(A). Nothing cancels if e is computed from its dominant action. H_s itself may be
singular: a regularizer that is linear in q(s) at a fixed policy, such as the conditional entropy,
has kappa = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torch_occ._support.choices import later
from torch_occ._support.constants import FORCING, MAX_ITERATIONS, NOISE, RESTARTS, SQUARE
from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import DenseFlow, Flow, LayeredFlow, join
from torch_occ.regularizers.derivatives import Blocks, Full, Hessian, Separable
from torch_occ.step.ways import prefers_iterations


class SeparableStates:
    """(R, p, kappa) of every state from d, w, c, at the cost O(A)."""

    def __init__(self, hessian: Separable) -> None:
        d, w = hessian.d, hessian.w
        inverse = hessian.curvature.reciprocal().masked_fill(~hessian.actions, 0.0)
        share = w * inverse
        # e = 1 - sum w/D cancels when one action dominates its state, so 1 - w/D of that action is
        # computed as d/D. The sign in the key keeps masked actions, where d = w = 0, from being
        # chosen if all shares are zero.
        dominant = (share + inverse.sign()).argmax(-1, keepdim=True)
        e = (-share).scatter(-1, dominant, (d * inverse).gather(-1, dominant)).sum(-1)
        self.inverse = inverse  # (*batch, S, A)
        self.softest = inverse.argmax(-1, keepdim=True)  # (*batch, S, 1)
        self.total = inverse.sum(-1)  # (*batch, S)
        self.p = (e / self.total).unsqueeze(-1) * inverse + share  # (*batch, S, A)
        self.parts = hessian.c, (share * d).sum(-1), e * e / self.total  # of kappa
        self.kappa = (self.parts[0] + self.parts[1] + self.parts[2]).clamp(min=0)  # (*batch, S)

    def respond(self, x: Tensor) -> Tensor:
        """Return R x.

        Since R 1 = 0, x is first taken relative to its entry at the softest action, the one with
        the largest 1/D. Then nothing cancels there.
        """
        x = x - x.gather(-1, self.softest.expand(*x.shape[:-1], 1))
        return (x - ((self.inverse * x).sum(-1) / self.total).unsqueeze(-1)) * self.inverse

    def covariance(self, kernel: Tensor, layer: slice = slice(None)) -> Tensor:
        """Return P' R P `(*batch, S', S')` for transitions `(*batch, S_k, A, S')` of a layer."""
        weight = self.inverse[..., layer, :].unsqueeze(-1)
        softest = self.softest[..., layer, :].unsqueeze(-1)
        softest = softest.expand(*weight.shape[:-2], 1, kernel.shape[-1])
        deviation = kernel - kernel.expand(*weight.shape[:-1], -1).gather(-2, softest)
        mean = (weight / self.total[..., layer, None, None]).mT @ deviation
        # In place, because these are the largest tensors of a step.
        deviation = deviation.sub_(mean).mul_(weight.sqrt()).flatten(-3, -2)
        return deviation.mT @ deviation

    def curves_upwards(self) -> tuple[Tensor, Tensor]:
        """Return whether R >= 0 and whether kappa >= 0 before clamping, up to rounding.

        Both have the shape `(*batch, S)`.
        """
        parts = torch.stack(self.parts)
        return (self.inverse >= 0).all(-1), parts.sum(0) >= -NOISE * parts.abs().sum(0)


class GeneralStates:
    """(R, p, kappa) of every state from its block H_s, by inverting the bordered matrix."""

    def __init__(self, hessian: Blocks) -> None:
        actions = hessian.actions
        present = actions.to(hessian.blocks.dtype)
        # Scale the diagonal to one and the border to length one, so that the inverse is accurate.
        scale = torch.where(actions & (hessian.curvature > 0), hessian.curvature, 1.0).rsqrt()
        length = (scale * present).norm(dim=-1, keepdim=True)
        border = (scale * present / length).unsqueeze(-1)
        core = scale.unsqueeze(-1) * hessian.blocks * scale.unsqueeze(-2)
        core = core + torch.diag_embed(1 - present)
        upper, lower = torch.cat([core, border], -1), torch.nn.functional.pad(border.mT, (0, 1))
        bordered = torch.cat([upper, lower], -2)
        inverse = torch.linalg.inv_ex(bordered).inverse
        pairs = actions.unsqueeze(-1) & actions.unsqueeze(-2)
        R = scale.unsqueeze(-1) * inverse[..., :-1, :-1] * scale.unsqueeze(-2)
        self.R = torch.where(pairs, R, 0.0)
        self.p = inverse[..., :-1, -1] * scale * present / length
        self.bordered, self.corner = bordered, -inverse[..., -1, -1]
        self.kappa = (self.corner / length.squeeze(-1) ** 2).clamp(min=0)

    def respond(self, x: Tensor) -> Tensor:
        return matvec(self.R, x)

    def covariance(self, kernel: Tensor, layer: slice = slice(None)) -> Tensor:
        return kernel.flatten(-3, -2).mT @ (self.R[..., layer, :, :] @ kernel).flatten(-3, -2)

    def curves_upwards(self) -> tuple[Tensor, Tensor]:
        """Return whether R >= 0 and whether kappa >= 0, up to rounding; `(*batch, S)` each.

        R >= 0 holds if the bordered matrix has exactly one negative eigenvalue, due to the border.
        """
        return has_inertia(self.bordered, 1), self.corner >= -NOISE


def has_inertia(matrix: Tensor, negative: int) -> Tensor:
    """Return whether symmetric matrices have this number of negative eigenvalues, up to rounding.

    They are `(*batch, n, n)`, and scaled to entries of size one.
    """
    finite = matrix.isfinite().all(-1).all(-1)
    eigenvalues = torch.linalg.eigvalsh(torch.where(finite[..., None, None], matrix, 0.0))
    return finite & ((eigenvalues < -NOISE).sum(-1) == negative)


States = SeparableStates | GeneralStates


# -- Conjugate gradients for the Newton system, without forming a matrix ---------------------------
#
# Let z be a guess of kappa du - p'x, one number per state. A backward and a forward sweep through
# the layers compute
#
#     backward:   v = z + P_p v                      the multipliers
#     forward:    du = r + P'(R(x - P v) + p du)     the change of q(s); all flow constraints hold
#
# The guess is right when kappa du = z + p'x. With z = K^(1/2) y - p'x this is M y = b (see below),
# and K^(1/2) du - y is the residual b - M y.
#
# The error of a step is measured relative to q(s) in each state, so that rare states are as
# accurate as frequent ones. Newton's method can use an unfinished step: y is orthogonal to the
# residual, so the step is a descent direction, ⟨x, dq⟩ >= |y|^2, and it satisfies all constraints.


class Swept(NamedTuple):
    """The result of the two sweeps for a guess z."""

    v: Tensor  # (*batch, S)
    within: Tensor  # (*batch, S, A), the change of q at constant q(s)
    du: Tensor  # (*batch, S)

    @property
    def size(self) -> Tensor:
        """The size of the change of each state, `(*batch, S)`."""
        return self.du.abs() + self.within.abs().sum(-1)


#: Both sweeps for z `(*batch, S)`, x `(*batch, S, A)` and r `(*batch, S)`; None stands for zero.
Sweep = Callable[[Tensor, Tensor | None, Tensor | None], Swept]


def sweeps_in_torch(states: States, flow: LayeredFlow) -> Sweep:
    """Return the sweeps layer by layer, for dense and sparse layers."""
    split = flow.mdp.split
    policies = split(states.p, -2)

    def sweep(z: Tensor, x: Tensor | None, r: Tensor | None) -> Swept:
        forces = split(z, -1)
        v = [forces[-1]]
        zero = torch.zeros_like(v[0]).unsqueeze(-1)
        ahead = [zero.expand(*v[0].shape, flow.mdp.num_actions)]
        for k in reversed(range(len(flow.layers))):
            ahead.insert(0, flow.layers[k].ahead(v[0]))
            v.insert(0, forces[k] + (policies[k] * ahead[0]).sum(-1))
        expected = join(ahead, 2)
        within = states.respond(-expected if x is None else x - expected)
        sources, parts = None if r is None else split(r, -1), split(within, -2)
        du = [torch.zeros_like(v[0]) if sources is None else sources[0]]
        for k, layer in enumerate(flow.layers):
            arrived = layer.arrive(parts[k] + policies[k] * du[k].unsqueeze(-1))
            du.append(arrived if sources is None else sources[k + 1] + arrived)
        return Swept(join(v, 1), within, join(du, 1))

    return sweep


class ConjugateGradients:
    """Solves the Newton system by conjugate gradients on M.

    Args:
        visits: `(*batch, S)`, q(s) at the current iterate, the unit of errors.
    """

    def __init__(self, states: States, flow: LayeredFlow, visits: Tensor) -> None:
        self.states, self.flow, self.visits = states, flow, visits
        self.root = states.kappa.sqrt()
        self.sweep = sweep_of(states, flow)
        # A residual y corresponds to an error of y / root in du. States with kappa = 0 have none.
        self.unit = torch.where(states.kappa > 0, self.root * visits, torch.inf)  # (*batch, S)

    def solve(self, x: Tensor, r: Tensor, inexact: bool = False) -> tuple[Tensor, Tensor]:
        """Return (dq, v).

        If `inexact`, the solution is only as accurate as Newton's method needs. Otherwise, it is
        accurate to rounding; elements where that fails are NaN.
        """
        states, eps = self.states, torch.finfo(x.dtype).eps
        mean = (states.p * x).sum(-1)
        swept = self.sweep(-mean, x, r)
        residual = self.root * swept.du
        y = torch.zeros_like(residual)
        if not inexact:
            unit, goal = self._own_size(swept), torch.full_like(residual[..., 0], eps ** (5 / 6))
            error = _largest(residual, unit)
        else:
            unit = self.unit
            error = _largest(residual, unit)
            goal = (FORCING * error.clamp(max=1).square()).clamp(min=eps ** (5 / 6))
        for _ in range(RESTARTS):
            y = y + self._descend(residual, unit, goal)
            swept = self.sweep(self.root * y - mean, x, r)
            # Compute the true residual; that of the recurrence has accumulated rounding errors.
            residual = self.root * swept.du - y
            before, error = error, _largest(residual, unit)
            change = _largest(swept.du, self.visits)
            finer = (FORCING * change.square()).clamp(min=eps ** (5 / 6))
            goal = torch.where(10 * error > change, torch.minimum(goal, finer), goal)
            if not bool(((error > 2 * goal) & (error < 0.1 * before)).any()):
                break
        dq = states.p * swept.du.unsqueeze(-1) + swept.within
        if not inexact:
            # If x is constant within layers, its effect cancels, and only rounding errors are left.
            noise = torch.where(self.root > 0, eps * (mean.abs() + swept.v.abs()) / self.root, 0.0)
            accepted = eps**0.5 * (self.root * swept.size).norm(dim=-1) + 1e3 * noise.norm(dim=-1)
            failed = ~(residual.norm(dim=-1) <= accepted)
            dq = dq.masked_fill(failed[..., None, None], torch.nan)
            return dq, swept.v.masked_fill(failed[..., None], torch.nan)
        return dq, swept.v

    def _own_size(self, swept: Swept) -> Tensor:
        """Return the unit of errors for an unknown right-hand side: the first change of each state.

        A state that should not change at all has only rounding errors. So the unit is at least eps
        times the largest change, absolute or relative to the visits, whichever is less.
        """
        eps, size, visits = torch.finfo(self.root.dtype).eps, swept.size, self.visits
        relative = visits * (size / visits).amax(-1, keepdim=True)
        least = eps * torch.minimum(size.amax(-1, keepdim=True), relative)
        return torch.where(self.root > 0, self.root * torch.maximum(size, least), torch.inf)

    def _descend(self, residual: Tensor, unit: Tensor, goal: Tensor) -> Tensor:
        """Solve M y = residual from zero; each element stops when its error is below its goal."""
        y, direction = torch.zeros_like(residual), residual
        square = (residual * residual).sum(-1)
        running = (_largest(residual, unit) > goal) & (square > 0)
        for _ in range(MAX_ITERATIONS):
            if not bool(running.any()):
                break
            image = direction - self.root * self.sweep(self.root * direction, None, None).du
            # Elements that have stopped do not change.
            length = torch.where(running, square / (direction * image).sum(-1), 0.0).unsqueeze(-1)
            y, residual = y + length * direction, residual - length * image
            before, square = square, (residual * residual).sum(-1)
            carried = torch.where(running, square / before, 0.0).unsqueeze(-1)
            direction = residual + carried * direction
            running = running & (_largest(residual, unit) > goal) & (square > 0)
        return y


def sweep_of(states: States, flow: LayeredFlow) -> Sweep:
    """Return the compiled sweeps where they apply and Numba is installed, else those in torch."""
    if isinstance(states, SeparableStates) and flow.mdp.is_sparse and _has_numba():
        compiled = later("step.compiled")
        if compiled.applies(flow.mdp):
            sweep: Sweep = compiled.sweeps(states, flow.mdp)
            return sweep
    return sweeps_in_torch(states, flow)


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


def _largest(residual: Tensor, unit: Tensor) -> Tensor:
    return (residual / unit).abs().amax(-1)


# -- The linear system of one Newton step: solve ---------------------------------------------------
#
#     H dq = x + E' v,        E dq = r
#
# for the step dq `(*batch, S, A)` and the multipliers v `(*batch, S)`; docs/step.md derives it. Let
# du be the change of q(s), K = diag(kappa), P_p the transition matrix under p, and Q = P' R P.
# Without the actions,
#
#     kappa du = p'x + (I - P_p) v,        (I - P_p)' du = r + P'R x - Q v.
#
# With B = (I - P_p)^-1, a sweep through the layers, M = I + K^(1/2) B' Q B K^(1/2) is left to be
# factored: as a whole, in conjugate gradients, or layer by layer as in a Kalman filter,
#
#     Yhat_k = (Y_k^-1 + K_k)^-1,        Y_{k+1} = Q_{k+1} + P_p' Yhat_k P_p.


#: The largest curvature of terms of q(s), relative to the others, for conjugate gradients.
STEEP = 1e3


class Factorization(Protocol):
    """A factored system, which solves for many right-hand sides."""

    def solve(self, x: Tensor, r: Tensor, inexact: bool = False) -> tuple[Tensor, Tensor]:
        """Return (dq, v) for right-hand sides x `(*batch, S, A)` and r `(*batch, S)`.

        If `inexact`, an iterative solver stops when the error is small compared with the first one.
        """
        ...


def factorize(hessian: Hessian, flow: Flow, q: Tensor, *, exact: bool = False) -> Factorization:
    """Factor the system at q by the method that is expected to be fastest.

    `exact` says whether systems will be solved to rounding, not `inexact`.
    """
    if isinstance(hessian, Full):
        return FullFactorization(hessian, flow.mdp)
    states = SeparableStates(hessian) if isinstance(hessian, Separable) else GeneralStates(hessian)
    if isinstance(flow, DenseFlow):
        return DenseFactorization(states, flow)
    # Where terms of q(s) dominate, conjugate gradients would need hundreds of iterations.
    steep = False
    if isinstance(states, SeparableStates) and max(flow.mdp.layer_sizes) <= SQUARE:
        steep = bool((states.parts[0] * states.total > STEEP).any())
    if not steep and prefers_iterations(flow.mdp, q.shape[:-2].numel(), exact):
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

    def solve(self, x: Tensor, r: Tensor, inexact: bool = False) -> tuple[Tensor, Tensor]:
        states, flow = self.states, self.flow
        mean = (states.p * x).sum(-1)
        arrived = r + flow.inflow(states.respond(x)) + matvec(self.Q, matvec(self.B, mean))
        free = self.root * matvec(self.B.mT, arrived)  # K^(1/2) du if kappa were zero
        held = torch.cholesky_solve(free.unsqueeze(-1), self.cholesky).squeeze(-1)
        v = matvec(self.B, self.root * held - mean)
        within = states.respond(x - flow.lookahead(v))
        du = matvec(self.B.mT, r + flow.inflow(within))
        return states.p * du.unsqueeze(-1) + within, v


class LayeredFactorization:
    """Factorization of M layer by layer; the largest matrix has the width of one layer."""

    def __init__(self, states: States, flow: LayeredFlow) -> None:
        self.states, self.flow = states, flow
        sizes, least = flow.mdp.layer_slices, torch.finfo(states.kappa.dtype).tiny ** 0.5
        self.roots = flow.mdp.split(states.kappa.clamp(min=least).sqrt(), -1)
        self.means = flow.mdp.split(states.p, -2)
        self.steps: list[Tensor] = []  # P_p of layer k, (*batch, S_k, S_{k+1})
        self.reached: list[Tensor] = []  # Y_k, (*batch, S_k, S_k)
        self.factors: list[Tensor] = []  # L L' = I + K^(1/2) Y_k K^(1/2)
        gain = Y = states.p.new_zeros(sizes[0].stop, sizes[0].stop)
        for k in range(flow.mdp.horizon):
            if k:
                kernel, policy = flow.layers[k - 1].dense, self.means[k - 1]
                self.steps.append((policy.unsqueeze(-2) @ kernel).squeeze(-2))
                carried = self.steps[-1].mT @ gain @ self.steps[-1]
                Y = states.covariance(kernel, sizes[k - 1]) + carried
            half = self.roots[k].unsqueeze(-1) * Y  # K^(1/2) Y
            identity = torch.eye(Y.shape[-1], dtype=Y.dtype, device=Y.device)
            L = torch.linalg.cholesky_ex(identity + half * self.roots[k].unsqueeze(-2)).L
            explained = torch.linalg.solve_triangular(L, half, upper=False)
            gain = Y - explained.mT @ explained  # Yhat_k
            self.reached.append(Y)
            self.factors.append(L)

    def solve(self, x: Tensor, r: Tensor, inexact: bool = False) -> tuple[Tensor, Tensor]:
        states, flow, split = self.states, self.flow, self.flow.mdp.split
        means = split((states.p * x).sum(-1), -1)
        arrivals = split(r + flow.inflow(states.respond(x)), -1)
        pull = []  # v_k from the layers up to k, without the later ones
        m = arrivals[0]
        for k, (root, mean) in enumerate(zip(self.roots, means, strict=True)):
            pull.append(root * root * m - mean)
            if k + 1 < len(means):  # m - Yhat pull = (I + Y K)^-1 (m + Y mean)
                passed = self._damp(k, root * (m + matvec(self.reached[k], mean))) / root
                m = arrivals[k + 1] + matvec(self.steps[k].mT, passed)
        values: list[Tensor] = []
        for k in reversed(range(len(means))):  # y - K Yhat y = (I + K Y)^-1 y
            y = pull[k] + matvec(self.steps[k], values[0]) if values else pull[k]
            values.insert(0, self.roots[k] * self._damp(k, y / self.roots[k]))
        v = torch.cat(values, -1)
        within = states.respond(x - flow.lookahead(v))
        sources = split(r + flow.inflow(within), -1)
        du = [sources[0]]
        for k, step in enumerate(self.steps):
            du.append(sources[k + 1] + matvec(step.mT, du[k]))
        return states.p * torch.cat(du, -1).unsqueeze(-1) + within, v

    def _damp(self, k: int, x: Tensor) -> Tensor:
        """Solve with a factor. Differences with Yhat would have no digits where K Y is huge."""
        return torch.cholesky_solve(x.unsqueeze(-1), self.factors[k]).squeeze(-1)


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

    def solve(self, x: Tensor, r: Tensor, inexact: bool = False) -> tuple[Tensor, Tensor]:
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


def matvec(matrix: Tensor, x: Tensor) -> Tensor:
    """Return products of matrices `(*batch, n, m)` with vectors `(*batch, m)`."""
    return (matrix @ x.unsqueeze(-1)).squeeze(-1)
