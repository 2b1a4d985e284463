"""Checks of the arguments of a step, with the error messages of both backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_occ._support.private import forward_modes
from torch_occ.mdp.checks import broadcast, check_table
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.step.solution import Certified, Status


class SolveError(RuntimeError):
    """Raised when a step could not be certified. `solution` holds the uncertified result."""

    def __init__(self, message: str, solution: Certified) -> None:
        super().__init__(message)
        self.solution: Any = solution  # a Solution or a Projection


def check_arguments(
    mdp: LayeredMDP,
    loss: Tensor,
    t: Tensor | float,
    start: Tensor,
    parameters: dict[str, torch.Size],
) -> tuple[Tensor, dict[str, torch.Size]]:
    """Check shapes and types of a step's arguments.

    Args:
        parameters: the batch shape of every parameter, by the name in error messages.

    Returns:
        t as a tensor, and every batch shape by name.

    Raises:
        TypeError: if an argument is not a tensor, or t not a number.
        ValueError: if a shape, number type or device does not fit the MDP, or batch shapes do not
            broadcast.
    """
    check_like("cumulative_loss", loss, mdp)
    check_episode(t)
    t = torch.as_tensor(t, dtype=mdp.dtype, device=mdp.device)
    check_like("warm_start", start, mdp)
    shapes = {"cumulative_loss": loss.shape[:-2]} | parameters
    shapes |= {"mdp": mdp.batch_shape, "t": t.shape, "warm_start": start.shape[:-2]}
    check_batches(shapes)
    return t, shapes


def check_episode(t: Any) -> None:
    """Raise a TypeError if t is not a number or a tensor."""
    if not isinstance(t, Tensor | int | float):
        raise TypeError(f"t: expected a number or a tensor, got {type(t).__name__}")


def parameter_shapes(shapes: Mapping[str, torch.Size | Tensor]) -> dict[str, torch.Size]:
    """Return batch shapes of parameters by their names in error messages."""
    return {
        f"regularizer: {name}": x.shape if isinstance(x, Tensor) else x
        for name, x in shapes.items()
    }


def check_types(parameters: Mapping[str, Tensor], mdp: LayeredMDP) -> None:
    """Check that parameters have the number type and the device of the MDP.

    Raises:
        ValueError: if one does not; the message names it.
    """
    for name, parameter in parameters.items():
        if parameter.dtype != mdp.dtype or parameter.device != mdp.device:
            raise ValueError(
                f"regularizer: {name} is {parameter.dtype} on {parameter.device}, the MDP "
                f"{mdp.dtype} on {mdp.device}; use step.to(...) for both"
            )


def check_reachable(mdp: LayeredMDP) -> None:
    """Check that some policy reaches every state.

    Raises:
        ValueError: if a state cannot be reached; the message names the first one.
    """
    unreachable = (~mdp.reachable).nonzero()
    if len(unreachable):
        raise ValueError(
            f"mdp: {len(unreachable)} states cannot be reached, the first is "
            f"{mdp.locate(int(unreachable[0]))}; the set Omega of occupancy measures has no "
            "interior then. Remove them with mdp.prune()"
        )


def check_probabilities(mdp: LayeredMDP) -> None:
    """Check probabilities that are not those of the step's own MDP, and were not checked yet.

    Raises:
        ValueError: if one is not finite, or a state cannot be reached.
    """
    if not all(bool(p.isfinite().all()) for p in mdp.probabilities):
        raise ValueError(
            "mdp: a probability is not finite; make it with LayeredMDP(transitions, ...), "
            "whose error names the place"
        )
    check_reachable(mdp)


def check_layout(mdp: LayeredMDP, own: LayeredMDP) -> LayeredMDP:
    """Check that an MDP has the layout of the step's own one.

    Returns:
        The MDP.

    Raises:
        ValueError: if layer sizes or available actions differ.
    """
    if mdp.layer_sizes != own.layer_sizes or not torch.equal(mdp.actions, own.actions):
        raise ValueError(
            f"mdp: expected the layout of {own}, got {mdp}; "
            "make it with mdp.with_transitions, or make another FTRLStep"
        )
    return mdp


def check_batches(shapes: dict[str, torch.Size]) -> None:
    """Check that all batch shapes broadcast.

    Raises:
        ValueError: if a shape does not broadcast against those before it; the message names it.
    """
    batch = torch.Size()
    for name, shape in shapes.items():
        try:
            batch = broadcast(batch, shape)
        except RuntimeError:
            raise ValueError(
                f"{name}: expected a batch shape that broadcasts against {tuple(batch)}, "
                f"got {tuple(shape)}"
            ) from None


def check_transforms() -> None:
    """Refuse forward mode inside forward mode.

    torch loses tangents of a custom function there, and the result would be silently wrong.

    Raises:
        NotImplementedError: if two forward modes are active.
    """
    if forward_modes() > 1:
        raise NotImplementedError(
            "torch does not support forward mode inside forward mode here; "
            "use jacrev or grad for one of them"
        )


def check_like(name: str, x: Tensor, mdp: LayeredMDP) -> None:
    """Check that x is a tensor `(*batch, S, A)` with the number type and the device of the MDP.

    Raises:
        TypeError: if x is not a tensor.
        ValueError: if its shape, number type or device is wrong.
    """
    check_table(name, x, mdp)
    if x.dtype != mdp.dtype or x.device != mdp.device:
        raise ValueError(
            f"{name}: is {x.dtype} on {x.device}, the MDP {mdp.dtype} on {mdp.device}; "
            "convert one of them"
        )


def check_values(
    step_mdp: LayeredMDP, mdp: LayeredMDP, loss: Tensor, start: Tensor, t: Tensor, zeros: bool
) -> None:
    """Check the values of plain tensors; runs inside every transform.

    Args:
        step_mdp: the MDP of the step, which was checked when the step was made.
        zeros: whether `start` may have zeros.

    Raises:
        ValueError: if t is below 1, a state cannot be reached, or a number is not finite or has
            the wrong sign; the message names the place.
    """
    early = (~((t >= 1) & t.isfinite())).nonzero()
    if len(early):
        raise ValueError(f"t: expected an episode of at least 1, got {float(t[tuple(early[0])])}")
    if mdp is not step_mdp:
        check_probabilities(mdp)
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


def place_of(mdp: LayeredMDP, index: Tensor) -> str:
    """Return the batch element, layer, state and action of an index, for error messages."""
    *batch, state, action = index.tolist()
    element = f"batch element {tuple(batch)}, " if batch else ""
    return f"{element}{mdp.locate(state)}, action {action}"


def report(check: bool, solution: Certified, what: str = "the FTRL step") -> None:
    """Report failed elements of a solution if `check` is set; `what` names the problem.

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
