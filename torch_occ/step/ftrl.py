"""The FTRL step as a torch module.

q_t = argmin over q in Omega of ⟨q, cumulative_loss⟩ + psi_t(q)        (`alg:main_alg`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from torch_occ._support.choices import Backend, check_backend, engine_takes, later
from torch_occ._support.private import carries_derivative, forward_modes, inside_transform
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import interior_point
from torch_occ.regularizers.base import Regularizer, SeparableRegularizer
from torch_occ.regularizers.derivatives import Evaluator
from torch_occ.regularizers.parameters import Frozen
from torch_occ.regularizers.schedules import Schedule
from torch_occ.regularizers.terms import keep
from torch_occ.step.budgets import solve_with_budgets
from torch_occ.step.entropic import Entropic
from torch_occ.step.graph import autocasts, enroll, promote, solve_in_graph, solve_plainly
from torch_occ.step.implicit import Setting, entropic_equation, solve_setting
from torch_occ.step.solution import (
    Budgets,
    Options,
    Solution,
    check_arguments,
    check_budgets,
    check_episode,
    check_layout,
    check_like,
    check_reachable,
    check_types,
    over,
    report,
)
from torch_occ.step.ways import pays_off, why_not

if TYPE_CHECKING:
    from torch_occ.step.compiled import CompiledStep


class FTRLStep(Frozen):
    """The FTRL step over occupancy measures.

        q_t = argmin over q in Omega of ⟨q, cumulative_loss⟩ + psi_t(q)        (`alg:main_alg`)

    It is differentiable with respect to the loss, t, the parameters of the regularizer and the
    probabilities of the MDP. The MDP, the structure of the regularizer and the options are fixed;
    changing them raises an AttributeError. The values of parameters may change at any time.

    Args:
        mdp: every state must be reachable; see `LayeredMDP.prune`.
        regularizer: psi_t, for example `jin_luo(mdp)`.
        tolerance: the largest dual residual (a relative error of q) that counts as solved; by
            default eps^(2/3).
        max_steps: the largest number of Newton steps.
        backend: "engine" is compiled and supports built-in regularizers on the CPU in double
            precision, over one MDP, or over a batch of MDPs with layers of up to 24 states. "torch"
            supports everything. "auto" uses the engine where it is supported, unless layers are so
            wide that BLAS is faster. `solution.backend` is the one that was used.
        constraints: budgets on expected costs, ⟨G_i, q⟩ <= h_i.

    Raises:
        ValueError: if a state cannot be reached, the regularizer has no term or belongs to another
            layout, an option is wrong, or backend is "engine" and the engine does not support this
            step.

    Example:
        >>> mdp = LayeredMDP.random(horizon=3, width=3, num_actions=3)
        >>> step = FTRLStep(mdp, jin_luo(mdp))
        >>> q = step(torch.rand(mdp.num_states, mdp.num_actions, dtype=torch.float64), t=100)
    """

    #: Attributes that follow from the others, and the compiled step with its caches.
    fingerprint_ignores: ClassVar[tuple[str, ...]] = (
        "evaluator",
        "interior",
        "name_in_graphs",
        "schedule",
        "_compiled",
    )
    fixed: ClassVar = {"backend": "call step.use(backend)"} | dict.fromkeys(
        ("mdp", "regularizer", "options", "evaluator", "interior", "constraints"),
        "make a new FTRLStep(mdp, regularizer, ...)",
    )
    backend: Backend
    evaluator: Evaluator

    def __init__(
        self,
        mdp: LayeredMDP,
        regularizer: Regularizer,
        *,
        tolerance: float | None = None,
        max_steps: int = 200,
        backend: Backend = "auto",
        constraints: Budgets | None = None,
    ) -> None:
        super().__init__()
        _check_parts(mdp, regularizer, constraints)
        self.mdp, self.regularizer, self.constraints = mdp, regularizer, constraints
        self.options = Options(tolerance, max_steps)
        #: The name of a schedule that depends on t, if there is one.
        schedules = (x for x in regularizer.modules() if isinstance(x, Schedule) and x.depends_on_t)
        self.schedule = next((type(x).__name__ for x in schedules), None)
        self.interior = interior_point(mdp).detach()
        self._compiled: CompiledStep | None = None
        self.use(backend)

    def use(self, backend: Backend) -> None:
        """Choose the backend; see the class. Nothing is compiled before the first solve.

        Raises:
            ValueError: if the name is unknown, or the engine does not support this step.
        """
        evaluator = Evaluator(self.regularizer)
        self.__dict__.update(backend=check_backend(backend), evaluator=evaluator, _compiled=None)
        if engine_takes(backend, lambda: why_not(self.mdp, self.regularizer)) and (
            backend == "engine" or pays_off(self.mdp)
        ):
            compiled = later("step.compiled")
            self._compiled = compiled.CompiledStep(self.mdp, evaluator, self.options)
        # Graphs take facts for granted that belong to the name.
        self.name_in_graphs = enroll(self)

    def forward(
        self,
        cumulative_loss: Tensor,
        t: Tensor | float | None = None,
        *,
        warm_start: Tensor | None = None,
        mdp: LayeredMDP | None = None,
        constraints: Budgets | None = None,
    ) -> Tensor:
        """Solve the step; the arguments are those of `solve`.

        Returns:
            q_t, `(*batch, S, A)`.

        Raises:
            SolveError: if an element could not be certified.
            TypeError, ValueError: if an argument is wrong; see `solve`.
        """
        return self.solve(
            cumulative_loss, t, warm_start=warm_start, mdp=mdp, constraints=constraints
        ).q

    def solve(
        self,
        cumulative_loss: Tensor,
        t: Tensor | float | None = None,
        *,
        warm_start: Tensor | None = None,
        mdp: LayeredMDP | None = None,
        check: bool = True,
        constraints: Budgets | None = None,
        multipliers: Tensor | None = None,
    ) -> Solution:
        """Solve the step and certify the solution.

        Args:
            cumulative_loss: `(*batch, S, A)`. Values on masked pairs are ignored. Numbers of
                another precision than the MDP's are converted, and their gradients converted back.
            t: the episode, at least 1: a number, or a tensor that broadcasts against `batch`. It
                may be left out if no schedule in the regularizer depends on it.
            warm_start: an occupancy measure to start from, positive on every pair; for example the
                last q. With entropies (torch_occ.step.entropic) it may have zeros. Elements that
                fail are solved again without it, except inside transforms of torch.func.
            mdp: an MDP with the same layout and other probabilities (`mdp.with_transitions`), to
                differentiate with respect to them.
            check: whether to raise `SolveError` if an element fails. With False, read
                `solution.status`; derivatives of failed elements are NaN.
            constraints: budgets for this call, instead of those of the step.
            multipliers: where to start the multipliers of the budgets, `(*batch, m)`; for example
                those of the last solution.

        Returns:
            q_t, the multipliers v of the flow constraints, and the certificate of each element.
            With budgets, also their multipliers and slack.

        Raises:
            SolveError: if `check` is set and an element could not be certified. If no policy meets
                the budgets, it is an `InfeasibleError`.
            TypeError: if an argument is not a tensor, or t not a number, or missing.
            ValueError: if a shape or value is wrong; the message names the argument and the place.
            NotImplementedError: inside two nested forward modes.
        """
        budgets = self.constraints if constraints is None else constraints
        given = (warm_start, mdp, check, budgets, multipliers)
        if torch.compiler.is_compiling():
            return solve_in_graph(self, cumulative_loss, t, *given)
        t = self.episode(t) if t is None else t
        cumulative_loss = promote(cumulative_loss, self.mdp)
        if torch.is_inference_mode_enabled() or autocasts(cumulative_loss):
            again = partial(self.solve, mdp=mdp, check=check, constraints=constraints)
            return solve_plainly(again, cumulative_loss, t, warm_start, multipliers)
        return self.solve_at(None, cumulative_loss, t, *given)

    def episode(self, t: Tensor | float | None) -> Tensor | float:
        """Return t, or 1 if t is None and nothing depends on it (else a TypeError)."""
        if t is None and self.schedule is not None:
            raise TypeError(
                f"t: the schedule {self.schedule} of the regularizer depends on the episode; "
                "call step(cumulative_loss, t), with t = 1, 2, ..."
            )
        return 1.0 if t is None else t

    def solve_at(
        self,
        parameters: Sequence[Tensor] | None,
        cumulative_loss: Tensor,
        t: Tensor | float,
        warm_start: Tensor | None,
        mdp: LayeredMDP | None = None,
        check: bool = True,
        budgets: Budgets | None = None,
        multipliers: Tensor | None = None,
    ) -> Solution:
        """Solve the step at these parameters of `Evaluator` or its own."""
        if budgets is not None:
            if warm_start is not None and self.evaluator.in_logs:
                # A q that underflowed is no start for the search; the interior point is.
                empty = ((warm_start == 0) & self.mdp.actions).any(-1).any(-1)
                warm_start = torch.where(over(empty, 2), self.interior, warm_start)
            prepared = self._prepare(cumulative_loss, t, warm_start, mdp, parameters)
            engine = self._compiled if mdp is None and not prepared[0].probabilities else None
            return solve_with_budgets(
                self, engine, prepared, -cumulative_loss, budgets, multipliers, check
            )
        given = (cumulative_loss, t, warm_start, mdp, parameters)
        if inside_transform():  # there, control flow cannot depend on the result
            return self._solve_in_torch(*given, check=check)
        found = None
        if self._compiled is not None:
            start = self.interior if warm_start is None else warm_start
            found = self._compiled(cumulative_loss, t, start, mdp, parameters)
        if found is None:
            solution = self._solve_in_torch(*given, check=False)
            found = solution, solution.all_converged
        solution, converged = found
        if converged:
            return solution
        again = None
        if warm_start is not None:
            # A warm start can be too close to the boundary. From the interior point, Newton's
            # method converges.
            again = self.solve_at(parameters, cumulative_loss, t, None, mdp, check=False)
        elif self.backend == "auto" and solution.backend == "engine":
            again = self._solve_in_torch(*given, check=False)
        if again is not None:
            solution = solution.merge(again, again.converged & ~solution.converged)
        report(check, solution)
        return solution

    def pull_back(self, *given: Any) -> list[Tensor] | None:
        """Return `CompiledStep.pull_back`, if it can be computed."""
        return None if self._compiled is None else self._compiled.pull_back(*given)

    def compare(
        self, loss: Tensor, t: Tensor | float, start: Tensor | None, *given: Any, **kind: Any
    ) -> tuple[Tensor, Tensor] | None:
        """Return `CompiledStep.compare`, if it can be computed."""
        if self._compiled is None or self.constraints is not None:
            return None
        loss, start = promote(loss, self.mdp), self.interior if start is None else start
        return self._compiled.compare(loss, t, start, *given, **kind)

    def closed_form(
        self, loss: Tensor, t: Tensor | float, start: Tensor | None, mdp: LayeredMDP | None
    ) -> tuple[Entropic, Sequence[Tensor]]:
        """Return the step of an entropy as an equation, and its tensors."""
        loss = promote(loss, self.mdp)
        setting, first, rank = self._prepare(loss, t, start, mdp, None)
        return entropic_equation(setting, self.options, loss, first, rank, False)

    def _solve_in_torch(self, loss: Tensor, *given: Any, check: bool) -> Solution:
        setting, start, rank = self._prepare(loss, *given)
        return solve_setting(setting, self.options, loss, start, rank, check)

    def _prepare(
        self,
        cumulative_loss: Tensor,
        t: Tensor | float,
        warm_start: Tensor | None,
        mdp: LayeredMDP | None,
        parameters: Sequence[Tensor] | None,
    ) -> tuple[Setting, Tensor, int]:
        """Check the arguments; return psi_t, where to start, and the number of batch dimensions."""
        model = self.mdp if mdp is None else check_layout(mdp, self.mdp)
        start = self.interior
        if warm_start is not None:
            check_like("warm_start", warm_start, model)
            start = keep("pair", model, warm_start, 0.0)
        own = parameters is None
        if parameters is None:
            parameters = self.evaluator.parameters(check_episode(t, model))
        shapes = self.evaluator.batch_shapes(parameters)
        t, rank = check_arguments(model, cumulative_loss, t, start, shapes)
        if forward_modes() > 1:  # torch loses tangents there, silently
            raise NotImplementedError(
                "torch does not support forward mode inside forward mode here; "
                "use jacrev or grad for one of them"
            )
        check_types(self.regularizer, model)
        if own and not inside_transform():
            self.regularizer.validate()
        probabilities = mdp is not None or carries_derivative(*model.probabilities)
        setting = Setting(model, self.evaluator, probabilities, t, tuple(parameters))
        return setting, start.detach(), rank

    @property
    def expected_backend(self) -> str:
        """The backend that solves this step, unless an input needs the other one."""
        return "torch" if self._compiled is None else "engine"

    def check_parameters(self) -> None:
        """Check number types, devices and domains of the parameters of the regularizer."""
        check_types(self.regularizer, self.mdp)
        self.regularizer.validate()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Give a copy its own name; compiled graphs refer to steps by name."""
        super().__setstate__(state)
        self.name_in_graphs = enroll(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> Self:
        """Move the MDP together with the parameters."""
        super()._apply(fn, *args)
        self.__dict__.update(mdp=self.mdp.map_tensors(fn), interior=fn(self.interior))
        self.use(self.backend)
        return self


def _check_parts(mdp: LayeredMDP, regularizer: Regularizer, constraints: Budgets | None) -> None:
    """Check what a step is made of."""
    if not isinstance(mdp, LayeredMDP):
        order = "; the order is FTRLStep(mdp, regularizer)" * isinstance(regularizer, LayeredMDP)
        raise TypeError(f"mdp: expected a LayeredMDP, got {_kind_of(mdp)}{order}")
    if not isinstance(regularizer, Regularizer):
        advice = (
            "use one such as occ.jin_luo(mdp), or derive a class from occ.SeparableRegularizer, "
            "occ.StatewiseRegularizer or occ.JointRegularizer"
        )
        if isinstance(regularizer, type) and issubclass(regularizer, Regularizer):
            advice = f"make one, {regularizer.__name__}(...)"
        raise TypeError(
            f"regularizer: expected an occ.Regularizer, got {_kind_of(regularizer)}; {advice}"
        )
    if constraints is not None:
        check_budgets(constraints, mdp)
    check_reachable(mdp)
    for leaf in regularizer.leaves():
        if isinstance(leaf, SeparableRegularizer) and not leaf.arguments:
            raise ValueError(
                f"regularizer: {type(leaf).__name__} has no term; "
                "override pair, rest, state or complement"
            )
    regularizer.check_places(mdp)


def _kind_of(x: Any) -> str:
    return f"the class {x.__name__}" if isinstance(x, type) else type(x).__name__
