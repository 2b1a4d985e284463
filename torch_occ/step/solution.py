"""What goes into a step and what comes out: budgets, options, solution, errors of both backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_occ._support import constants
from torch_occ.mdp.checks import (
    as_tensor,
    broadcast,
    check_dtype,
    check_kind,
    check_table,
    check_that,
    check_type,
    unexpected,
    whole,
)
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import optimal_policy


class Status(IntEnum):
    """The outcome of a solve; everything but CONVERGED is a failure."""

    CONVERGED = constants.CONVERGED
    MAX_STEPS = constants.MAX_STEPS
    STALLED = constants.STALLED
    UNDERFLOW = constants.UNDERFLOW
    NOT_FINITE = constants.NOT_FINITE
    NOT_CONVEX = constants.NOT_CONVEX
    INFEASIBLE = constants.INFEASIBLE

    @property
    def advice(self) -> str:
        """The meaning of the status, and what to do."""
        return _ADVICE[self]


_ADVICE = {
    Status.CONVERGED: "solved and certified",
    Status.MAX_STEPS: "the iteration limit was reached; "
    "raise max_steps, or start closer with warm_start",
    Status.STALLED: "rounding errors stopped the progress before the tolerance was reached; "
    "rescale the loss, or accept a larger tolerance",
    Status.UNDERFLOW: "an occupancy fell below the smallest floating-point number; "
    "add a LogBarrier, or use a smaller learning rate",
    Status.NOT_FINITE: "a derivative of the regularizer overflowed; "
    "check that the regularizer is finite and convex inside Omega",
    Status.NOT_CONVEX: "the regularizer is not convex at the point found, which may be no minimum; "
    "check the signs of its weights and the curvature of its functions",
    Status.INFEASIBLE: "no policy meets the budgets; raise their limits",
}


@dataclass(frozen=True)
class Options:
    """When to stop.

    Args:
        tolerance: the largest dual residual that counts as converged; by default eps^(2/3), which
            is 4e-11 in double precision.
        max_steps: the largest number of Newton steps.
        steady: whether the last Newton step must be within the tolerance, too, where digits are
            scarce. Beside pairs of large weight, a small residual may be a large error of others.

    Raises:
        ValueError: if the tolerance is not positive, or max_steps is below 1.
    """

    tolerance: float | None = None
    max_steps: int = 200
    steady: bool = False

    def __post_init__(self) -> None:
        fine = self.tolerance is None or (isinstance(self.tolerance, Real) and self.tolerance > 0)
        check_that(fine, "tolerance", "a positive number", repr(self.tolerance))
        whole("max_steps", self.max_steps)

    def tolerance_in(self, dtype: torch.dtype) -> float:
        """Return the tolerance, or its default for this number type."""
        return torch.finfo(dtype).eps ** (2 / 3) if self.tolerance is None else self.tolerance


class Solution(NamedTuple):
    """The minimizer and its certificate, for a batch of problems."""

    q: Tensor  # (*batch, S, A)
    value: Tensor  # (*batch, S), the multipliers v of the flow constraints
    # (*batch, 5), read by the properties below. One tensor, because making five costs time.
    certificate: Tensor
    compiled: bool = False  # whether the engine solved all of it
    multipliers: Tensor | None = None  # (*batch, m), of the budgets; None without budgets
    slack: Tensor | None = None  # (*batch, m), limits minus expected costs; None without budgets

    @property
    def backend(self) -> str:
        """The backend that solved it; "torch" if this solved any element, else "engine"."""
        return "engine" if self.compiled else "torch"

    @property
    def status(self) -> Tensor:
        """`(*batch,)`, the outcome of each element as a number of `Status`."""
        return self.certificate[..., 0].long()

    @property
    def steps(self) -> Tensor:
        """`(*batch,)`, the number of Newton steps."""
        return self.certificate[..., 1].long()

    @property
    def decrement(self) -> Tensor:
        """`(*batch,)`, the Newton decrement at the last step."""
        return self.certificate[..., 2]

    @property
    def flow_residual(self) -> Tensor:
        """`(*batch,)`, the largest |E q - b| relative to q(s)."""
        return self.certificate[..., 3]

    @property
    def dual_residual(self) -> Tensor:
        """`(*batch,)`, the largest |grad psi + loss - E'v|, in units of q times its curvature.

        In these units it is the relative error of q. It includes the rounding errors of the sums
        of losses along an episode, which no solver can undo. A state with one action has no
        decision to make; its residual is relative to the terms of its equation.
        """
        return self.certificate[..., 4]

    @property
    def converged(self) -> Tensor:
        """`(*batch,)`, whether each element was solved and certified."""
        return self.certificate[..., 0] == Status.CONVERGED

    @property
    def all_converged(self) -> bool:
        """Whether every element was solved and certified."""
        return bool(self.converged.all())

    @property
    def duality_gap(self) -> Tensor:
        """`(*batch,)`, how far the objective is above the optimum with budgets, at most.

        It is the sum of multipliers times slack: zero up to rounding, also without budgets. It is
        NaN for elements that were not solved: then it bounds nothing.
        """
        gap = torch.zeros_like(self.certificate[..., 0])
        if self.multipliers is not None and self.slack is not None:
            gap = (self.multipliers * self.slack).abs().sum(-1)
        return torch.where(self.converged, gap, torch.nan)

    def merge(self, other: Solution, where: Tensor) -> Solution:
        """Return `other` at the elements given by `where` `(*batch,)`, this solution elsewhere."""
        q, value, certificate = merge(where, other[:3], self[:3])
        compiled = self.compiled and (other.compiled or not bool(where.any()))
        return Solution(q, value, certificate, compiled)


def over(x: Tensor, event_dims: int) -> Tensor:
    """Append event dimensions to x `(*batch,)`, to broadcast against `(*batch, *event)`."""
    return x[(..., *(None,) * event_dims)]


def merge(where: Tensor, theirs: Sequence[Tensor], mine: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors `(*batch, ...)` with their elements given by `where` `(*batch,)`."""
    pairs = zip(theirs, mine, strict=True)
    return [torch.where(over(where, x.dim() - where.dim()), y, x) for y, x in pairs]


