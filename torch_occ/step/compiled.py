"""The step in compiled kernels: solves, first derivatives, and sweeps for sparse transitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_occ._support.constants import DEAD
from torch_occ._support.private import (
    in_forward_mode,
    own_parameters,
    refuse_batched_derivatives,
)
from torch_occ._support.processes import for_each
from torch_occ.engine.batch import BAD_INPUT
from torch_occ.engine.budgets import Budget, find_multipliers, make_budget_room
from torch_occ.engine.layout import PAIR, Floats, Kinds, Model, Rows, Terms, V, make_work
from torch_occ.engine.newton import SMALLEST
from torch_occ.engine.sparse import sweep_all
from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import SparseLayer
from torch_occ.regularizers.derivatives import Evaluator
from torch_occ.regularizers.parameters import spread_batch, with_rank
from torch_occ.regularizers.terms import Factor
from torch_occ.step.arrays import (
    ONE,
    Groups,
    MDPArrays,
    followed,
    kinds_of,
    number,
    plain,
    rows,
    rows_of,
    shaped,
    summed,
    tabulate,
    untabulate,
)
from torch_occ.step.budgets import BudgetSearch
from torch_occ.step.checks import (
    check_arguments,
    check_layout,
    check_probabilities,
    check_types,
    check_values,
    parameter_shapes,
)
from torch_occ.step.entropic import Entropy, Task, entropy_of, solve_entropic
from torch_occ.step.implicit import (
    Bound,
    ImplicitSolution,
    Setting,
    Stationarity,
    poison,
    push_forward,
)
from torch_occ.step.solution import Options, Solution, Status
from torch_occ.step.system import SeparableStates, Swept
from torch_occ.step.ways import is_entropy, pays_off, solves_in_logs, why_not_world

# -- Derivatives of a compiled step: by kernels where possible, by the torch path elsewhere --------
#
# The kernels differentiate q and v with respect to the weights and exponents of the terms; their
# rows (torch_occ.regularizers.terms) differentiate those with respect to t and the parameters.
# Forward mode in the parameters and second derivatives use the torch path.


class EngineSolution(NamedTuple):
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
    world: MDPArrays
    values: list[Any]  # numbers or arrays: t and the parameters, as the rows read them
    terms: Floats  # (2, N or 1, K or K * S * A), weights and exponents
    found: EngineSolution
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

    def pull_back(
        self, bars: Floats, inputs: Sequence[Any], needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return derivatives with respect to t and the parameters from those of `linear`."""
        pairs, terms = self.step.pairs, self.step.composition.terms
        rows_of_terms = [term.weight for term in terms] + [term.exponent for term in terms]
        given = list(zip(rows_of_terms, untabulate(bars, self.batch, pairs), strict=False))
        found: list[Tensor | None] = [None] * len(needed)
        for i, x in enumerate(inputs):
            if needed[i]:
                slopes = (bar * row.slope(self.values, i) for row, bar in given if i in row.factors)
                found[i] = shaped(sum(slopes, 0.0), x, i == 0, self.batch, pairs)
        return found


