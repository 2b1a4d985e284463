"""The Kullback-Leibler projection as a torch module.

argmin over q in Delta of learning_rate ⟨q, loss⟩ + KL(q || reference)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from torch_occ._support.backends import Backend, check_backend, engine_takes, later
from torch_occ._support.private import carries_derivative, inside_transform
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import join
from torch_occ.mdp.validation import broadcast
from torch_occ.step.checks import check_transforms, report
from torch_occ.step.entropic import Poisoned, in_front
from torch_occ.step.problem import with_rank
from torch_occ.step.projection.checks import check_layout, check_shapes, check_values
from torch_occ.step.projection.dual import Problem, arrive, direction, settle, unfold
from torch_occ.step.projection.rows import Active
from torch_occ.step.solution import Options, Status

if TYPE_CHECKING:
    from torch_occ.step.projection.compiled import CompiledProjection, Found


Rows = tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]


class Projection(NamedTuple):
    """The projection q(s,a,s') = q(s,a) p(s'|s,a) and its certificate, for a batch of problems."""

    q: Tensor  # (*batch, S, A)
    transitions: tuple[Tensor, ...]  # p of every layer, (*batch, S_k, A, S_{k+1})
    value: Tensor  # (*batch, S), the multipliers v of the flow constraints
    status: Tensor  # (*batch,), numbers of `Status`
    steps: Tensor  # (*batch,), the number of Newton steps
    flow_residual: Tensor  # (*batch,), the largest violation of a flow constraint, relative to q(s)
    dual_residual: Tensor  # (*batch,), the largest error of a stationarity condition of log q

    @property
    def converged(self) -> Tensor:
        """`(*batch,)`, whether each element was solved and certified."""
        return self.status == Status.CONVERGED


class KLProjection(nn.Module):
    """The Kullback-Leibler projection onto occupancy measures whose transitions have bounds.

        argmin of learning_rate ⟨q, loss⟩ + KL(q || reference)    over q(s,a,s') >= 0 with
        sum_{a,s'} q(s,a,s') = initial(s), or the sum of q(.,.,s) over the layer before,
        lower(s'|s,a) q(s,a) <= q(s,a,s') <= upper(s'|s,a) q(s,a).

    KL is the unnormalized divergence, sum q log(q / reference) - q + reference. This is the step of
    UOB-REPS (Jin, Jin, Luo, Sra and Yu, 2020). The published dual has two multipliers per
    (s, a, s'); here they are eliminated, and one multiplier per state is left
    (torch_occ.step.projection.dual).

    It is differentiable with respect to q, transitions, bounds, loss, learning rate and the initial
    distribution of the MDP, to the third order, also in forward mode. The derivative is that of the
    active bounds at the solution; where a bound is only just active, it is one-sided.

    Args:
        mdp: its layout and its initial distribution are used, its probabilities are not.
        tolerance: the largest dual residual (a relative error of q) that counts as solved; by
            default eps^(2/3).
        max_steps: the largest number of Newton steps.
        backend: "engine" is compiled and works on the CPU in double precision, with one initial
            distribution. "torch" supports everything. "auto" uses the engine where it is
            supported. Problems that the engine cannot solve are solved again in torch.

    Raises:
        ValueError: if the layers of the MDP are sparse, an option is wrong, or backend is "engine"
            and the engine does not support this MDP.

    Example:
        >>> mdp = LayeredMDP.random(horizon=3, width=3, num_actions=3)
        >>> project = KLProjection(mdp)
        >>> lower = [(p - 0.1).clamp(min=0) for p in mdp.transitions]
        >>> upper = [(p + 0.1).clamp(max=1) for p in mdp.transitions]
        >>> q, p = project(interior_point(mdp), mdp.transitions, lower, upper, loss, 0.1)
    """

    #: The compiled projection follows from the other attributes.
    fingerprint_ignores: ClassVar[tuple[str, ...]] = ("_compiled",)

    def __init__(
        self,
        mdp: LayeredMDP,
        *,
        tolerance: float | None = None,
        max_steps: int = 200,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_layout(mdp)
        self.mdp, self.options = mdp, Options(tolerance, max_steps)
        self.use(backend)

    def use(self, backend: Backend) -> None:
        """Choose the backend; see the class. Nothing is compiled before the first solve.

        Raises:
            ValueError: if the name is unknown, or the engine does not support this MDP.
        """
        self.backend: Backend = check_backend(backend)
        self._compiled: CompiledProjection | None = None

        def why_not() -> str | None:
            return later("step.compiled.inputs").why_not_model(self.mdp)

        if not carries_derivative(self.mdp.initial) and engine_takes(backend, why_not):
            compiled = later("step.projection.compiled")
            self._compiled = compiled.CompiledProjection(self.mdp, self.options)

    def forward(
        self,
        q: Tensor,
        transitions: Sequence[Tensor],
        lower: Sequence[Tensor],
        upper: Sequence[Tensor],
        loss: Tensor | None = None,
        learning_rate: Tensor | float = 1.0,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return q(s,a) and p(s'|s,a) of the projection; see `solve`."""
        found = self.solve(q, transitions, lower, upper, loss, learning_rate)
        return found.q, found.transitions

    def solve(
        self,
        q: Tensor,
        transitions: Sequence[Tensor],
        lower: Sequence[Tensor],
        upper: Sequence[Tensor],
        loss: Tensor | None = None,
        learning_rate: Tensor | float = 1.0,
        *,
        check: bool = True,
    ) -> Projection:
        """Project the reference q(s,a) p(s'|s,a). Batch shapes broadcast.

        Args:
            q: positive weights `(*batch, S, A)` of the reference. They need not satisfy any
                constraint.
            transitions: p of the reference, one tensor `(*batch, S_k, A, S_{k+1})` per layer, as
                `mdp.transitions`. They must be positive where the upper bound is.
            lower: the lower bounds of the transitions, in the same form.
            upper: the upper bounds; each row needs sum(lower) <= 1 <= sum(upper).
            loss: `(*batch, S, A)`; zero by default.
            learning_rate: a number, or a tensor `(*batch,)`.
            check: whether to raise an error if an element failed.

        Returns:
            The projection, with a status per batch element.

        Raises:
            TypeError: if an argument is not a tensor.
            ValueError: if a shape or a value is wrong; it names the layer, the state, the action,
                the successor and the batch element.
            SolveError: if `check` is set and an element failed.
        """
        mdp = self.mdp
        loss = torch.zeros_like(q) if loss is None else loss
        rate = torch.as_tensor(learning_rate, dtype=mdp.dtype, device=mdp.device)
        rows = {"transitions": transitions, "lower": lower, "upper": upper}
        rank = len(check_shapes(mdp, q, loss, rate, rows))
        rank = max(rank, mdp.initial.dim() - 1)
        check_transforms()
        pairs, layers = [q, loss], [p for part in rows.values() for p in part]
        tensors = [
            *(with_rank(x, rank, 2) for x in pairs),
            *(with_rank(rate, rank, 0), with_rank(mdp.initial, rank, 1)),
            *(with_rank(x, rank, 3) for x in layers),
        ]
        problem = problem_of(mdp, tensors)
        differentiable = any(carries_derivative(x) for x in tensors)
        found = None if inside_transform() else self._solve_compiled(tensors)
        if found is not None:
            certificate, guess, active = found.certificate, found.guess, None
            if not differentiable:
                return Projection(found.q, found.rows, found.value, *_read(certificate))
        else:
            task = Task(mdp, self.options, lambda found: report(check, found, "the projection"))
            guess, certificate, *masks = Solve.apply(task, *(x.detach() for x in tensors))
            active = tuple(map(Active, masks[0::2], masks[1::2]))
        at = unfold(mdp, problem, guess, active)
        if not differentiable:
            return Projection(at.q(), at.rows, join(list(at.value), 1), *_read(certificate))
        active = at.active
        for _ in range(2):
            guess = guess + direction(mdp, at, guess)[0]
            at = unfold(mdp, problem, guess, active)
        return Projection(
            Poisoned.apply(at.q(), certificate),
            tuple(Poisoned.apply(p, certificate) for p in at.rows),
            Poisoned.apply(join(list(at.value), 1), certificate),
            *_read(certificate),
        )

    def _solve_compiled(self, tensors: Sequence[Tensor]) -> Found | None:
        """Solve in the engine; None if it does not support this, or an element failed."""
        if self._compiled is None:
            return None
        q, loss, rate, _, *layers = (x.detach() for x in tensors)
        check_values(self.mdp, q, loss, rate, split_rows(self.mdp, layers))
        found: Found = self._compiled(q, loss, rate, *layers)
        return found if not bool(found.certificate[..., 0].any()) else None

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any) -> Self:
        """Move the MDP together with the module."""
        super()._apply(fn, *args)
        self.mdp = self.mdp.map_tensors(fn)
        self.use(self.backend)
        return self


@dataclass(frozen=True)
class Task:
    """The data of a projection that are not tensors."""

    mdp: LayeredMDP
    options: Options
    report: Callable[[Projection], None]  # raises if a step failed, unless failures are allowed


def problem_of(mdp: LayeredMDP, tensors: Sequence[Tensor]) -> Problem:
    """Build the problem from q, loss, rate, initial distribution, transitions and bounds."""
    q, loss, rate, initial, *layers = tensors
    available, (p, lower, upper) = mdp.actions, split_rows(mdp, layers)
    log_weight = torch.where(available, q, 1.0).log() - rate[..., None, None] * loss
    log_weight = torch.where(available, log_weight, -torch.inf)
    # Masked pairs and impossible successors take no part; any numbers do.
    masks = [mask.unsqueeze(-1) for mask in mdp.split(available, -2)]
    return Problem(
        initial,
        log_weight,
        tuple(
            torch.where(mask & (high > 0), x, 1.0).log()
            for x, high, mask in zip(p, upper, masks, strict=True)
        ),
        tuple(torch.where(mask, x, 0.0) for x, mask in zip(lower, masks, strict=True)),
        tuple(torch.where(mask, x, 1.0) for x, mask in zip(upper, masks, strict=True)),
    )


def split_rows(mdp: LayeredMDP, layers: Sequence[Tensor]) -> Rows:
    """Transitions, lower and upper bounds, from a list of all their layers."""
    L = mdp.horizon
    return tuple(layers[:L]), tuple(layers[L : 2 * L]), tuple(layers[2 * L :])


class Solve(torch.autograd.Function):
    """log q(s), the certificate and the active bounds of every layer; not differentiable."""

    @staticmethod
    def forward(task: Task, *tensors: Tensor) -> tuple[Tensor, ...]:
        mdp, (q, loss, rate, initial, *layers) = task.mdp, tensors
        check_values(mdp, q, loss, rate, split_rows(mdp, layers))
        batch = broadcast(
            *(x.shape[:-2] for x in (q, loss)),
            *(rate.shape, initial.shape[:-1]),
            *(x.shape[:-3] for x in layers),
        )
        problem = problem_of(mdp, tensors)
        masses = [x.sum(-1) for x in mdp.split(torch.where(mdp.actions, q, 0.0), -2)]
        first = join([(x / x.sum(-1, keepdim=True)).log() for x in masses], 1)
        found = settle(mdp, problem, first.expand(*batch, -1).contiguous(), task.options)
        at, tolerance = found.at, task.options.tolerance_in(q.dtype)
        dual, flow = at.off.abs().amax(-1), flow_residual(mdp, problem.initial, at.q(), at.rows)
        certified = (dual <= tolerance) & (flow <= tolerance)
        stalled = found.status == Status.STALLED
        status = torch.where(stalled & certified, int(Status.CONVERGED), found.status)
        certificate = torch.stack([status.to(q), found.steps.to(q), flow, dual], -1)
        value = join(list(at.value), 1)
        task.report(Projection(at.q(), at.rows, value, *_read(certificate)))
        masks = (x.expand(*batch, *x.shape[-3:]) for active in at.active for x in active)
        return found.guess, certificate, *masks

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], task: Task, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        outputs = Solve.apply(task, *in_front(info.batch_size, in_dims[1:], tensors))
        return outputs, (0,) * len(outputs)


def flow_residual(mdp: LayeredMDP, initial: Tensor, q: Tensor, rows: Sequence[Tensor]) -> Tensor:
    """The largest |q(s) - inflow(s)| / q(s), `(*batch,)`."""
    layers = zip(rows[:-1], mdp.split(q, -2)[:-1], strict=True)
    inflow = join([initial, *(arrive(p, x) for p, x in layers)], 1)
    return ((q.sum(-1) - inflow) / q.sum(-1)).abs().amax(-1)


def _read(certificate: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Status, steps, flow residual and dual residual."""
    status, steps, flow, dual = certificate.unbind(-1)
    return status.long(), steps.long(), flow, dual