class SolveError(RuntimeError):
    """Raised when a step could not be certified. `solution` holds the uncertified result."""

    def __init__(self, message: str, solution: Any) -> None:
        super().__init__(message)
        self.solution = solution


class InfeasibleError(SolveError):
    """Raised when no policy meets all budgets.

    `certificate` holds weights y >= 0, `(m,)`. Every policy has ⟨sum_i y_i G_i, q⟩ > ⟨y, h⟩, so it
    violates at least one budget. `element` is the index of the batch element.
    """

    def __init__(
        self,
        solution: Solution,
        element: tuple[int, ...],
        certificate: Tensor,
        least: float,
        allowed: float,
    ) -> None:
        where = f"batch element {element}: " if element else ""
        weights = ", ".join(f"{y:.6g}" for y in certificate.tolist())
        super().__init__(
            f"{where}no policy meets the budgets. With weights y = ({weights}), the least possible "
            f"value of sum_i y_i ⟨G_i, q⟩ is {least:.6g}, and the limits allow {allowed:.6g}. "
            "Raise a limit whose weight is positive",
            solution,
        )
        self.certificate, self.element = certificate, element


def report(check: bool, solution: Any, what: str = "the FTRL step") -> None:
    """Report failed elements of a solution if `check` is set; `what` names the problem.

    The solution has a status, steps and a dual residual per element.

    Raises:
        SolveError: if an element failed; the message lists the first five.
    """
    if not check or not bool(solution.status.any()):
        return
    failed = (solution.status != Status.CONVERGED).nonzero()
    lines = []
    for index in failed[:5]:
        status = Status(int(solution.status[tuple(index)]))
        element = f"batch element {tuple(index.tolist())}" if len(index) else what
        lines.append(
            f"{element}: {status.name} after {int(solution.steps[tuple(index)])} Newton steps, "
            f"dual residual {float(solution.dual_residual[tuple(index)]):.1e}: {status.advice}"
        )
    more = f"\n... and {len(failed) - 5} more" if len(failed) > 5 else ""
    raise SolveError(
        f"{what} was not solved; solve(..., check=False) returns statuses instead\n"
        + "\n".join(lines)
        + more,
        solution,
    )


# -- Budgets ---------------------------------------------------------------------------------------


