"""Derivatives of a solution by the implicit function theorem, not through the solver.

Let z = (q, v) solve `operator(z; arguments) = rhs`, with the Jacobian K at the solution. Then

    forward:    K dz = d rhs - d operator
    reverse:    K' lambda = z_bar,    rhs_bar = lambda,    arguments_bar = - (d operator)' lambda

A linear system with K is itself such an equation, with the same K. So one `autograd.Function`
serves both: the derivative of a solution is the solution of a linear equation. This gives
derivatives of any order, in reverse and in forward mode. No factorization is differentiated.

There are two equations, both with the system of torch_occ.step.system:

    Stationarity   grad psi_t(q) - E'v = x,  E q = b       the FTRL step, x = - cumulative loss
    Linearized     H(q) u - E'm = x,         E u = r       its derivatives
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_occ._support.private import carries_derivative, refuse_batched_derivatives
from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_adjoint, flow_of, flow_source
from torch_occ.regularizers.base import total
from torch_occ.regularizers.derivatives import Derivatives, Evaluator, derivatives
from torch_occ.regularizers.parameters import spread_batch, with_rank
from torch_occ.step.entropic import Entropy, Task, entropy_of, solve_entropic
from torch_occ.step.newton import newton
from torch_occ.step.solution import (
    Options,
    Solution,
    Status,
    check_probabilities,
    check_values,
    report,
)
from torch_occ.step.system import Factorization, factorize
from torch_occ.step.ways import is_entropy, solves_in_logs


@dataclass(frozen=True)
class Setting:
    """psi_t over an MDP.

    The tensors that it may be differentiated with respect to are `(t, *parameters)`, followed by
    `mdp.probabilities` if these are differentiated. As arguments of `ImplicitSolution`, all but the
    parameters have the same number of batch dimensions, so that a `vmap` can put its dimension in
    front of all of them; `bind` puts them back.
    """

    mdp: LayeredMDP
    evaluator: Evaluator
    probabilities: bool  # whether they are among the tensors
    t: Tensor = None  # type: ignore[assignment]  # until `bind`
    parameters: tuple[Tensor, ...] = ()

    @property
    def event_dims(self) -> tuple[int | None, ...]:
        """The number of event dimensions of each tensor; None for parameters, which have any."""
        return (0, *self.evaluator.event_dims, *(self._model_dims if self.probabilities else ()))

    @property
    def _model_dims(self) -> tuple[int, ...]:
        return (1, *(layer.event_dims for layer in self.mdp.layers))

    def bind(self, tensors: Sequence[Tensor]) -> Setting:
        """Return psi_t and the MDP with these tensors."""
        t, count = tensors[0], len(self.evaluator.names)
        mdp = self.mdp
        if self.probabilities:
            mdp = mdp.with_probabilities(*tensors[1 + count :])
        return replace(self, mdp=mdp, t=t, parameters=tuple(tensors[1 : 1 + count]))

    def align(self, rank: int, *pairs: Tensor) -> list[Tensor]:
        """Return these tensors, `(*batch, S, A)`, and its own with this number of batch dimensions.

        A vmap puts its dimension in front of them, where it is aligned then.
        """
        tensors = [with_rank(x, rank, 2) for x in pairs]
        tensors += self.evaluator.align(rank, self.t, self.parameters)
        if self.probabilities:
            given = zip(self.mdp.probabilities, self._model_dims, strict=True)
            tensors += [with_rank(p, rank, dim) for p, dim in given]
        return tensors

    def validate(self, x: Tensor, start: Tensor) -> None:
        """Check values; runs on plain tensors, inside every transform."""
        self.evaluator.validate(self.parameters)
        if self.probabilities:
            check_probabilities(self.mdp)
        check_values(self.mdp, -x, start, self.t, zeros=False)

    def deriver(self, batch: torch.Size) -> Callable[[Tensor], Derivatives]:
        """Return the function from q `(*batch, S, A)` to gradient and Hessian; plain tensors."""
        t = self.t.expand(batch) if self.t.dim() else self.t
        evaluate = self.evaluator.bind_constants(self.parameters, t)
        return lambda q: derivatives(self.mdp, self.evaluator.regularizer, evaluate, q)

    def gradient(self, q: Tensor) -> Tensor:
        """Return grad psi_t(q), in operations that every transform supports."""
        evaluate = self.evaluator.bind(self.parameters, self.t.expand(q.shape[:-2]))
        read = self.evaluator.regularizer.read
        return torch.func.grad(lambda q: total(self.mdp, evaluate(read(self.mdp, q))).sum())(q)

    def hessian_product(self, q: Tensor, u: Tensor) -> Tensor:
        """Return H(q) u, in operations that every transform supports."""
        return torch.func.grad(lambda q: (self.gradient(q) * u).sum())(q)

    def constrain(self, q: Tensor, v: Tensor) -> Tensor:
        """Return E q, `(*batch, S)`; constraints of a subclass may depend on v, too."""
        return q.sum(-1) - flow_of(self.mdp).inflow(q)

    def adjoint(self, v: Tensor) -> Tensor:
        """Return E'v, `(*batch, S, A)`."""
        return flow_adjoint(self.mdp, v)

    @property
    def source(self) -> Tensor:
        """Return b of the constraints E q = b."""
        return flow_source(self.mdp)

    def factorize(self, q: Tensor, batch: torch.Size, elements: int) -> Factorization:
        """Factor K at q, for right-hand sides with this number of elements."""
        hessian = self.deriver(batch)(q).hessian
        return factorize(hessian, flow_of(self.mdp, elements), q, exact=True)


