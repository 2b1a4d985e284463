"""Derivatives of a solution by the implicit function theorem, not through the solver.

The derivative of a solution is the solution of a linear equation with the Jacobian K, and so is the
derivative of that: one `autograd.Function` serves both (docs/step.md). There are two equations:

    Stationarity   grad psi_t(q) - E'v = x,  E q = b       the FTRL step, x = - cumulative loss
    Linearized     H(q) u - E'm = x,         E u = r       its derivatives
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from torch_occ._support.private import (
    in_forward_mode,
    inside_transform,
    refuse_batched_derivatives,
)
from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_adjoint, flow_of, flow_source
from torch_occ.regularizers.base import SeparableRegularizer, total
from torch_occ.regularizers.derivatives import Derivatives, Evaluator, derivatives
from torch_occ.regularizers.parameters import spread_batch, with_rank
from torch_occ.regularizers.terms import Argument, change
from torch_occ.step.entropic import Entropic, entropy_of, poison, push_forward
from torch_occ.step.newton import conserves_mass, newton
from torch_occ.step.solution import (
    Options,
    Solution,
    check_probabilities,
    check_values,
    event_dims_of,
    report,
)
from torch_occ.step.system import Factorization, factorize
from torch_occ.step.ways import solves_in_logs

if TYPE_CHECKING:
    from torch_occ.step.ftrl import FTRLStep

Tensors = Sequence[Tensor]


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
        model = event_dims_of(self.mdp) if self.probabilities else ()
        return (0, *self.evaluator.event_dims, *model)

    def bind(self, tensors: Sequence[Tensor]) -> Setting:
        """Return psi_t and the MDP with these tensors."""
        last, mdp = 1 + len(self.evaluator.names), self.mdp
        mdp = mdp.with_probabilities(*tensors[last:]) if self.probabilities else mdp
        return replace(self, mdp=mdp, t=tensors[0], parameters=tuple(tensors[1:last]))

    def align(self, rank: int, *pairs: Tensor) -> list[Tensor]:
        """Return these tensors, `(*batch, S, A)`, and its own with this number of batch dimensions.

        A vmap puts its dimension in front of them, where it is aligned then.
        """
        tensors = [with_rank(x, rank, 2) for x in pairs]
        tensors += self.evaluator.align(rank, self.t, self.parameters)
        if self.probabilities:
            given = zip(self.mdp.probabilities, event_dims_of(self.mdp), strict=True)
            tensors += [with_rank(p, rank, dim) for p, dim in given]
        return tensors

    def batch_shape(self, *others: torch.Size) -> torch.Size:
        """Return the batch shape of all tensors, and of these."""
        given = self.evaluator.batch_shapes(self.parameters).values()
        return broadcast(self.t.shape, self.mdp.batch_shape, *given, *others)

    def validate(self, x: Tensor, start: Tensor) -> None:
        """Check values; runs on plain tensors, inside every transform."""
        self.evaluator.validate(self.parameters)
        if self.probabilities:
            check_probabilities(self.mdp)
        check_values(self.mdp, -x, start, self.t, zeros=False)

    def deriver(self, batch: torch.Size) -> Callable[[Tensor], Derivatives]:
        """Return the function from q `(*batch, S, A)` to gradient and Hessian; plain tensors."""
        t = self.t.expand(batch) if self.t.dim() else self.t
        evaluate = self.evaluator.bind([p.detach() for p in self.parameters], t.detach())
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
class Equation:
    """An equation with the Jacobian K; its first tensors are its right-hand side, or a start."""

    setting: Setting

    leading: ClassVar[tuple[int, ...]]  # event dimensions of the tensors before the setting's

    @property
    def events(self) -> tuple[int | None, ...]:
        """The number of event dimensions of each tensor."""
        return (*self.leading, *self.setting.event_dims)

    def solve(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return q and v, and a certificate with what else belongs to it, for plain tensors."""
        raise NotImplementedError

    def point(self, tensors: Tensors, outputs: Tensors) -> tuple[Tensor, Tensors]:
        """Return q and the tensors of the setting at which K is evaluated."""
        raise NotImplementedError

    def operator(self, outputs: Tensors, arguments: Tensors) -> tuple[Tensor, Tensor]:
        """Return the left-hand side, as a function of all tensors after the first two."""
        raise NotImplementedError

    def pull_back(self, tensors: Tensors, outputs: Tensors, z_bar: Tensors, more: bool) -> Tensors:
        """Return derivatives with respect to the tensors; with `more`, also after the first two."""
        q, setting = self.point(tensors, outputs)
        # K' is K with the signs of its off-diagonal blocks changed.
        given = (Linearized(self.setting), z_bar[0], -z_bar[1], q, *setting)
        x_bar, minus_r_bar = ImplicitSolution.apply(*given)
        if not more:
            return x_bar, -minus_r_bar
        _, pull, *_ = torch.func.vjp(lambda *given: self.operator(outputs, given), *tensors[2:])
        return x_bar, -minus_r_bar, *pull((-x_bar, minus_r_bar))

    def push(self, tensors: Tensors, outputs: Tensors, tangents: Sequence[Any]) -> Tensors:
        """Return the tangents of q and v."""
        q, setting = self.point(tensors, outputs)
        x, r = tangents[0], tangents[1] if self.leading[1] == 1 else None  # not a start
        x = torch.zeros_like(outputs[0]) if x is None else x
        r = torch.zeros_like(outputs[1]) if r is None else r
        if any(dot is not None for dot in tangents[2:]):
            moved = push_forward(
                lambda *given: self.operator(outputs, given), tensors[2:], tangents[2:]
            )
            x, r = x - moved[0], r - moved[1]
        given = (*poison(outputs, (x, r)), q, *setting)
        found: Tensors = ImplicitSolution.apply(Linearized(self.setting), *given)
        return found