class Budgets(nn.Module):
    """Upper limits on expected costs, ⟨G_i, q⟩ <= h_i for i = 1, ..., m.

    ⟨G_i, q⟩ is the expected cost of an episode if taking action a in state s costs G_i(s,a). Both
    tensors may have a batch and may require gradients. They are buffers, so they move with the
    step.

    Args:
        costs: G, `(*batch, m, S, A)`. Values on masked pairs are ignored.
        limits: h, `(*batch, m)`.

    Raises:
        TypeError: if an argument is not a tensor of floating-point numbers.
        ValueError: if the number of budgets differs, or is zero, or a number is not finite.

    Example:
        >>> budgets = Budgets(costs, limits)  # costs (m, S, A), limits (m,)
        >>> step = FTRLStep(mdp, jin_luo(mdp), constraints=budgets)
    """

    costs: Tensor
    limits: Tensor

    def __init__(self, costs: Tensor, limits: Tensor) -> None:
        super().__init__()
        costs, limits = as_tensor(costs), as_tensor(limits)
        for name, x, least in (("costs", costs, 3), ("limits", limits, 1)):
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            fine = isinstance(x, Tensor) and x.is_floating_point()
            check_that(fine, name, "a tensor of floating-point numbers", found, TypeError)
            shape = "shape (*batch, m, S, A)" if least == 3 else "shape (*batch, m)"
            check_that(x.dim() >= least, name, shape, tuple(x.shape))
        fine = costs.shape[-3] == limits.shape[-1] > 0
        counts = f"{limits.shape[-1]} limits for {costs.shape[-3]} rows of costs"
        check_that(fine, "limits", "one limit per budget and at least one budget", counts)
        # Inside a graph, values are checked when the operator makes its own budgets.
        hidden = torch.compiler.is_compiling()
        if not hidden and len(wrong := (~limits.isfinite()).nonzero()):
            raise ValueError(
                f"limits: entry {tuple(wrong[0].tolist())} is {float(limits[tuple(wrong[0])])}; "
                "expected a finite number. Leave out a budget that has no limit"
            )
        self.register_buffer("costs", costs)
        self.register_buffer("limits", limits)

    def __len__(self) -> int:
        return self.limits.shape[-1]

    def __repr__(self) -> str:
        return f"Budgets({len(self)} budgets, costs {tuple(self.costs.shape)})"

    def on_existing_pairs(self, mdp: LayeredMDP) -> Tensor:
        """The costs, zero on masked pairs."""
        return self.costs if bool(mdp.actions.all()) else self.costs.where(mdp.actions, 0.0)


def check_budgets(budgets: Budgets, mdp: LayeredMDP) -> None:
    """Check that these are budgets, and that their costs fit an MDP."""
    check_type("constraints", budgets, Budgets, "occ.Budgets(costs, limits)")
    fine, shape = budgets.costs.shape[-2:] == mdp.actions.shape, tuple(budgets.costs.shape)
    expected = f"costs of shape (*batch, m, {mdp.num_states}, {mdp.num_actions})"
    check_that(fine, "constraints", expected, shape)
    for name, x in (("costs", budgets.costs), ("limits", budgets.limits)):
        if x.dtype != mdp.dtype or x.device != mdp.device:
            raise ValueError(
                f"constraints: {name} are {x.dtype} on {x.device}, the MDP {mdp.dtype} on "
                f"{mdp.device}; convert one of them"
            )
    wrong = (~budgets.costs.isfinite() & mdp.actions).nonzero()
    if len(wrong):
        *batch, budget, state, action = wrong[0].tolist()
        raise ValueError(
            f"constraints: the cost of {element_of(batch)}budget {budget}, "
            f"{mdp.locate(state)}, action {action} is {float(budgets.costs[tuple(wrong[0])])}; "
            "expected a finite number"
        )


def least_cost(mdp: LayeredMDP, costs: Tensor) -> Tensor:
    """min over q in Omega of ⟨costs, q⟩, `(*batch,)`, by backward induction."""
    value = optimal_policy(mdp, costs).value
    return (value[..., : mdp.layer_sizes[0]] * mdp.initial).sum(-1)


# -- Checks of the arguments of a step, with the error messages of both backends -------------------
#
# They raise a TypeError for what is no tensor and no number, and a ValueError for anything else.


def check_arguments(
    mdp: LayeredMDP,
    loss: Tensor,
    t: Tensor | float,
    start: Tensor,
    parameters: Mapping[str, torch.Size],
) -> tuple[Tensor, int]:
    """Check shapes and types of a step's arguments.

    Args:
        parameters: the batch shape of every parameter by name.

    Returns:
        t as a tensor, and the number of batch dimensions.
    """
    check_like("cumulative_loss", loss, mdp)
    t = check_episode(t, mdp)
    check_like("warm_start", start, mdp)
    shapes = {"cumulative_loss": loss.shape[:-2]}
    shapes |= {f"regularizer: {name}": shape for name, shape in parameters.items()}
    shapes |= {"mdp": mdp.batch_shape, "t": t.shape, "warm_start": start.shape[:-2]}
    check_batches(shapes)
    return t, max(map(len, shapes.values()))


def check_episode(t: Any, mdp: LayeredMDP) -> Tensor:
    """Check that t is a number or a tensor, and return it as a tensor."""
    check_type("t", t, Tensor | int | float, "a number or a tensor")
    try:
        return torch.as_tensor(t, dtype=mdp.dtype, device=mdp.device)
    except (OverflowError, RuntimeError):
        raise ValueError(
            f"t: expected an episode of at least 1 and below {torch.finfo(mdp.dtype).max:.1e}, "
            "the largest number of the MDP's type; got a larger integer"
        ) from None