@dataclass(frozen=True)
class Stationarity:
    """grad psi_t(q) - E'v = x, E q = b; tensors `(x, start, *setting)`.

    `check` says whether failures raise. With None, the arguments are not checked either.
    """

    setting: Setting
    options: Options
    check: bool | None

    leading = (2, 2)

    def solve(self, x: Tensor, start: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        bound = self.setting.bind(tensors)
        if self.check is not None:
            bound.validate(x, start)
        given = bound.evaluator.batch_shape(bound.parameters)
        batch = broadcast(
            x.shape[:-2], start.shape[:-2], bound.t.shape, bound.mdp.batch_shape, given
        )
        solution = newton(
            flow_of(bound.mdp, batch.numel()),
            bound.deriver(batch),
            -x.expand(*batch, *x.shape[-2:]),
            start,
            self.options,
        )
        report(bool(self.check), solution)
        return solution[:3]

    def point(
        self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Return q and the tensors of the setting at which K is evaluated."""
        return outputs[0], tensors[2:]

    def operator(
        self, outputs: Sequence[Tensor], arguments: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        bound, q, v = self.setting.bind(arguments), outputs[0], outputs[1]
        return bound.gradient(q) - bound.adjoint(v), bound.constrain(q, v) - bound.source

    def rhs_cotangents(self, x_bar: Tensor, r_bar: Tensor) -> tuple[Tensor, None]:
        return x_bar, None

    def rhs_tangents(self, x: Tensor | None, start: Tensor | None) -> tuple[Tensor | None, None]:
        return x, None


@dataclass(frozen=True)
class Linearized:
    """H(q) u - E'm = x, E u = r; tensors `(x, r, q, *setting)`."""

    setting: Setting

    leading = (2, 1, 2)

    def solve(self, x: Tensor, r: Tensor, q: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        bound = self.setting.bind(tensors)
        batch = broadcast(q.shape[:-2], bound.t.shape)
        q = q.expand(*batch, *q.shape[-2:])
        whole = broadcast(x.shape[:-2], batch)  # under a vmap, q may have a dimension that x lacks
        x, r = x.expand(*whole, *x.shape[-2:]), r.expand(*whole, *r.shape[-1:])
        return bound.factorize(q, batch, whole.numel()).solve(x, r)

    def point(
        self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        return tensors[2], tensors[3:]

    def operator(
        self, outputs: Sequence[Tensor], arguments: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        (q, *tensors), (u, m) = arguments, outputs
        bound = self.setting.bind(tensors)
        q = q.expand(broadcast(q.shape, u.shape))
        return bound.hessian_product(q, u) - bound.adjoint(m), bound.constrain(u, m)

    def rhs_cotangents(self, x_bar: Tensor, r_bar: Tensor) -> tuple[Tensor, Tensor]:
        return x_bar, r_bar

    def rhs_tangents(
        self, x: Tensor | None, r: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        return x, r


Equation = Stationarity | Linearized


class ImplicitSolution(torch.autograd.Function):
    """The solution of an equation, differentiable by the implicit function theorem."""

    @staticmethod
    def forward(equation: Equation, *tensors: Tensor) -> tuple[Tensor, ...]:
        return equation.solve(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.equation, *tensors = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)
        ctx.count = len(tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched_derivatives(*cotangents)
        equation, saved = ctx.equation, ctx.saved_tensors
        tensors, outputs = saved[: ctx.count], saved[ctx.count :]
        z_bar = poison(outputs, cotangents[:2])
        q, setting = equation.point(tensors, outputs)
        linearized = Linearized(equation.setting)
        # K' is K with the signs of its off-diagonal blocks changed.
        x_bar, minus_r_bar = ImplicitSolution.apply(linearized, z_bar[0], -z_bar[1], q, *setting)
        r_bar = -minus_r_bar
        arguments = tensors[2:]
        if any(ctx.needs_input_grad[3:]):
            operator = equation.operator
            _, pull_back, *_ = torch.func.vjp(lambda *given: operator(outputs, given), *arguments)
            pulled = pull_back((-x_bar, -r_bar))
        else:
            pulled = (None,) * len(arguments)
        grads = (*equation.rhs_cotangents(x_bar, r_bar), *pulled)
        pairs = zip(grads, tensors, strict=True)
        return None, *(None if g is None else _sum_to(g, x) for g, x in pairs)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batched_derivatives(*tangents)
        equation, saved = ctx.equation, ctx.saved_tensors
        tensors, outputs = saved[: ctx.count], saved[ctx.count :]
        q, setting = equation.point(tensors, outputs)
        x, r = equation.rhs_tangents(*tangents[:2])
        x = torch.zeros_like(outputs[0]) if x is None else x
        r = torch.zeros_like(outputs[1]) if r is None else r
        if any(tangent is not None for tangent in tangents[2:]):
            operator = equation.operator
            moved = push_forward(lambda *given: operator(outputs, given), tensors[2:], tangents[2:])
            x, r = x - moved[0], r - moved[1]
        x, r = poison(outputs, (x, r))
        dq, dv = ImplicitSolution.apply(Linearized(equation.setting), x, r, q, *setting)
        return (dq, dv, *(None,) * (len(outputs) - 2))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], equation: Equation, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        dims = in_dims[1:]
        pairs = zip(tensors, dims, strict=True)
        front = [x if dim is None else x.movedim(dim, 0) for x, dim in pairs]
        events = (*equation.leading, *equation.setting.event_dims)
        kinds = zip(dims, events, strict=True)
        batched = [dim is not None for dim, event in kinds if event is None]
        inside = any(batched) or bool(equation.setting.evaluator.vmapped)
        if inside:
            # The regularizer must be evaluated under a vmap of its own, and all tensors need the
            # dimension of that vmap.
            evaluator = equation.setting.evaluator.under_vmap(batched)
            equation = replace(equation, setting=replace(equation.setting, evaluator=evaluator))
        rank = tensors[0].dim() - equation.leading[0] - (dims[0] is not None)
        for i, event in enumerate(events):
            if event is None:
                continue
            shared, number = dims[i] is None, tensors[i].dim() == (dims[i] is not None)
            if number and (inside or not shared):
                front[i] = front[i].reshape(-1, *(1,) * (rank + event))
            elif shared and not number:
                front[i] = front[i].unsqueeze(0)
            if shared and inside:
                front[i] = front[i].expand(info.batch_size, *front[i].shape[1:])
        outputs = ImplicitSolution.apply(equation, *front)
        return outputs, (0,) * len(outputs)


def poison(outputs: Sequence[Tensor], z: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Set z to NaN for elements that failed: their derivatives would be silently wrong.

    Elements on which nothing depends, with z = 0, stay: others share their parameters.
    """
    if len(outputs) == 2:
        return z[0], z[1]
    asked = (z[0] != 0).any(-1).any(-1) | (z[1] != 0).any(-1)
    failed = (outputs[2][..., 0] != Status.CONVERGED) & asked
    x = torch.where(failed[..., None, None], torch.nan, z[0])
    return x, torch.where(failed[..., None], torch.nan, z[1])


def push_forward(
    function: Callable[..., tuple[Tensor, Tensor]],
    at: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Return the derivative along tangents, by two reverse passes; forward mode does not nest."""
    (y0, y1), pull_back, *_ = torch.func.vjp(function, *at)

    def paired(cotangents: tuple[Tensor, Tensor]) -> Tensor:
        pairs = zip(pull_back(cotangents), tangents, strict=True)
        terms = ((g * tangent).sum() for g, tangent in pairs if tangent is not None)
        return sum(terms, y0.new_zeros(()))

    return torch.func.grad(paired)((torch.zeros_like(y0), torch.zeros_like(y1)))


def _sum_to(gradient: Tensor, like: Tensor) -> Tensor:
    return gradient.sum_to_size(like.shape) if gradient.shape != like.shape else gradient


def solve_setting(
    setting: Setting, options: Options, loss: Tensor, start: Tensor, rank: int, check: bool | None
) -> Solution:
    """Solve the step in torch, an entropy in logarithms.

    Args:
        setting: with its tensors, which need not be aligned.
        rank: the number of batch dimensions.
        check: as in `Stationarity`.
    """
    mdp, regularizer = setting.mdp, setting.evaluator.regularizer
    tensors = setting.align(rank, -loss, start)
    if not solves_in_logs(regularizer, mdp):
        return Solution(*ImplicitSolution.apply(Stationarity(setting, options, check), *tensors))
    values = [spread_batch(setting.t), *setting.parameters]
    given = entropy_of(setting.evaluator.composition, values)
    wide = given.weight.dim() - given.price.dim()
    entropy = Entropy(with_rank(given.weight, rank, wide), with_rank(given.price, rank, 0))
    mdp = setting.bind(tensors[2:]).mdp

    def validate(
        model: LayeredMDP, loss: Tensor, start: Tensor, entropy: Entropy, t: Tensor
    ) -> None:
        if check is None:
            return
        if setting.probabilities:
            check_probabilities(model)
        check_values(model, loss, start, t, zeros=True)
        if not bool((entropy.weight > 0).all() and entropy.weight.isfinite().all()):
            raise ValueError(
                "regularizer: its weight is not a positive number; check its parameters"
            )

    closed, tell = is_entropy(regularizer, closed=True), partial(report, bool(check))
    task = Task(mdp, options, setting.probabilities, closed, validate, tell)
    _, start, t, *_ = tensors
    differentiable = any(carries_derivative(x) for x in (loss, t, *entropy, *mdp.probabilities))
    # The entropy may not depend on t, whose batch counts all the same.
    loss = with_rank(loss, rank, 2)
    loss = loss.expand(*broadcast(loss.shape[:-2], t.shape), *loss.shape[-2:])
    return solve_entropic(task, loss, start, entropy, t, differentiable)
