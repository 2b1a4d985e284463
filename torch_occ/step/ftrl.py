"""The FTRL step as a torch module.

q_t = argmin over q in Omega of <q, cumulative_loss> + psi_t(q)        (`alg:main_alg`)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor

from torch_occ._support.backends import Backend, check_backend, engine_takes, later
from torch_occ._support.private import carries_derivative, forward_modes, inside_transform
from torch_occ.kernels.constants import SQUARE
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import interior_point
from torch_occ.mdp.validation import broadcast
from torch_occ.regularizers.arguments import keep
from torch_occ.regularizers.base import Regularizer, SeparableRegularizer
from torch_occ.regularizers.derivatives import Evaluator
from torch_occ.regularizers.frozen import Frozen
from torch_occ.step.entropic import Entropy, Task, entropy_at, is_entropy, solve_entropic
from torch_occ.step.implicit import Bound, ImplicitSolution, Setting, Stationarity
from torch_occ.step.newton import Options, Solution
from torch_occ.step.status import Status

if TYPE_CHECKING:
    from torch_occ.step.compiled import CompiledStep


class SolveError(RuntimeError):
    """A step that could not be certified. `solution` holds what was found."""

    def __init__(self, message: str, solution: Solution) -> None:
        super().__init__(message)
        self.solution = solution


class FTRLStep(Frozen):
    """The occupancy-measure FTRL step, differentiable in the loss, t, the regularizer's parameters and the MDP's probabilities.

    Args:
        mdp: every state must be reachable; see `LayeredMDP.prune`.
        regularizer: psi_t, for example `jin_luo(mdp)`.
        tolerance: the largest dual residual, a relative error of q, that counts as solved; eps^(2/3) by default.
        max_steps: Newton steps allowed.
        backend: "engine" is compiled, for built-in regularizers over a single MDP on the CPU in double precision; "torch" does everything;
            "auto" takes the engine where it can and where layers are not so wide that BLAS is faster. `solution.backend` says who solved.

    The MDP, the structure of the regularizer and the options are fixed, and changing them is an error. The values of parameters may
    change at any time.

    Example:
        >>> mdp = LayeredMDP.random(horizon=3, width=3, num_actions=3)
        >>> step = FTRLStep(mdp, jin_luo(mdp))
        >>> q = step(torch.rand(mdp.num_states, mdp.num_actions, dtype=torch.float64), t=100)
    """

    #: What follows from the rest, and the compiled step with its caches.
    fingerprint_ignores: ClassVar[tuple[str, ...]] = ("evaluator", "interior", "_compiled")
    fixed: ClassVar = {"backend": "call step.use(backend)"} | dict.fromkeys(
        ("mdp", "regularizer", "options", "evaluator", "interior"),
        "make a new FTRLStep(mdp, regularizer, ...)",
    )
    backend: Backend

    def __init__(
        self,
        mdp: LayeredMDP,
        regularizer: Regularizer,
        *,
        tolerance: float | None = None,
        max_steps: int = 200,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        _check_reachable(mdp)
        for leaf in regularizer.leaves():
            if isinstance(leaf, SeparableRegularizer) and not leaf.arguments:
                raise ValueError(
                    f"regularizer: {type(leaf).__name__} has no term; override pair, rest, state or complement"
                )
        self.mdp, self.regularizer = mdp, regularizer
        self.options = Options(tolerance, max_steps)
        self.evaluator = Evaluator(regularizer)
        self.in_logs = is_entropy(regularizer)
        self.interior = interior_point(mdp).detach()
        self._compiled: CompiledStep | None = None
        self.use(backend)

    def use(self, backend: Backend) -> None:
        """Choose who solves from now on; see the class. Nothing is compiled before the first solve."""
        self.__dict__.update(backend=check_backend(backend), _compiled=None)

        def why_not() -> str | None:
            return later("step.kernel_inputs").why_not(self.mdp, self.regularizer)

        if any(carries_derivative(p) for p in self.mdp.probabilities) or not engine_takes(
            backend, why_not
        ):
            return
        compiled = later("step.compiled")
        if backend == "engine" or compiled.pays_off(self.mdp):
            self._compiled = compiled.CompiledStep(self.mdp, self.regularizer, self.options)

    def forward(
        self,
        cumulative_loss: Tensor,
        t: Tensor | float = 1.0,
        *,
        warm_start: Tensor | None = None,
        mdp: LayeredMDP | None = None,
    ) -> Tensor:
        """q_t, `(*batch, S, A)`. Raises `SolveError` if an element cannot be certified. The arguments are those of `solve`."""
        return self.solve(cumulative_loss, t, warm_start=warm_start, mdp=mdp).q

    def solve(
        self,
        cumulative_loss: Tensor,
        t: Tensor | float = 1.0,
        *,
        warm_start: Tensor | None = None,
        mdp: LayeredMDP | None = None,
        check: bool = True,
    ) -> Solution:
        """The step with its certificate.

        Args:
            cumulative_loss: `(*batch, S, A)`. Values on masked pairs are ignored.
            t: the episode, at least 1: a number, or a tensor that broadcasts against `batch`.
            warm_start: an occupancy measure to start from, positive on every pair; for example the last q.
                The q of an entropy (torch_occ.entropic) may have fallen to zero, and is taken as it is.
            mdp: the same layout with other probabilities (`mdp.with_transitions`), to differentiate in them.
            check: raise `SolveError` when an element fails. With False, look at `solution.status`; derivatives of failed elements
                are NaN.
        """
        if torch.is_inference_mode_enabled():  # Newton's method needs autograd for its Hessians
            with torch.inference_mode(False):
                start = None if warm_start is None else warm_start.clone()
                episode = t.clone() if isinstance(t, Tensor) else t
                return self.solve(
                    cumulative_loss.clone(), episode, warm_start=start, mdp=mdp, check=check
                )
        if mdp is None and self._compiled is not None and not inside_transform():
            found = self._compiled(
                cumulative_loss, t, self.interior if warm_start is None else warm_start
            )
            if (
                found is not None
            ):  # else the input is not what it should be, and the checks below say why
                solution, converged = found
                if not converged:
                    _report(check, solution)
                return solution
        return self._solve_in_torch(cumulative_loss, t, warm_start=warm_start, mdp=mdp, check=check)

    def _solve_in_torch(
        self,
        cumulative_loss: Tensor,
        t: Tensor | float,
        *,
        warm_start: Tensor | None,
        mdp: LayeredMDP | None,
        check: bool,
    ) -> Solution:
        model = self.mdp if mdp is None else _check_layout(mdp, self.mdp)
        _check_like("cumulative_loss", cumulative_loss, model)
        if not isinstance(t, Tensor | int | float):
            raise TypeError(f"t: expected a number or a tensor, got {type(t).__name__}")
        t = torch.as_tensor(t, dtype=model.dtype, device=model.device)
        start = self.interior
        if warm_start is not None:
            _check_like("warm_start", warm_start, model)
            start = keep("pair", model, warm_start, 0.0)
        given = self.evaluator.batch_shapes(self.evaluator.own_parameters)
        shapes = {f"regularizer: {name}": shape for name, shape in given.items()}
        shapes |= {"mdp": model.batch_shape, "t": t.shape, "warm_start": start.shape[:-2]}
        _check_batches({"cumulative_loss": cumulative_loss.shape[:-2]} | shapes)
        _check_transforms()
        self._check_types(model)
        probabilities = mdp is not None or any(carries_derivative(p) for p in model.probabilities)
        if self.in_logs and model.num_states <= SQUARE:
            return self._solve_in_logs(
                model, cumulative_loss, t, start.detach(), probabilities, check
            )
        setting = Setting(model, self.evaluator, probabilities)
        # A vmap puts its dimension in front of this rank: parameters must not line up with it.
        rank = max(cumulative_loss.dim() - 2, *map(len, shapes.values()))
        tensors = [_rank(t, rank, 0), *self.evaluator.own_parameters]
        if probabilities:
            dims = (1, *(layer.event_dims for layer in model.layers))
            tensors += [
                _rank(p, rank, event_dims)
                for p, event_dims in zip(model.probabilities, dims, strict=True)
            ]
        report = partial(_report, check)

        def check_values(bound: Bound, x: Tensor, start: Tensor) -> None:
            bound.evaluator.validate(bound.parameters)
            _check_values(self.mdp, bound.mdp, -x, start, bound.t, zeros=False)

        equation = Stationarity(setting, self.options, check_values, report)
        outputs = ImplicitSolution.apply(
            equation, _rank(-cumulative_loss, rank, 2), _rank(start.detach(), rank, 2), *tensors
        )
        return Solution(*outputs)

    def _solve_in_logs(
        self,
        model: LayeredMDP,
        loss: Tensor,
        t: Tensor,
        start: Tensor,
        probabilities: bool,
        check: bool,
    ) -> Solution:
        """The step of an entropy; see torch_occ.step.entropic."""
        if not inside_transform():
            self.regularizer.validate()
        entropy = entropy_at(self.regularizer, t)
        batches = (*(x.dim() for x in (t, *entropy)), len(model.batch_shape))
        rank = max(loss.dim() - 2, start.dim() - 2, *batches)
        entropy = Entropy(*(_rank(x, rank, 0) for x in entropy))
        if probabilities:
            dims = (1, *(layer.event_dims for layer in model.layers))
            tensors = [
                _rank(p, rank, dim) for p, dim in zip(model.probabilities, dims, strict=True)
            ]
            model = model.with_probabilities(*tensors)

        def check_values(
            mdp: LayeredMDP, loss: Tensor, start: Tensor, entropy: Entropy, t: Tensor
        ) -> None:
            _check_values(self.mdp, mdp, loss, start, t, zeros=True)
            if not bool((entropy.weight > 0).all() and entropy.weight.isfinite().all()):
                raise ValueError(
                    "regularizer: its weight is not a positive number; check its parameters"
                )

        task = Task(model, self.options, probabilities, check_values, partial(_report, check))
        inputs = (loss, t, *entropy, *model.probabilities)
        differentiable = any(carries_derivative(x) for x in inputs)
        loss, start, t = _rank(loss, rank, 2), _rank(start, rank, 2), _rank(t, rank, 0)
        return solve_entropic(task, loss, start, entropy, t, differentiable)

    def check_parameters(self) -> None:
        """Raise a ValueError that names a parameter outside its domain, or of another type than the MDP's."""
        self._check_types(self.mdp)
        self.regularizer.validate()

    def _check_types(self, mdp: LayeredMDP) -> None:
        for name, parameter in self.regularizer.named_parameters():
            if parameter.dtype != mdp.dtype or parameter.device != mdp.device:
                raise ValueError(
                    f"regularizer: {name} is {parameter.dtype} on {parameter.device}, the MDP {mdp.dtype} on {mdp.device}; "
                    "use step.to(...) for both"
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> Self:
        """Moves the MDP together with the parameters."""
        super()._apply(fn, *args)
        self.__dict__.update(mdp=self.mdp.map_tensors(fn), interior=fn(self.interior))
        self.use(self.backend)
        return self


def _rank(x: Tensor, rank: int, event_dims: int) -> Tensor:
    """x with leading ones up to a batch rank."""
    return x[(None,) * (rank + event_dims - x.dim())] if x.dim() < rank + event_dims else x


# -- input ----------------------------------------------------------------------------------------------------------------


def _check_reachable(mdp: LayeredMDP) -> None:
    unreachable = (~mdp.reachable).nonzero()
    if len(unreachable):
        raise ValueError(
            f"mdp: {len(unreachable)} states cannot be reached, the first is {mdp.locate(int(unreachable[0]))}; "
            "Omega has no interior there. Remove them with mdp.prune()"
        )


def _check_layout(mdp: LayeredMDP, own: LayeredMDP) -> LayeredMDP:
    if mdp.layer_sizes != own.layer_sizes or not torch.equal(mdp.actions, own.actions):
        raise ValueError(
            f"mdp: expected the layout of {own}, got {mdp}; make it with mdp.with_transitions, or another FTRLStep"
        )
    return mdp


def _check_batches(shapes: dict[str, torch.Size]) -> None:
    """Every batch shape must broadcast with those named before it."""
    batch = torch.Size()
    for name, shape in shapes.items():
        try:
            batch = broadcast(batch, shape)
        except RuntimeError:
            raise ValueError(
                f"{name}: expected a batch shape that broadcasts against {tuple(batch)}, got {tuple(shape)}"
            ) from None


def _check_transforms() -> None:
    """torch loses tangents of a custom function under two forward modes, so that would be silently wrong."""
    if forward_modes() > 1:
        raise NotImplementedError(
            "forward mode inside forward mode is not supported by torch here; use jacrev or grad for one of them"
        )


def _check_like(name: str, x: Tensor, mdp: LayeredMDP) -> None:
    expected = (mdp.num_states, mdp.num_actions)
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name}: expected a tensor of shape (*batch, {expected[0]}, {expected[1]}), got {type(x).__name__}"
        )
    if tuple(x.shape[-2:]) != expected:
        raise ValueError(
            f"{name}: expected shape (*batch, {expected[0]}, {expected[1]}), got {tuple(x.shape)}"
        )
    if x.dtype != mdp.dtype or x.device != mdp.device:
        raise ValueError(
            f"{name}: is {x.dtype} on {x.device}, the MDP {mdp.dtype} on {mdp.device}; convert one of them"
        )


