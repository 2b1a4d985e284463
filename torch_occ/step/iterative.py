"""Conjugate gradients for the Newton system of torch_occ.step.kkt, without forming a matrix.

Let z be a guess of kappa du - p'x, one number per state. A backward and a forward sweep through the
layers compute

    backward:   v = z + P_p v                      the multipliers
    forward:    du = r + P'(R(x - P v) + p du)     the change of q(s); all flow constraints hold

The guess is right when kappa du = z + p'x. With z = K^(1/2) y - p'x this is M y = b for the matrix
M = I + K^(1/2) B' Q B K^(1/2) of torch_occ.step.kkt, and K^(1/2) du - y is the residual b - M y.

All eigenvalues of M are at least one. They are at most of the order of the horizon squared times
the number of actions, whatever q and P are, because no pair sends more mass into a state than the
state receives. In practice they are at most a few dozen. An iteration costs one product with P and
one with P'.

The error of a step is measured relative to q(s) in each state, so that rare states are as accurate
as frequent ones. Newton's method can use an unfinished step: y is orthogonal to the residual, so
the step is a descent direction, ⟨x, dq⟩ >= |y|^2, and it satisfies all constraints.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torch_occ._support.backends import later
from torch_occ.kernels.constants import FORCING, MAX_ITERATIONS, RESTARTS
from torch_occ.mdp.occupancy import LayeredFlow, join
from torch_occ.step.states import SeparableStates, States


class Swept(NamedTuple):
    """The result of the two sweeps for a guess z."""

    v: Tensor  # (*batch, S)
    within: Tensor  # (*batch, S, A), the change of q at constant q(s)
    du: Tensor  # (*batch, S)

    @property
    def size(self) -> Tensor:
        """The size of the change of each state, `(*batch, S)`."""
        return self.du.abs() + self.within.abs().sum(-1)


class Sweeps(Protocol):
    """An implementation of the two sweeps."""

    def sweep(self, z: Tensor, x: Tensor | None, r: Tensor | None) -> Swept:
        """Run both sweeps for z `(*batch, S)`, x `(*batch, S, A)` and r `(*batch, S)`.

        None stands for zero.
        """
        ...


class TorchSweeps:
    """The sweeps in torch, layer by layer, for dense and sparse layers."""

    def __init__(self, states: States, flow: LayeredFlow) -> None:
        self.states, self.flow = states, flow
        self.policies = flow.mdp.split(states.p, -2)

    def sweep(self, z: Tensor, x: Tensor | None, r: Tensor | None) -> Swept:
        flow, split = self.flow, self.flow.mdp.split
        forces = split(z, -1)
        v = [forces[-1]]
        zero = torch.zeros_like(v[0]).unsqueeze(-1)
        ahead = [zero.expand(*v[0].shape, flow.mdp.num_actions)]
        for k in reversed(range(len(flow.layers))):
            ahead.insert(0, flow.layers[k].ahead(v[0]))
            v.insert(0, forces[k] + (self.policies[k] * ahead[0]).sum(-1))
        expected = join(ahead, 2)
        within = self.states.respond(-expected if x is None else x - expected)
        sources, parts = None if r is None else split(r, -1), split(within, -2)
        du = [torch.zeros_like(v[0]) if sources is None else sources[0]]
        for k, layer in enumerate(flow.layers):
            arrived = layer.arrive(parts[k] + self.policies[k] * du[k].unsqueeze(-1))
            du.append(arrived if sources is None else sources[k + 1] + arrived)
        return Swept(join(v, 1), within, join(du, 1))


class ConjugateGradients:
    """Solves the Newton system by conjugate gradients on M.

    Args:
        visits: `(*batch, S)`, q(s) at the current iterate, the unit of errors.
    """

    def __init__(self, states: States, flow: LayeredFlow, visits: Tensor) -> None:
        self.states, self.flow, self.visits = states, flow, visits
        self.root = states.kappa.sqrt()
        self.sweep = sweeps_of(states, flow).sweep
        # A residual y corresponds to an error of y / root in du. States with kappa = 0 have none.
        self.unit = torch.where(states.kappa > 0, self.root * visits, torch.inf)  # (*batch, S)
        self.iterations = 0

    def solve(self, x: Tensor, r: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (dq, v).

        With a guess of v, the solution is only as accurate as Newton's method needs. Without one,
        it is accurate to rounding; elements where that fails are NaN.
        """
        states, flow, eps = self.states, self.flow, torch.finfo(x.dtype).eps
        if guess is not None:
            x = x + (guess.unsqueeze(-1) - flow.lookahead(guess))
        mean = (states.p * x).sum(-1)
        swept = self.sweep(-mean, x, r)
        residual = self.root * swept.du
        y = torch.zeros_like(residual)
        if guess is None:
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
            if not bool(((error > 2 * goal) & (error < 0.1 * before)).any()):
                break
        dq = states.p * swept.du.unsqueeze(-1) + swept.within
        if guess is None:
            # If x is constant within layers, its effect cancels, and only rounding errors are left.
            noise = torch.where(self.root > 0, eps * (mean.abs() + swept.v.abs()) / self.root, 0.0)
            accepted = eps**0.5 * (self.root * swept.size).norm(dim=-1) + 1e3 * noise.norm(dim=-1)
            failed = ~(residual.norm(dim=-1) <= accepted)
            dq = dq.masked_fill(failed[..., None, None], torch.nan)
            return dq, swept.v.masked_fill(failed[..., None], torch.nan)
        return dq, swept.v + guess

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
            self.iterations += 1
            image = direction - self.root * self.sweep(self.root * direction, None, None).du
            # Elements that have stopped do not change.
            length = torch.where(running, square / (direction * image).sum(-1), 0.0).unsqueeze(-1)
            y, residual = y + length * direction, residual - length * image
            before, square = square, (residual * residual).sum(-1)
            carried = torch.where(running, square / before, 0.0).unsqueeze(-1)
            direction = residual + carried * direction
            running = running & (_largest(residual, unit) > goal) & (square > 0)
        return y


def sweeps_of(states: States, flow: LayeredFlow) -> Sweeps:
    """Return the compiled sweeps where they apply and Numba is installed, else those in torch."""
    if isinstance(states, SeparableStates) and flow.mdp.is_sparse and _has_numba():
        compiled = later("step.compiled.sweeps")
        if compiled.applies(flow.mdp):
            return compiled.CompiledSweeps(states, flow.mdp)
    return TorchSweeps(states, flow)


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


def _largest(residual: Tensor, unit: Tensor) -> Tensor:
    return (residual / unit).abs().amax(-1)
