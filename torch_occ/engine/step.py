"""The engine behind `FTRLStep`: tensors in, tensors out, for one MDP and a batch of losses, episodes and parameters.

Between torch and the kernels stand the weights and exponents of the elementary terms: autograd knows how they come from t and the
parameters, the engine how the solution depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_occ.derivatives import Evaluator
from torch_occ.engine.arrays import exponents_of, kinds_of, model_of, terms_of, weights_of, why_not
from torch_occ.engine.batches import BAD_INPUT, solve_linear, solve_steps
from torch_occ.engine.compiling import patiently
from torch_occ.engine.layout import Floats, Ints, Model, Work, make_work
from torch_occ.engine.threads import for_each
from torch_occ.implicit import Bound, poison, push_forward
from torch_occ.mdp import LayeredMDP
from torch_occ.newton import Options, Solution
from torch_occ.regularizers import Regularizer
from torch_occ.validation import broadcast

__all__ = ["WIDEST", "CompiledStep", "why_not"]

#: Beyond this width, BLAS does better on the torch path.
WIDEST = 40

#: Elements of a batch below which threads are not worth waking.
_ALONE = 16


class CompiledStep:
    """min <q, loss> + psi_t(q), for plain tensors outside every transform of torch.func.

    Args:
        replay: solves the same step on the torch path; double backward goes there.
    """

    def __init__(self, mdp: LayeredMDP, regularizer: Regularizer, options: Options, replay: Callable[..., Solution]) -> None:
        self.mdp, self.regularizer, self.options, self.replay = mdp, regularizer, options, replay
        self.tolerance = float(np.finfo(np.float64).eps ** (2 / 3) if options.tolerance is None else options.tolerance)
        #: Where each parameter is: dictionaries, in which `torch.func.functional_call` exchanges them.
        self.slots: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in regularizer.modules():
            for name, parameter in module._parameters.items():
                self.slots.setdefault(id(parameter), []).append((module._parameters, name))
        self.valid: list[Any] = []  # values of the parameters that were found valid
        self.works: list[Work] = []  # scratch memory at rest
        self.evaluator = Evaluator(regularizer)

    @cached_property
    def model(self) -> Model:
        return model_of(self.mdp)

    @cached_property
    def kinds(self) -> tuple[Ints, Ints]:
        with torch.no_grad():
            return kinds_of(terms_of(self.regularizer, torch.ones((), dtype=torch.float64)))

    def __call__(self, loss: Tensor, t: Tensor | float, start: Tensor) -> Solution | None:
        """The solution, or None if some input is not plain or not good; nothing is said about which."""
        if isinstance(t, int | float):
            t = torch.tensor(t, dtype=torch.float64)
        parameters = self._parameters()
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
        inputs: tuple[Any, ...] = (loss, t, *parameters)
        followed = (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)) or forward_ad._current_level >= 0
        solve = partial(_CompiledSolution.apply, self) if followed else self.solve
        outputs: Any = solve(batch, start.detach(), *inputs)
        return None if outputs is None else replace(Solution(*outputs), backend="engine")

    def _parameters(self) -> list[Any]:
        return [places[0][0][places[0][1]] for places in self.slots.values()]

    @contextmanager
    def parameters_set_to(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        """The regularizer as it was in the forward pass: `functional_call` has put its own parameters back since."""
        before = self._parameters()

        def put(values: Sequence[Any]) -> None:
            for places, value in zip(self.slots.values(), values, strict=True):
                for slot, name in places:
                    slot[name] = value

        put(parameters)
        try:
            yield
        finally:
            put(before)

    def _in_domain(self, t: Tensor, parameters: Sequence[Tensor]) -> bool:
        low, high = (float(t.detach()),) * 2 if t.dim() == 0 else (float(x) for x in t.detach().aminmax())
        values = [p.tolist() for p in parameters]
        if values != self.valid:
            self.regularizer.validate()
            self.valid = values
        return low >= 1 and high < np.inf

    def weights(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and exponents of the terms at t `(*batch,)`, `(*batch, K)` each; autograd follows them."""
        terms = terms_of(self.regularizer, t)
        given = [x.shape for term in terms for x in (term.weight, getattr(term.function, "p", None)) if isinstance(x, Tensor)]
        batch = broadcast(t.shape, *given)
        return weights_of(terms, batch), exponents_of(terms, batch)

    def _numbers(self, t: Tensor, batch: torch.Size) -> tuple[Floats, Floats]:
        """The same as rows for the kernels, `(N or 1, K)`."""
        with torch.no_grad():
            if batch:
                weights, exponents = self.weights(t)
                return _rows(weights, batch, 1), _rows(exponents, batch, 1)
            terms = terms_of(self.regularizer, t)
        powers = [getattr(term.function, "p", 0.0) for term in terms]
        return np.array([[float(term.weight) for term in terms]]), np.array([[float(p) for p in powers]])

    def solve(self, batch: torch.Size, start: Tensor, loss: Tensor, t: Tensor, *parameters: Tensor) -> tuple[Tensor, ...] | None:
        """The tensors of `Solution`, or None for a loss that is not finite or a start that is not positive."""
        mdp, count = self.mdp, batch.numel()
        weights, exponents = self._numbers(t, batch)
        q, v = np.empty((count, mdp.num_states * mdp.num_actions)), np.empty((count, mdp.num_states))
        report, nowhere, limits = np.empty((count, 5)), np.empty(0), (self.tolerance, self.options.max_steps)
        inputs = (self.model, self.kinds, exponents, weights, _rows(loss, batch, 2), _rows(start, batch, 2))
        self._run(count, lambda first, stop, work: solve_steps(*inputs, q, v, report, first, stop, *limits, nowhere, work))
        if (report[:, 0] == BAD_INPUT).any():
            return None
        columns = [np.ascontiguousarray(column).reshape(batch) for column in report.T]
        counts = [column.astype(np.int64) for column in columns[:2]]
        pairs = (*batch, mdp.num_states, mdp.num_actions)
        return tuple(torch.from_numpy(x) for x in (q.reshape(pairs), v.reshape(pairs[:-1]), *counts, *columns[2:]))

    def linear(self, x: Tensor, r: Tensor, q: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """H(q) u - E'm = x, E u = r: u and m, and the derivatives of <u, grad psi_t(q)> in weights and exponents, `(*batch, K)`."""
        mdp, batch = self.mdp, q.shape[:-2]
        count = batch.numel()
        weights, exponents = self._numbers(t, batch)
        u, m = np.empty((count, mdp.num_states * mdp.num_actions)), np.empty((count, mdp.num_states))
        bars = np.empty((2, count, len(self.kinds[0])))
        inputs = (self.model, self.kinds, exponents, weights, _rows(q, batch, 2), _rows(x, batch, 2), _rows(r, batch, 1))
        self._run(count, lambda first, stop, work: solve_linear(*inputs, u, m, bars[0], bars[1], first, stop, work))
        pairs = (*batch, mdp.num_states, mdp.num_actions)
        found = torch.from_numpy(bars).reshape(2, *batch, -1)
        return torch.from_numpy(u).reshape(pairs), torch.from_numpy(m).reshape(pairs[:-1]), found[0], found[1]

    def pull_back(self, t: Tensor, parameters: Sequence[Tensor], bars: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """From cotangents of weights and exponents to those of `(t, *parameters)`."""
        # On leaves of its own: a graph inside a graph that ends in the same leaves loses the gradients of shared ones.
        leaves = [x.detach().requires_grad_() for x in (t, *parameters)]
        with torch.enable_grad(), self.parameters_set_to(leaves[1:]):
            pairs = [(y, bar.sum_to_size(y.shape)) for y, bar in zip(self.weights(leaves[0]), bars, strict=True) if y.requires_grad]
        outputs, cotangents = [y for y, _ in pairs], [bar for _, bar in pairs]
        return torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True) if outputs else (None,) * len(leaves)

    def push_gradient(self, q: Tensor, at: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> Tensor:
        """The derivative of grad psi_t(q) along tangents of `(t, *parameters)`."""
        own = self.evaluator.own_parameters  # a shared one under each of its names
        known = dict(zip(at[1:], tangents[1:], strict=True))

        def gradient(t: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
            found = Bound(self.mdp, self.evaluator, t, parameters).gradient(q)
            return found, found.new_zeros(())

        return push_forward(gradient, (at[0], *own), (tangents[0], *(known[p] for p in own)))[0]

    def _run(self, count: int, part: Callable[[int, int, Work], None]) -> None:
        threads = 1 if count < _ALONE else min(torch.get_num_threads(), count)

        def share(i: int) -> None:
            work = self.works.pop() if self.works else make_work(self.model)
            part(i * count // threads, (i + 1) * count // threads, work)
            self.works.append(work)

        with patiently:
            for_each(share, threads)


class _CompiledSolution(torch.autograd.Function):
    """(loss, t, *parameters) -> the tensors of `Solution`."""

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
        loss, t, *parameters, q, v, status = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        q_bar, v_bar = poison((q, v, status), bars[:2]) if bool(status.any()) else bars[:2]
        with step.parameters_set_to(parameters):
            if torch.is_grad_enabled():  # somebody will differentiate this: say it in operations that autograd sees
                again = step.replay(loss, t, warm_start=q.detach(), mdp=None, check=False)
                wanted = [x for x, need in zip((loss, t, *parameters), needed, strict=True) if need]
                found = iter(torch.autograd.grad((again.q, again.value), wanted, (q_bar, v_bar), create_graph=True, allow_unused=True))
                return (None, None, None, *(next(found) if need else None for need in needed))
            x_bar, _, *bars_of_terms = step.linear(q_bar, -v_bar, q, t)  # the sign of the off-diagonal blocks: K' and not K
            others = step.pull_back(t, parameters, [-bar for bar in bars_of_terms]) if any(needed[1:]) else (None,) * len(needed[1:])
            return (None, None, None, -x_bar.sum_to_size(loss.shape), *others)

    @staticmethod
    def jvp(ctx: Any, _step: None, _batch: None, _start: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        step: CompiledStep = ctx.step
        _, t, *parameters, q, v, status = ctx.saved_tensors
        x = torch.zeros_like(q) if tangents[0] is None else -tangents[0].expand_as(q)
        with step.parameters_set_to(parameters):
            if any(tangent is not None for tangent in tangents[1:]):
                x = x - step.push_gradient(q, (t, *parameters), tangents[1:])
            x, r = poison((q, v, status), (x, torch.zeros_like(v)))
            return (*step.linear(x, r, q, t)[:2], None, None, None, None, None)


def _rows(x: Tensor, batch: torch.Size, event_dims: int) -> Floats:
    """`(*some of batch, *event)` as `(N or 1, events)`, contiguous."""
    split = x.dim() - event_dims
    rows = x.detach() if x.shape[:split].numel() == 1 else x.detach().expand(*batch, *x.shape[split:])
    array: Floats = rows.contiguous().numpy()
    return array.reshape(-1, x.shape[split:].numel())