def _check_values(
    step_mdp: LayeredMDP, mdp: LayeredMDP, loss: Tensor, start: Tensor, t: Tensor, zeros: bool
) -> None:
    """Runs on plain tensors, inside every transform; `zeros` if a start may have them."""
    early = (~((t >= 1) & t.isfinite())).nonzero()
    if len(early):
        raise ValueError(f"t: expected an episode of at least 1, got {float(t[tuple(early[0])])}")
    if mdp is not step_mdp:  # other probabilities, which nobody has looked at yet
        if not all(bool(p.isfinite().all()) for p in mdp.probabilities):
            raise ValueError(
                "mdp: a probability is not finite; LayeredMDP(transitions, ...) tells which"
            )
        _check_reachable(mdp)
    wrong = (~loss.isfinite() & mdp.actions).nonzero()
    if len(wrong):
        raise ValueError(
            f"cumulative_loss: {_place(mdp, wrong[0])} is {float(loss[tuple(wrong[0])])}; expected a finite number"
        )
    good = (start >= 0) if zeros else (start > 0)
    wrong = (~(good & start.isfinite()) & mdp.actions).nonzero()
    if len(wrong):
        expected = "an occupancy of at least 0" if zeros else "a positive occupancy"
        raise ValueError(
            f"warm_start: {_place(mdp, wrong[0])} is {float(start[tuple(wrong[0])])}; expected {expected}"
        )


def _place(mdp: LayeredMDP, index: Tensor) -> str:
    *batch, state, action = index.tolist()
    element = f"batch element {tuple(batch)}, " if batch else ""
    return f"{element}{mdp.locate(state)}, action {action}"


def _report(check: bool, solution: Solution) -> None:
    """Raise if an element failed and somebody wants to know."""
    if not check or not bool(solution.status.any()):
        return
    failed = (solution.status != Status.CONVERGED).nonzero()
    lines = []
    for index in failed[:5]:
        status = Status(int(solution.status[tuple(index)]))
        element = f"batch element {tuple(index.tolist())}" if len(index) else "the step"
        lines.append(
            f"{element}: {status.name} after {int(solution.steps[tuple(index)])} Newton steps, "
            f"dual residual {float(solution.dual_residual[tuple(index)]):.1e}: {status.advice}"
        )
    more = f"\n... and {len(failed) - 5} more" if len(failed) > 5 else ""
    raise SolveError(
        "the FTRL step was not solved; check=False returns statuses instead\n"
        + "\n".join(lines)
        + more,
        solution,
    )
