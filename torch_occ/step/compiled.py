"""The engine behind `FTRLStep`: tensors in, tensors out, for one MDP and a batch of losses, episodes and parameters.

Between torch and the kernels stand the weights and exponents of the elementary terms. A formula knows how they come from t and the
parameters (for regularizers with parts that are not built in, autograd does); the engine knows how the solution depends on them. What it
does not say in closed form, forward mode in the terms and double backward, is said on the torch path, for a regularizer whose parameters
are those weights and exponents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.compiling import compile_message
from torch_occ._support.private import in_forward_mode
from torch_occ._support.threads import for_each
from torch_occ.kernels.batches import BAD_INPUT, solve_linear, solve_steps
from torch_occ.kernels.layout import Floats, Ints, Model, Work, make_work
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.validation import broadcast
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import TabularRegularizer
from torch_occ.regularizers.derivatives import Evaluator
from torch_occ.regularizers.terms import Power, Term
from torch_occ.step.formulas import Formula, identity, record, slots_of
from torch_occ.step.implicit import (
    Bound,
    ImplicitSolution,
    Setting,
    Stationarity,
    poison,
    push_forward,
)
from torch_occ.step.kernel_inputs import kinds_of, list_exponents, model_of, terms_of, why_not
from torch_occ.step.newton import Options, Solution
from torch_occ.step.rows import followed, number, plain, rows, shaped, summed, tabulate, untabulate

__all__ = ["CompiledStep", "pays_off", "why_not"]

#: Beyond this width of dense layers, BLAS on the torch path catches up: measured with 2 to 10 layers and actions, one thread.
WIDEST = 150

_SINGLE = torch.Size()

#: Elements of a batch below which threads are not worth waking.
_ALONE = 16


def pays_off(mdp: LayeredMDP) -> bool:
    """Whether the engine is expected to be faster than the torch path."""
    return mdp.is_sparse or max(mdp.layer_sizes) <= WIDEST


class CompiledStep:
    """min <q, loss> + psi_t(q), for plain tensors outside every transform of torch.func."""

    def __init__(self, mdp: LayeredMDP, regularizer: Regularizer, options: Options) -> None:
        self.mdp, self.regularizer, self.options = mdp, regularizer, options
        self.shape = torch.Size((mdp.num_states, mdp.num_actions))
        self.tolerance = options.tolerance_in(torch.float64)
        self.zeros = np.zeros(mdp.num_states)
        self.slots = slots_of(regularizer)
        self.valid: list[Any] = []  # values of the parameters that were found valid
        self.works: list[Work] = []  # scratch memory at rest

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy has memory of its own."""
        return CompiledStep, (self.mdp, self.regularizer, self.options)

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
    def formula(self) -> Formula | None:
        return record(self.regularizer)

    @cached_property
    def explicit(self) -> Evaluator:
        """The same psi with weights and exponents for parameters."""
        return Evaluator(_Explicit(self.template))

    def __call__(self, loss: Tensor, t: Tensor | float, start: Tensor) -> tuple[Solution, bool] | None:
        """The solution and whether all of it converged, or None if some input is not plain or not good; nothing is said about which."""
        inputs: list[Any] = [t, *[slot[name] for slot, name in self.slots]]
        values = [number(x) for x in inputs]
        if not (plain(loss) and plain(start)) or any(x is None for x in values) or not self._in_domain(values):
            return None
        formula = self.formula
        if formula is None:  # then torch works out the terms, and they are the inputs
            terms = terms_of(self.regularizer, torch.as_tensor(t, dtype=torch.float64))
            self._check_kinds(terms)
            outputs = (*(term.weight for term in terms), *list_exponents(terms))
            inputs, formula = [x.double() if isinstance(x, Tensor) else x for x in outputs], identity(2 * len(terms))
            values = [number(x) for x in inputs]
        batch = self._batch(loss, start, values)
        if batch is None:
            return None
        try:
            replayed, numbers = formula.replay(values)
        except ArithmeticError:
            return None
        table = tabulate(numbers, batch)
        found = self.solve(batch, start, loss, table)
        statuses = found.certificate[:, 0].tolist()
        if BAD_INPUT in statuses:
            return None
        converged = not any(statuses)
        certificate = found.certificate if converged else found.certificate.copy()  # derivatives look at failures once more
        if in_forward_mode() or (torch.is_grad_enabled() and followed(loss, *inputs)):
            q, v = _Follow.apply(_Origin(self, formula, replayed, table, found, batch, converged), loss, *inputs)
        else:
            q, v = found.tensors(batch, self.shape)
        return Solution(q, v, torch.from_numpy(certificate.reshape(*batch, 5)), "engine"), converged

    def _check_kinds(self, terms: Sequence[Term]) -> None:
        """A user's table may say something else today; its kinds are what kernels and derivatives were made for."""
        found, known = ([(term.argument, type(term.function)) for term in each] for each in (terms, self.template))
        if found != known:
            raise RuntimeError(f"regularizer: its terms were {known}, and are {found} now; make a new FTRLStep(mdp, regularizer)")

    def _in_domain(self, values: list[Any]) -> bool:
        t = values[0]
        good = 1.0 <= t < math.inf if type(t) is float else bool(((t >= 1.0) & (t < math.inf)).all())
        known = [x if type(x) is float else x.tolist() for x in values[1:]]
        if known != self.valid:
            self.regularizer.validate()
            self.valid = known
        return good

    def _batch(self, loss: Tensor, start: Tensor, values: list[Any]) -> torch.Size | None:
        """The batch shape, or None if there is none."""
        if loss.shape == self.shape == start.shape and all(type(x) is float for x in values):
            return _SINGLE
        try:
            batch = broadcast(loss.shape[:-2], start.shape[:-2], *(np.shape(x) for x in values))
        except RuntimeError:
            return None
        return batch if loss.shape[-2:] == self.shape == start.shape[-2:] else None

    def solve(self, batch: torch.Size, start: Tensor, loss: Tensor, terms: Floats) -> _Found:
        """Every element of a batch."""
        count = batch.numel()
        found = _Found(*self._empty(count), np.empty((count, 5)))
        inputs = (self.model, self.kinds, terms, rows(loss, batch, 2), rows(start, batch, 2))
        self._run(count, solve_steps, *inputs, *found, self.tolerance, self.options.max_steps)
        return found

    def linear(self, x: Floats, r: Floats, q: Floats, terms: Floats) -> tuple[Floats, Floats, Floats]:
        """H(q) u - E'm = -x, E u = r, in rows: u and m, and the derivatives of <u, grad psi(q)> in weights and exponents, `(2, N, K)`."""
        count = len(q) // self.shape[0]
        u, m = self._empty(count)
        bars = np.empty((2, count, terms.shape[2]))
        self._run(count, solve_linear, self.model, self.kinds, terms, q, x, r, u, m, bars)
        return u, m, bars

    def _empty(self, count: int) -> tuple[Floats, Floats]:
        """Rows of pairs and rows of states."""
        num_states, num_actions = self.shape
        return np.empty((count * num_states, num_actions)), np.empty(count * num_states)

    def _run(self, count: int, kernel: Callable[..., None], *arguments: Any) -> None:
        """The kernel over a batch, in as many threads as are worth it."""
        if count < _ALONE:
            with compile_message:
                self._run_alone(0, count, kernel, *arguments)
            return
        threads = min(torch.get_num_threads(), count)

        def share(i: int) -> None:
            self._run_alone(i * count // threads, (i + 1) * count // threads, kernel, *arguments)

        with compile_message:
            for_each(share, threads)

    def _run_alone(self, first: int, stop: int, kernel: Callable[..., None], *arguments: Any) -> None:
        """Elements first, ..., stop - 1, with scratch memory that nobody else has in hand."""
        try:
            work = self.works.pop()
        except IndexError:
            work = make_work(self.model)
        kernel(*arguments, first, stop, work)
        self.works.append(work)

    # -- on the torch path ------------------------------------------------------------------------------------------------

    def replay(self, formula: Formula, q: Tensor, loss: Tensor, inputs: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """(q, v) once more, from the solution, in operations that autograd sees."""
        setting = Setting(self.mdp, self.explicit, probabilities=False)
        equation = Stationarity(setting, self.options, check=lambda *_: None, report=lambda _: None)
        one = torch.ones((1,) * (q.dim() - 2), dtype=q.dtype)  # nothing depends on t any more
        found = ImplicitSolution.apply(equation, -loss.expand_as(q), q.detach(), one, *self._named(formula, inputs))
        return found[0], found[1]

    def push_gradient(self, formula: Formula, q: Tensor, at: Sequence[Any], tangents: Sequence[Tensor | None]) -> Tensor:
        """The derivative of grad psi(q) along tangents of the formula's inputs."""
        one, zero = torch.ones(q.shape[:-2], dtype=q.dtype), torch.zeros((), dtype=q.dtype)
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def gradient(*moved: Tensor) -> tuple[Tensor, Tensor]:
            inputs = list(at)
            for i, x in zip(moving, moved, strict=True):
                inputs[i] = x
            return Bound(self.mdp, self.explicit, one, self._named(formula, inputs)).gradient(q), zero

        return push_forward(gradient, [at[i] for i in moving], [tangents[i] for i in moving])[0]

    def _named(self, formula: Formula, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """In the order of `explicit`: the weights, then the exponents of the powers."""
        _, outputs = formula.replay(inputs)
        wanted = [True] * len(self.template) + [isinstance(term.function, Power) for term in self.template]
        outputs = [x for x, want in zip(outputs, wanted, strict=True) if want]
        return tuple(x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in outputs)


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


class _Found(NamedTuple):
    """The solutions of a batch, in rows; the status may be BAD_INPUT."""

    q: Floats  # (N * S, A)
    v: Floats  # (N * S,)
    certificate: Floats  # (N, 5)

    def tensors(self, batch: torch.Size, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """q and v, on the same memory."""
        if not batch:
            return torch.from_numpy(self.q), torch.from_numpy(self.v)
        return torch.from_numpy(self.q.reshape(*batch, *shape)), torch.from_numpy(self.v.reshape(*batch, shape[0]))


class _Origin(NamedTuple):
    """Where a solution comes from: what its derivative needs besides tensors."""

    step: CompiledStep
    formula: Formula
    replayed: list[Any]  # all values of the formula
    terms: Floats  # (2, N or 1, K), weights and exponents
    found: _Found
    batch: torch.Size
    converged: bool

    @property
    def certificate(self) -> Tensor:
        return torch.from_numpy(self.found.certificate.reshape(*self.batch, 5))

    def linear(self, q: Tensor, x: Tensor | None, r: Tensor | None) -> tuple[Floats, Floats, Floats]:
        """H(q) u - E'm = -x, E u = r at the solution; see `CompiledStep.linear`. NaN where it is none."""
        if x is None or not self.converged:
            x = torch.zeros_like(q) if x is None else x
            x, r = poison((q, q, self.certificate), (x, torch.zeros_like(q[..., 0]) if r is None else r))
        right = self.step.zeros if r is None else rows(r, self.batch, 1)
        return self.step.linear(rows(x, self.batch, 2), right, self.found.q, self.terms)


class _Follow(torch.autograd.Function):
    """(q, v), found already, as a function of the loss and of the formula's inputs, tensors or numbers."""

    @staticmethod
    def forward(ctx: Any, origin: _Origin, loss: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
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
        origin: _Origin = ctx.origin
        batch, needed = origin.batch, ctx.needs_input_grad[1:]
        q, loss, inputs = _saved(ctx)
        if torch.is_grad_enabled() or in_forward_mode():  # somebody will differentiate this, or does so already
            with torch.enable_grad():
                return None, *_differentiably(origin, q, (loss, *inputs), needed, q_bar, v_bar)
        minus_x_bar, _, bars = origin.linear(q, q_bar, v_bar)  # K' and not K: the sign of v_bar differs
        found = [summed(torch.from_numpy(minus_x_bar.reshape(q.shape)), loss) if needed[0] else None]
        if any(needed[1:]):
            pulled = origin.formula.pull_back(origin.replayed, untabulate(bars, batch))
            found += [shaped(bar, x, batch) if need else None for bar, x, need in zip(pulled, inputs, needed[1:], strict=True)]
        return None, *found, *[None] * (len(needed) - len(found))

    @staticmethod
    def jvp(ctx: Any, _origin: None, *tangents: Tensor | None) -> tuple[Tensor, Tensor]:
        origin: _Origin = ctx.origin
        q, _, inputs = _saved(ctx)
        x = torch.zeros_like(q) if tangents[0] is None else tangents[0].expand_as(q)
        if any(tangent is not None for tangent in tangents[1:]):
            x = x + origin.step.push_gradient(origin.formula, q, inputs, tangents[1:])
        u, m, _ = origin.linear(q, x, None)
        return origin.found._replace(q=u, v=m).tensors(origin.batch, origin.step.shape)


def _saved(ctx: Any) -> tuple[Tensor, Tensor, list[Any]]:
    """q, the loss, and the formula's inputs."""
    q, loss, *tensors = ctx.saved_tensors
    rest = iter(tensors)
    return q, loss, [next(rest) if x is None else x for x in ctx.numbers]


def _differentiably(
    origin: _Origin, q: Tensor, inputs: Sequence[Any], needed: Sequence[bool], q_bar: Tensor | None, v_bar: Tensor | None
) -> list[Tensor | None]:
    """The backward pass in operations that autograd sees."""
    v = origin.found.tensors(origin.batch, origin.step.shape)[1]
    bars = (torch.zeros_like(q) if q_bar is None else q_bar, torch.zeros_like(v) if v_bar is None else v_bar)
    again = origin.step.replay(origin.formula, q, inputs[0], inputs[1:])
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    found = iter(torch.autograd.grad(again, wanted, poison((q, v, origin.certificate), bars), create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]
