"""What surrounds a step in a network: other number types, autocast, inference mode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torch_occ._support.fingerprints import fingerprints
from torch_occ._support.private import outside_graphs, refuse_compiled_derivatives, with_autograd
from torch_occ.mdp.checks import as_tensor
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.step.solution import Solution

if TYPE_CHECKING:
    from torch_occ.step.ftrl import FTRLStep


def promote(loss: Tensor, mdp: LayeredMDP) -> Tensor:
    """Convert a loss of lower precision, from a float32 network for example, to that of the MDP.

    Autograd converts its gradient back. Other tensors are returned as they are.
    """
    dtype = mdp.dtype
    if getattr(loss, "dtype", dtype) is dtype:  # isinstance would cost a microsecond
        return loss
    loss = as_tensor(loss)
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        return loss
    return loss.to(dtype) if loss.dtype.itemsize < dtype.itemsize else loss


def autocasts(loss: Tensor) -> bool:
    """Return whether autocast is active; it would compute products of Newton's method in 16 bits.

    torch leaves double precision alone.
    """
    plain = getattr(loss, "dtype", None) in (torch.float64, None)
    return not plain and torch.is_autocast_enabled(loss.device.type)


def solve_plainly(
    solve: Callable[..., Solution],
    loss: Tensor,
    t: Tensor | float,
    warm_start: Tensor | None,
    multipliers: Tensor | None,
) -> Solution:
    """Solve a step without autocast and without inference mode.

    Newton's method needs autograd for Hessians, which inference mode excludes. The solution found
    there does not require gradients.
    """
    if not torch.is_inference_mode_enabled():
        with torch.autocast(loss.device.type, enabled=False):
            return solve(loss, t, warm_start=warm_start, multipliers=multipliers)
    with torch.inference_mode(False), torch.no_grad():
        # Autograd refuses tensors that were made in inference mode.
        start, prices = (x if x is None else x.clone() for x in (warm_start, multipliers))
        episode = t.clone() if isinstance(t, Tensor) else t
        return solve(loss.clone(), episode, warm_start=start, multipliers=prices)


# -- The step as an operator of torch, for torch.compile and torch.export --------------------------
#
# A compiled graph cannot look into Newton's method. It sees one operator, `torch_occ::solve_step`,
# of the loss, t, the warm start and the parameters of the regularizer, and
# `torch_occ::pull_back_step`, its derivative. Both run the step as usual. A graph holds tensors and
# names but no modules, so it refers to the step by its name in a table of this process.
#
# The derivative solves the step again, from the solution that it is given; this takes one or two
# iterations. Outside of torch.compile the operators are not used.


_steps: WeakValueDictionary[str, FTRLStep] = WeakValueDictionary()
_numbers = itertools.count()


def enroll(step: FTRLStep) -> str:
    """Enter a step into the table, and return its name there: a number, and what it solves."""
    name = f"step {next(_numbers)} {_signature(step)}"
    _steps[name] = step
    return name


def _signature(step: FTRLStep) -> str:
    """Return a hash of all that the result depends on, apart from the operator's tensors."""
    composition = step.evaluator.composition
    users = [f"{type(part).__module__}.{type(part).__qualname__}" for part, _ in composition.others]
    rows = (composition.terms, [row for _, row in composition.others], users, step.evaluator.names)
    try:
        return fingerprints(step=[step.mdp, repr(rows), repr(step.options)])["step"]
    except RuntimeError:  # made inside a transform of torch.func, whose tensors cannot be read
        return "inside a transform"


def solve_in_graph(
    step: FTRLStep,
    loss: Tensor,
    t: Tensor | float,
    warm_start: Tensor | None,
    check: bool,
    given: Mapping[str, Any],
) -> Solution:
    """Solve a step inside a graph that is being recorded.

    Args:
        given: other arguments of `FTRLStep.solve`. A step with one of them that is not None cannot
            be part of a graph. torch.compile then divides the graph there.

    Raises:
        NotImplementedError: if the graph cannot be divided, in torch.export.
    """
    refuse_compiled_derivatives()
    reason = _why_not(step, check, given)
    if reason is None:
        t = torch.as_tensor(t, dtype=step.mdp.dtype, device=step.mdp.device)
        parameters = list(step.evaluator.parameters(t))
        found = solve_step(step.name_in_graphs, loss, t, warm_start, parameters)
        return Solution(found[0], found[1], found[2], step.expected_backend)
    if not torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(f"torch.export: {reason}")
    return _solve_outside(step, loss, t, warm_start, check, given)


def _why_not(step: FTRLStep, check: bool, given: Mapping[str, Any]) -> str | None:
    """Return the reason why a step cannot be an operator in a graph, or None if it can."""
    for name, value in given.items():
        if value is not None:
            return f"a step with {name} is not an operator of a graph; call it without compiling"
    if not check:
        return "a step with check=False is not an operator of a graph; call it without compiling"
    if any(p.requires_grad for p in step.mdp.probabilities):
        return (
            "a step whose MDP requires gradients is not an operator of a graph; detach the "
            "probabilities, or call it without compiling"
        )
    return None


