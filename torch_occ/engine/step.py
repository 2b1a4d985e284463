"""The engine behind `FTRLStep`: tensors in, tensors out, for one MDP and a batch of losses, episodes and parameters.

Between torch and the kernels stand the weights and exponents of the elementary terms. Autograd knows how they come from t and the
parameters; the engine knows how the solution depends on them. What it does not say in closed form, forward mode in the terms and double
backward, is said on the torch path, for a regularizer whose parameters are those weights and exponents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_occ.catalog import TabularRegularizer
from torch_occ.derivatives import Evaluator
from torch_occ.engine.arrays import exponents_of, kinds_of, model_of, terms_of, weights_of, why_not
from torch_occ.engine.batches import BAD_INPUT, solve_linear, solve_steps
from torch_occ.engine.compiling import patiently
from torch_occ.engine.layout import Floats, Ints, Model, Work, make_work
from torch_occ.engine.threads import for_each
from torch_occ.implicit import Bound, ImplicitSolution, Setting, Stationarity, poison, push_forward
from torch_occ.mdp import LayeredMDP
from torch_occ.newton import Options, Solution
from torch_occ.regularizers import Regularizer
from torch_occ.terms import Power, Term
from torch_occ.validation import broadcast

__all__ = ["WIDEST", "CompiledStep", "why_not"]

#: Beyond this width, BLAS does better on the torch path.
WIDEST = 40

#: Elements of a batch below which threads are not worth waking.
_ALONE = 16


class CompiledStep:
    """min <q, loss> + psi_t(q), for plain tensors outside every transform of torch.func."""

    def __init__(self, mdp: LayeredMDP, regularizer: Regularizer, options: Options) -> None:
        self.mdp, self.regularizer, self.options = mdp, regularizer, options
        self.tolerance = options.tolerance_in(torch.float64)
        # Dictionaries, because `torch.func.functional_call` exchanges what is in them.
        self.slots = [(module._parameters, name) for module in regularizer.modules() for name in module._parameters]
        self.valid: list[Any] = []  # values of the parameters that were found valid
        self.works: list[Work] = []  # scratch memory at rest

    @cached_property
    def model(self) -> Model:
        return model_of(self.mdp)

    @cached_property
    def template(self) -> list[Term]:
        """The terms at some t: their arguments and functions are what they are at every t."""
        with torch.no_grad():
            return terms_of(self.regularizer, torch.ones((), dtype=torch.float64))

    @cached_property
    def kinds(self) -> tuple[Ints, Ints]:
        return kinds_of(self.template)

    @cached_property
    def explicit(self) -> Evaluator:
        """The same psi with weights and exponents for parameters."""
        return Evaluator(_Explicit(self.template))

    def __call__(self, loss: Tensor, t: Tensor | float, start: Tensor) -> Solution | None:
        """The solution, or None if some input is not plain or not good; nothing is said about which."""
        if isinstance(t, int | float):
            t = torch.tensor(t, dtype=torch.float64)
        parameters: list[Any] = [slot[name] for slot, name in self.slots]
        shape = (self.mdp.num_states, self.mdp.num_actions)
        for x in (loss, start, t, *parameters):
            if not isinstance(x, Tensor) or x.dtype != torch.float64 or x.device.type != "cpu":
                return None
        if loss.shape[-2:] != shape or start.shape[-2:] != shape or not self._in_domain(t, parameters):
            return None
        try:
            batch = broadcast(loss.shape[:-2], start.shape[:-2], t.shape, *(p.shape for p in parameters))
        except RuntimeError:
            return None
        terms = terms_of(self.regularizer, t)
        inputs = (loss, weights_of(terms), exponents_of(terms))
        followed = any(x.requires_grad for x in inputs) if torch.is_grad_enabled() else False
        outputs: Any
        if followed or forward_ad._current_level >= 0:
            outputs = _CompiledSolution.apply(self, batch, start.detach(), *inputs)
        else:
            outputs = self.solve(batch, start, *inputs)
        return None if outputs is None else replace(Solution(*outputs), backend="engine")

    def _in_domain(self, t: Tensor, parameters: Sequence[Tensor]) -> bool:
        low, high = (t.item(),) * 2 if t.dim() == 0 else (x.item() for x in t.aminmax())
        values = [p.tolist() for p in parameters]
        if values != self.valid:
            self.regularizer.validate()
            self.valid = values
        return low >= 1 and high < np.inf

    def solve(self, batch: torch.Size, start: Tensor, loss: Tensor, weights: Tensor, exponents: Tensor) -> tuple[Tensor, ...] | None:
        """The tensors of `Solution`, or None for a loss that is not finite or a start that is not positive."""
        mdp, count = self.mdp, batch.numel()
        q, v = np.empty((count, mdp.num_states * mdp.num_actions)), np.empty((count, mdp.num_states))
        report, nowhere, limits = np.empty((count, 5)), np.empty(0), (self.tolerance, self.options.max_steps)
        inputs = (_rows(exponents, batch, 1), _rows(weights, batch, 1), _rows(loss, batch, 2), _rows(start, batch, 2))

        def part(first: int, stop: int, work: Work) -> None:
            solve_steps(self.model, self.kinds, *inputs, q, v, report, first, stop, *limits, nowhere, work)

        self._run(count, part)
        if (report[:, 0] == BAD_INPUT).any():
            return None
        columns = [np.ascontiguousarray(column).reshape(batch) for column in report.T]
        counts = [column.astype(np.int64) for column in columns[:2]]
        pairs = (*batch, mdp.num_states, mdp.num_actions)
        return tuple(torch.from_numpy(x) for x in (q.reshape(pairs), v.reshape(pairs[:-1]), *counts, *columns[2:]))

    def linear(self, x: Tensor, r: Tensor, q: Tensor, weights: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """H(q) u - E'm = x, E u = r: u and m, and the derivatives of <u, grad psi(q)> in weights and exponents, `(*batch, K)`."""
        mdp, batch = self.mdp, q.shape[:-2]
        count = batch.numel()
        u, m = np.empty((count, mdp.num_states * mdp.num_actions)), np.empty((count, mdp.num_states))
        bars = np.empty((2, count, len(self.kinds[0])))
        inputs = (_rows(exponents, batch, 1), _rows(weights, batch, 1), _rows(q, batch, 2), _rows(x, batch, 2), _rows(r, batch, 1))

        def part(first: int, stop: int, work: Work) -> None:
            solve_linear(self.model, self.kinds, *inputs, u, m, bars[0], bars[1], first, stop, work)

        self._run(count, part)
        pairs = (*batch, mdp.num_states, mdp.num_actions)
        found = torch.from_numpy(bars.reshape(2, *batch, -1))
        return torch.from_numpy(u.reshape(pairs)), torch.from_numpy(m.reshape(pairs[:-1])), found[0], found[1]

    def _run(self, count: int, part: Callable[[int, int, Work], None]) -> None:
        threads = 1 if count < _ALONE else min(torch.get_num_threads(), count)

        def share(i: int) -> None:
            work = self.works.pop() if self.works else make_work(self.model)
            part(i * count // threads, (i + 1) * count // threads, work)
            self.works.append(work)

        with patiently:
            for_each(share, threads)

    # -- on the torch path ------------------------------------------------------------------------------------------------

    def replay(self, q: Tensor, loss: Tensor, weights: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
        """(q, v) once more, from the solution, in operations that autograd sees."""
        setting = Setting(self.mdp, self.explicit, probabilities=False)
        equation = Stationarity(setting, self.options, check=lambda *_: None, report=lambda _: None)
        one = torch.ones((1,) * (q.dim() - 2), dtype=q.dtype)  # nothing depends on t any more
        found = ImplicitSolution.apply(equation, -loss.expand_as(q), q.detach(), one, *self._named(weights, exponents))
        return found[0], found[1]

    def push_gradient(self, q: Tensor, at: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Tensor:
        """The derivative of grad psi(q) along tangents of weights and exponents."""
        one, zero = torch.ones(q.shape[:-2], dtype=q.dtype), torch.zeros((), dtype=q.dtype)
        moves = [torch.zeros_like(x) if dx is None else dx for x, dx in zip(at, tangents, strict=True)]

        def gradient(weights: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
            return Bound(self.mdp, self.explicit, one, self._named(weights, exponents)).gradient(q), zero

        return push_forward(gradient, at, moves)[0]

    def _named(self, weights: Tensor, exponents: Tensor) -> tuple[Tensor, ...]:
        """In the order of `explicit`: the weights, then the exponents of the powers."""
        powers = [exponents[..., i] for i, term in enumerate(self.template) if isinstance(term.function, Power)]
        return (*weights.unbind(-1), *powers)


class _Explicit(TabularRegularizer):
    """A table of terms whose weights and exponents are its parameters."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = tuple(terms)
        powers = {f"p{i}": term.function.p for i, term in enumerate(terms) if isinstance(term.function, Power)}
        super().__init__(**{f"w{i}": term.weight for i, term in enumerate(terms)}, **powers)

    def table(self) -> tuple[Term, ...]:
        functions = [
            Power(getattr(self, f"p{i}")) if isinstance(term.function, Power) else term.function for i, term in enumerate(self.terms)
        ]
        return tuple(Term(term.argument, functions[i], getattr(self, f"w{i}")) for i, term in enumerate(self.terms))


class _CompiledSolution(torch.autograd.Function):
    """(loss, weights, exponents) -> the tensors of `Solution`."""

    @staticmethod
    def forward(ctx: Any, step: CompiledStep, batch: torch.Size, start: Tensor, *inputs: Tensor) -> tuple[Tensor, ...] | None:
        outputs = step.solve(batch, start, *inputs)
        ctx.step = step
        if outputs is not None:
            ctx.mark_non_differentiable(*outputs[2:])
            ctx.save_for_backward(*inputs, *outputs[:3])
            ctx.save_for_forward(*inputs, *outputs[:3])
        return outputs

    @staticmethod
    def backward(ctx: Any, *bars: Tensor) -> tuple[Tensor | None, ...]:
        step: CompiledStep = ctx.step
        loss, weights, exponents, q, v, status = ctx.saved_tensors
        q_bar, v_bar = poison((q, v, status), bars[:2]) if bool(status.any()) else bars[:2]
        if torch.is_grad_enabled():  # somebody will differentiate this
            inputs, needed = (loss, weights, exponents), ctx.needs_input_grad[3:]
            wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
            found = iter(torch.autograd.grad(step.replay(q, *inputs), wanted, (q_bar, v_bar), create_graph=True, allow_unused=True))
            return (None, None, None, *(next(found) if need else None for need in needed))
        x_bar, _, *terms_bar = step.linear(q_bar, -v_bar, q, weights, exponents)  # -v_bar: K' and not K
        grads = [
            -bar if bar.shape == x.shape else -bar.sum_to_size(x.shape)
            for bar, x in zip((x_bar, *terms_bar), (loss, weights, exponents), strict=True)
        ]
        return (None, None, None, *grads)

    @staticmethod
    def jvp(ctx: Any, _step: None, _batch: None, _start: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        step: CompiledStep = ctx.step
        _, weights, exponents, q, v, status = ctx.saved_tensors
        x = torch.zeros_like(q) if tangents[0] is None else -tangents[0].expand_as(q)
        if any(tangent is not None for tangent in tangents[1:]):
            x = x - step.push_gradient(q, (weights, exponents), tangents[1:])
        x, r = poison((q, v, status), (x, torch.zeros_like(v)))
        return (*step.linear(x, r, q, weights, exponents)[:2], None, None, None, None, None)


def _rows(x: Tensor, batch: torch.Size, event_dims: int) -> Floats:
    """`(*some of batch, *event)` as `(N or 1, events)`, contiguous."""
    split, x = x.dim() - event_dims, x.detach()
    if split and x.shape[:split].numel() > 1:
        x = x.expand(*batch, *x.shape[split:])
    array: Floats = x.contiguous().numpy()
    return array.reshape(-1, math.prod(array.shape[array.ndim - event_dims :]))