@dataclass(frozen=True)
class Stationarity(Equation):
    """grad psi_t(q) - E'v = x, E q = b; tensors `(x, start, *setting)`.

    `check` says whether failures raise. With None, the arguments are not checked either.
    """

    options: Options
    check: bool | None

    leading = (2, 2)

    def solve(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, start, *rest = tensors
        bound = self.setting.bind(rest)
        if self.check is not None:
            bound.validate(x, start)
        batch = bound.batch_shape(x.shape[:-2], start.shape[:-2])
        flow, loss = flow_of(bound.mdp, batch.numel()), -x.expand(*batch, *x.shape[-2:])
        options = replace(self.options, steady=bool(bound.evaluator.regularizer.places()))
        solution = newton(flow, bound.deriver(batch), loss, start, options)
        report(bool(self.check), solution)
        return solution[:3]

    def point(self, tensors: Tensors, outputs: Tensors) -> tuple[Tensor, Tensors]:
        return outputs[0], tensors[2:]

    def operator(self, outputs: Tensors, arguments: Tensors) -> tuple[Tensor, Tensor]:
        bound, q, v = self.setting.bind(arguments), outputs[0], outputs[1]
        return bound.gradient(q) - bound.adjoint(v), bound.constrain(q, v) - bound.source


@dataclass(frozen=True)
class Linearized(Equation):
    """H(q) u - E'm = x, E u = r; tensors `(x, r, q, *setting)`."""

    leading = (2, 1, 2)

    def solve(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, r, q, *rest = tensors
        bound = self.setting.bind(rest)
        batch = bound.batch_shape(q.shape[:-2])
        q = q.expand(*batch, *q.shape[-2:])
        whole = broadcast(x.shape[:-2], batch)  # under a vmap, q may have a dimension that x lacks
        x, r = x.expand(*whole, *x.shape[-2:]), r.expand(*whole, *r.shape[-1:])
        return bound.factorize(q, batch, whole.numel()).solve(x, r)

    def point(self, tensors: Tensors, outputs: Tensors) -> tuple[Tensor, Tensors]:
        return tensors[2], tensors[3:]

    def operator(self, outputs: Tensors, arguments: Tensors) -> tuple[Tensor, Tensor]:
        (q, *tensors), (u, m) = arguments, outputs
        bound = self.setting.bind(tensors)
        q = q.expand(broadcast(q.shape, u.shape))
        return bound.hessian_product(q, u) - bound.adjoint(m), bound.constrain(u, m)


class ImplicitSolution(torch.autograd.Function):
    """The solution of an equation, differentiable by the implicit function theorem."""

    @staticmethod
    def forward(equation: Equation | Entropic, *tensors: Tensor) -> tuple[Tensor, ...]:
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
        saved = ctx.saved_tensors  # torch.utils.checkpoint lets them be read once
        tensors, outputs = saved[: ctx.count], saved[ctx.count :]
        needed, z_bar = ctx.needs_input_grad[1:], poison(outputs, cotangents[:2])
        found = ctx.equation.pull_back(tensors, outputs, z_bar, any(needed[2:]))
        grads = zip(found, tensors, needed, strict=False)
        bars = [g.sum_to_size(x.shape) if need else None for g, x, need in grads]
        return None, *bars, *[None] * (len(needed) - len(bars))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batched_derivatives(*tangents)
        saved = ctx.saved_tensors
        tensors, outputs = saved[: ctx.count], saved[ctx.count :]
        return *ctx.equation.push(tensors, outputs, tangents), *[None] * (len(outputs) - 2)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], equation: Equation | Entropic, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        events = equation.events
        rank = tensors[0].dim() - (events[0] or 0) - (in_dims[1] is not None)
        front = []
        for i, (x, dim, event) in enumerate(zip(tensors, in_dims[1:], events, strict=True)):
            if dim is None:
                # What has no batch dimensions stays without.
                stays = event is None or (i and x.dim() <= event)
                front.append(x if stays else x.unsqueeze(0))
                continue
            if event is None:
                raise NotImplementedError(
                    "torch.func.vmap: the parameters of a module inside a regularizer, such as "
                    "nn.Linear, cannot be batched; call the step once for each of them"
                )
            x = x.movedim(dim, 0)
            missing = rank + event + 1 - x.dim()
            front.append(x.reshape(x.shape[0], *(1,) * missing, *x.shape[1:]))
        outputs = ImplicitSolution.apply(equation, *front)
        return outputs, (0,) * len(outputs)


class Known(torch.autograd.Function):
    """Outputs that are known already, as a function of inputs.

    The first argument is a rule for their derivatives, with

    - `outputs()`, a tuple, and `kept`, how many of them its derivatives depend on;
    - `pull_back(kept, inputs, needed, bars)`, first derivatives by formulas, or None;
    - `replay(kept, inputs, bars, more)`, outputs in differentiable operations, and their bars;
      derivatives of any order are right if `more` is set.
    """

    @staticmethod
    def forward(ctx: Any, rule: Any, *inputs: Any) -> Any:
        found = rule.outputs()
        ctx.rule, ctx.numbers = rule, [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*found[: rule.kept], *(x for x in inputs if isinstance(x, Tensor)))
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> tuple[Any, ...]:
        rule, needed = ctx.rule, ctx.needs_input_grad[1:]
        if all(bar is None for bar in bars):
            return None, *[None] * len(needed)
        refuse_batched_derivatives(*bars)
        saved = ctx.saved_tensors
        kept, tensors = saved[: rule.kept], iter(saved[rule.kept :])
        inputs = [next(tensors) if x is None else x for x in ctx.numbers]
        again = torch.is_grad_enabled() or in_forward_mode()  # this is differentiated, too
        found = None if again else rule.pull_back(kept, inputs, needed, bars)
        if found is None:
            with torch.enable_grad():
                outputs, bars = rule.replay(kept, inputs, bars, again)
                wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
                options = {"create_graph": again, "allow_unused": True}
                grads = iter(torch.autograd.grad(outputs, wanted, bars, **options))
            found = [next(grads) if need else None for need in needed]
        return None, *found


def solve_setting(
    setting: Setting, options: Options, loss: Tensor, start: Tensor, rank: int, check: bool | None
) -> Solution:
    """Solve the step in torch, an entropy in logarithms; `rank` counts batch dimensions.

    `check` as in `Stationarity`. The tensors of the setting need not be aligned.
    """
    if not solves_in_logs(setting.evaluator, setting.mdp):
        tensors = setting.align(rank, -loss, start)
        return Solution(*ImplicitSolution.apply(Stationarity(setting, options, check), *tensors))
    equation, arguments = entropic_equation(setting, options, loss, start, rank, check)
    plan = equation.plan(*arguments) if equation.closed and not inside_transform() else None
    if plan is not None:
        found = plan[0].certify(plan[1])
        if bool((found.flow_residual <= options.tolerance_in(loss.dtype)).all()):
            return found
    return Solution(*ImplicitSolution.apply(equation, *arguments)[:3])


def entropic_equation(
    setting: Setting, options: Options, loss: Tensor, start: Tensor, rank: int, check: bool | None
) -> tuple[Entropic, Tensors]:
    """Return the step of an entropy as an equation, and its tensors; arguments as above."""
    evaluator, tensors = setting.evaluator, setting.align(rank, loss, start)
    given = entropy_of(evaluator.composition, [spread_batch(setting.t), *setting.parameters])
    mdp = setting.bind(tensors[2:]).mdp
    centred = not (setting.probabilities or inside_transform()) and conserves_mass(mdp)
    equation = Entropic(mdp, options, setting.probabilities, evaluator.closed, check, centred)
    probabilities = mdp.probabilities if setting.probabilities else ()
    entropy = [with_rank(x, rank, 1) for x in given]
    return equation, (*tensors[:2], *entropy, tensors[2], *probabilities)


# -- First and second derivatives of the step with respect to the loss; both differentiable --------
#
# At a solution q, a small change x of the loss changes q by -Pi x (docs/step.md), and Pi changes by
# d/ds Pi(L + s m) = Pi D3psi[Pi m] Pi with D3psi[u] = d/ds H(q + s u).


class Linearization:
    """First and second derivatives of a step at its solution q.

    `dense` and `bend` are for MDPs of at most a few hundred pairs, `apply` is for all.

    Args:
        q: a solution of the step, `(*batch, S, A)`.
        t: its episodes, `(*batch,)`.
    """

    def __init__(self, step: FTRLStep, q: Tensor, t: Tensor) -> None:
        self.mdp, self.q = step.mdp, q
        t = with_rank(t, q.dim() - 2, 0)
        parameters = tuple(step.evaluator.parameters(t))
        self.setting = Setting(step.mdp, step.evaluator, False, t, parameters)

    def apply(self, x: Tensor) -> Tensor:
        """Return Pi x for x of shape `(*more, *batch, S, A)`."""
        nothing = torch.zeros(x.shape[:-1], dtype=x.dtype, device=x.device)
        # All tensors get the same number of batch dimensions, so that the dimension that a vmap
        # puts in front of them is aligned.
        tensors = (x, nothing, *self.setting.align(x.dim() - 2, self.q))
        moved: Tensor = ImplicitSolution.apply(Linearized(self.setting), *tensors)[0]
        return moved

    def dense(self) -> Tensor:
        """Return Pi as a matrix over all pairs, `(*batch, S * A, S * A)`."""
        identity = torch.eye(self.q.shape[-2:].numel(), dtype=self.q.dtype, device=self.q.device)
        return self.apply(self._columns(identity)).flatten(-2).movedim(0, -1)

    def bend(self, u: Tensor, G: Tensor) -> Tensor:
        """Return D3psi[u](G) = d/ds tr(H(q + s u) G), `(*batch,)`.

        G `(*batch, S * A, S * A)` is symmetric. For scalar terms f(x), with x linear in q, this is
        the sum of f'''(x) times the change of x along u times the variance of x if q has the
        covariance G.
        """
        bound = self.setting.bind(self.setting.align(self.q.dim() - 2))
        if bound.evaluator.regularizer.levels != {SeparableRegularizer}:
            return self._bend_by_columns(bound, u, G)
        total = torch.zeros_like(u[..., 0, 0])
        for name, third in self._third_derivatives(bound).items():
            moment = third * change(name, self.mdp, u) * self._variance(name, G)
            total = total + moment.sum(-1 if name == "state" else (-2, -1))
        return total

    def _third_derivatives(self, bound: Setting) -> dict[Argument, Tensor]:
        """Return the third derivatives at q of the scalar terms, by argument."""
        regularizer = bound.evaluator.regularizer
        evaluate = bound.evaluator.bind(bound.parameters, bound.t.expand(self.q.shape[:-2]))
        inputs = regularizer.read(self.mdp, self.q)
        names, every = regularizer.arguments, tuple(range(len(inputs)))

        def value(*xs: Tensor) -> Tensor:
            return total(self.mdp, evaluate(dict(zip(names, xs, strict=True)))).sum()

        def slopes_of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda *xs: torch.stack(
                [slope.sum() for slope in torch.func.grad(function, every)(*xs)]
            ).sum()

        third = torch.func.grad(slopes_of(slopes_of(value)), every)(*inputs.values())
        return dict(zip(names, third, strict=True))

    def _variance(self, name: Argument, G: Tensor) -> Tensor:
        """Return the variance of an argument of psi if q has the covariance G."""
        S, A = self.q.shape[-2:]
        paired = G.unflatten(-1, (S, A)).unflatten(-3, (S, A))  # (*batch, S, A, S, A)
        blocks = paired.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # (*batch, S, A, A)
        if name == "state":
            return blocks.sum((-2, -1))
        others = self.mdp.other_actions
        return (others @ blocks @ others if name == "rest" else blocks).diagonal(dim1=-2, dim2=-1)

    def _bend_by_columns(self, bound: Setting, u: Tensor, G: Tensor) -> Tensor:
        """Compute `bend` for any regularizer, with one Hessian product per column of G."""
        rows = G.movedim(-1, 0).unflatten(-1, self.q.shape[-2:])  # (S * A, *batch, S, A)
        picks = self._columns(torch.eye(len(rows), dtype=G.dtype, device=G.device))

        def trace(q: Tensor) -> Tensor:
            return (bound.hessian_product(q.expand(len(rows), *q.shape), rows) * picks).sum()

        return (torch.func.grad(trace)(self.q) * u).sum((-2, -1))

    def _columns(self, matrix: Tensor) -> Tensor:
        """Return the rows of a matrix over pairs as a leading batch, `(S * A, *batch, S, A)`."""
        batch, pairs = self.q.shape[:-2], self.q.shape[-2:]
        return matrix.reshape(-1, *(1,) * len(batch), *pairs).expand(-1, *batch, *pairs)
