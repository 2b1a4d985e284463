"""The step in compiled kernels: solves, first derivatives, and sweeps for sparse transitions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import typeof
from torch import Tensor

from torch_occ._support import private
from torch_occ._support.constants import DEAD
from torch_occ._support.processes import for_each
from torch_occ.engine import batch as kernels
from torch_occ.engine.lanes import allocator, width_of
from torch_occ.engine.layout import Bools, Floats, Model, Work, lanes_in, make_work
from torch_occ.engine.linear import sweep_all
from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import SparseLayer
from torch_occ.regularizers.derivatives import Evaluator
from torch_occ.regularizers.terms import Factor
from torch_occ.step import arrays
from torch_occ.step.arrays import MDPArrays, number, plain, rows, tabulate
from torch_occ.step.entropic import poison
from torch_occ.step.implicit import Known, Setting, solve_setting
from torch_occ.step.solution import (
    Options,
    Solution,
    Status,
    check_arguments,
    check_layout,
    check_probabilities,
    check_types,
    check_values,
)
from torch_occ.step.system import SeparableStates, Sweep, Swept
from torch_occ.step.ways import pays_off, solves_in_logs, why_not_model, why_not_world

# -- Derivatives of a compiled step: by kernels where possible, by the torch path elsewhere --------
#
# The kernels differentiate q and v by the weights and exponents of the terms, and their
# rows those with respect to t and the parameters. Second derivatives use the torch path.


class Origin(NamedTuple):
    """The solutions of a batch in rows, and all that their derivatives need, apart from tensors.

    It is a rule of `Known` for (q, v) as a function of the loss, t, the parameters, and the
    probabilities if they are differentiated.
    """

    step: CompiledStep
    world: MDPArrays
    values: list[Any]  # numbers or arrays: t and the parameters, as the rows read them
    numbers: list[Any]  # weights and exponents of the terms
    terms: Floats  # the same, (2, N or 1, K or K * S * A)
    q: Floats  # (N * S, A)
    v: Floats  # (N * S,)
    certificate: Floats  # (N, 5)
    batch: torch.Size
    converged: bool
    kept: int = 1

    def outputs(self) -> tuple[Tensor, Tensor]:
        return self.step.tensors(self.batch, self.q, self.v)

    def replay(
        self, kept: Sequence[Tensor], inputs: Sequence[Any], bars: Sequence[Any], more: bool
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return (q, v) in differentiable operations, and their bars."""
        (q,), (x, r) = kept, bars
        x = torch.zeros_like(q) if x is None else x
        r = torch.zeros_like(q[..., 0]) if r is None else r
        return self.step.replay(self.world.mdp, q, *inputs), self.poison(q, x, r)

    def poison(self, q: Tensor, x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        """Set x and r to NaN for elements that failed."""
        certificate = torch.from_numpy(self.certificate.reshape(*self.batch, 5))
        return poison((q, q, certificate), (x, r))

    def linear(
        self, q: Tensor, x: Tensor | None, r: Tensor | None, wanted: int = 0
    ) -> tuple[Floats, Floats, Floats]:
        """Solve H(q) u - E'm = -x, E u = r; see `CompiledStep.linear`. Failed elements are NaN."""
        x = torch.zeros_like(q) if x is None else x
        if not self.converged:
            x, r = self.poison(q, x, torch.zeros_like(q[..., 0]) if r is None else r)
        right = self.step.zeros if r is None else rows(r, self.batch, 1)
        given = (self.terms, self.q, rows(x, self.batch, 2), right)
        return self.step.linear(self.world, self.batch, *given, wanted)

    def pull_back(
        self,
        kept: Sequence[Tensor],
        inputs: Sequence[Any],
        needed: Sequence[bool],
        bars: Sequence[Tensor | None],
    ) -> list[Tensor | None] | None:
        """Return derivatives by the loss and the inputs where needed, from those by q and v.

        None if some q(s) is so small that v must be differentiated in logarithms.
        """
        step, last = self.step, 1 + len(self.values)  # the probabilities follow
        if step.in_logs and bool((self.q @ step.ones < DEAD).any()):
            return None
        (q,), (loss, *inputs) = kept, inputs
        wanted = step.depth if any(needed[1:last]) else 0
        # The system is K' and not K: the sign of v_bar differs.
        minus_x_bar, r_bar, by_terms = self.linear(q, bars[0], bars[1], wanted)
        loss_bar, m = step.tensors(self.batch, minus_x_bar, r_bar)
        found = [arrays.summed(loss_bar, loss) if needed[0] else None]
        slopes = arrays.untabulate(by_terms, self.batch, step.pairs) if wanted else []
        for i, x in enumerate(inputs[: last - 1]):
            if not needed[1 + i]:
                found.append(None)
                continue
            total: Any = 0.0
            for k in step.uses[i]:
                total = total + slopes[k] * step.rows[k].slope(self.values, i, self.numbers[k])
            found.append(arrays.shaped(total, x, i == 0, self.batch, step.pairs))
        if any(needed[last:]):
            v = torch.from_numpy(self.v).view_as(m)
            found += self.world.pull_back(q, v, loss_bar, m, needed[last:])
        return found + [None] * (len(needed) - len(found))


# -- The engine of `FTRLStep`: compiled solves of a batch of problems ------------------------------
#
# Each problem has its own loss, t, warm start and parameters, and may have its own transitions. The
# kernels read weights and exponents of the elementary terms, computed from the rows of psi.
#
# A batch over a sparse MDP or one with narrow layers is solved in lanes, LANES elements at a time.
# A single problem and other MDPs are solved in plain arrays, one element at a time. The choice does
# not depend on the size of the batch, so an element has the same bits in every batch.


_SINGLE = torch.Size()

#: The smallest batch that is shared among threads.
_ALONE = 16

#: How many times as large as another weight that of a term of q(s) may be for conjugate gradients.
_STEEP = 100.0

_ONLY = np.zeros(1, dtype=np.int64)

_NO_TARGETS, _NO_PATHS = 2 * (np.zeros(0),), 2 * (np.zeros((0, 0, 0), dtype=np.int64),)


class CompiledStep:
    """min ⟨q, loss⟩ + psi_t(q) in compiled kernels, for tensors outside torch.func transforms."""

    def __init__(self, mdp: LayeredMDP, evaluator: Evaluator, options: Options) -> None:
        self.mdp, self.evaluator, self.options = mdp, evaluator, options
        self.regularizer, self.composition = evaluator.regularizer, evaluator.composition
        self.shape = torch.Size((mdp.num_states, mdp.num_actions))
        self.tolerance = options.tolerance_in(torch.float64)
        self.zeros, self.ones = np.zeros(mdp.num_states), np.ones(mdp.num_actions)
        # The shape of weights and exponents: one per pair if a parameter has one per layer, ...
        self.pairs = self.shape if self.regularizer.places() else arrays.ONE
        # The parameters in their slots, where `torch.func.functional_call` exchanges them.
        self.slots: list[tuple[dict[Any, Any], Factor]] = [
            ({} if factor.owner is None else private.own_parameters(factor.owner), factor)
            for factor in self.evaluator.factors
        ]
        terms = self.composition.terms
        self.kinds = arrays.kinds_of(terms)
        self.rows = [term.weight for term in terms] + [term.exponent for term in terms]
        self.numbers = [row.constant for row in self.rows]
        self.moving = [(k, row) for k, row in enumerate(self.rows) if row.factors]
        # The rows that depend on t and on each parameter.
        self.uses = [
            [k for k, row in enumerate(self.rows) if i in row.factors]
            for i in range(1 + len(self.slots))
        ]
        # 2 if an exponent depends on a parameter, 1 if only weights do.
        self.depth = 2 if any(term.exponent.factors for term in terms) else 1
        self.in_logs = solves_in_logs(self.evaluator, self.mdp)
        self.valid: list[Any] = []  # the last values of the parameters that were valid
        # Memory that no thread uses now, by the way of solving and the storage of transitions.
        self.free: dict[Any, list[tuple[kernels.Room, Work, Model]]] = defaultdict(list)
        self.direct: dict[Any, Callable[..., None]] = {}  # kernels of a single problem

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without scratch memory, so that a copy makes its own."""
        return CompiledStep, (self.mdp, self.evaluator, self.options)

    @cached_property
    def world(self) -> MDPArrays:
        return MDPArrays(self.mdp, self.steep)

    @property
    def steep(self) -> bool:
        """Whether a convex term of q(s) has a weight far above another's, now and at t = 1."""
        values = [1.0, *(number(x.double()) for x in self.read(1.0)[1:])]
        with suppress(ArithmeticError):  # parameters are validated later
            found = [*zip(self.composition.terms, self.weigh(values), strict=False)]
            others = (np.abs(w).min() for x, w in found if x.argument != "state")
            least = _STEEP * min(others, default=math.inf)
            return any(x.argument == "state" and np.max(w) > least for x, w in found)
        return False

    def __call__(
        self,
        loss: Tensor,
        t: Tensor | float,
        start: Tensor,
        mdp: LayeredMDP | None = None,
        parameters: Sequence[Tensor] | None = None,
        budgets: Sequence[Tensor] = (),
    ) -> tuple[Solution, bool] | None:
        """Solve the step.

        Args:
            mdp: other probabilities for the step's layout; by default its own MDP.
            parameters: those of `Evaluator`; by default the regularizer's own, now.
            budgets: costs `(*batch, m, S * A)`, limits and multipliers `(*batch, m)`, which are
                not differentiated. Multipliers are where to start; they are overwritten.

        Returns:
            The solution, and whether all elements converged; None if the engine does not support
            these inputs.

        Raises:
            ValueError, TypeError: if an argument is wrong, with the message of the torch path.
        """
        prepared = self._prepare(loss, t, start, mdp, parameters)
        if prepared is None:
            return None
        world, inputs, values, numbers, terms, batch = prepared
        entropies, count = None, batch.numel()
        own, within, m = budgets, None, 0
        if budgets:
            own = [x.reshape(count, *x.shape[len(batch) :]).contiguous() for x in budgets]
            within, m = tuple(x.numpy() for x in own), own[1].shape[1]
        if terms.shape[1] > 1 and self.kinds[2]:
            entropies = np.empty(count, dtype=np.bool_)
            kernels.find_entropies(self.kinds, terms, entropies)
        q, v, certificate = self._empty(count, 5)
        given = (rows(loss, batch, 2), rows(start, batch, 2), q, v, certificate)
        limits = (None, self.tolerance, self.options.max_steps)
        self.run(world, batch, kernels.solve_steps, terms, entropies, m, *given, within, *limits)
        statuses = certificate[:, 0]
        if self.in_logs and not np.isfinite(q).all():
            lost = ~np.isfinite(q.reshape(count, -1)).all(-1)
            statuses[lost & (statuses == Status.CONVERGED)] = Status.NOT_FINITE
        converged = not (statuses.any() if batch else certificate.item(0))
        if not converged and (statuses == kernels.BAD_INPUT).any():
            self._complain(world, loss, t, start)
            return None
        followed = (loss, *inputs, *world.tensors)
        if private.in_forward_mode():
            found = self.replay(world.mdp, self.tensors(batch, q, v)[0], *followed)
        elif torch.is_grad_enabled() and any(
            isinstance(x, Tensor) and x.requires_grad for x in followed
        ):
            solved = (q, v, certificate, batch, converged)
            found = Known.apply(Origin(self, world, values, numbers, terms, *solved), *followed)
        else:
            found = self.tensors(batch, q, v)
        # The user gets a copy of failures, because derivatives read them later.
        certificate = certificate if converged else certificate.copy()
        marks = torch.from_numpy(certificate.reshape(*batch, 5))
        y = own[2].view(*batch, m) if own else None
        return Solution(found[0], found[1], marks, True, y), converged

    def compare(
        self, loss: Tensor, t: Any, start: Tensor, mdp: Any, *shown: Any, empirical: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Return losses of solutions and their slopes in the loss; see `engine.entropic.compare`.

        Args:
            shown: targets `(*batch, S, A)`, or states and actions `(*batch, N, L)`.

        Returns:
            `(*batch,)` and `(*batch, S, A)`; None if an argument or the result is wrong, or if more
            than the loss is differentiated.
        """
        given, shape = shown[0], getattr(shown[0], "shape", _SINGLE)
        known = all(isinstance(x, Tensor) and x.is_cpu for x in shown)
        prepared = self._prepare(loss, t, start, mdp, None) if self.in_logs else None
        if prepared is None or not known or shape[:-2] not in (_SINGLE, prepared[-1]):
            return None
        world, inputs, _, _, terms, batch = prepared
        moving = any(isinstance(x, Tensor) and x.requires_grad for x in (*inputs, given))
        paths = [x for x in shown if x.dtype in (torch.int64, torch.int32) and x.shape == shape]
        if moving or world.tensors or world.batch_shape:
            return None
        if len(shown) == 1 and plain(given) and shape[-2:] == self.shape:
            targets = rows(given, batch, 2).ravel()
            found = (targets, np.log(np.maximum(targets, 1e-300)), *_NO_PATHS)
        elif len(paths) == 2 and given.numel() and shape[1:][-1:] == (world.mdp.horizon,):
            found = (*_NO_TARGETS, *(x.long().reshape(-1, *shape[-2:]).numpy() for x in paths))
        else:
            return None
        slope, v, certificate = self._empty(batch.numel(), 5)
        value, error = np.empty((2, batch.numel()))
        aim = kernels.Aim(*found, empirical, value, error)
        arguments = (rows(loss, batch, 2), rows(start, batch, 2), slope, v, certificate, None, aim)
        limits = (self.tolerance, self.options.max_steps)
        self.run(world, batch, kernels.solve_steps, terms, None, 0, *arguments, *limits)
        result = torch.from_numpy(value.reshape(batch)), self.tensors(batch, slope, v)[0]
        # As of a linear-programming solver. A maximum may lose NaN, the value does not.
        return result if ((error <= 1e-6) & np.isfinite(value)).all() else None

    def pull_back(
        self,
        parameters: Sequence[Tensor],
        loss: Tensor,
        t: Tensor | None,
        q: Tensor,
        bars: Sequence[Tensor | None],
        more: bool,
    ) -> list[Tensor] | None:
        """Return derivatives at the solution q from those by q and v, or None if torch must.

        They are those in the loss; with `more`, in t and the parameters, too.
        """
        prepared = self._prepare(loss, 1.0 if t is None else t, q, None, parameters)
        if prepared is None:
            return None
        world, inputs, values, numbers, terms, batch = prepared
        # Neither the multipliers nor the certificate are read.
        solved = (rows(q, batch, 2), self.zeros, self.zeros, batch, True)
        origin = Origin(self, world, values, numbers, terms, *solved)
        needed = [True, more and t is not None, *[more] * (len(inputs) - 1)]
        bar = origin.pull_back((q,), (loss, *inputs), needed, bars)
        return None if bar is None else [x for x in bar if x is not None]

    def _prepare(
        self,
        loss: Tensor,
        t: Tensor | float,
        start: Tensor,
        mdp: LayeredMDP | None,
        parameters: Sequence[Tensor] | None,
    ) -> tuple[MDPArrays, list[Any], list[Any], list[Any], Floats, torch.Size] | None:
        """Return the MDPs, the fields of `Origin` before q, the inputs and the batch shape."""
        world = self.world_of(mdp)
        if world is None:
            return None
        inputs = self.read(t) if parameters is None else [t, *parameters]
        values = [number(x) for x in inputs]
        batch = None
        if plain(loss) and plain(start) and self._in_domain(values, parameters):
            batch = self._batch(world, loss, start, values)
        if batch is None:
            self._complain(world, loss, t, start)
            return None
        try:
            numbers = self.weigh(values)
        except ArithmeticError:
            return None
        return world, inputs, values, numbers, tabulate(numbers, batch, self.pairs), batch

    def tensors(self, batch: torch.Size, q: Floats, v: Floats) -> tuple[Tensor, Tensor]:
        """Return rows of pairs and of states as tensors that share their memory."""
        if batch:
            q, v = q.reshape(*batch, *self.shape), v.reshape(*batch, self.shape[0])
        return torch.from_numpy(q), torch.from_numpy(v)

    def read(self, t: Tensor | float) -> list[Any]:
        """Return t, and the values of the parameters now, as the rows read them."""
        found: list[Any] = [t]
        if self.composition.known is not None:
            self.composition.check()
        for slot, factor in self.slots:
            value: Tensor | None = slot.get(factor.key)
            if value is None or value.dim():
                value = factor.read(torch.as_tensor(t, dtype=torch.float64))
            found.append(value)
        return found

    def weigh(self, values: list[Any]) -> list[Any]:
        """Return the weights and the exponents of the terms at values of t and the parameters."""
        known: dict[Any, Any] = {}
        numbers: list[Any] = self.numbers.copy()
        for k, row in self.moving:
            numbers[k] = row.at(values, known)
        return numbers

    def world_of(self, mdp: LayeredMDP | None) -> MDPArrays | None:
        """Return the MDPs of a call; None if the engine does not support them.

        Raises:
            ValueError: if the layout is not that of the step, or a probability is wrong.
        """
        if mdp is None:
            if self.world.is_current:
                return self.world
            mdp = self.mdp
            if not self.world.tensors:  # they were changed in place
                check_probabilities(mdp)
                self.world = MDPArrays(mdp, self.steep)
                return self.world
        # The user may have changed tensors that are differentiated, so they are read again.
        check_layout(mdp, self.mdp)
        if mdp.is_sparse or why_not_world(mdp) is not None or not pays_off(mdp):
            return None
        check_probabilities(mdp)
        return MDPArrays(mdp, self.steep)

    def _complain(self, world: MDPArrays, loss: Tensor, t: Tensor | float, start: Tensor) -> None:
        """Raise the error of the torch path if an argument is wrong, else return."""
        given = self.evaluator.batch_shapes(self.read(1.0)[1:])
        t, _ = check_arguments(world.mdp, loss, t, start, given)
        check_types(self.regularizer, self.mdp)
        check_values(self.mdp, loss.detach(), start, t.detach(), zeros=self.in_logs)

    def _in_domain(self, values: list[Any], parameters: Sequence[Tensor] | None) -> bool:
        """Return whether t is finite and at least 1; validate parameters that have changed."""
        t, *known = values
        if {*map(type, values)} != {float}:
            if any(x is None for x in values):
                return False
            t, known = np.asarray(t), [x if type(x) is float else x.tolist() for x in known]
            good = bool(((t >= 1.0) & (t < math.inf)).all())
        else:
            good = 1.0 <= t < math.inf
        if known != self.valid:
            if parameters is None:
                self.regularizer.validate()
            else:
                self.evaluator.validate(parameters)
            self.valid = known
        return good

    def _batch(
        self, world: MDPArrays, loss: Tensor, start: Tensor, values: list[Any]
    ) -> torch.Size | None:
        """Return the batch shape, or None if shapes are wrong or do not broadcast."""
        if type(values[0]) is not float:  # it broadcasts against (*batch, S, A) then
            values[0] = values[0][..., None, None]
        batches = [x.shape[:-2] for x in values if type(x) is not float]
        if loss.shape == self.shape == start.shape and not batches and not world.batch_shape:
            return _SINGLE
        try:
            batch = broadcast(loss.shape[:-2], start.shape[:-2], world.batch_shape, *batches)
        except RuntimeError:
            return None
        return batch if loss.shape[-2:] == self.shape == start.shape[-2:] else None

    # -- calls of the kernels: elements in groups, groups in threads, and their memory -------------

    def linear(
        self,
        world: MDPArrays,
        batch: torch.Size,
        terms: Floats,
        q: Floats,
        x: Floats,
        r: Floats,
        wanted: int = 0,
    ) -> tuple[Floats, Floats, Floats]:
        """Solve H(q) u - E'm = -x, E u = r; return u, m, and `(wanted, N, K or K * S * A)`.

        These are derivatives of ⟨u, grad psi(q)⟩ by the weights, and by the exponents if 2 are
        wanted.
        """
        count = batch.numel()
        u, m, _ = self._empty(count, 0)
        bars = np.empty((wanted, count, terms.shape[2]))
        self.run(world, batch, kernels.solve_linear, terms, None, 0, q, x, r, u, m, bars)
        return u, m, bars

    def _empty(self, count: int, columns: int) -> tuple[Floats, Floats, Floats]:
        """Allocate rows of pairs, rows of states, and rows of elements."""
        num_rows = count * self.shape[0]
        return np.empty((num_rows, self.shape[1])), np.empty(num_rows), np.empty((count, columns))

    def run(
        self,
        world: MDPArrays,
        batch: torch.Size,
        kernel: Any,
        terms: Floats,
        entropies: Bools | None,
        num_budgets: int,
        *arguments: Any,
    ) -> None:
        """Run a kernel over all elements, in several threads if the batch is large enough.

        Args:
            entropies: the elements that are solved in logarithms; None if all or none of them are.
        """
        model, count = world.model, batch.numel()
        sizes = terms.shape[2], num_budgets
        if not batch:  # a single problem should not wait for Python
            free, memory = self._borrow(model, sizes, 0, None)
            given = (model, self.kinds, terms, *arguments, _ONLY, 0, 1, *memory[:2], None)
            # Numba would look at the types of all arguments; these decide, the others are the same.
            key = kernel, type(model.next_state), num_budgets > 0, type(arguments[-3])
            if key not in self.direct:
                self.direct[key] = kernel.compile(tuple(map(typeof, given)))
            self.direct[key](*given)
            free.append(memory)
            return
        owners = world.owners(batch) if world.batch_shape else None
        lanes = lanes_in(model, count)
        way = 0 if lanes is None else 1 if owners is None else 2
        if lanes is None:
            order = np.arange(count)
        elif owners is not None:
            kinds = world.tables[2][owners] + (0 if entropies is None else 2 * entropies)
            order = arrays.order_of(kinds)
        elif entropies is None:
            order = arrays.plain_order(count, lanes)
        else:
            order = arrays.order_of(entropies, lanes)
        groups = len(order) // (lanes or 1)
        threads = 1 if count < _ALONE else min(torch.get_num_threads(), groups)

        def share(i: int) -> None:
            free, memory = self._borrow(model, sizes, way, lanes)
            room, work, own = memory
            given = model if owners is None else kernels.Models(*world.tables, owners, own)
            bounds = (i * groups // threads, (i + 1) * groups // threads)
            kernel(
                *(given, self.kinds, terms, *arguments),
                *(order, *bounds, room, work, width_of(lanes)),
            )
            free.append(memory)

        for_each(share, threads)

    def _borrow(self, model: Model, *key: Any) -> tuple[list[Any], Any]:
        """Take `_memory` for this model that no thread uses, from the list where to return it."""
        free = self.free[type(model.next_state), *key]
        try:
            return free, free.pop()
        except IndexError:
            return free, _memory(model, *key)

    def systems(self, t: Tensor, parameters: Sequence[Tensor]) -> Callable[[Tensor], Any]:
        """Return the function from q `(*batch, S, A)` to its linear system; plain tensors."""
        values = [number(x) for x in (t, *parameters)]
        if type(values[0]) is not float:
            values[0] = values[0][..., None, None]
        world = self.world_of(None)
        assert world is not None
        return partial(CompiledSystem, self, world, self.weigh(values))

    # -- on the torch path -------------------------------------------------------------------------

    def replay(
        self, mdp: LayeredMDP, q: Tensor, loss: Tensor, *inputs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return (q, v) in differentiable operations of torch, starting from the solution q.

        Args:
            inputs: t and the parameters, followed by the probabilities if they are differentiated.
        """
        count = 1 + len(self.slots)
        t, *parameters = (torch.as_tensor(x, dtype=torch.float64) for x in inputs[:count])
        differentiated = len(inputs) > count
        mdp = mdp.with_probabilities(*inputs[count:]) if differentiated else mdp
        setting = Setting(mdp, self.evaluator, differentiated, t, tuple(parameters))
        given = (loss.expand_as(q), q.detach(), q.dim() - 2)
        found = solve_setting(setting, self.options, *given, check=None)
        return found.q, found.value


class CompiledSystem(NamedTuple):
    """A `torch_occ.step.system.Factorization` in compiled kernels."""

    step: CompiledStep
    world: MDPArrays
    numbers: list[Any]  # weights and exponents of the terms
    q: Tensor  # (*batch, S, A)

    def solve(self, x: Tensor, r: Tensor, inexact: bool = False) -> tuple[Tensor, Tensor]:
        """Solve H u - E'w = x, E u = r, for x `(*more, *batch, S, A)`."""
        step, whole = self.step, x.shape[:-2]
        table = tabulate(self.numbers, whole, step.pairs)
        given = (rows(self.q.expand_as(x), whole, 2), rows(-x, whole, 2), rows(r, whole, 1))
        return step.tensors(whole, *step.linear(self.world, whole, table, *given)[:2])


def _memory(
    model: Model, sizes: tuple[int, int], way: int, lanes: int | None
) -> tuple[kernels.Room, Work, Model]:
    """Allocate memory for a group: numbers of weights and of budgets, and `way` as in `run`."""
    new = allocator(lanes)
    own = model
    if way == 2:
        tables = (model.next_state, model.arrivals, model.initial)
        next_state, arrivals, initial = (new(*x.shape) for x in tables)
        own = model._replace(next_state=next_state, arrivals=arrivals, initial=initial)
    return kernels.make_room(*sizes, model, new), make_work(model, new), own


# -- Compiled sweeps for torch_occ.step.system: separable Hessians, sparse transitions ------------


def applies(mdp: LayeredMDP) -> bool:
    """Return whether the kernel supports this MDP: single, sparse, float64, on the CPU."""
    return why_not_model(mdp) is None and all(isinstance(x, SparseLayer) for x in mdp.layers[:-1])


def sweeps(states: SeparableStates, mdp: LayeredMDP) -> Sweep:
    """Return the sweeps in a kernel, which loops over a batch."""
    softest = states.softest.squeeze(-1).to(states.p.dtype)
    own = ((states.p, 2), (states.inverse, 2), (states.total, 1), (softest, 1))

    def sweep(z: Tensor, x: Tensor | None, r: Tensor | None) -> Swept:
        given = [
            (part, dims) for part, dims in ((z, 1), own[0], (x, 2), (r, 1)) if part is not None
        ]
        batch = broadcast(*(part.shape[: part.dim() - dims] for part, dims in given))

        def flat(part: Tensor, dims: int) -> Floats:
            """Return one row per element of the batch, or a single row if all share it."""
            return rows(part, batch, dims).reshape(-1, part.shape[-dims:].numel())

        du, v = (z.new_zeros(*batch, mdp.num_states) for _ in range(2))
        du, within = du if r is None else du.add_(r), z.new_empty(*batch, *mdp.actions.shape)
        force = np.zeros((1, 0)) if x is None else flat(x, 2)
        parts: Any = tuple(flat(*part) for part in own)
        out: Any = tuple(part.view(batch.numel(), -1).numpy() for part in (v, within, du))
        known = (mdp.num_actions, arrays.rows_of(mdp))
        sweep_all(*known, parts, flat(z, 1), force, x is not None, out)
        return Swept(v, within, du)

    return sweep
