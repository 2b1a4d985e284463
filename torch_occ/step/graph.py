"""What surrounds a step in a network: other number types, autocast, inference mode."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from torch_occ._support.fingerprints import UnhashableError, fingerprints
from torch_occ._support.private import (
    constant_in_graphs,
    outside_graphs,
    refuse_compiled_derivatives,
    with_autograd,
)
from torch_occ.mdp.checks import as_tensor
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.parameters import with_rank
from torch_occ.step.solution import Budgets, Solution

if TYPE_CHECKING:
    from torch_occ.step.ftrl import FTRLStep


def promote(loss: Tensor, mdp: LayeredMDP) -> Tensor:
    """Convert a loss, from a float32 network for example, to the number type of the MDP.

    Autograd converts its gradient back. Other objects are returned as they are.
    """
    dtype = mdp.dtype
    if getattr(loss, "dtype", dtype) is dtype:  # isinstance would cost a microsecond
        return loss
    loss = as_tensor(loss)
    return loss.to(dtype) if isinstance(loss, Tensor) and loss.is_floating_point() else loss


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
# With the engine, the derivative needs no second solve; otherwise the step is solved again from its
# solution. Outside of torch.compile the operators are not used.


_steps: WeakValueDictionary[str, FTRLStep] = WeakValueDictionary()
_numbers = itertools.count()


def enroll(step: FTRLStep) -> str:
    """Enter a step into the table, and return its name there: a number, and what it solves.

    That is a hash of all that the result depends on, apart from the operator's tensors.
    """
    composition, modules = step.evaluator.composition, vars(torch.nn.Module()).keys()
    rows = (composition.terms, [row for _, row in composition.others], step.evaluator.names)
    parts = [part for other, _ in composition.others for part in other.modules()]
    own = [[{k: vars(x)[k] for k in vars(x).keys() - modules}, [*x.buffers(False)]] for x in parts]
    solved = [step.mdp, repr(rows), repr(step.options), [*map(type, parts)], own]
    try:
        signature = fingerprints(step=solved)["step"]
    except (RuntimeError, UnhashableError):  # tensors of torch.func; attributes such as a lock
        signature = uuid.uuid4().hex  # equal to no other
    name = f"step {next(_numbers)} {signature}"
    _steps[name] = step
    return name


class Facts(NamedTuple):
    """What a graph takes for granted about a step of this name."""

    dtype: torch.dtype
    device: torch.device
    plain: bool  # whether the regularizer has no parameters
    timed: bool  # whether it depends on t
    movable: bool  # whether the MDP requires gradients
    compiled: bool


@constant_in_graphs
def facts_of(name: str) -> Facts:
    """Return the facts of a step; a graph that read them one by one would check all of them."""
    refuse_compiled_derivatives()
    step = step_of(name)
    mdp, plain = step.mdp, not step.evaluator.names
    movable = any(p.requires_grad for p in mdp.probabilities)
    known = (plain, step.schedule is not None, movable, step.expected_backend == "engine")
    return Facts(mdp.dtype, mdp.device, *known)


def solve_in_graph(
    step: FTRLStep,
    loss: Tensor,
    t: Tensor | float | None,
    warm_start: Tensor | None,
    mdp: LayeredMDP | None,
    check: bool,
    budgets: Budgets | None,
    multipliers: Tensor | None,
) -> Solution:
    """Solve a step inside a graph that is being recorded.

    With `mdp` or without `check` it cannot be part of a graph. torch.compile then divides the
    graph there; torch.export, which cannot, raises a NotImplementedError.
    """
    facts, reason = facts_of(step.name_in_graphs), None
    if mdp is not None or not check:
        name = "check=False" if mdp is None else "mdp"
        reason = f"a step with {name} is not an operator of a graph; call it without compiling"
    elif facts.movable:
        reason = (
            "a step whose MDP requires gradients is not an operator of a graph; detach the "
            "probabilities, or call it without compiling"
        )
    if reason is None:
        loss = loss.to(facts.dtype) if loss.is_floating_point() else loss
        now, parameters = None, []
        if facts.timed or not facts.plain or t is not None:
            now = torch.as_tensor(step.episode(t), dtype=facts.dtype, device=facts.device)
            parameters = [] if facts.plain else list(step.evaluator.parameters(now))
        given = [] if budgets is None else [budgets.costs, budgets.limits]
        given += [] if multipliers is None else [multipliers]
        found = solve_step(step.name_in_graphs, loss, now, warm_start, parameters, given)
        q, v, certificate, *prices = found
        return Solution(q, v, certificate, facts.compiled, *prices)
    if not torch.compiler.is_dynamo_compiling():
        raise NotImplementedError(f"torch.export: {reason}")
    named = {"mdp": mdp, "check": check, "constraints": budgets, "multipliers": multipliers}
    return _solve_outside(step, loss, t, warm_start=warm_start, **named)


#: Solve a step between two graphs, as without torch.compile.
_solve_outside = outside_graphs(lambda step, *given, **named: step.solve(*given, **named))


def step_of(name: str) -> FTRLStep:
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


Tensors = Sequence[Tensor]


def _solve(
    name: str, loss: Tensor, t: Any, start: Tensor | None, parameters: Tensors, budgets: Tensors
) -> Solution:
    """Solve a step at these parameters; `budgets` are costs, limits, and a start of multipliers."""
    given: Sequence[Any] = (Budgets(*budgets[:2]), *budgets[2:]) if budgets else ()
    t = 1.0 if t is None else t
    return step_of(name).solve_at(parameters, loss, t, start, None, True, *given)


def as_operator(
    schema: str,
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup: Callable[..., None] | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Make a function an operator of torch, with empty results, and a derivative and its setup.

    torch.library.custom_op does the same, but every call takes 20 microseconds longer.
    """

    def make(function: Callable[..., Any]) -> Any:
        name = f"torch_occ::{function.__name__}"
        library.define(schema)
        library.impl(function.__name__, function, "CompositeExplicitAutograd")
        torch.library.register_fake(name, fake, lib=library)
        torch.library.register_autograd(name, backward, setup_context=setup, lib=library)
        return getattr(torch.ops.torch_occ, function.__name__).default

    return make