@outside_graphs
def _solve_outside(
    step: FTRLStep,
    loss: Tensor,
    t: Tensor | float,
    warm_start: Tensor | None,
    check: bool,
    given: Mapping[str, Any],
) -> Solution:
    """Solve a step between two graphs, as without torch.compile."""
    return step.solve(loss, t, warm_start=warm_start, check=check, **given)


def _step_of(name: str) -> FTRLStep:
    """Return the step of this name; in another process, one that solves the same."""
    step = _steps.get(name)
    if step is not None:
        return step
    signature = name.split()[-1]
    for other, candidate in list(_steps.items()):
        if other.split()[-1] == signature:
            return candidate
    raise RuntimeError(
        f"{name}: this process has no FTRLStep with the MDP, the regularizer and the options of "
        "this compiled or exported program. Keep the module that it was made with, or make an "
        "equal FTRLStep before the program is run"
    )


@torch.library.custom_op(
    "torch_occ::solve_step",
    mutates_args=(),
    schema="(str name, Tensor loss, Tensor t, Tensor? start, Tensor[] parameters)"
    " -> (Tensor, Tensor, Tensor)",
)
def solve_step(
    name: str, loss: Tensor, t: Tensor, start: Tensor | None, parameters: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, v and the certificate of a step."""
    with with_autograd(), torch.no_grad():
        found = _step_of(name).solve_at(parameters, loss, t, start)
    return found.q, found.value, found.certificate


@solve_step.register_fake
def _(
    name: str, loss: Tensor, t: Tensor, start: Tensor | None, parameters: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    step = _step_of(name)
    shapes = [loss.shape[:-2], t.shape, step.mdp.batch_shape]
    shapes += step.evaluator.batch_shapes(parameters).values()
    if start is not None:
        shapes.append(start.shape[:-2])
    batch = torch.broadcast_shapes(*shapes)
    q = loss.new_empty(*batch, *loss.shape[-2:], dtype=step.mdp.dtype)
    return q, q.new_empty(*batch, loss.shape[-2]), q.new_empty(*batch, 5)


@torch.library.custom_op(
    "torch_occ::pull_back_step",
    mutates_args=(),
    schema="(str name, Tensor q_bar, Tensor v_bar, Tensor q, Tensor loss, Tensor t, "
    "Tensor[] parameters) -> Tensor[]",
)
def pull_back_step(
    name: str,
    q_bar: Tensor,
    v_bar: Tensor,
    q: Tensor,
    loss: Tensor,
    t: Tensor,
    parameters: Sequence[Tensor],
) -> list[Tensor]:
    """Return the derivatives in the loss, t and the parameters."""
    with with_autograd(), torch.enable_grad():
        loss, t, *given = (x.detach().requires_grad_() for x in (loss, t, *parameters))
        found = _step_of(name).solve_at(given, loss, t, q)
        grads = torch.autograd.grad(
            (found.q, found.value), (loss, t, *given), (q_bar, v_bar), materialize_grads=True
        )
    # An operator must not return one tensor twice, nor a view of an input.
    return [x.clone() for x in grads]


@pull_back_step.register_fake
def _(
    name: str,
    q_bar: Tensor,
    v_bar: Tensor,
    q: Tensor,
    loss: Tensor,
    t: Tensor,
    parameters: Sequence[Tensor],
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (loss, t, *parameters)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.name, loss, t, _, parameters = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(output[0], loss, t, *parameters)


def _pull_back(ctx: Any, q_bar: Tensor, v_bar: Tensor, _: Any) -> tuple[Any, ...]:
    q, loss, t, *parameters = ctx.saved_tensors
    loss_bar, t_bar, *bars = pull_back_step(ctx.name, q_bar, v_bar, q, loss, t, parameters)
    return None, loss_bar, t_bar, None, bars


solve_step.register_autograd(_pull_back, setup_context=_save)


@solve_step.register_vmap
def _(
    info: Any,
    in_dims: tuple[Any, ...],
    name: str,
    loss: Tensor,
    t: Tensor,
    start: Tensor | None,
    parameters: Sequence[Tensor],
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    _, loss_dim, t_dim, start_dim, parameter_dims = in_dims
    if any(dim is not None for dim in parameter_dims):
        raise NotImplementedError(
            "torch.compile: a vmap over the parameters of a regularizer cannot be compiled; give "
            "the parameters a batch shape instead, or do not compile it"
        )
    rank = max(
        x.dim() - events - (dim is not None)
        for x, events, dim in ((loss, 2, loss_dim), (t, 0, t_dim), (start, 2, start_dim))
        if x is not None
    )

    def front(x: Tensor, dim: int | None, events: int) -> Tensor:
        """Put the new dimension in front, before `rank` dimensions of the batch."""
        x = x.unsqueeze(0) if dim is None else x.movedim(dim, 0)
        return x.reshape(x.shape[0], *(1,) * (rank + events + 1 - x.dim()), *x.shape[1:])

    loss = front(loss, loss_dim, 2).expand(info.batch_size, *(-1,) * (rank + 2))
    start = None if start is None else front(start, start_dim, 2)
    found = solve_step(name, loss, front(t, t_dim, 0), start, parameters)
    return found, (0, 0, 0)
