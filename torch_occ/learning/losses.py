"""Losses for networks: Fenchel-Young, expected cost, likelihood of demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_occ._support.private import (
    carries_derivative,
    in_forward_mode,
    outside_graphs,
    refuse_batched_derivatives,
    values_are_hidden,
    with_autograd,
)
from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.layered import LayeredMDP, remembered
from torch_occ.mdp.layers import DenseLayer, Layer, Pattern, SparseLayer
from torch_occ.mdp.occupancy import flow_adjoint, flow_of, flow_residual, flow_source
from torch_occ.regularizers.base import total
from torch_occ.regularizers.terms import keep
from torch_occ.step.entropic import entropy_of
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.graph import step_of
from torch_occ.step.solution import Budgets, Solution, check_like, element_of, place_of

# -- Targets: occupancy measures that a plan should equal, checked before they are used ------------


def tolerance_in(dtype: torch.dtype) -> float:
    """Return the largest error of a target: 1e-6, as of a linear-programming solver, or more."""
    return max(1e-6, torch.finfo(dtype).eps ** 0.5)


class Moves(NamedTuple):
    """All transitions of an MDP as one sparse layer: one product serves all layers."""

    layer: SparseLayer  # from S * A pairs to S states
    # If every move and the first state are certain, the next state of every pair: `num_states` in
    # the last layer, -1 if the pair does not exist.
    next: Tensor | None


@remembered
def moves_of(mdp: LayeredMDP) -> Moves:
    """Return the moves of a single MDP."""
    pairs, following, found = [], [], []
    for layer, here in zip(mdp.layers[:-1], mdp.layer_slices, strict=False):
        if isinstance(layer, DenseLayer):
            rows = layer.probabilities.detach().flatten(0, 1).to_sparse()
            layer = SparseLayer.from_tensor(rows, mdp.num_actions)
        pairs.append(layer.pattern.pair + here.start * mdp.num_actions)
        following.append(layer.pattern.next + here.stop)
        found.append(layer.probabilities.detach())
    if not found:
        empty = torch.zeros(0, dtype=torch.int32, device=mdp.device)
        pairs, following, found = [empty], [empty], [empty.to(mdp.dtype)]
    pair, next_state = torch.cat(pairs), torch.cat(following)
    order = (pair.long() * mdp.num_states + next_state).argsort()
    sizes = (mdp.num_states, mdp.num_actions, mdp.num_states)
    whole = SparseLayer(Pattern(pair[order], next_state[order], sizes), torch.cat(found)[order])
    sure = None
    if len(mdp.initial) == 1 and bool((whole.probabilities == 1).all()):
        sure = torch.where(mdp.actions.flatten(), mdp.num_states, -1)
        sure[whole.pattern.pair] = whole.pattern.next.long()
    return Moves(whole, sure)


class Probe(NamedTuple):
    """Random numbers y over the constraints of a target, E target = b, as one product.

    A target that meets them has ⟨weights, target⟩ = goal, and any other one has not.
    """

    weights: Tensor  # (S * A,), E'y; on pairs that do not exist any number but zero
    goal: float  # ⟨y, b⟩


@remembered
def probe_of(mdp: LayeredMDP, empirical: bool) -> Probe:
    """Return the probe of the flow constraints of a single MDP, or of unit mass per layer."""
    draw = torch.Generator().manual_seed(0)
    size = mdp.horizon if empirical else mdp.num_states
    y = torch.randn(size, generator=draw, dtype=torch.float64).to(mdp.initial)
    weights = y[mdp.layer].unsqueeze(-1) if empirical else flow_adjoint(mdp, y).detach()
    weights = torch.where(mdp.actions, weights, 1 + y.abs().max()).flatten()
    goal = y.sum() if empirical else (y * flow_source(mdp).detach()).sum()
    return Probe(weights, float(goal))


def check_target(
    mdp: LayeredMDP, target: Tensor, budgets: Budgets | None = None, empirical: bool = False
) -> Tensor:
    """Check that a target is an occupancy measure of the MDP, up to `tolerance_in` its dtype.

    It must meet the budgets, too. An empirical one need not be a flow, but has mass one per layer.

    Returns:
        The target in the number type of the MDP, with tiny negative numbers set to zero.

    Raises:
        TypeError: if it is not a tensor.
        ValueError: if its shape is wrong, it is outside Omega, or it exceeds a budget; the message
            names the place.
        NotImplementedError: if the budgets require gradients.
    """
    tolerance = tolerance_in(mdp.dtype)
    if isinstance(target, Tensor) and target.is_floating_point():
        tolerance = max(tolerance, tolerance_in(target.dtype))
        target = target.to(mdp.dtype)
    check_like("target", target, mdp)
    least = -1.0
    if not values_are_hidden():
        least = float(target.detach().amin()) if target.numel() else 0.0
        if not (least >= -tolerance and _meets_probe(mdp, target.detach(), empirical)):
            _check_polytope(mdp, target.detach(), tolerance, empirical)
        if budgets is not None:
            _check_budgets(mdp, target.detach(), budgets, tolerance)
    return target if least >= 0 else target.clamp(min=0.0)


def _meets_probe(mdp: LayeredMDP, target: Tensor, empirical: bool) -> bool:
    """Return whether a target meets its constraints up to rounding; False if it is not clear."""
    if mdp.batch_shape:
        return False
    probe = probe_of(mdp, empirical)
    off = target.flatten(-2) @ probe.weights - probe.goal
    return not off.numel() or float(off.abs().amax()) <= 1024 * torch.finfo(off.dtype).eps


def _check_polytope(mdp: LayeredMDP, target: Tensor, tolerance: float, empirical: bool) -> None:
    wrong = (~target.isfinite() | (target < -tolerance)).nonzero()
    if len(wrong):
        raise ValueError(
            f"target: {place_of(mdp, wrong[0])} is {float(target[tuple(wrong[0])])}; "
            "expected an occupancy of at least 0"
        )
    wrong = ((target > tolerance) & ~mdp.actions).nonzero()
    if len(wrong):
        raise ValueError(
            f"target: {place_of(mdp, wrong[0])} is {float(target[tuple(wrong[0])])}, but this "
            "action does not exist"
        )
    if empirical:
        layers = torch.stack([part.sum((-2, -1)) for part in mdp.split(target, -2)], -1)
        wrong = ((layers - 1).abs() > tolerance).nonzero()
        if len(wrong):
            *batch, k = wrong[0].tolist()
            raise ValueError(
                f"target: {element_of(batch)}layer {k} has the mass "
                f"{float(layers[tuple(wrong[0])]):.6g}, expected 1; "
                "divide the visits by the number of trajectories"
            )
        return
    residual = flow_residual(mdp, target).detach()
    wrong = (residual.abs() > tolerance).nonzero()
    if len(wrong):
        *batch, state = wrong[0].tolist()
        held = float(target.expand(*residual.shape, -1).sum(-1)[tuple(wrong[0])])
        arriving = held - float(residual[tuple(wrong[0])])
        raise ValueError(
            f"target: {element_of(batch)}{mdp.locate(state)} has the mass {held:.6g}, but "
            f"{arriving:.6g} arrives there, so the target is no occupancy measure of this "
            "MDP; make one with occupancy(mdp, policy), or use negative_log_likelihood for "
            "demonstrations"
        )


def _check_budgets(mdp: LayeredMDP, target: Tensor, budgets: Budgets, tolerance: float) -> None:
    if carries_derivative(budgets.costs) or carries_derivative(budgets.limits):
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


# -- The regularized optimal value, min over q in Omega of ⟨q, loss⟩ + psi_t(q) --------------------
#
# Let q and v be the solution and its multipliers. The value equals the Lagrangian
#
#     G(q, v; loss, t, parameters, P) = ⟨q, loss⟩ + psi_t(q) - ⟨v, E q - b⟩,
#
# whose derivatives in q and in v vanish. So the first derivatives of the value are those of G with
# q and v held fixed (the envelope theorem): q for the loss, no linear system. For higher ones, q
# and v are functions of the arguments, and the step differentiates them.


def optimal_value(
    step: FTRLStep, solve: Callable[..., Solution], loss: Tensor, t: Tensor, mdp: LayeredMDP
) -> Tensor:
    """Return ⟨q, loss⟩ + psi_t(q) at the solution of a step, `(*batch,)`.

    It is differentiable, any number of times, in the loss, t, the parameters of psi and the
    probabilities of the MDP. `solve` gets the loss and t, and perhaps the parameters of `Evaluator`
    and an MDP with other probabilities.
    """
    evaluator = step.evaluator
    count = 2 + len(evaluator.names)
    differentiated = any(carries_derivative(p) for p in mdp.probabilities)

    def value_of(solution: Solution | None, *given: Tensor) -> Tensor:
        (loss, t, *parameters), rest = given[:count], given[count:]
        model = mdp.with_probabilities(*rest) if rest else mdp
        moves = solution is None
        if solution is None:
            solution = solve(loss, t, parameters, model if rest else None)
        q, v = solution.q, solution.value
        evaluate = evaluator.bind(parameters, t.expand(q.shape[:-2]))
        psi = total(model, evaluate(evaluator.regularizer.read(model, q)))
        value = (q * loss).sum((-2, -1)) + psi
        return value - (v * flow_residual(model, q)).sum(-1) if rest or moves else value

    given = (loss, t, *evaluator.parameters(t), *(mdp.probabilities if differentiated else ()))
    if values_are_hidden() or in_forward_mode():
        return value_of(None, *given)
    with torch.no_grad():
        solution = solve(loss, t)
        value = value_of(solution, *given)
    return Envelope.apply(partial(value_of, solution), partial(value_of, None), value, None, *given)


class Envelope(torch.autograd.Function):
    """A known value, with derivatives of a function that are right the first time.

    Args:
        once: the value as a function of the inputs, whose first derivatives are right; unused if
            the slope in the only input is known.
        again: a function whose derivatives of any order are right.
    """

    @staticmethod
    def forward(
        ctx: Any,
        once: Callable[..., Tensor] | None,
        again: Callable[..., Tensor],
        value: Tensor,
        slope: Tensor | None,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.once, ctx.again = once, again
        ctx.save_for_backward(slope, *inputs)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched_derivatives(bar)
        slope, *inputs = ctx.saved_tensors
        none, needed, more = [None] * 4, ctx.needs_input_grad[4:], torch.is_grad_enabled()
        if slope is not None and not more:
            loss_bar = (bar[..., None, None] * slope).sum_to_size(inputs[0].shape)
            return *none, loss_bar.to(inputs[0].dtype)
        with torch.enable_grad():
            if not more:
                inputs = [x.detach().requires_grad_(n) for x, n in zip(inputs, needed, strict=True)]
            value = (ctx.again if more else ctx.once)(*inputs)
            moving = [x for x, n in zip(inputs, needed, strict=True) if n]
            options = {"create_graph": more, "materialize_grads": True}
            found = iter(torch.autograd.grad(value, moving, bar, **options))
        return *none, *(next(found) if n else None for n in needed)


# -- The Fenchel-Young loss of a target occupancy measure (Blondel, Martins and Niculae, 2020) -----
#
#     FY(loss, target) = psi*(-loss) + psi(target) + ⟨target, loss⟩
#                      = [⟨target, loss⟩ + psi(target)] - min over q in Omega [⟨q, loss⟩ + psi(q)]
#
# It is convex in the loss, nonnegative, and zero exactly if the step answers with the target. Its
# gradient in the loss is target - q, and its second derivative is Pi
# (torch_occ.step.implicit).


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
        return _in_graph(step, loss, target, t, warm_start, mdp, empirical)
    model = step.mdp if mdp is None else mdp
    target, t = check_target(model, target, step.constraints, empirical), step.episode(t)
    now = torch.as_tensor(t, dtype=model.dtype, device=model.device)

    def solve(
        loss: Tensor,
        t: Tensor,
        parameters: Sequence[Tensor] | None = None,
        moved: LayeredMDP | None = None,
    ) -> Solution:
        if parameters is None:
            return step.solve(loss, t, warm_start=warm_start, mdp=mdp)
        given = (warm_start, moved or mdp, True, step.constraints)
        return step.solve_at(parameters, loss, t, *given)

    def value_of(loss: Tensor) -> Tensor:
        loss = keep("pair", model, loss.to(model.dtype), 0.0)
        paid = (target * loss).sum((-2, -1)) + _psi_if_finite(step, target, now, model)
        return paid - optimal_value(step, solve, loss, now, model)

    if _only_the_loss_moves(step, now, model, target):
        with torch.no_grad():
            solution = solve(loss, now)
            value = _gap(step, solution, loss, target, now, model.initial)
            slope = target - solution.q
        if bool(value.isfinite().all()):  # otherwise losses on masked pairs are not
            return Envelope.apply(None, value_of, value, slope, loss)
    return value_of(loss)


def _only_the_loss_moves(step: FTRLStep, t: Tensor, mdp: LayeredMDP, *others: Tensor) -> bool:
    """Return whether psi is an entropy, and autograd differentiates in nothing but the loss."""
    if not step.in_logs or step.constraints is not None:
        return False
    if values_are_hidden() or in_forward_mode():
        return False
    fixed = (t, *others, *step.parameters(), *mdp.probabilities)
    return not any(x.requires_grad for x in fixed)


def _gap(
    step: FTRLStep, solution: Solution, loss: Tensor, target: Tensor, t: Tensor, initial: Tensor
) -> Tensor:
    """Return the Fenchel-Young loss of an entropy, `(*batch,)`.

    By duality, ⟨q, loss⟩ + psi(q) = ⟨initial, v⟩ - kappa sum q.
    """
    composition = step.evaluator.composition
    weight, price = entropy_of(composition, composition.values(t))
    tiny = torch.finfo(target.dtype).tiny
    mass = target @ target.new_ones(target.shape[-1])  # faster than a sum
    logs = (target / mass.clamp(min=tiny).unsqueeze(-1)).clamp(min=tiny).log()
    paid = torch.linalg.vecdot(target.flatten(-2), (loss + weight.unsqueeze(-1) * logs).flatten(-2))
    gap = paid - solution.value[..., : len(initial)] @ initial
    if step.closed:
        return gap
    return gap + (price * (mass * mass.clamp(min=tiny).log() + solution.q.sum(-1))).sum(-1)


#: torch.compile divides the graph here, where more than the loss is differentiated.
_between_graphs = outside_graphs(fenchel_young_loss)


def _in_graph(
    step: FTRLStep,
    loss: Tensor,
    target: Tensor,
    t: Tensor | float | None,
    warm_start: Tensor | None,
    mdp: LayeredMDP | None,
    empirical: bool,
) -> Tensor:
    """Return the loss inside a graph that is being recorded."""
    others = (target, t, *step.parameters(), *step.mdp.probabilities)
    if mdp is not None or any(isinstance(x, Tensor) and x.requires_grad for x in others):
        return _between_graphs(
            step, loss, target, t, warm_start=warm_start, mdp=mdp, empirical=empirical
        )
    now = torch.as_tensor(step.episode(t), dtype=step.mdp.dtype, device=step.mdp.device)
    return fenchel_young(step.name_in_graphs, loss, target, now, warm_start, empirical)[0]


@torch.library.custom_op(
    "torch_occ::fenchel_young",
    mutates_args=(),
    schema="(str name, Tensor loss, Tensor target, Tensor t, Tensor? start, bool empirical)"
    " -> (Tensor, Tensor)",
)
def fenchel_young(
    name: str, loss: Tensor, target: Tensor, t: Tensor, start: Tensor | None, empirical: bool
) -> tuple[Tensor, Tensor]:
    """Return the Fenchel-Young loss, and its slope in the loss."""
    step = step_of(name)
    with with_autograd(), torch.enable_grad():
        batch = _batch_of(step, loss, target, t, start)
        given = loss.detach().expand(*batch, *loss.shape[-2:]).requires_grad_()
        value = fenchel_young_loss(step, given, target, t, warm_start=start, empirical=empirical)
        # The loss of one element does not change the value of another.
        (slope,) = torch.autograd.grad(value.sum(), given)
    return value.detach(), slope.contiguous()


def _batch_of(
    step: FTRLStep, loss: Tensor, target: Tensor, t: Tensor, start: Tensor | None
) -> torch.Size:
    shapes = [x.shape[:-2] for x in (loss, target, start) if x is not None]
    shapes += step.evaluator.batch_shapes(step.evaluator.parameters(t)).values()
    return torch.broadcast_shapes(*shapes, t.shape, step.mdp.batch_shape)


@fenchel_young.register_fake
def _(
    name: str, loss: Tensor, target: Tensor, t: Tensor, start: Tensor | None, empirical: bool
) -> tuple[Tensor, Tensor]:
    batch = _batch_of(step_of(name), loss, target, t, start)
    value = loss.new_empty(batch, dtype=step_of(name).mdp.dtype)
    return value, loss.new_empty(*batch, *loss.shape[-2:])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.shape = inputs[1].shape
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _pull_back(ctx: Any, bar: Tensor, _: Any) -> tuple[Any, ...]:
    (slope,) = ctx.saved_tensors
    loss_bar = (bar[..., None, None] * slope).sum_to_size(ctx.shape).to(slope.dtype)
    return None, loss_bar, None, None, None, None


fenchel_young.register_autograd(_pull_back, setup_context=_save)


def _psi_if_finite(step: FTRLStep, target: Tensor, t: Tensor, mdp: LayeredMDP) -> Tensor:
    """Return psi_t(target) with its derivatives, or zero for elements where it is not finite."""
    psi = step.regularizer
    value = psi(target, t, mdp)
    finite = value.detach().isfinite()
    if not values_are_hidden() and bool(finite.all()):
        return value
    # Derivatives of the infinite elements would be NaN, even behind a `where`.
    inside = torch.where(finite[..., None, None], target, step.interior)
    return torch.where(finite, psi(inside, t, mdp), 0.0)


# -- Demonstrations: trajectories that the MDP must be able to produce, and their probabilities ----
#
# N trajectories are two tensors of integers `(*batch, N, L)`: the state in each layer, numbered
# over all layers, and the action taken there.


#: A tensor, or one sequence of numbers per trajectory.
Trajectories = Tensor | Sequence[Any]


def check_demonstrations(
    mdp: LayeredMDP, states: Tensor, actions: Tensor, seen: Tensor | None = None
) -> None:
    """Check that the MDP can produce the trajectories, where they were observed.

    Raises:
        TypeError: if one argument is not a tensor of integers.
        ValueError: if a shape is wrong, or if a state, an action or a transition is impossible; the
            message names the trajectory and the layer. Inside transforms of torch.func, where
            control flow cannot depend on values, only the shapes are checked.
    """
    for name, x in (("states", states), ("actions", actions)):
        if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name}: expected a tensor of integers (torch.int64), got {kind}")
        if x.dim() < 2 or x.shape[-1] != mdp.horizon or x.shape[-2] == 0:
            raise ValueError(
                f"{name}: expected shape (*batch, N, {mdp.horizon}), one entry per layer, "
                f"got {tuple(x.shape)}"
            )
    if states.shape != actions.shape:
        raise ValueError(
            f"actions: expected the shape of states, {tuple(states.shape)}, "
            f"got {tuple(actions.shape)}"
        )
    if values_are_hidden() or (seen is None and _are_paths(mdp, states, actions)):
        return
    whole = torch.ones_like(states, dtype=torch.bool) if seen is None else seen
    bounds = torch.tensor([(part.start, part.stop) for part in mdp.layer_slices])
    first, stop = bounds.to(states.device).unbind(-1)
    if at := _first_wrong(whole & ((states < first) | (states >= stop))):
        here = mdp.layer_slices[at[-1]]
        raise ValueError(
            f"states: {_place_of(at)} is {int(states[at])}, which is not a state of this layer; "
            f"those are {here.start} to {here.stop - 1}"
        )
    inside = (actions >= 0) & (actions < mdp.num_actions)
    exists = mdp.actions[states.clamp(min=0), torch.where(inside, actions, 0)]
    if at := _first_wrong(whole & ~(inside & exists)):
        raise ValueError(
            f"actions: {_place_of(at)} is {int(actions[at])}, an action that does not exist in "
            f"{mdp.locate(int(states[at]))}"
        )
    if at := _first_wrong(~(arrivals(mdp, states, actions, seen).detach() > 0)):
        *_, k = at
        if k == 0:
            why = "where no episode of this MDP begins"
        else:
            before = (*at[:-1], k - 1)
            why = (
                f"which cannot follow {mdp.locate(int(states[before]))}, "
                f"action {int(actions[before])}"
            )
        raise ValueError(
            f"states: {_place_of(at)} is {int(states[at])} ({mdp.locate(int(states[at]))}), {why}"
        )


def _are_paths(mdp: LayeredMDP, states: Tensor, actions: Tensor) -> bool:
    """Return whether moves are certain and these trajectories right; False if it is not clear."""
    following = None if mdp.batch_shape else moves_of(mdp).next
    if following is None or bool((actions < 0).any() or (actions >= mdp.num_actions).any()):
        return False
    ends = torch.nn.functional.pad(states[..., 1:], (0, 1), value=mdp.num_states)
    index = (states * mdp.num_actions + actions).clamp(0, len(following) - 1)
    return bool((following[index] == ends).all() and (states[..., 0] == 0).all())


def arrivals(
    mdp: LayeredMDP, states: Tensor, actions: Tensor, seen: Tensor | None = None
) -> Tensor:
    """Return initial(s_0), P(s_1 | s_0, a_0), ... of each trajectory, `(*batch, N, L)`.

    It is differentiable in the probabilities, and one where nothing was observed.
    """
    if seen is not None:
        first = torch.tensor([part.start for part in mdp.layer_slices], device=states.device)
        whole = torch.where(seen, states, first), torch.where(seen, actions, 0)
        return torch.where(seen, arrivals(mdp, *whole), 1.0)
    if not (mdp.batch_shape or values_are_hidden()) and not any(
        carries_derivative(p) for p in mdp.probabilities
    ):
        moves = _moved(moves_of(mdp).layer, states * mdp.num_actions + actions, states[..., 1:])
        return torch.cat([mdp.initial[states[..., :1]], moves], -1)
    index = states - torch.tensor([part.start for part in mdp.layer_slices], device=states.device)
    found = [_at(mdp.initial, index[..., 0])]
    for k, layer in enumerate(mdp.layers[:-1]):
        pair = index[..., k] * mdp.num_actions + actions[..., k]
        found.append(_moved(layer, pair, index[..., k + 1]))
    batch = broadcast(*(part.shape for part in found))
    return torch.stack([part.expand(batch) for part in found], -1)


def _moved(layer: Layer, pair: Tensor, following: Tensor) -> Tensor:
    """Return P(s' | s, a) of pairs s * A + a and states s', `(*batch, N)` each."""
    width = layer.sizes[-1]
    wanted = pair[..., : following.shape[-1]] * width + following
    if isinstance(layer, DenseLayer):
        return _at(layer.probabilities.flatten(-3), wanted)
    stored = layer.pattern.pair.long() * width + layer.pattern.next  # sorted
    entry = torch.searchsorted(stored, wanted).clamp(max=max(len(stored) - 1, 0))
    return torch.where(stored[entry] == wanted, _at(layer.probabilities, entry), 0.0)


def _at(table: Tensor, index: Tensor) -> Tensor:
    """Return the entries of a table `(*batch, n)` at an index `(*batch, N)`."""
    batch = broadcast(table.shape[:-1], index.shape[:-1])
    index = index.long().expand(*batch, index.shape[-1])
    return table.expand(*batch, table.shape[-1]).gather(-1, index)


def _first_wrong(wrong: Tensor) -> tuple[int, ...]:
    """Return the index of the first True; empty if there is none."""
    found = wrong.nonzero()
    return tuple(found[0].tolist()) if len(found) else ()


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
    model = step.mdp if mdp is None else mdp
    if isinstance(cost, Tensor) and cost.is_floating_point():
        cost = cost.to(model.dtype)
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
    model = step.mdp if mdp is None else mdp
    states, actions, seen = _observed(model, states, actions)
    check_demonstrations(model, states, actions, seen)
    index = states * model.num_actions + actions  # (*batch, N, L)
    index = index if seen is None else torch.where(seen, index, 0)
    t = step.episode(t)
    now = torch.as_tensor(t, dtype=model.dtype, device=model.device)

    def value_of(loss: Tensor) -> Tensor:
        solution = step.solve(loss, t, warm_start=warm_start, mdp=mdp)
        logs = _log_policy(step, solution, loss.to(model.dtype), t, model).flatten(-2)
        batch = broadcast(logs.shape[:-1], index.shape[:-2])
        every = index.expand(*batch, *index.shape[-2:])
        chosen = logs.expand(*batch, -1).gather(-1, every.flatten(-2)).view(every.shape)
        if transitions:
            chosen = chosen + arrivals(model, states, actions, seen).log()
        chosen = chosen if seen is None else torch.where(seen, chosen, 0.0)
        return -chosen.sum(-1).mean(-1)

    certain = step.closed and not (transitions or model.batch_shape or step.regularizer.places())
    certain = certain and seen is None and _only_the_loss_moves(step, now, model)
    if not certain or moves_of(model).next is None:
        return value_of(loss)
    # Along a path, the sum of log pi = (v(s) - loss(s, a) - v(s')) / w is (v(s_0) - losses) / w.
    with torch.no_grad():
        solution, composition = (
            step.solve(loss, t, warm_start=warm_start),
            step.evaluator.composition,
        )
        weight = entropy_of(composition, composition.values(now)).weight
        flat = index.flatten(-2).long()  # (*batch, N * L)
        share = solution.q.new_full((), 1 / index.shape[-2]).expand(flat.shape)
        visits = solution.q.new_zeros(*flat.shape[:-1], solution.q.shape[-2:].numel())
        visits = visits.scatter_add(-1, flat, share).unflatten(-1, solution.q.shape[-2:])
        paid = torch.where(visits > 0, visits * loss, 0.0).flatten(-2).sum(-1)
        value = (paid - solution.value[..., 0]) / weight.squeeze(-1)
        slope = (visits - solution.q) / weight.unsqueeze(-1)
    return Envelope.apply(None, value_of, value, slope, loss)


def _observed(
    mdp: LayeredMDP, states: Trajectories, actions: Trajectories
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return `(*batch, N, L)` each, and which steps were observed; None if all were."""
    if isinstance(states, Sequence) and isinstance(actions, Sequence):
        sizes = [[len(x) for x in part] for part in (states, actions)]
        if sizes[0] != sizes[1] or not all(0 < size <= mdp.horizon for size in sizes[0]):
            raise ValueError(
                f"states, actions: expected trajectories of equal lengths from 1 to {mdp.horizon}, "
                f"got {sizes[0]} states and {sizes[1]} actions"
            )
        rows = [[torch.as_tensor(x, device=mdp.device) for x in part] for part in (states, actions)]
        states, actions = (
            torch.stack([torch.cat([x, x.new_full((mdp.horizon - len(x),), -1)]) for x in part])
            for part in rows
        )
    if not (isinstance(states, Tensor) and isinstance(actions, Tensor)) or values_are_hidden():
        return states, actions, None  # type: ignore[return-value]
    if states.shape != actions.shape or bool((states >= 0).all()):
        return states, actions, None
    seen = (states != -1) | (actions != -1)
    if at := _first_wrong(seen[..., 1:] & ~seen[..., :-1]):
        raise ValueError(f"states: {_place_of(at)} is -1, but a later step was observed")
    return states, actions, seen


def _log_policy(
    step: FTRLStep, solution: Solution, loss: Tensor, t: Tensor | float, mdp: LayeredMDP
) -> Tensor:
    """Return log pi `(*batch, S, A)`; values on masked pairs are meaningless."""
    if step.in_logs and step.constraints is None:  # a softmax; see torch_occ.step.entropic
        episode = torch.as_tensor(t, dtype=mdp.dtype, device=mdp.device)
        composition = step.evaluator.composition
        weight = entropy_of(composition, composition.values(episode)).weight.unsqueeze(-1)
        Q = loss + flow_of(mdp).lookahead(solution.value)
        return torch.where(mdp.actions, -Q / weight, -torch.inf).log_softmax(-1)
    return keep("pair", mdp, solution.q, 1.0).log() - solution.q.sum(-1, keepdim=True).log()