library = torch.library.Library("torch_occ", "FRAGMENT")


def empty_solution(
    name: str, loss: Tensor, t: Any, start: Any, parameters: Tensors, budgets: Tensors
) -> list[Tensor]:
    """Return what `solve_step` returns, without numbers."""
    step = step_of(name)
    shapes = [loss.shape[:-2], step.mdp.batch_shape, *([] if t is None else [t.shape])]
    shapes += step.evaluator.batch_shapes(parameters).values()
    shapes += [] if start is None else [start.shape[:-2]]
    shapes += [x.shape[:-dims] for x, dims in zip(budgets, (3, 1, 1), strict=False)]
    batch = torch.broadcast_shapes(*shapes)
    q = loss.new_empty(*batch, *loss.shape[-2:], dtype=step.mdp.dtype)
    sizes = [loss.shape[-2], 5] + [x.shape[-1] for x in budgets[1:2] for _ in range(2)]
    return [q, *(q.new_empty(*batch, size) for size in sizes)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.name, loss, t, _, parameters, budgets = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    found = [output[0], *output[3:4]]
    ctx.ends = len(found), len(found) + len(parameters)
    ctx.save_for_backward(loss, t, *found, *parameters, *budgets)


def _pull_back(ctx: Any, bars: list[Any]) -> tuple[Any, ...]:
    (loss, t, *rest), (one, two) = ctx.saved_tensors, ctx.ends
    found, parameters, budgets = rest[:one], rest[one:two], rest[two:]
    _, _, by_t, _, *needed = ctx.needs_input_grad
    more = by_t or any(map(any, needed))
    given = (ctx.name, [*bars[:2], *bars[3:]], found, loss, t, parameters, budgets, more)
    loss_bar, *others = pull_back_step(*given)
    t_bar = others.pop(0) if more and t is not None else None
    others += [None] * (len(rest) - one)
    count = len(parameters)
    return None, loss_bar, t_bar, None, others[:count], others[count : count + len(budgets)]


@as_operator(
    "solve_step(str name, Tensor loss, Tensor? t, Tensor? start, Tensor[] parameters, "
    "Tensor[] budgets) -> Tensor[]",
    empty_solution,
    _pull_back,
    _save,
)
def solve_step(
    name: str,
    loss: Tensor,
    t: Tensor | None,
    start: Tensor | None,
    parameters: Tensors,
    budgets: Tensors,
) -> list[Tensor]:
    """Return q, v and the certificate; with budgets, also their multipliers and slack."""
    with with_autograd(), torch.no_grad():
        found = _solve(name, loss, t, start, parameters, budgets)
    # An operator must not return views; nor one tensor twice, as slack and multipliers may be.
    rest = [x.clone() for x in (found.multipliers, found.slack) if x is not None]
    return [x.contiguous() for x in (found.q, found.value, found.certificate, *rest)]


def _moving(loss: Any, t: Any, parameters: Any, budgets: Any, more: bool) -> list[Any]:
    """Return what a derivative is taken in."""
    others = [*([] if t is None else [t]), *parameters, *budgets[:2]]
    return [loss, *(others if more else [])]


def _empty_bars(*given: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in _moving(*given[3:])]


def _refuse_second(ctx: Any, *bars: Any) -> None:
    raise NotImplementedError(
        "a compiled or exported step has first derivatives only; call it without compiling"
    )


@as_operator(
    "pull_back_step(str name, Tensor?[] bars, Tensor[] found, Tensor loss, Tensor? t, "
    "Tensor[] parameters, Tensor[] budgets, bool more) -> Tensor[]",
    _empty_bars,
    _refuse_second,
)
def pull_back_step(
    name: str,
    bars: Sequence[Tensor | None],
    found: Tensors,
    loss: Tensor,
    t: Tensor | None,
    parameters: Tensors,
    budgets: Tensors,
    more: bool,
) -> list[Tensor]:
    """Return the derivative in the loss; with `more`, also in t, the parameters and the budgets.

    `found` are q, and the multipliers of budgets.
    """
    step = step_of(name)
    if not budgets and (bar := step.pull_back(parameters, loss, t, found[0], bars, more)):
        return bar
    with with_autograd(), torch.enable_grad():
        loss = loss.detach().requires_grad_()
        t = None if t is None else t.detach().requires_grad_(more)
        given, limits = (
            [x.detach().requires_grad_(more) for x in part] for part in (parameters, budgets[:2])
        )
        start = [*limits, *(x.detach() for x in found[1:])]
        again = _solve(name, loss, t, found[0].detach(), given, start)
        outputs = (again.q, again.value, again.multipliers, again.slack)
        pairs = [(x, bar) for x, bar in zip(outputs, bars, strict=False) if bar is not None]
        moving = _moving(loss, t, given, limits, more)
        solved, cotangents = zip(*pairs, strict=True)
        grads = torch.autograd.grad(solved, moving, cotangents, materialize_grads=True)
    return [x.clone(memory_format=torch.contiguous_format) for x in grads]


def _map(
    info: Any, in_dims: tuple[Any, ...], name: str, *given: Any
) -> tuple[list[Tensor], list[int]]:
    loss, t, start, parameters, budgets = given
    _, loss_dim, t_dim, start_dim, *dims = in_dims
    if any(dim is not None for part in dims for dim in part) or budgets:
        raise NotImplementedError(
            "torch.compile: a vmap over the parameters of a regularizer or with budgets cannot be "
            "compiled; give them a batch shape instead, or do not compile it"
        )
    parts = (loss, loss_dim, 2), (t, t_dim, 0), (start, start_dim, 2)
    rank = max(x.dim() - events - (dim is not None) for x, dim, events in parts if x is not None)

    # The new dimension goes in front, before `rank` dimensions of the batch.
    loss, t, start = (
        x if dim is None else with_rank(x.movedim(dim, -1), rank, events + 1).movedim(-1, 0)
        for x, dim, events in parts
    )
    loss = with_rank(loss, rank + 1, 2).expand(info.batch_size, *(-1,) * (rank + 2))
    return solve_step(name, loss, t, start, parameters, budgets), [0] * 3


torch.library.register_vmap("torch_occ::solve_step", _map, lib=library)
