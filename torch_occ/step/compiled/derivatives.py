"""Derivatives of a compiled step: by kernels where possible, by the torch path elsewhere.

The kernels differentiate q and v with respect to the weights and exponents of the terms; a formula
differentiates those with respect to t and the parameters. Forward mode in the terms and second
derivatives use the torch path, with the weights and exponents as parameters of the regularizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torch_occ._support.private import (
    in_forward_mode,
    refuse_batched_derivatives,
)
from torch_occ.kernels.constants import DEAD
from torch_occ.kernels.layout import Floats
from torch_occ.step.compiled.formulas import Formula
from torch_occ.step.compiled.inputs import rows, shaped, summed, untabulate
from torch_occ.step.compiled.worlds import World
from torch_occ.step.implicit import poison, push_forward

if TYPE_CHECKING:
    from torch_occ.step.compiled.solving import CompiledStep


class Found(NamedTuple):
    """The solutions of a batch, in rows; the status may be BAD_INPUT."""

    q: Floats  # (N * S, A)
    v: Floats  # (N * S,)
    certificate: Floats  # (N, 5)

    def tensors(self, batch: torch.Size, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Return q and v as tensors that share memory with these arrays."""
        if not batch:
            return torch.from_numpy(self.q), torch.from_numpy(self.v)
        q, v = self.q.reshape(*batch, *shape), self.v.reshape(*batch, shape[0])
        return torch.from_numpy(q), torch.from_numpy(v)


class Origin(NamedTuple):
    """All that the derivative of a solution needs, apart from tensors."""

    step: CompiledStep
    world: World
    formula: Formula
    replayed: list[Any]  # all values of the formula
    terms: Floats  # (2, N or 1, K or K * S * A), weights and exponents
    found: Found
    batch: torch.Size
    converged: bool

    @property
    def has_dead(self) -> bool:
        """Whether some q(s) is so small that v must be differentiated in logarithms."""
        return self.step.in_logs and bool((self.found.q.sum(-1) < DEAD).any())

    @property
    def certificate(self) -> Tensor:
        return torch.from_numpy(self.found.certificate.reshape(*self.batch, 5))

    def linear(
        self, q: Tensor, x: Tensor | None, r: Tensor | None, wanted: int = 0
    ) -> tuple[Floats, Floats, Floats]:
        """Solve H(q) u - E'm = -x, E u = r. Failed elements are NaN.

        Args:
            wanted: 1 to differentiate ⟨u, grad psi(q)⟩ with respect to the weights, 2 with respect
                to weights and exponents, 0 otherwise.

        Returns:
            u, m, and these derivatives, `(wanted, N, K or K * S * A)`.
        """
        if x is None or not self.converged:
            x = torch.zeros_like(q) if x is None else x
            r = torch.zeros_like(q[..., 0]) if r is None else r
            x, r = poison((q, q, self.certificate), (x, r))
        right = self.step.zeros if r is None else rows(r, self.batch, 1)
        given = (self.terms, self.found.q, rows(x, self.batch, 2), right)
        return self.step.groups.linear(self.world, self.batch, *given, wanted)