def check_types(regularizer: nn.Module, mdp: LayeredMDP) -> None:
    """Check that parameters have the number type and the device of the MDP."""
    for name, parameter in regularizer.named_parameters():
        if parameter.dtype != mdp.dtype or parameter.device != mdp.device:
            raise ValueError(
                f"regularizer: {name} is {parameter.dtype} on {parameter.device}, the MDP "
                f"{mdp.dtype} on {mdp.device}; use step.to(...) for both"
            )


def check_reachable(mdp: LayeredMDP) -> None:
    """Check that some policy reaches every state."""
    unreachable = (~mdp.reachable).nonzero()
    if len(unreachable):
        raise ValueError(
            f"mdp: {len(unreachable)} states cannot be reached, the first is "
            f"{mdp.locate(int(unreachable[0]))}; the set Omega of occupancy measures has no "
            "interior then. Remove them with mdp.prune()"
        )


def check_probabilities(mdp: LayeredMDP) -> None:
    """Check probabilities that were not checked yet, which are not those of the step's own MDP."""
    if not all(bool(p.isfinite().all()) for p in mdp.probabilities):
        raise ValueError(
            "mdp: a probability is not finite; make it with LayeredMDP(transitions, ...), "
            "whose error names the place"
        )
    check_reachable(mdp)


def check_layout(mdp: LayeredMDP, own: LayeredMDP) -> LayeredMDP:
    """Check that an MDP has the layout of the step's own one, and return it."""
    check_kind("mdp", mdp, LayeredMDP)
    if mdp.layer_sizes != own.layer_sizes or not torch.equal(mdp.actions, own.actions):
        advice = "make it with mdp.with_transitions, or make another FTRLStep"
        raise unexpected("mdp", f"the layout of {own}", f"{mdp}; {advice}")
    return mdp


def check_batches(shapes: Mapping[str, torch.Size]) -> None:
    """Check that each batch shape broadcasts against those before it; the message names it."""
    batch = torch.Size()
    for name, shape in shapes.items():
        try:
            batch = broadcast(batch, shape)
        except RuntimeError:
            expected = f"a batch shape that broadcasts against {tuple(batch)}"
            raise unexpected(name, expected, tuple(shape)) from None


def check_like(name: str, x: Tensor, mdp: LayeredMDP) -> None:
    """Check that x is a tensor `(*batch, S, A)` with the number type and the device of the MDP."""
    check_table(name, x, mdp)
    if x.layout is not torch.strided:
        raise ValueError(f"{name}: is a tensor of layout {x.layout}; convert it with .to_dense()")
    check_dtype(name, x, mdp, "the MDP")


def check_values(mdp: LayeredMDP, loss: Tensor, start: Tensor, t: Tensor, *, zeros: bool) -> None:
    """Check the values of plain tensors; runs inside every transform.

    Args:
        zeros: whether `start` may have zeros.
    """
    early = (~((t >= 1) & t.isfinite())).nonzero()
    if len(early):
        raise ValueError(f"t: expected an episode of at least 1, got {float(t[tuple(early[0])])}")
    wrong = (~loss.isfinite() & mdp.actions).nonzero()
    if len(wrong):
        raise ValueError(
            f"cumulative_loss: {place_of(mdp, wrong[0])} is {float(loss[tuple(wrong[0])])}; "
            "expected a finite number"
        )
    good = (start >= 0) if zeros else (start > 0)
    wrong = (~(good & start.isfinite()) & mdp.actions).nonzero()
    if len(wrong):
        expected = "an occupancy of at least 0" if zeros else "a positive occupancy"
        raise ValueError(
            f"warm_start: {place_of(mdp, wrong[0])} is {float(start[tuple(wrong[0])])}; "
            f"expected {expected}"
        )


def event_dims_of(mdp: LayeredMDP) -> tuple[int, ...]:
    """Return the number of event dimensions of each of the probabilities."""
    return (1, *(layer.event_dims for layer in mdp.layers))


def place_of(mdp: LayeredMDP, index: Tensor) -> str:
    """Return the batch element, layer, state and action of an index, for error messages."""
    *batch, state, action = index.tolist()
    return f"{element_of(batch)}{mdp.locate(state)}, action {action}"


def element_of(batch: Sequence[int]) -> str:
    """Return the beginning of an error message: the batch element, if there is a batch."""
    return f"batch element {tuple(batch)}, " if batch else ""
