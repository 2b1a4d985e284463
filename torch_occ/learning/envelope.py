"""The regularized optimal value, min over q in Omega of ⟨q, loss⟩ + psi_t(q), and its derivatives.

Let q and v be the solution and its multipliers. The value equals the Lagrangian

    G(q, v; loss, t, parameters, P) = ⟨q, loss⟩ + psi_t(q) - ⟨v, E q - b⟩,

whose derivatives in q and in v vanish. So the derivatives of the value are those of G with q and v
held fixed (the envelope theorem): q for the loss, no linear system. The second derivatives follow
from q and v, which the step differentiates: -Pi for the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_occ._support.private import (
    carries_derivative,
    refuse_batched_derivatives,
)
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_residual
from torch_occ.regularizers.base import total
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.implicit import push_forward
from torch_occ.step.solution import Solution

Function = Callable[..., Tensor]


def optimal_value(
    step: FTRLStep, solution: Solution, loss: Tensor, t: Tensor, mdp: LayeredMDP
) -> Tensor:
    """Return ⟨q, loss⟩ + psi_t(q) at the solution of a step, `(*batch,)`.

    It is differentiable, any number of times, in the loss, t, the parameters of psi and the
    probabilities of the MDP.

    Args:
        solution: what `step.solve(loss, t, mdp=mdp)` returned.
        loss: `(*batch, S, A)`.
    """
    evaluator = step.evaluator
    count = len(evaluator.names)
    differentiated = any(carries_derivative(p) for p in mdp.probabilities)
    probabilities = mdp.probabilities if differentiated else ()

    def lagrangian(q: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        """Return psi_t(q) - ⟨v, E q - b⟩, the part that `Stationary` differentiates by autograd."""
        t, parameters, given = rest[0], rest[1 : 1 + count], rest[1 + count :]
        model = mdp.with_probabilities(*given) if given else mdp
        batch = torch.broadcast_shapes(q.shape[:-2], t.shape)
        evaluate = evaluator.bind(parameters, t.expand(batch))
        value = total(model, evaluate(evaluator.regularizer.read(model, q)))
        return value - (v * flow_residual(model, q)).sum(-1) if given else value

    rest = (t, *evaluator.own_parameters, *probabilities)
    return Stationary.apply(lagrangian, solution.q, solution.value, loss, *rest)


class Stationary(torch.autograd.Function):
    """⟨q, loss⟩ + function(q, v, *rest), where the derivatives in q and v cancel.

    The first derivative treats q and v as constants. The second one does not, because the first
    one is computed from q and v by differentiable operations.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Function, q: Tensor, v: Tensor, loss: Tensor, *rest: Tensor) -> Tensor:
        return (q * loss).sum((-2, -1)) + function(q, v, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched_derivatives(bar)
        q, v, loss, *rest = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        found: list[Tensor | None] = [None] * len(rest)
        if any(needed):
            function, moving = _of_some(ctx.function, q, v, rest, needed)
            _, pull_back, *_ = torch.func.vjp(function, *moving)
            pulled = iter(pull_back(bar))
            found = [next(pulled) if need else None for need in needed]
        loss_bar = None
        if ctx.needs_input_grad[3]:
            loss_bar = (bar[..., None, None] * q).sum_to_size(loss.shape)
        return None, None, None, loss_bar, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        q, v, _, *rest = ctx.saved_tensors
        loss_dot, rest_dots = tangents[3], tangents[4:]
        moved = torch.zeros_like(q[..., 0, 0])
        if loss_dot is not None:
            moved = (q * loss_dot).sum((-2, -1))
        needed = [dot is not None for dot in rest_dots]
        if any(needed):
            function, moving = _of_some(ctx.function, q, v, rest, needed)
            zero = torch.zeros_like(v)
            dots = [dot for dot in rest_dots if dot is not None]
            moved = moved + push_forward(lambda *x: (function(*x), zero), moving, dots)[0]
        return moved


def _of_some(
    function: Function, q: Tensor, v: Tensor, rest: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Function, list[Tensor]]:
    """Return the function of the needed tensors among `rest` alone, and those tensors."""

    def of_needed(*moving: Tensor) -> Tensor:
        given = iter(moving)
        return function(
            q, v, *(next(given) if need else x for x, need in zip(rest, needed, strict=True))
        )

    return of_needed, [x for x, need in zip(rest, needed, strict=True) if need]