class Follow(torch.autograd.Function):
    """(q, v), which are known already, as a function of the loss, t and the parameters.

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
        last = 1 + len(origin.values)  # the probabilities follow
        wanted = origin.step.depth if any(needed[1:last]) else 0
        minus_x_bar, r_bar, bars = origin.linear(q, q_bar, v_bar, wanted)
        loss_bar = torch.from_numpy(minus_x_bar.reshape(q.shape))
        found = [summed(loss_bar, loss) if needed[0] else None, *[None] * (len(needed) - 1)]
        if wanted:
            found[1:last] = origin.pull_back(bars, inputs[: last - 1], needed[1:last])
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
        last = 1 + len(origin.values)  # the probabilities follow
        x = torch.zeros_like(q) if tangents[0] is None else tangents[0].expand_as(q)
        r = None
        if any(tangent is not None for tangent in tangents[1:last]):
            moved = inputs[: last - 1], tangents[1:last]
            x = x + origin.step.push_gradient(q, *moved)
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
        return origin.step.replay(origin.world.mdp, q, given[0], given[1:])

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
    again = origin.step.replay(origin.world.mdp, q, inputs[0], inputs[1:])
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
    bars = poison((q, v, origin.certificate), (q_bar, v_bar))
    grads = torch.autograd.grad(again, wanted, bars, create_graph=True, allow_unused=True)
    found = iter(grads)
    return [next(found) if need else None for need in needed]


# -- The engine of `FTRLStep`: compiled solves of a batch of problems ------------------------------
#
# Each problem has its own loss, t, warm start and parameters, and may have its own transitions. The
# kernels read weights and exponents of the elementary terms, computed from the rows of psi.


_SINGLE = torch.Size()


class CompiledStep:
    """min ⟨q, loss⟩ + psi_t(q) in compiled kernels, for tensors outside torch.func transforms."""

    def __init__(self, mdp: LayeredMDP, evaluator: Evaluator, options: Options) -> None:
        self.mdp, self.evaluator, self.options = mdp, evaluator, options
        self.regularizer, self.composition = evaluator.regularizer, evaluator.composition
        self.shape = torch.Size((mdp.num_states, mdp.num_actions))
        self.tolerance = options.tolerance_in(torch.float64)
        self.zeros = np.zeros(mdp.num_states)
        # The shape of weights and exponents: one per pair if a parameter has one per layer, ...
        self.pairs = self.shape if self.regularizer.places() else ONE
        # The parameters in their slots, where `torch.func.functional_call` exchanges them.
        self.slots: list[tuple[dict[Any, Any], Factor]] = [
            ({} if factor.owner is None else own_parameters(factor.owner), factor)
            for factor in self.evaluator.factors
        ]
        # 2 if an exponent depends on a parameter, 1 if only weights do.
        self.depth = 2 if any(term.exponent.factors for term in self.composition.terms) else 1
        self.valid: list[Any] = []  # the last values of the parameters that were valid

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without scratch memory, so that a copy makes its own."""
        return CompiledStep, (self.mdp, self.evaluator, self.options)

    @cached_property
    def world(self) -> MDPArrays:
        return MDPArrays(self.mdp)

    @property
    def model(self) -> Model:
        return self.world.model

    @cached_property
    def kinds(self) -> Kinds:
        return kinds_of(self.composition.terms)

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.kinds)

    @cached_property
    def in_logs(self) -> bool:
        """Whether the torch path solves the step in logarithms."""
        return solves_in_logs(self.regularizer, self.mdp)

    def __call__(
        self,
        loss: Tensor,
        t: Tensor | float,
        start: Tensor,
        mdp: LayeredMDP | None = None,
        parameters: Sequence[Tensor] | None = None,
    ) -> tuple[Solution, bool] | None:
        """Solve the step.

        Args:
            mdp: other probabilities for the step's layout; by default its own MDP.
            parameters: those of `Evaluator`; by default the regularizer's own, now.

        Returns:
            The solution, and whether all elements converged; None if the engine does not support
            these inputs.

        Raises:
            ValueError, TypeError: if an argument is wrong, with the message of the torch path.
        """
        world = self.world_of(mdp)
        if world is None:
            return None
        inputs = self.read(t) if parameters is None else [t, *parameters]
        values = [number(x) for x in inputs]
        readable = plain(loss) and plain(start) and not any(x is None for x in values)
        if not readable or not self._in_domain(values, parameters):
            self._complain(world, loss, t, start)
            return None
        scalars = all(type(x) is float for x in values)
        if type(values[0]) is not float:
            values[0] = values[0][..., None, None]
        batch = self._batch(world, loss, start, values, scalars)
        if batch is None:
            self._complain(world, loss, t, start)
            return None
        try:
            numbers = self.composition.weigh(values)
        except ArithmeticError:
            return None
        table = tabulate([*numbers.terms, *numbers.exponents], batch, self.pairs)
        found = self.solve(world, batch, start, loss, table)
        statuses = found.certificate[:, 0]
        if self.in_logs and not np.isfinite(found.q).all():
            lost = ~np.isfinite(found.q.reshape(len(statuses), -1)).all(-1)
            statuses[lost & (statuses == Status.CONVERGED)] = Status.NOT_FINITE
        converged = not (statuses.any() if batch else statuses.item())
        if not converged and (statuses == BAD_INPUT).any():
            self._complain(world, loss, t, start)
            return None
        # The user gets a copy of failures, because derivatives read them from `found` later.
        certificate = found.certificate if converged else found.certificate.copy()
        given = (loss, *inputs, *world.tensors)
        if in_forward_mode() or (torch.is_grad_enabled() and followed(*given)):
            origin = Origin(self, world, values, table, found, batch, converged)
            q, v = Follow.apply(origin, *given)
        else:
            q, v = found.tensors(batch, self.shape)
        return Solution(q, v, torch.from_numpy(certificate.reshape(*batch, 5)), "engine"), converged

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

    def world_of(self, mdp: LayeredMDP | None) -> MDPArrays | None:
        """Return the MDPs of a call; None if the engine does not support them.

        Raises:
            ValueError: if the layout is not that of the step, or a probability is wrong.
        """
        if mdp is None and not self.world.tensors:
            return self.world
        # The user may have changed tensors that are differentiated, so they are read again.
        mdp = self.mdp if mdp is None else check_layout(mdp, self.mdp)
        if mdp.is_sparse or why_not_world(mdp) is not None or not pays_off(mdp):
            return None
        check_probabilities(mdp)
        return MDPArrays(mdp)

    def _complain(self, world: MDPArrays, loss: Tensor, t: Tensor | float, start: Tensor) -> None:
        """Raise the error of the torch path if an argument is wrong, else return."""
        parameters = dict(self.regularizer.named_parameters())
        given = self.evaluator.batch_shapes(self.read(1.0)[1:])
        t, _ = check_arguments(world.mdp, loss, t, start, parameter_shapes(given))
        check_types(parameters, self.mdp)
        check_values(self.mdp, self.mdp, loss.detach(), start, t.detach(), zeros=self.in_logs)

    def _in_domain(self, values: list[Any], parameters: Sequence[Tensor] | None) -> bool:
        """Return whether t is finite and at least 1; validate parameters that have changed."""
        t = values[0]
        if type(t) is float:
            good = 1.0 <= t < math.inf
        else:
            good = bool(((t >= 1.0) & (t < math.inf)).all())
        known = [x if type(x) is float else x.tolist() for x in values[1:]]
        if known != self.valid:
            if parameters is None:
                self.regularizer.validate()
            else:
                self.evaluator.validate(parameters)
            self.valid = known
        return good

    def _batch(
        self, world: MDPArrays, loss: Tensor, start: Tensor, values: list[Any], scalars: bool
    ) -> torch.Size | None:
        """Return the batch shape, or None if shapes are wrong or do not broadcast.

        `scalars` says that all values are numbers.
        """
        if scalars and loss.shape == self.shape == start.shape and not world.batch_shape:
            return _SINGLE
        batches = [x.shape[:-2] for x in values if type(x) is not float]
        try:
            batch = broadcast(loss.shape[:-2], start.shape[:-2], world.batch_shape, *batches)
        except RuntimeError:
            return None
        return batch if loss.shape[-2:] == self.shape == start.shape[-2:] else None

    def solve(
        self, world: MDPArrays, batch: torch.Size, start: Tensor, loss: Tensor, terms: Floats
    ) -> EngineSolution:
        """Solve every element of a batch; `terms` are weights and exponents of `tabulate`."""
        found = self.groups.solve(
            world,
            batch,
            terms,
            rows(loss, batch, 2),
            rows(start, batch, 2),
            self.tolerance,
            self.options.max_steps,
        )
        return EngineSolution(*found)

    # -- on the torch path -------------------------------------------------------------------------

    def replay(
        self, mdp: LayeredMDP, q: Tensor, loss: Tensor, inputs: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        """Return (q, v) in differentiable operations, starting from the solution q.

        Args:
            inputs: t and the parameters, followed by the probabilities if they are differentiated.
        """
        rank, count = q.dim() - 2, 1 + len(self.evaluator.factors)
        dims = (1, *(layer.event_dims for layer in mdp.layers))
        given = [with_rank(p, rank, dim) for p, dim in zip(inputs[count:], dims, strict=False)]
        differentiated, aligned = len(given) > 0, self._aligned(rank, inputs[:count])
        mdp = mdp.with_probabilities(*given) if differentiated else mdp
        if self.in_logs:
            t, *values = aligned
            entropy = entropy_of(self.composition, [spread_batch(t), *values])
            entropy = Entropy(*(with_rank(x, rank, 0) for x in entropy))
            closed = is_entropy(self.regularizer, closed=True)
            checks = (lambda *_: None, lambda _: None)
            task = Task(mdp, self.options, differentiated, closed, *checks)
            again = solve_entropic(task, loss.expand_as(q), q.detach(), entropy, t, True)
            return again.q, again.value
        setting = Setting(mdp, self.evaluator, differentiated)
        equation = Stationarity(setting, self.options, check=lambda *_: None, report=lambda _: None)
        tensors = (-loss.expand_as(q), q.detach(), *aligned, *given)
        found = ImplicitSolution.apply(equation, *tensors)
        return found[0], found[1]

    def push_gradient(
        self, q: Tensor, at: Sequence[Any], tangents: Sequence[Tensor | None]
    ) -> Tensor:
        """Return the derivative of grad psi(q) along tangents of t and the parameters."""
        zero = torch.zeros((), dtype=q.dtype)
        # The same floor as in torch_occ.engine.newton.floor_pairs.
        q = torch.where(self.mdp.actions, q.clamp(min=SMALLEST), 0.0)
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def gradient(*moved: Tensor) -> tuple[Tensor, Tensor]:
            inputs = list(at)
            for i, x in zip(moving, moved, strict=True):
                inputs[i] = x
            t, *parameters = self._aligned(q.dim() - 2, inputs)
            return Bound(self.mdp, self.evaluator, t, tuple(parameters)).gradient(q), zero

        return push_forward(gradient, [at[i] for i in moving], [tangents[i] for i in moving])[0]

    def _aligned(self, rank: int, inputs: Sequence[Any]) -> list[Tensor]:
        """Return t and the parameters as tensors with this number of batch dimensions."""
        t, *parameters = (torch.as_tensor(x, dtype=torch.float64) for x in inputs)
        return self.evaluator.align(rank, t, parameters)


# -- Compiled sweeps for torch_occ.step.system, with separable Hessians and sparse transitio ----


_ROWS: WeakKeyDictionary[LayeredMDP, Rows] = WeakKeyDictionary()


def applies(mdp: LayeredMDP) -> bool:
    """Return whether the kernel supports this MDP: single, sparse, float64, on the CPU."""
    sparse = all(isinstance(layer, SparseLayer) for layer in mdp.layers[:-1])
    plain = mdp.device.type == "cpu" and mdp.dtype == torch.float64
    return sparse and not mdp.batch_shape and plain


class CompiledSweeps:
    """The sweeps of torch_occ.step.system.TorchSweeps in a kernel; it loops over a batch."""

    def __init__(self, states: SeparableStates, mdp: LayeredMDP) -> None:
        if mdp not in _ROWS:
            _ROWS[mdp] = rows_of(mdp)
        self.rows = _ROWS[mdp]
        self.pairs = tuple(states.p.shape[-2:])
        softest = states.softest.squeeze(-1).to(states.p.dtype)
        self.states = [part.detach() for part in (states.p, states.inverse, states.total, softest)]

    def sweep(self, z: Tensor, x: Tensor | None, r: Tensor | None) -> Swept:
        p, inverse, total, softest = self.states
        given = [(z, 1), (p, 2)]
        given += [(part, dims) for part, dims in ((x, 2), (r, 1)) if part is not None]
        batch = broadcast(*(part.shape[: part.dim() - dims] for part, dims in given))
        v, within = z.new_empty(*batch, self.pairs[0]), z.new_empty(*batch, *self.pairs)
        du = z.new_zeros(*batch, self.pairs[0])
        count = batch.numel()
        if r is not None:
            du.copy_(r)
        force = np.zeros((1, 0)) if x is None else _flat(x, batch, 2)
        own = ((p, 2), (inverse, 2), (total, 1), (softest, 1))
        parts: Any = tuple(_flat(part, batch, dims) for part, dims in own)
        out = (part.view(count, -1).numpy() for part in (v, within, du))
        sweep_all(self.pairs[1], self.rows, parts, _flat(z, batch, 1), force, x is not None, *out)
        return Swept(v, within, du)


def _flat(part: Tensor, batch: torch.Size, dims: int) -> NDArray[Any]:
    """Return one row per element of the batch, or a single row if all elements share it."""
    event = part.shape[part.dim() - dims :]
    part = part.detach() if part.numel() == event.numel() else part.detach().expand(*batch, *event)
    return part.reshape(-1, event.numel()).contiguous().numpy()


# -- The search for the multipliers of budgets, and the linear system of its derivatives -----------


class CompiledBudgets:
    """The compiled step at an episode t; weights and exponents are those of now.

    Args:
        t: plain, `(*batch,)` or fewer dimensions.
        interior: where failed elements start again.
    """

    def __init__(self, step: CompiledStep, t: Tensor, interior: Tensor) -> None:
        self.step, self.interior = step, interior
        values = [number(x) for x in step.read(t)]
        if type(values[0]) is not float:
            values[0] = values[0][..., None, None]
        found = step.composition.weigh(values)
        self.numbers = [*found.terms, *found.exponents]

    def search(
        self, loss: Tensor, costs: Tensor, limits: Tensor, start: Tensor, guess: Tensor
    ) -> BudgetSearch:
        """`torch_occ.step.budgets.find_multipliers` in kernels, ten times as fast."""
        step, batch = self.step, loss.shape[:-2]
        count, pairs, m = batch.numel(), loss.shape[-2:].numel(), limits.shape[-1]
        table = tabulate(self.numbers, batch, step.pairs)
        given = [rows(x, batch, 2).reshape(-1, pairs) for x in (loss, start)]
        prices = rows(costs.flatten(-2), batch, 2).reshape(-1, m, pairs)
        allowed = rows(limits, batch, 1).reshape(-1, m)
        q, v = np.empty((count, pairs)), np.empty((count, step.shape[0]))
        y = np.array(guess.reshape(-1, m).numpy(), copy=True)
        proof, certificate = np.zeros((count, m)), np.empty((count, 5))
        nothing, middle = np.zeros(0), self.interior.numpy().flatten()

        def own(x: Floats, n: int) -> Floats:
            return x[min(n, len(x) - 1)]

        def solve(n: int) -> None:
            work, terms = make_work(step.model), Terms(*step.kinds, own(table[1], n))
            work.pairs[PAIR] = own(given[1], n)
            budget = Budget(
                *(own(given[0], n), own(prices, n), own(allowed, n), y[n], proof[n]),
                *(middle, nothing, step.tolerance, step.options.max_steps),
            )
            certificate[n] = find_multipliers(
                step.model, terms, own(table[0], n), budget, make_budget_room(pairs, m), work
            )
            q[n], v[n] = work.pairs[PAIR], work.states[V]

        for_each(solve, count)
        found = EngineSolution(q.reshape(-1, step.shape[1]), v.ravel(), certificate)
        marks = torch.from_numpy(certificate.reshape(*batch, 5))
        solution = Solution(*found.tensors(batch, step.shape), marks, "engine")
        shape = (*batch, m)
        return BudgetSearch(
            solution, torch.from_numpy(y.reshape(shape)), torch.from_numpy(proof.reshape(shape))
        )

    def factorize(self, q: Tensor) -> CompiledSystem:
        """The linear system at q, `(*batch, S, A)`."""
        return CompiledSystem(self, q)


class CompiledSystem:
    """A `torch_occ.step.system.Factorization` in compiled kernels."""

    def __init__(self, budgets: CompiledBudgets, q: Tensor) -> None:
        self.budgets, self.q = budgets, q

    def solve(self, x: Tensor, r: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Solve H u - E'w = x, E u = r, for x `(*more, *batch, S, A)`."""
        step, whole = self.budgets.step, x.shape[:-2]
        table = tabulate(self.budgets.numbers, whole, step.pairs)
        at = rows(self.q.expand_as(x), whole, 2)
        given = (at, rows(-x, whole, 2), rows(r, whole, 1))
        u, w, _ = step.groups.linear(step.world, whole, table, *given, wanted=0)
        return torch.from_numpy(u.reshape(x.shape)), torch.from_numpy(w.reshape(r.shape))