class Follow(torch.autograd.Function):
    """(q, v), which are known already, as a function of the loss and the formula's inputs.

    The probabilities follow if they are differentiated.
    """

    @staticmethod
    def forward(ctx: Any, origin: Origin, loss: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, v = origin.found.tensors(origin.batch, origin.step.shape)
        ctx.origin, ctx.numbers = origin, [None if isinstance(x, Tensor) else x for x in inputs]
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        ctx.save_for_backward(q, loss, *tensors)
        if in_forward_mode():
            ctx.save_for_forward(q, loss, *tensors)
        ctx.set_materialize_grads(False)
        return q, v

    @staticmethod
    def backward(ctx: Any, q_bar: Tensor | None, v_bar: Tensor | None) -> tuple[Any, ...]:
        origin: Origin = ctx.origin
        batch, needed = origin.batch, ctx.needs_input_grad[1:]
        if q_bar is None and v_bar is None:  # as after the envelope theorem (torch_occ.learning)
            return None, *[None] * len(needed)
        refuse_batched_derivatives(q_bar, v_bar)
        q, loss, inputs = _saved(ctx)
        if torch.is_grad_enabled() or in_forward_mode():  # this pass is differentiated, too
            with torch.enable_grad():
                return None, *_differentiably(origin, q, (loss, *inputs), needed, q_bar, v_bar)
        if origin.has_dead:
            with torch.enable_grad():
                again = _differentiably(origin, q, (loss, *inputs), needed, q_bar, v_bar)
            return None, *(None if x is None else x.detach() for x in again)
        # The system is K' and not K: the sign of v_bar differs.
        last = 1 + origin.formula.inputs  # the probabilities follow
        wanted = origin.formula.depth if any(needed[1:last]) else 0
        minus_x_bar, r_bar, bars = origin.linear(q, q_bar, v_bar, wanted)
        loss_bar = torch.from_numpy(minus_x_bar.reshape(q.shape))
        found = [summed(loss_bar, loss) if needed[0] else None, *[None] * (len(needed) - 1)]
        if wanted:
            formula, pairs = origin.formula, origin.step.pairs
            given = untabulate(bars, batch, pairs)
            given += [0.0] * (len(formula.outputs) - len(given))  # exponents that are constants
            pulled = formula.pull_back(origin.replayed, given)
            found[1:last] = [
                shaped(bar, x, place, batch, pairs) if need else None
                for bar, x, place, need in zip(
                    pulled, inputs[: last - 1], formula.places, needed[1:last], strict=True
                )
            ]
        if any(needed[last:]):
            v = origin.found.tensors(batch, origin.step.shape)[1]
            m = torch.from_numpy(r_bar.reshape(v.shape))
            found[last:] = origin.world.pull_back(q, v, loss_bar, m, needed[last:])
        return None, *found

    @staticmethod
    def jvp(ctx: Any, _origin: None, *tangents: Tensor | None) -> tuple[Tensor, Tensor]:
        origin: Origin = ctx.origin
        refuse_batched_derivatives(*tangents)
        q, loss, inputs = _saved(ctx)
        if origin.has_dead:
            return _push(origin, q, (loss, *inputs), tangents)
        last = 1 + origin.formula.inputs  # the probabilities follow
        x = torch.zeros_like(q) if tangents[0] is None else tangents[0].expand_as(q)
        r = None
        if any(tangent is not None for tangent in tangents[1:last]):
            moved = inputs[: last - 1], tangents[1:last]
            x = x + origin.step.push_gradient(origin.formula, q, *moved)
        if any(tangent is not None for tangent in tangents[last:]):
            v = origin.found.tensors(origin.batch, origin.step.shape)[1]
            more, r = origin.world.push_forward(q, v, tangents[last:])
            x = x + more
        u, m, _ = origin.linear(q, x, r)
        return origin.found._replace(q=u, v=m).tensors(origin.batch, origin.step.shape)


def _saved(ctx: Any) -> tuple[Tensor, Tensor, list[Any]]:
    """Return q, the loss, and the other inputs."""
    q, loss, *tensors = ctx.saved_tensors
    rest = iter(tensors)
    return q, loss, [next(rest) if x is None else x for x in ctx.numbers]


def _push(
    origin: Origin, q: Tensor, inputs: Sequence[Any], tangents: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Compute the derivative along tangents on the torch path."""
    moving = [i for i, tangent in enumerate(tangents) if tangent is not None]

    def again(*moved: Tensor) -> tuple[Tensor, Tensor]:
        given = list(inputs)
        for i, x in zip(moving, moved, strict=True):
            given[i] = x
        return origin.step.replay(origin.formula, origin.world.mdp, q, given[0], given[1:])

    return push_forward(again, [inputs[i] for i in moving], [tangents[i] for i in moving])


def _differentiably(
    origin: Origin,
    q: Tensor,
    inputs: Sequence[Any],
    needed: Sequence[bool],
    q_bar: Tensor | None,
    v_bar: Tensor | None,
) -> list[Tensor | None]:
    """Run the backward pass in differentiable operations."""
    v = origin.found.tensors(origin.batch, origin.step.shape)[1]
    q_bar = torch.zeros_like(q) if q_bar is None else q_bar
    v_bar = torch.zeros_like(v) if v_bar is None else v_bar
    again = origin.step.replay(origin.formula, origin.world.mdp, q, inputs[0], inputs[1:])
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    bars = poison((q, v, origin.certificate), (q_bar, v_bar))
    grads = torch.autograd.grad(again, wanted, bars, create_graph=True, allow_unused=True)
    found = iter(grads)
    return [next(found) if need else None for need in needed]
