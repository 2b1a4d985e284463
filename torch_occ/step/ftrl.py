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
from torch_occ._support.private import carries_derivative, inside_transform
from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import interior_point
from torch_occ.regularizers.base import Regularizer, SeparableRegularizer
from torch_occ.regularizers.derivatives import Evaluator
from torch_occ.regularizers.parameters import Frozen, spread_batch, with_rank
from torch_occ.regularizers.terms import keep
from torch_occ.step.budgets import solve_with_budgets
from torch_occ.step.checks import (
    check_arguments,
    check_episode,
    check_layout,
    check_like,
    check_reachable,
    check_transforms,
    check_types,
    check_values,
    parameter_shapes,
    report,
)
from torch_occ.step.entropic import Entropy, Task, entropy_of, solve_entropic
from torch_occ.step.graph import autocasts, enroll, promote, solve_in_graph, solve_plainly
from torch_occ.step.implicit import ImplicitSolution, Problem, Setting, Stationarity
from torch_occ.step.limits import Budgets
from torch_occ.step.solution import Options, Solution
from torch_occ.step.ways import is_entropy, pays_off, solves_in_logs, why_not

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
        if not isinstance(constraints, Budgets | None):
            raise TypeError(
                "constraints: expected occ.Budgets(costs, limits), got "
                f"{type(constraints).__name__}"
            )
        if constraints is not None:
            constraints.check(mdp)
        check_reachable(mdp)
        for leaf in regularizer.leaves():
            if isinstance(leaf, SeparableRegularizer) and not leaf.arguments:
                raise ValueError(
                    f"regularizer: {type(leaf).__name__} has no term; "
                    "override pair, rest, state or complement"
                )
        regularizer.check_places(mdp)
        self.mdp, self.regularizer, self.constraints = mdp, regularizer, constraints
        self.options = Options(tolerance, max_steps)
        self.in_logs, self.closed = is_entropy(regularizer), is_entropy(regularizer, closed=True)
        self.interior = interior_point(mdp).detach()
        self._compiled: CompiledStep | None = None
        self.use(backend)
        self.name_in_graphs = enroll(self)

    def use(self, backend: Backend) -> None:
        """Choose the backend; see the class. Nothing is compiled before the first solve.

        Raises:
            ValueError: if the name is unknown, or the engine does not support this step.
        """
        evaluator = Evaluator(self.regularizer)
        self.__dict__.update(backend=check_backend(backend), evaluator=evaluator, _compiled=None)

        if not engine_takes(backend, lambda: why_not(self.mdp, self.regularizer)):
            return
        if backend == "engine" or pays_off(self.mdp):
            compiled = later("step.compiled")
            self._compiled = compiled.CompiledStep(self.mdp, evaluator, self.options)

    def forward(
        self,
        cumulative_loss: Tensor,
        t: Tensor | float = 1.0,
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
        t: Tensor | float = 1.0,
        *,
        warm_start: Tensor | None = None,
        mdp: LayeredMDP | None = None,
        check: bool = True,
        constraints: Budgets | None = None,
        multipliers: Tensor | None = None,
    ) -> Solution:
        """Solve the step and certify the solution.

        Args:
            cumulative_loss: `(*batch, S, A)`. Values on masked pairs are ignored. Numbers of lower
                precision than the MDP's are converted, and their gradients converted back.
            t: the episode, at least 1: a number, or a tensor that broadcasts against `batch`.
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
            TypeError: if an argument is not a tensor, or t not a number.
            ValueError: if a shape or value is wrong; the message names the argument and the place.
            NotImplementedError: inside two nested forward modes.
        """
        cumulative_loss = promote(cumulative_loss, self.mdp)
        budgets = self.constraints if constraints is None else constraints
        if torch.compiler.is_compiling():
            given = {"mdp": mdp, "constraints": budgets, "multipliers": multipliers}
            return solve_in_graph(self, cumulative_loss, t, warm_start, check, given)
        if torch.is_inference_mode_enabled() or autocasts(cumulative_loss):
            return solve_plainly(
                partial(self.solve, mdp=mdp, check=check, constraints=constraints),
                cumulative_loss,
                t,
                warm_start,
                multipliers,
            )
        if budgets is not None:
            problem = self.prepare(cumulative_loss, t, warm_start, mdp)
            single = mdp is None and not problem.probabilities and not self.mdp.batch_shape
            engine = self._compiled if single and not inside_transform() else None
            return solve_with_budgets(
                problem, engine, -cumulative_loss, budgets, multipliers, check
            )
        return self.solve_at(None, cumulative_loss, t, warm_start, mdp, check)

    def solve_at(
        self,
        parameters: Sequence[Tensor] | None,
        cumulative_loss: Tensor,
        t: Tensor | float,
        warm_start: Tensor | None,
        mdp: LayeredMDP | None = None,
        check: bool = True,
    ) -> Solution:
        """Solve the step without budgets, at these parameters of `Evaluator` or its own."""
        given = (cumulative_loss, t, warm_start, mdp, parameters)
        if inside_transform():  # there, control flow cannot depend on the result
            return self._solve_in_torch(*given, check=check)
        solution, converged = self._attempt(*given)
        if converged:
            return solution
        if warm_start is not None:
            # A warm start can be too close to the boundary. From the interior point, Newton's
            # method converges.
            again, _ = self._attempt(cumulative_loss, t, None, mdp, parameters)
            solution = solution.merge(again, again.converged & ~solution.converged)
        if self.backend == "auto" and solution.backend == "engine" and not solution.all_converged:
            again = self._solve_in_torch(cumulative_loss, t, None, mdp, parameters, check=False)
            solution = solution.merge(again, again.converged & ~solution.converged)
        report(check, solution)
        return solution

    def _attempt(
        self,
        cumulative_loss: Tensor,
        t: Tensor | float,
        warm_start: Tensor | None,
        mdp: LayeredMDP | None,
        parameters: Sequence[Tensor] | None,
    ) -> tuple[Solution, bool]:
        """Return the solution, and whether all elements converged."""
        if self._compiled is not None:
            start = self.interior if warm_start is None else warm_start
            found = self._compiled(cumulative_loss, t, start, mdp, parameters)
            if found is not None:
                return found
        given = (cumulative_loss, t, warm_start, mdp, parameters)
        solution = self._solve_in_torch(*given, check=False)
        return solution, bool(solution.converged.all())

    def _solve_in_torch(
        self,
        cumulative_loss: Tensor,
        t: Tensor | float,
        warm_start: Tensor | None,
        mdp: LayeredMDP | None,
        parameters: Sequence[Tensor] | None,
        check: bool,
    ) -> Solution:
        problem = self.prepare(cumulative_loss, t, warm_start, mdp, parameters)
        if self.in_logs and solves_in_logs(self.regularizer, problem.mdp):
            return self._solve_in_logs(problem, cumulative_loss, check)
        setting = Setting(problem.mdp, self.evaluator, problem.probabilities)
        equation = Stationarity(setting, self.options, problem.validate, partial(report, check))
        return Solution(*ImplicitSolution.apply(equation, *problem.align(-cumulative_loss)))

    def prepare(
        self,
        cumulative_loss: Tensor,
        t: Tensor | float,
        warm_start: Tensor | None,
        mdp: LayeredMDP | None,
        parameters: Sequence[Tensor] | None = None,
    ) -> Problem:
        """Check the arguments of `solve`, and collect what the torch path needs."""
        model = self.mdp if mdp is None else check_layout(mdp, self.mdp)
        start = self.interior
        if warm_start is not None:
            check_like("warm_start", warm_start, model)
            start = keep("pair", model, warm_start, 0.0)
        check_episode(t)
        now = torch.as_tensor(t, dtype=model.dtype, device=model.device)
        own = parameters is None
        parameters = self.evaluator.parameters(now) if parameters is None else parameters
        given = self.evaluator.batch_shapes(parameters)
        t, shapes = check_arguments(model, cumulative_loss, t, start, parameter_shapes(given))
        check_transforms()
        check_types(dict(self.regularizer.named_parameters()), model)
        if own and not inside_transform():
            self.regularizer.validate()
        probabilities = mdp is not None or any(carries_derivative(p) for p in model.probabilities)
        rank = max(map(len, shapes.values()))
        return Problem(self, model, t, tuple(parameters), start.detach(), probabilities, rank)

    def _solve_in_logs(self, problem: Problem, loss: Tensor, check: bool) -> Solution:
        """Solve the step for an entropy; see torch_occ.step.entropic."""
        _, model, t, parameters, start, probabilities, _ = problem
        entropy = entropy_of(self.evaluator.composition, [spread_batch(t), *parameters])
        batches = (*(x.dim() for x in (t, *entropy)), len(model.batch_shape))
        rank = max(loss.dim() - 2, start.dim() - 2, *batches)
        entropy = Entropy(*(with_rank(x, rank, 0) for x in entropy))
        if probabilities:
            dims = (1, *(layer.event_dims for layer in model.layers))
            pairs = zip(model.probabilities, dims, strict=True)
            model = model.with_probabilities(*(with_rank(p, rank, dim) for p, dim in pairs))

        def validate(
            mdp: LayeredMDP, loss: Tensor, start: Tensor, entropy: Entropy, t: Tensor
        ) -> None:
            check_values(self.mdp, mdp, loss, start, t, zeros=True)
            if not bool((entropy.weight > 0).all() and entropy.weight.isfinite().all()):
                raise ValueError(
                    "regularizer: its weight is not a positive number; check its parameters"
                )

        options = (self.options, probabilities, self.closed)
        task = Task(model, *options, validate, partial(report, check))
        inputs = (loss, t, *entropy, *model.probabilities)
        differentiable = any(carries_derivative(x) for x in inputs)
        loss, start, t = with_rank(loss, rank, 2), with_rank(start, rank, 2), with_rank(t, rank, 0)
        # The entropy may not depend on t, whose batch counts all the same.
        loss = loss.expand(*broadcast(loss.shape[:-2], t.shape), *loss.shape[-2:])
        return solve_entropic(task, loss, start, entropy, t, differentiable)

    @property
    def expected_backend(self) -> str:
        """The backend that solves this step, unless an input needs the other one."""
        return "torch" if self._compiled is None else "engine"

    def check_parameters(self) -> None:
        """Check the parameters of the regularizer.

        Raises:
            ValueError: if one is outside its domain, or has another number type or device than
                the MDP; the message names it.
        """
        check_types(dict(self.regularizer.named_parameters()), self.mdp)
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
