"""The engine of `FTRLStep`: compiled solves of a batch of problems.

Each problem has its own loss, t, warm start and parameters, and may have its own transitions. The
kernels read weights and exponents of the elementary terms. A formula
(torch_occ.step.compiled.formulas) computes them from t and the parameters. For regularizers with
parts written by a user, torch computes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.private import in_forward_mode
from torch_occ.kernels.constants import SQUARE
from torch_occ.kernels.layout import Floats, Kinds, Model
from torch_occ.kernels.solver.batches import BAD_INPUT
from torch_occ.kernels.solver.newton import SMALLEST
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.validation import broadcast
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.derivatives import Evaluator
from torch_occ.regularizers.terms import Power, Term
from torch_occ.step.checks import (
    check_arguments,
    check_layout,
    check_probabilities,
    check_types,
    check_values,
    parameter_shapes,
)
from torch_occ.step.compiled.derivatives import Follow, Found, Origin
from torch_occ.step.compiled.explicit import Explicit, in_form
from torch_occ.step.compiled.formulas import Formula, identity, record, slots_of
from torch_occ.step.compiled.groups import Groups
from torch_occ.step.compiled.inputs import (
    ONE,
    followed,
    kinds_of,
    list_exponents,
    number,
    plain,
    rows,
    tabulate,
    terms_of,
)
from torch_occ.step.compiled.worlds import World, pays_off, why_not, why_not_world
from torch_occ.step.entropic import Entropy, Task, entropy_of, is_entropy, solve_entropic
from torch_occ.step.implicit import (
    Bound,
    ImplicitSolution,
    Setting,
    Stationarity,
    push_forward,
)
from torch_occ.step.problem import with_rank
from torch_occ.step.solution import Options, Solution

__all__ = ["CompiledStep", "pays_off", "why_not"]

_SINGLE = torch.Size()


class CompiledStep:
    """min ⟨q, loss⟩ + psi_t(q) in compiled kernels, for tensors outside torch.func transforms."""

    def __init__(self, mdp: LayeredMDP, regularizer: Regularizer, options: Options) -> None:
        self.mdp, self.regularizer, self.options = mdp, regularizer, options
        self.shape = torch.Size((mdp.num_states, mdp.num_actions))
        self.tolerance = options.tolerance_in(torch.float64)
        self.zeros = np.zeros(mdp.num_states)
        # The shape of weights and exponents: one per pair if a parameter has one per layer, ...
        self.pairs = self.shape if regularizer.places() else ONE
        self.slots = slots_of(regularizer)
        self.valid: list[Any] = []  # the last values of the parameters that were valid

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without scratch memory, so that a copy makes its own."""
        return CompiledStep, (self.mdp, self.regularizer, self.options)

    @cached_property
    def world(self) -> World:
        return World(self.mdp)

    @property
    def model(self) -> Model:
        return self.world.model

    @cached_property
    def template(self) -> list[Term]:
        """The terms at t = 1; their arguments and functions are the same at every t."""
        with torch.no_grad():
            return terms_of(self.regularizer, torch.ones((), dtype=torch.float64))

    @cached_property
    def kinds(self) -> Kinds:
        return kinds_of(self.template)

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.kinds)

    @cached_property
    def formula(self) -> Formula | None:
        return record(self.regularizer)

    @cached_property
    def explicit(self) -> Evaluator:
        """psi with the weights and exponents of its terms as parameters."""
        return Evaluator(Explicit(self.template, None if self.pairs is ONE else self.mdp))

    @cached_property
    def in_logs(self) -> bool:
        """Whether psi is an entropy, and the MDP small enough to solve it in logarithms."""
        return is_entropy(self.regularizer) and self.shape[0] <= SQUARE

    def __call__(
        self, loss: Tensor, t: Tensor | float, start: Tensor, mdp: LayeredMDP | None = None
    ) -> tuple[Solution, bool] | None:
        """Solve the step.

        Args:
            mdp: other probabilities for the step's layout; by default its own MDP.

        Returns:
            The solution, and whether all elements converged; None if the engine does not support
            these inputs.

        Raises:
            ValueError, TypeError: if an argument is wrong, with the message of the torch path.
        """
        try:
            inputs: list[Any] = [t, *[slot[name] for slot, name in self.slots]]
        except KeyError:  # a parametrization was registered; the torch path says what to do
            return None
        world = self.world_of(mdp)
        if world is None:
            return None
        values = [number(x) for x in inputs]
        readable = plain(loss) and plain(start) and not any(x is None for x in values)
        if not readable or not self._in_domain(values):
            self._complain(world, loss, t, start)
            return None
        formula = self.formula
        if formula is None:
            formula, inputs, values = self.computed_by_torch(t)
        scalars = all(type(x) is float for x in values)
        values = values if scalars else formula.spread(values)
        batch = self._batch(world, loss, start, values, scalars)
        if batch is None:
            self._complain(world, loss, t, start)
            return None
        try:
            replayed, numbers = formula.replay(values)
        except ArithmeticError:
            return None
        table = tabulate(numbers, batch, self.pairs)
        found = self.solve(world, batch, start, loss, table)
        statuses = found.certificate[:, 0]
        converged = not (statuses.any() if batch else statuses.item())
        if not converged and (statuses == BAD_INPUT).any():
            self._complain(world, loss, t, start)
            return None
        # The user gets a copy of failures, because derivatives read them from `found` later.
        certificate = found.certificate if converged else found.certificate.copy()
        given = (loss, *inputs, *world.tensors)
        if in_forward_mode() or (torch.is_grad_enabled() and followed(*given)):
            origin = Origin(self, world, formula, replayed, table, found, batch, converged)
            q, v = Follow.apply(origin, *given)
        else:
            q, v = found.tensors(batch, self.shape)
        return Solution(q, v, torch.from_numpy(certificate.reshape(*batch, 5)), "engine"), converged

    def computed_by_torch(self, t: Tensor | float) -> tuple[Formula, list[Any], list[Any]]:
        """Return a formula whose inputs are the weights and exponents; they, and their values."""
        terms = terms_of(self.regularizer, torch.as_tensor(t, dtype=torch.float64))
        self._check_kinds(terms)
        outputs = (*(term.weight for term in terms), *list_exponents(terms))
        inputs = [x.double() if isinstance(x, Tensor) else x for x in outputs]
        return identity(2 * len(terms)), inputs, [number(x) for x in inputs]

    def world_of(self, mdp: LayeredMDP | None) -> World | None:
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
        return World(mdp)

    def _complain(self, world: World, loss: Tensor, t: Tensor | float, start: Tensor) -> None:
        """Raise the error of the torch path if an argument is wrong, else return."""
        parameters = dict(self.regularizer.named_parameters())
        evaluator = Evaluator(self.regularizer)
        given = evaluator.batch_shapes(evaluator.own_parameters)
        t, _ = check_arguments(world.mdp, loss, t, start, parameter_shapes(given))
        check_types(parameters, self.mdp)
        check_values(self.mdp, self.mdp, loss.detach(), start, t.detach(), zeros=self.in_logs)

    def _check_kinds(self, terms: Sequence[Term]) -> None:
        """Check that arguments and functions of a user's terms are those at construction."""
        found = [(term.argument, type(term.function)) for term in terms]
        known = [(term.argument, type(term.function)) for term in self.template]
        if found != known:
            raise RuntimeError(
                f"regularizer: its terms were {known}, and are {found} now; "
                "make a new FTRLStep(mdp, regularizer)"
            )

    def _in_domain(self, values: list[Any]) -> bool:
        """Return whether t is finite and at least 1; validate parameters that have changed."""
        t = values[0]
        if type(t) is float:
            good = 1.0 <= t < math.inf
        else:
            good = bool(((t >= 1.0) & (t < math.inf)).all())
        known = [x if type(x) is float else x.tolist() for x in values[1:]]
        if known != self.valid:
            self.regularizer.validate()
            self.valid = known
        return good

    def _batch(
        self, world: World, loss: Tensor, start: Tensor, values: list[Any], scalars: bool
    ) -> torch.Size | None:
        """Return the batch shape, or None if shapes are wrong or do not broadcast.

        `scalars` says that all values are numbers.
        """
        if scalars and loss.shape == self.shape == start.shape and not world.batch_shape:
            return _SINGLE
        batches = [x.shape[:-2] for x in values if type(x) is not float]  # of the spread forms
        try:
            batch = broadcast(loss.shape[:-2], start.shape[:-2], world.batch_shape, *batches)
        except RuntimeError:
            return None
        return batch if loss.shape[-2:] == self.shape == start.shape[-2:] else None

    def solve(
        self, world: World, batch: torch.Size, start: Tensor, loss: Tensor, terms: Floats
    ) -> Found:
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
        return Found(*found)

    # -- on the torch path -------------------------------------------------------------------------

    def replay(
        self, formula: Formula, mdp: LayeredMDP, q: Tensor, loss: Tensor, inputs: Sequence[Any]
    ) -> tuple[Tensor, Tensor]:
        """Return (q, v) in differentiable operations, starting from the solution q.

        Args:
            inputs: those of the formula, followed by the probabilities if they are differentiated.
        """
        rank, count = q.dim() - 2, formula.inputs
        one = torch.ones((1,) * rank, dtype=q.dtype)  # stands for t, on which nothing depends
        dims = (1, *(layer.event_dims for layer in mdp.layers))
        given = [with_rank(p, rank, dim) for p, dim in zip(inputs[count:], dims, strict=False)]
        differentiated, named = len(given) > 0, self._named(formula, inputs[:count])
        mdp = mdp.with_probabilities(*given) if differentiated else mdp
        if self.in_logs:
            arguments = (term.argument for term in self.template)
            entropy = entropy_of(list(zip(arguments, named, strict=True)))
            entropy = Entropy(*(x[(None,) * (rank - x.dim())] for x in entropy))
            task = Task(mdp, self.options, differentiated, lambda *_: None, lambda _: None)
            again = solve_entropic(task, loss.expand_as(q), q.detach(), entropy, one, True)
            return again.q, again.value
        setting = Setting(mdp, self.explicit, differentiated)
        equation = Stationarity(setting, self.options, check=lambda *_: None, report=lambda _: None)
        tensors = (-loss.expand_as(q), q.detach(), one, *named, *given)
        found = ImplicitSolution.apply(equation, *tensors)
        return found[0], found[1]

    def push_gradient(
        self, formula: Formula, q: Tensor, at: Sequence[Any], tangents: Sequence[Tensor | None]
    ) -> Tensor:
        """Return the derivative of grad psi(q) along tangents of the formula's inputs."""
        one, zero = torch.ones(q.shape[:-2], dtype=q.dtype), torch.zeros((), dtype=q.dtype)
        # The same floor as in torch_occ.kernels.solver.newton.floor_pairs.
        q = torch.where(self.mdp.actions, q.clamp(min=SMALLEST), 0.0)
        moving = [i for i, tangent in enumerate(tangents) if tangent is not None]

        def gradient(*moved: Tensor) -> tuple[Tensor, Tensor]:
            inputs = list(at)
            for i, x in zip(moving, moved, strict=True):
                inputs[i] = x
            bound = Bound(self.mdp, self.explicit, one, self._named(formula, inputs))
            return bound.gradient(q), zero

        return push_forward(gradient, [at[i] for i in moving], [tangents[i] for i in moving])[0]

    def _named(self, formula: Formula, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the parameters of `explicit`: the weights, then the exponents of the powers."""
        _, outputs = formula.replay(formula.spread(inputs))
        powers = [isinstance(term.function, Power) for term in self.template]
        wanted = [True] * len(self.template) + powers
        terms = [*self.template, *self.template]
        return tuple(
            in_form(term, x, None if self.pairs is ONE else self.shape)
            for term, x, want in zip(terms, outputs, wanted, strict=True)
            if want
        )
