"""Losses for networks: Fenchel-Young, expected cost, likelihood of demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_occ._support.private import (
    carries_derivative,
    in_forward_mode,
    outside_graphs,
    values_are_hidden,
    with_autograd,
)
from torch_occ.mdp.checks import as_tensor, broadcast, check_kind, check_that
from torch_occ.mdp.layered import LayeredMDP, remembered
from torch_occ.mdp.occupancy import flow_of, flow_residual, flow_source, join
from torch_occ.regularizers.base import total
from torch_occ.regularizers.terms import keep
from torch_occ.step.entropic import entropy_of
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.graph import (
    as_operator,
    autocasts,
    empty_solution,
    facts_of,
    promote,
    step_of,
)
from torch_occ.step.implicit import Known
from torch_occ.step.solution import (
    Budgets,
    Solution,
    check_batches,
    check_like,
    element_of,
    place_of,
)

# -- Targets: occupancy measures that a plan should equal, checked before they are used ------------


def check_target(
    mdp: LayeredMDP, target: Tensor, budgets: Budgets | None = None, empirical: bool = False
) -> Tensor:
    """Check that a target is an occupancy measure that meets the budgets, up to a solver's errors.

    An empirical one need not be a flow, but has mass one per layer. Return it in the number type of
    the MDP, with tiny negative numbers set to zero.
    """
    given, eps = target, torch.finfo(mdp.dtype).eps
    if isinstance(target, Tensor) and target.is_floating_point():
        given, eps = target.to(mdp.dtype), max(eps, torch.finfo(target.dtype).eps)
    tolerance = max(1e-6, eps**0.5)  # as of a linear-programming solver
    check_like("target", given, mdp)
    if values_are_hidden():
        return given.clamp(min=0.0)
    plain = given.detach()
    least = float(plain.amin()) if plain.numel() else 0.0
    rows, sums = _probes(mdp, empirical)
    off = ((plain.flatten(-2).unsqueeze(-2) @ rows.mT).squeeze(-2) - sums).abs()
    if not (least >= -tolerance and bool((off <= tolerance / 100).all())):
        _complain(mdp, plain, tolerance, empirical)
    if budgets is not None:
        _check_budgets(mdp, plain, budgets, tolerance)
    return given if least >= 0 else given.clamp(min=0.0)


def _complain(mdp: LayeredMDP, target: Tensor, tolerance: float, empirical: bool) -> None:
    """Raise the error of a target, if it violates an equation by more than the tolerance."""
    outside = ~target.isfinite() | (target < -tolerance), "; expected an occupancy of at least 0"
    missing = (target > tolerance) & ~mdp.actions, ", but this action does not exist"
    for where, why in (outside, missing):
        if len(wrong := where.nonzero()):
            found = f"{place_of(mdp, wrong[0])} is {float(target[tuple(wrong[0])])}"
            raise ValueError(f"target: {found}{why}")
    mass = target.sum(-1)
    if empirical:  # one in every layer
        mass = mass.new_zeros(*mass.shape[:-1], mdp.horizon).index_add(-1, mdp.layer, mass)
        due = torch.ones_like(mass)
    else:
        due = flow_of(mdp).inflow(target.detach()) + flow_source(mdp)
    off = (mass - due).abs().detach()
    if not len(wrong := (~(off <= tolerance)).nonzero()):
        return
    *batch, i = wrong[0].tolist()
    held, arrives = (float(x.expand_as(off)[tuple(wrong[0])]) for x in (mass, due))
    place = f"{element_of(batch)}{f'layer {i}' if empirical else mdp.locate(i)}"
    why = "expected 1; divide the visits by the number of trajectories"
    if not empirical:
        why = (
            f"but {arrives:.6g} arrives there, so the target is no occupancy measure of this MDP; "
            "make one with occupancy(mdp, policy), or use negative_log_likelihood for "
            "demonstrations"
        )
    raise ValueError(f"target: {place} has the mass {held:.6g}, {why}")


@remembered
def _probes(mdp: LayeredMDP, empirical: bool) -> tuple[Tensor, Tensor]:
    """Two random sums of the equations of a target: `(*batch, 2, S * A)`, and what they equal.

    Where an equation is violated by r, so are almost surely both of them, by about r (Freivalds).
    """
    (S, A), draw = mdp.actions.shape, torch.Generator().manual_seed(0)
    found = torch.randn(2, *(1 for _ in mdp.batch_shape), S, A + 1, generator=draw)
    x, masked = found[..., 0].to(mdp.initial), found[..., 1:].to(mdp.initial)
    if empirical:
        x = x[..., mdp.layer]
        rows, sums = x.unsqueeze(-1), x[..., [part.start for part in mdp.layer_slices]]
    else:
        rows, sums = x.unsqueeze(-1) - flow_of(mdp).lookahead(x), x * flow_source(mdp)
    rows = torch.where(mdp.actions, rows, masked).detach()
    return rows.flatten(-2).movedim(0, -2).contiguous(), sums.sum(-1).movedim(0, -1).detach()


def _check_budgets(mdp: LayeredMDP, target: Tensor, budgets: Budgets, tolerance: float) -> None:
    if carries_derivative(budgets.costs, budgets.limits):
        raise NotImplementedError(
            "fenchel_young_loss is not differentiable in budgets; detach costs and limits, or use "
            "expected_cost"
        )
    costs = budgets.on_existing_pairs(mdp)
    spent = (costs * target.unsqueeze(-3)).sum((-2, -1))
    excess = spent - budgets.limits
    wrong = (excess > tolerance * (1 + budgets.limits.abs())).nonzero()
    if len(wrong):
        *batch, budget = wrong[0].tolist()
        limit = float(budgets.limits.expand_as(excess)[tuple(wrong[0])])
        raise ValueError(
            f"target: {element_of(batch)}budget {budget}: its expected cost is "
            f"{float(spent.expand_as(excess)[tuple(wrong[0])]):.6g}, the limit {limit:.6g}"
        )


# -- The Fenchel-Young loss of a target occupancy measure (Blondel, Martins and Niculae, 2020) -----
#
# It is convex in the loss, nonnegative, and zero exactly if the step answers with the target. Its
# gradient in the loss is target - q, and its second derivative is Pi (torch_occ.step.implicit).
# First derivatives of the minimum are those of ⟨q, loss⟩ + psi_t(q) - ⟨v, E q - b⟩ with q and v
# held fixed (the envelope theorem). For higher ones, the step is differentiated.


class Envelope(NamedTuple):
    """A rule of `Known` for a value whose first derivatives need no derivative of the solution."""

    value: Tensor
    slope: Tensor  # the derivative in the first input
    again: Callable[..., Tensor]  # the value; derivatives of any order are right
    once: Callable[..., Tensor] | None = None  # the value; first derivatives are right
    kept: int = 0

    def of(self, *inputs: Tensor) -> Tensor:
        """Return the value as a function of these inputs."""
        found: Tensor = Known.apply(self, *inputs)[0]
        return found

    def outputs(self) -> tuple[Tensor]:
        return (self.value.detach(),)

    def pull_back(self, _: Any, inputs: Sequence[Any], needed: Sequence[bool], bars: Any) -> Any:
        if any(needed[1:]):
            return None
        found = bars[0].unsqueeze(-1).unsqueeze(-1) * self.slope
        return [found.sum_to_size(inputs[0].shape).to(inputs[0].dtype), *[None] * len(needed[1:])]

    def replay(self, _: Any, inputs: Sequence[Tensor], bars: Any, more: bool) -> Any:
        return (self.once if self.once and not more else self.again)(*inputs), bars


def _model(step: FTRLStep, mdp: LayeredMDP | None) -> LayeredMDP:
    """Return the MDP of a call; a TypeError if the first argument is no step."""
    check_kind("step", step, FTRLStep)
    return step.mdp if mdp is None else mdp


def fenchel_young_loss(
    step: FTRLStep,
    loss: Tensor,
    target: Tensor,
    t: Tensor | float | None = None,
    *,
    warm_start: Tensor | None = None,
    mdp: LayeredMDP | None = None,
    empirical: bool = False,
) -> Tensor:
    """Compute the Fenchel-Young loss between predicted losses and a target.

        ⟨target, loss⟩ + psi_t(target) - min over q in Omega of [⟨q, loss⟩ + psi_t(q)]

    The gradient in the loss is exact: target - q, with q = step(loss, t). It costs no linear solve.
    The derivatives in t and in the parameters of psi are exact too, and so are second derivatives
    (but NaN in the power of `Tsallis`, twice, at a target with zeros).

    The target may have zeros: a vertex of Omega, such as a shortest path. Where psi_t(target) is
    not finite, as with a `LogBarrier` at a vertex, this constant is left out. The value is then the
    loss up to a constant, and may be negative; its gradient in the loss is the same. Do not learn
    the parameters of psi with such targets: what is left has no minimum in them. A regularizer of
    your own is finite at zeros if it writes x log x as `-torch.special.entr(x)`.

    Args:
        step: its regularizer is psi.
        loss: the predicted losses, `(*batch, S, A)`.
        target: occupancy measures, `(*batch, S, A)`. `occupancy(mdp, policy)` makes one.
        t: the episode, as in the step.
        warm_start: where the step starts, as in `FTRLStep.solve`.
        mdp: other probabilities, as in `FTRLStep.solve`.
        empirical: whether the target may be the mean visits of a few trajectories, which are not
            exactly a flow (maximum-entropy inverse reinforcement learning). The gradient is the
            same, target - q; the value may be negative.

    Returns:
        One number per element, `(*batch,)`.

    Raises:
        ValueError: if the target is not an occupancy measure of the MDP; the message names the
            place. Inside transforms of torch.func the values of the target are not checked.
        NotImplementedError: if the budgets of the step require gradients.
        SolveError, TypeError, ValueError: as the step.
    """
    if torch.compiler.is_compiling():
        facts = facts_of(step.name_in_graphs)
        fixed = (target, t, *(() if facts.plain else step.parameters()))
        moving = facts.movable or any(isinstance(x, Tensor) and x.requires_grad for x in fixed)
        if moving or mdp is not None:
            named: Any = {"warm_start": warm_start, "mdp": mdp, "empirical": empirical}
            return _between_graphs(step, loss, target, t, **named)
        now = torch.as_tensor(step.episode(t), dtype=facts.dtype, device=facts.device)
        return fenchel_young(step.name_in_graphs, loss, target, now, warm_start, empirical)[0]
    model, evaluator, t = _model(step, mdp), step.evaluator, step.episode(t)

    def in_torch(loss: Tensor) -> Tensor:
        aim = check_target(model, target, step.constraints, empirical)
        now = torch.as_tensor(t, dtype=model.dtype, device=model.device)
        moving = model.probabilities if carries_derivative(*model.probabilities) else ()
        loss = keep("pair", model, loss.to(model.dtype), 0.0)
        constant = step.regularizer(aim, now, model)
        finite = constant.detach().isfinite()
        if values_are_hidden() or not bool(finite.all()):
            # Derivatives of the infinite elements would be NaN, even behind a `where`.
            inside = torch.where(finite[..., None, None], aim, step.interior)
            constant = torch.where(finite, step.regularizer(inside, now, model), 0.0)
        given = (loss, aim, now, *evaluator.parameters(now), *moving)
        count = len(given) - len(moving)

        def least(solution: Solution | None, *given: Tensor) -> Tensor:
            (loss, aim, t, *parameters), moved = given[:count], given[count:]
            own = model.with_probabilities(*moved) if moved else model
            held = solution is not None and not moved
            if solution is None:
                others = (warm_start, own if moved else mdp, True, step.constraints)
                solution = step.solve_at(parameters, loss, t, *others)
            # Where q underflows, its derivative is zero, and that of psi infinite.
            q = solution.q.clamp(min=torch.finfo(model.dtype).tiny)
            evaluate = evaluator.bind(parameters, t.expand(q.shape[:-2]))
            psi = total(own, evaluate(step.regularizer.read(own, q)))
            value = ((q - aim) * loss).sum((-2, -1)) + psi
            return value if held else value - (solution.value * flow_residual(own, q)).sum(-1)

        if values_are_hidden() or in_forward_mode():
            return constant - least(None, *given)
        with torch.no_grad():
            solution = step.solve(loss, t, warm_start=warm_start, mdp=mdp)
            value = least(solution, *given)
        again, once = (partial(least, x) for x in (None, solution))
        return constant - Envelope(value, solution.q - aim, again, once).of(*given)

    return _compare(True, step, in_torch, loss, t, warm_start, mdp, target, empirical=empirical)


def _compare(
    fast: bool,
    step: FTRLStep,
    in_torch: Callable[[Tensor], Tensor],
    loss: Any,
    *given: Any,
    **kind: Any,
) -> Tensor:
    """Return a loss as the engine computes it, in closed form (both if `fast`), or in torch."""
    loss = as_tensor(loss)
    if autocasts(loss):
        with torch.autocast(loss.device.type, enabled=False):
            return _compare(fast, step, in_torch, loss, *given, **kind)
    fast = fast and not (values_are_hidden() or in_forward_mode())
    found = step.compare(loss, *given, **kind) if fast else None
    if found is None:
        shapes = [torch.Size(getattr(x, "shape", ())) for x in (loss, given[0], given[3])]
        name = "target" if len(given) == 4 else "states"
        check_batches({"cumulative_loss": shapes[0][:-2], "t": shapes[1], name: shapes[2][:-2]})
        found = _in_closed_form(step, loss, *given, **kind) if fast else None
    return in_torch(loss) if found is None else Envelope(*found, in_torch).of(loss)


def _in_closed_form(
    step: FTRLStep,
    loss: Tensor,
    t: Tensor | float,
    start: Tensor | None,
    mdp: LayeredMDP | None,
    *shown: Any,
    empirical: bool = False,
) -> tuple[Tensor, Tensor] | None:
    """Return a loss and its slope as `FTRLStep.compare` does, if psi is an entropy with kappa = 0.

    With the visits z of trajectories, the slope is z / w - y, where y has the policy of the step
    and E y = E z / w.
    """
    if not step.evaluator.closed or step.constraints is not None:
        return None
    model, paths = _model(step, mdp), len(shown) > 1
    equation, given = step.closed_form(loss, t, start, mdp)
    moving = any(getattr(x, "requires_grad", False) for x in (*given[2:], *shown))
    if equation.probabilities or moving:
        return None
    with torch.no_grad():
        weight, table = given[2].unsqueeze(-1), keep("pair", model, given[0], 0.0)
        if paths:
            aim = check_paths(model, *shown)[0]
        else:  # before the plan, which needs memory
            aim = check_target(model, shown[0], empirical=empirical)
            ones = aim.new_ones(aim.shape[-1], 1)
            logs = aim.clamp(min=torch.finfo(aim.dtype).tiny).log_().mul_(aim) @ ones
            mass = aim @ ones
            value = (weight * (logs - torch.xlogy(mass, mass))).sum((-2, -1))
            value = value + (aim * table).sum((-2, -1))
        found = equation.plan(*given, aim=aim / weight if paths else None)
        if found is None:
            return None
        plan = found[0]
        if paths:
            return -(aim * keep("pair", model, join(plan.logs, 2), 0.0)).sum((-2, -1)), plan.q
        return value - (flow_source(model) * plan.value).sum(-1), aim - plan.q


#: torch.compile divides the graph here, where more than the loss is differentiated.
_between_graphs = outside_graphs(fenchel_young_loss)


def _empty_losses(name: str, loss: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    target, t, start, _ = given
    q, *_ = empty_solution(name, loss, t, start, step_of(name).evaluator.parameters(t), [])
    slope = loss.new_empty(torch.broadcast_shapes(q.shape, target.shape))
    return q.new_empty(slope.shape[:-2]), slope


def _save_slope(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.shape = inputs[1].shape
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _scale_slope(ctx: Any, bar: Tensor, _: Any) -> tuple[Any, ...]:
    (slope,) = ctx.saved_tensors
    loss_bar = (bar[..., None, None] * slope).sum_to_size(ctx.shape).to(slope.dtype)
    return None, loss_bar, None, None, None, None


@as_operator(
    "fenchel_young(str name, Tensor loss, Tensor target, Tensor t, Tensor? start, bool empirical)"
    " -> (Tensor, Tensor)",
    _empty_losses,
    _scale_slope,
    _save_slope,
)
def fenchel_young(
    name: str, loss: Tensor, target: Tensor, t: Tensor, start: Tensor | None, empirical: bool
) -> tuple[Tensor, Tensor]:
    """Return the Fenchel-Young loss, and its slope in the loss."""
    step, slope = step_of(name), _empty_losses(name, loss, target, t, start, empirical)[1]
    if found := step.compare(loss, t, start, None, target, empirical=empirical):
        return found[0], found[1].to(slope.dtype)
    with with_autograd(), torch.enable_grad():
        given = loss.detach().expand_as(slope).requires_grad_()
        value = fenchel_young_loss(step, given, target, t, warm_start=start, empirical=empirical)
        # The loss of one element does not change the value of another.
        (slope,) = torch.autograd.grad(value.sum(), given)
    return value.detach(), slope.contiguous()


# -- Demonstrations: trajectories that the MDP must be able to produce, and their probabilities ----
#
# N trajectories are two tensors of integers `(*batch, N, L)`: the state in each layer, numbered
# over all layers, and the action taken there.


#: A tensor, or one sequence of numbers per trajectory.
Trajectories = Tensor | Sequence[Any]


def check_paths(
    mdp: LayeredMDP, states: Tensor, actions: Tensor, *, attached: bool = False
) -> tuple[Tensor, Tensor]:
    """Check that the MDP can produce the trajectories, where they were observed; see `follow`.

    Inside transforms of torch.func, where control flow cannot depend on values, only the shapes are
    checked.
    """
    for name, x in (("states", states), ("actions", actions)):
        if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name}: expected a tensor of integers (torch.int64), got {kind}")
        expected = f"shape (*batch, N, {mdp.horizon}), one entry per layer"
        fine = x.dim() >= 2 and x.shape[-1] == mdp.horizon and x.shape[-2] > 0
        check_that(fine, name, expected, tuple(x.shape))
    expected = f"the shape of states, {tuple(states.shape)}"
    check_that(states.shape == actions.shape, "actions", expected, tuple(actions.shape))
    visits, chances = follow(mdp, states, actions, attached)
    if values_are_hidden() or bool((chances > 0).all()):
        return visits, chances
    states, actions = states.expand_as(chances), actions.expand_as(chances)
    *trajectory, k = (~(chances > 0)).nonzero()[0].tolist()
    at, before, here = (*trajectory, k), (*trajectory, k - 1), mdp.layer_slices[k]
    place, state, action = _place_of(at), int(states[at]), int(actions[at])
    if k > 0 and int(states[before] & actions[before]) == -1:
        raise ValueError(f"states: {_place_of(before)} is -1, but a later step was observed")
    if not here.start <= state < here.stop:
        raise ValueError(
            f"states: {place} is {state}, which is not a state of this layer; those are "
            f"{here.start} to {here.stop - 1}"
        )
    if not (0 <= action < mdp.num_actions and bool(mdp.actions[state, action])):
        where = mdp.locate(state)
        raise ValueError(f"actions: {place} is {action}, an action that does not exist in {where}")
    why = "where no episode of this MDP begins"
    if k > 0:
        why = f"which cannot follow {mdp.locate(int(states[before]))}, action {actions[before]}"
    raise ValueError(f"states: {place} is {state} ({mdp.locate(state)}), {why}")


def follow(
    mdp: LayeredMDP, states: Tensor, actions: Tensor, attached: bool
) -> tuple[Tensor, Tensor]:
    """Return the mean visits of trajectories, `(*batch, S, A)`, and the chance of each step.

    Chances are initial(s_0), P(s_1 | s_0, a_0), ..., `(*batch, N, L)`: one where nothing was
    observed, zero where the observation is wrong. They are differentiable if `attached`.
    """
    (first, last, width, before, row), (S, A) = _tables(mdp), mdp.actions.shape
    shape = (*broadcast(mdp.batch_shape, states.shape[:-2]), *states.shape[-2:])
    states, actions, missing = states.expand(shape), actions.expand(shape), mdp.missing["pair"]
    seen = (states & actions) != -1
    state, action = (states - first).clamp(0 * last, last), actions.clamp(0, A - 1)
    pair = (state + first) * A + action
    fine = (state + first == states) & (action == actions)
    fine = fine if missing is None else fine & ~missing.flatten()[pair]
    share = fine.to(mdp.dtype).flatten(-2) / shape[-2]
    visits = share.new_zeros(*shape[:-2], S * A).scatter_add_(-1, pair.flatten(-2), share)
    if mdp.is_sparse:
        parts, chance = [], mdp.initial.unsqueeze(-2)
        for k, layer in enumerate(mdp.layers):
            parts.append(chance.expand(*shape[:-1], -1).gather(-1, state[..., k, None]))
            taken = chance.new_zeros(*shape[:-1], layer.sizes[0] * A)
            taken = taken.scatter(-1, (pair[..., k] - first[k] * A)[..., None], 1.0)
            p = layer.probabilities.unsqueeze(-1 - layer.event_dims)
            chance = layer.with_probabilities(p).arrive(taken.unflatten(-1, (-1, A)))
        found = torch.cat(parts, -1)
    else:
        row = _join_tables(mdp) if attached else row
        past = torch.nn.functional.pad(pair[..., :-1] * width[1:], (1, 0))
        index = (state + before + past).flatten(-2)
        found = row.expand(*shape[:-2], -1).gather(-1, index) if mdp.batch_shape else row[index]
    fine[..., 1:] &= seen[..., :-1]
    chances = torch.where(fine, found.view(shape), (~seen).to(mdp.dtype))
    return visits.unflatten(-1, (S, A)), chances


def _join_tables(mdp: LayeredMDP) -> Tensor:
    """Return the initial distribution and the dense tables of the layers in one row."""
    return join([mdp.initial, *(layer.dense.flatten(-3) for layer in mdp.layers[:-1])], 1)


@remembered
def _tables(mdp: LayeredMDP) -> tuple[Tensor, ...]:
    """Return for each layer its first state, its size less one, and where to find its table.

    In `_join_tables`, the last result, the entry of its state j after the pair i is at
    i `width` + j + `before`, the third and fourth result; j counts within the layer.
    """
    rows, end, A = [(0, mdp.layer_sizes[0] - 1, 0, 0)], mdp.layer_sizes[0], mdp.num_actions
    for here, there in pairwise(mdp.layer_slices):
        width = there.stop - there.start
        rows.append((there.start, width - 1, width, end - here.start * A * width))
        end += (here.stop - here.start) * A * width
    row = mdp.initial if mdp.is_sparse else _join_tables(mdp).detach()
    return *torch.tensor(rows, device=mdp.device).unbind(-1), row


def _place_of(at: tuple[int, ...]) -> str:
    *batch, trajectory, k = at
    return f"{element_of(batch)}trajectory {trajectory}, layer {k}"


# -- The expected cost of the plan, and the likelihood of demonstrated trajectories ----------------


def expected_cost(
    step: FTRLStep,
    loss: Tensor,
    cost: Tensor,
    t: Tensor | float | None = None,
    *,
    warm_start: Tensor | None = None,
    mdp: LayeredMDP | None = None,
) -> Tensor:
    """Compute what the plan for predicted losses costs in truth, ⟨q, cost⟩ with q = step(loss, t).

    Args:
        loss: the predicted losses, `(*batch, S, A)`.
        cost: the true losses, `(*batch, S, A)`. Values on masked pairs are ignored.
        t: the episode, as in `FTRLStep.solve`.
        warm_start: as there.
        mdp: as there.

    Returns:
        One number per element, `(*batch,)`; differentiable in all of them.

    Raises:
        SolveError, TypeError, ValueError: as the step; also if the cost has another shape.
    """
    model = _model(step, mdp)
    cost = promote(cost, model)
    check_like("cost", cost, model)
    q = step(loss, t, warm_start=warm_start, mdp=mdp)
    return (q * keep("pair", model, cost, 0.0)).sum((-2, -1))


def negative_log_likelihood(
    step: FTRLStep,
    loss: Tensor,
    states: Trajectories,
    actions: Trajectories,
    t: Tensor | float | None = None,
    *,
    warm_start: Tensor | None = None,
    mdp: LayeredMDP | None = None,
    transitions: bool = False,
) -> Tensor:
    """Compute the negative log-likelihood of demonstrated trajectories under the step's policy.

        - mean over trajectories of sum_k log pi(a_k | s_k),        pi(a | s) = q(s, a) / q(s)

    With `ConditionalEntropy`, minimizing it over the loss is maximum-causal-entropy inverse
    reinforcement learning (Ziebart, 2010). For entropies, log pi is computed from the multipliers
    of the step, so that it is finite even where pi underflows.

    Args:
        loss: the predicted losses, `(*batch, S, A)`.
        states: `(*batch, N, L)`, N trajectories per element: one state per layer, numbered over all
            layers as everywhere. Batch shapes broadcast. Trajectories that end early have -1 in
            both tensors from there on; or give two lists of N trajectories of any lengths.
        actions: `(*batch, N, L)`.
        t: the episode, as in `FTRLStep.solve`.
        warm_start: as there.
        mdp: as there.
        transitions: whether to add - log initial(s_0) - sum_k log P(s_{k+1} | s_k, a_k). These
            terms do not depend on the loss; they matter if the probabilities are learned.

    Returns:
        The mean over the N trajectories of each element, `(*batch,)`.

    Raises:
        ValueError: if the MDP cannot produce a trajectory; the message names the place. Inside
            transforms of torch.func values are not checked.
        TypeError: if states or actions are not tensors of integers.
        SolveError: as the step.
    """
    model = _model(step, mdp)
    t, given = step.episode(t), _padded(model, states, actions)

    def in_torch(loss: Tensor) -> Tensor:
        visits, chances = check_paths(model, *given, attached=transitions)
        now = torch.as_tensor(t, dtype=model.dtype, device=model.device)
        solution = step.solve(loss, t, warm_start=warm_start, mdp=mdp)
        if step.evaluator.in_logs and step.constraints is None:  # see torch_occ.step.entropic
            composition = step.evaluator.composition
            weight = entropy_of(composition, composition.values(now)).weight.unsqueeze(-1)
            kept = keep("pair", model, loss.to(model.dtype), 0.0)
            Q = kept + flow_of(model).lookahead(solution.value)
            logs = torch.where(model.actions, -Q / weight, -torch.inf).log_softmax(-1)
        else:
            q = solution.q
            logs = keep("pair", model, q, 1.0).log() - q.sum(-1, keepdim=True).log()
        value = -(visits * torch.where(visits > 0, logs, 0.0)).sum((-2, -1))
        return value - chances.log().sum(-1).mean(-1) if transitions else value

    fast = step.evaluator.closed and not transitions
    return _compare(fast, step, in_torch, loss, t, warm_start, mdp, *given)


def _padded(mdp: LayeredMDP, states: Trajectories, actions: Trajectories) -> tuple[Any, ...]:
    """Return lists of trajectories as tensors `(N, L)`, with -1 after their ends."""
    if not (isinstance(states, Sequence) and isinstance(actions, Sequence)):
        return as_tensor(states), as_tensor(actions)
    sizes = [[len(x) for x in part] for part in (states, actions)]
    fine = sizes[0] == sizes[1] != [] and all(0 < size <= mdp.horizon for size in sizes[0])
    expected = f"trajectories of equal lengths from 1 to {mdp.horizon}"
    found = f"{sizes[0]} states and {sizes[1]} actions"
    check_that(fine, "states, actions", expected, found)
    parts = ([[*x] + [-1] * (mdp.horizon - len(x)) for x in part] for part in (states, actions))
    return tuple(torch.tensor(part, device=mdp.device) for part in parts)
