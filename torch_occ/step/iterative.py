"""The Newton system of torch_occ.step.kkt by conjugate gradients: no matrix is formed, and P is only ever applied.

Two sweeps through the layers, back and forth, turn a guess z of the states' forces into what follows from it:

    back:     v = z + P_p v                      the multipliers
    forth:    du = r + P'(R(x - P v) + p du)     the change of q(s), with every flow constraint satisfied

and z is right when kappa du = z + p'x. With z = K^(1/2) y - p'x, that is M y = b for the matrix M = I + K^(1/2) B' Q B K^(1/2) of
torch_occ.step.kkt, and K^(1/2) du - y is the residual b - M y. All eigenvalues of M are at least one and, since no pair can send more into a
state than the state receives, at most of the order of the horizon squared times the number of actions, whatever q and P are; in
practice a few dozen. An iteration costs one product with P and one with P'.

The error of a step is judged in units of q(s), state by state, so that rare states are as right as frequent ones. y is orthogonal to the
residual, so an unfinished step still goes downhill, ⟨x, dq⟩ >= |y|^2, and satisfies all constraints: Newton's method can use it.
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
    """What the two sweeps make of z."""

    v: Tensor  # (*batch, S)
    within: Tensor  # (*batch, S, A), the change of q at constant q(s)
    du: Tensor  # (*batch, S)

    @property
    def size(self) -> Tensor:
        """How much a state changes, `(*batch, S)`."""
        return self.du.abs() + self.within.abs().sum(-1)


class Sweeps(Protocol):
    """Both sweeps at once."""

    def sweep(self, z: Tensor, x: Tensor | None, r: Tensor | None) -> Swept:
        """Back from z `(*batch, S)`, forth with x `(*batch, S, A)` and r `(*batch, S)`; None is zero."""
        ...


class TorchSweeps:
    """Layer by layer, whatever the layers are."""

    def __init__(self, states: States, flow: LayeredFlow) -> None:
        self.states, self.flow = states, flow
        self.policies = flow.mdp.split(states.p, -2)

    def sweep(self, z: Tensor, x: Tensor | None, r: Tensor | None) -> Swept:
        flow, split = self.flow, self.flow.mdp.split
        forces = split(z, -1)
        v, ahead = (
            [forces[-1]],
            [
                torch.zeros_like(forces[-1])
                .unsqueeze(-1)
                .expand(*forces[-1].shape, flow.mdp.num_actions)
            ],
        )
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
    """Solves with M by applying it.

    Args:
        visits: `(*batch, S)`, q(s) where the system was taken: the unit of errors.
    """

    def __init__(self, states: States, flow: LayeredFlow, visits: Tensor) -> None:
        self.states, self.flow, self.visits = states, flow, visits
        self.root = states.kappa.sqrt()
        self.sweep = sweeps_of(states, flow).sweep
        # A residual y stands for an error of y / root in du; where changes cost nothing, there is no error.
        self.unit = torch.where(states.kappa > 0, self.root * visits, torch.inf)  # (*batch, S)
        self.iterations = 0

    def solve(self, x: Tensor, r: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(dq, v). With a guess of v, only as accurately as Newton's method has use for; else to rounding, or NaN if that fails."""
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
            residual = (
                self.root * swept.du - y
            )  # the true one, free of the rounding of the recurrence
            before, error = error, _largest(residual, unit)
            if not bool(((error > 2 * goal) & (error < 0.1 * before)).any()):
                break
        dq = states.p * swept.du.unsqueeze(-1) + swept.within
        if guess is None:
            # Forces that cancel, as those of a constant loss do, leave their rounding and nothing else.
            noise = torch.where(self.root > 0, eps * (mean.abs() + swept.v.abs()) / self.root, 0.0)
            accepted = eps**0.5 * (self.root * swept.size).norm(dim=-1) + 1e3 * noise.norm(dim=-1)
            failed = ~(residual.norm(dim=-1) <= accepted)
            return dq.masked_fill(failed[..., None, None], torch.nan), swept.v.masked_fill(
                failed[..., None], torch.nan
            )
        return dq, swept.v + guess

    def _own_size(self, swept: Swept) -> Tensor:
        """The unit of errors where nothing is known about the right-hand side: what each state itself begins with.

        Rounding makes something of a state that should do nothing, so the smallest is eps times the largest, as masses or relative to
        the visits, whichever is less.
        """
        eps, size, visits = torch.finfo(self.root.dtype).eps, swept.size, self.visits
        least = eps * torch.minimum(
            size.amax(-1, keepdim=True), visits * (size / visits).amax(-1, keepdim=True)
        )
        return torch.where(self.root > 0, self.root * torch.maximum(size, least), torch.inf)

    def _descend(self, residual: Tensor, unit: Tensor, goal: Tensor) -> Tensor:
        """Conjugate gradients on M y = residual from zero, each element of the batch until its own error is below its goal."""
        y, direction = torch.zeros_like(residual), residual
        square = (residual * residual).sum(-1)
        running = (_largest(residual, unit) > goal) & (square > 0)
        for _ in range(MAX_ITERATIONS):
            if not bool(running.any()):
                break
            self.iterations += 1
            image = direction - self.root * self.sweep(self.root * direction, None, None).du
            # Elements that are done stand still.
            length = torch.where(running, square / (direction * image).sum(-1), 0.0).unsqueeze(-1)
            y, residual = y + length * direction, residual - length * image
            before, square = square, (residual * residual).sum(-1)
            direction = (
                residual + torch.where(running, square / before, 0.0).unsqueeze(-1) * direction
            )
            running = running & (_largest(residual, unit) > goal) & (square > 0)
        return y


def sweeps_of(states: States, flow: LayeredFlow) -> Sweeps:
    """The compiled sweeps where they apply and Numba is installed, else those in torch."""
    if isinstance(states, SeparableStates) and flow.mdp.is_sparse and _has_numba():
        compiled = later("step.compiled_sweeps")
        if compiled.applies(flow.mdp):
            return compiled.CompiledSweeps(states, flow.mdp)
    return TorchSweeps(states, flow)


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


def _largest(residual: Tensor, unit: Tensor) -> Tensor:
    return (residual / unit).abs().amax(-1)
