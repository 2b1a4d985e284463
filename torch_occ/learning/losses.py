"""Losses for networks: Fenchel-Young, expected cost, likelihood of demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torch_occ._support.private import (
    carries_derivative,
    in_forward_mode,
    outside_graphs,
    refuse_batched_derivatives,
    values_are_hidden,
    versions_of,
)
from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import DenseLayer, Layer, Pattern, SparseLayer
from torch_occ.mdp.occupancy import flow_of, flow_residual, flow_source
from torch_occ.regularizers.base import total
from torch_occ.regularizers.terms import keep
from torch_occ.step.entropic import entropy_of, push_forward
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.solution import Budgets, Solution, check_like, place_of

# -- Targets: occupancy measures that a plan should equal, checked before they are used ------------


def tolerance_in(dtype: torch.dtype) -> float:
    """Return the largest error of a target: 1e-6, as of a linear-programming solver, or more."""
    return max(1e-6, torch.finfo(dtype).eps ** 0.5)


class Moves(NamedTuple):
    """All transitions of an MDP as one sparse layer: one product serves all layers."""

    versions: list[int]
    # From S * A pairs to S states. Pairs that do not exist lead back to the first state, where
    # their mass is noticed.
    layer: SparseLayer
    sure: bool  # whether every move and the first state are certain


_MOVES: WeakKeyDictionary[LayeredMDP, Moves] = WeakKeyDictionary()


def moves_of(mdp: LayeredMDP) -> Moves:
    """Return the moves of a single MDP, remembered until a probability is changed in place."""
    versions = versions_of(mdp.probabilities)
    known = _MOVES.get(mdp)
    if known is not None and versions and known.versions == versions:
        return known
    pairs, following, found = [], [], []
    for layer, here in zip(mdp.layers[:-1], mdp.layer_slices, strict=False):
        if isinstance(layer, DenseLayer):
            rows = layer.probabilities.detach().flatten(0, 1).to_sparse()
            layer = SparseLayer.from_tensor(rows, mdp.num_actions)
        pairs.append(layer.pattern.pair + here.start * mdp.num_actions)
        following.append(layer.pattern.next + here.stop)
        found.append(layer.probabilities.detach())
    sure = len(mdp.initial) == 1 and all(bool((p == 1).all()) for p in found)
    pairs.append((~mdp.actions.flatten()).nonzero().flatten().int())
    following.append(torch.zeros_like(pairs[-1]))
    found.append(torch.ones_like(pairs[-1], dtype=mdp.dtype))
    pair, next_state = torch.cat(pairs), torch.cat(following)
    order = (pair.long() * mdp.num_states + next_state).argsort()
    sizes = (mdp.num_states, mdp.num_actions, mdp.num_states)
    whole = SparseLayer(Pattern(pair[order], next_state[order], sizes), torch.cat(found)[order])
    _MOVES[mdp] = Moves(versions, whole, sure)
    return _MOVES[mdp]


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
    if not values_are_hidden():
        _check_polytope(mdp, target.detach(), tolerance, empirical)
        if budgets is not None:
            _check_budgets(mdp, target.detach(), budgets, tolerance)
    return target.clamp(min=0.0)


def _check_polytope(mdp: LayeredMDP, target: Tensor, tolerance: float, empirical: bool) -> None:
    mass = target @ target.new_ones(mdp.num_actions)  # faster than a sum
    if not (mdp.batch_shape or empirical):
        off = mass - moves_of(mdp).layer.arrive(target) - flow_source(mdp).detach()
        if float(off.abs().amax()) <= tolerance and float(target.amin()) >= -tolerance:
            return
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
        layers = torch.stack([part.sum(-1) for part in mdp.split(mass, -1)], -1)
        wrong = ((layers - 1).abs() > tolerance).nonzero()
        if len(wrong):
            *batch, k = wrong[0].tolist()
            element = f"batch element {tuple(batch)}, " if batch else ""
            raise ValueError(
                f"target: {element}layer {k} has the mass {float(layers[tuple(wrong[0])]):.6g}, "
                "expected 1; divide the visits by the number of trajectories"
            )
        return
    residual = flow_residual(mdp, target).detach()
    wrong = (residual.abs() > tolerance).nonzero()
    if len(wrong):
        *batch, state = wrong[0].tolist()
        element = f"batch element {tuple(batch)}, " if batch else ""
        held = float(target.expand(*residual.shape, -1).sum(-1)[tuple(wrong[0])])
        arriving = held - float(residual[tuple(wrong[0])])
        raise ValueError(
            f"target: {element}{mdp.locate(state)} has the mass {held:.6g}, but {arriving:.6g} "
            "arrives there, so the target is no occupancy measure of this MDP; make one with "
            "occupancy(mdp, policy), or use negative_log_likelihood for demonstrations"
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
        element = f"batch element {tuple(batch)}, " if batch else ""
        limit = float(budgets.limits.expand_as(excess)[tuple(wrong[0])])
        raise ValueError(
            f"target: {element}budget {budget}: its expected cost is "
            f"{float(spent.expand_as(excess)[tuple(wrong[0])]):.6g}, the limit {limit:.6g}"
        )


# -- The regularized optimal value, min over q in Omega of ⟨q, loss⟩ + psi_t(q), and its deriva ----
#
# Let q and v be the solution and its multipliers. The value equals the Lagrangian
#
#     G(q, v; loss, t, parameters, P) = ⟨q, loss⟩ + psi_t(q) - ⟨v, E q - b⟩,
#
# whose derivatives in q and in v vanish. So the derivatives of the value are those of G with q and
# v held fixed (the envelope theorem): q for the loss, no linear system. The second derivatives
# follow from q and v, which the step differentiates: -Pi for the loss.


Function = Callable[..., Tensor]


def optimal_value(
    step: FTRLStep, solution: Solution, loss: Tensor, t: Tensor, mdp: LayeredMDP
) -> Tensor:
    """Return ⟨q, loss⟩ + psi_t(q) at the solution of a step, `(*batch,)`.

    It is differentiable, any number of times, in the loss, t, the parameters of psi and the
    probabilities of the MDP.

    Args:
        solution: what `step.solve(loss, t, mdp=mdp)` returned.
        loss: `(*batch, S, A)`.
    """
    evaluator = step.evaluator
    count = len(evaluator.names)
    differentiated = any(carries_derivative(p) for p in mdp.probabilities)
    probabilities = mdp.probabilities if differentiated else ()

    def lagrangian(q: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        """Return psi_t(q) - ⟨v, E q - b⟩, the part that autograd differentiates."""
        t, parameters, given = rest[0], rest[1 : 1 + count], rest[1 + count :]
        model = mdp.with_probabilities(*given) if given else mdp
        batch = torch.broadcast_shapes(q.shape[:-2], t.shape)
        evaluate = evaluator.bind(parameters, t.expand(batch))
        value = total(model, evaluate(evaluator.regularizer.read(model, q)))
        return value - (v * flow_residual(model, q)).sum(-1) if given else value

    rest = (t, *evaluator.parameters(t), *probabilities)
    with torch.no_grad():
        value = (solution.q * loss).sum((-2, -1)) + lagrangian(solution.q, solution.value, *rest)
    return Envelope.apply(lagrangian, value.detach(), solution.q, solution.value, loss, *rest)


class Envelope(torch.autograd.Function):
    """⟨q, loss⟩ + function(q, v, *rest), a known value; its derivatives in q and v cancel.

    The first derivative treats q and v as constants. The second one does not, because the first
    one is computed from q and v by differentiable operations. Without a function, q may be any
    slope of the value in the loss.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        function: Function | None,
        value: Tensor,
        q: Tensor,
        v: Tensor,
        loss: Tensor,
        *rest: Tensor,
    ) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.function, _, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, bar: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched_derivatives(bar)
        q, v, loss, *rest = ctx.saved_tensors
        needed = ctx.needs_input_grad[5:]
        found: list[Tensor | None] = [None] * len(rest)
        if any(needed):
            function, moving = _of_some(ctx.function, q, v, rest, needed)
            _, pull_back, *_ = torch.func.vjp(function, *moving)
            pulled = iter(pull_back(bar))
            found = [next(pulled) if need else None for need in needed]
        loss_bar = None
        if ctx.needs_input_grad[4]:
            loss_bar = (bar[..., None, None] * q).sum_to_size(loss.shape)
        return None, None, None, None, loss_bar, *found

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        q, v, _, *rest = ctx.saved_tensors
        loss_dot, rest_dots = tangents[4], tangents[5:]
        moved = torch.zeros_like(q[..., 0, 0])
        if loss_dot is not None:
            moved = (q * loss_dot).sum((-2, -1))
        needed = [dot is not None for dot in rest_dots]
        if any(needed):
            function, moving = _of_some(ctx.function, q, v, rest, needed)
            zero = torch.zeros_like(v)
            dots = [dot for dot in rest_dots if dot is not None]
            moved = moved + push_forward(lambda *x: (function(*x), zero), moving, dots)[0]
        return moved


def _of_some(
    function: Function, q: Tensor, v: Tensor, rest: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Function, list[Tensor]]:
    """Return the function of the needed tensors among `rest` alone, and those tensors."""

    def of_needed(*moving: Tensor) -> Tensor:
        given = iter(moving)
        return function(
            q, v, *(next(given) if need else x for x, need in zip(rest, needed, strict=True))
        )

    return of_needed, [x for x, need in zip(rest, needed, strict=True) if need]


# -- The Fenchel-Young loss of a target occupancy measure (Blondel, Martins and Niculae, 2020) -----
#
#     FY(loss, target) = psi*(-loss) + psi(target) + ⟨target, loss⟩
#                      = [⟨target, loss⟩ + psi(target)] - min over q in Omega [⟨q, loss⟩ + psi(q)]
#
# It is convex in the loss, nonnegative, and zero exactly if the step answers with the target. Its
# gradient in the loss is target - q, and its second derivative is Pi
# (torch_occ.step.linearization).


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
        return _between_graphs(
            step, loss, target, t, warm_start=warm_start, mdp=mdp, empirical=empirical
        )
    model = step.mdp if mdp is None else mdp
    target, t = check_target(model, target, step.constraints, empirical), step.episode(t)
    solution = step.solve(loss, t, warm_start=warm_start, mdp=mdp)
    t = torch.as_tensor(t, dtype=model.dtype, device=model.device)
    loss = loss.to(model.dtype)
    if _only_the_loss_moves(step, t, model, target):
        value = _gap(step, solution, loss, target, t, model.initial)
        if bool(value.isfinite().all()):  # otherwise losses on masked pairs are not
            return Envelope.apply(None, value, target - solution.q, solution.value, loss)
    loss = keep("pair", model, loss, 0.0)
    paid = (target * loss).sum((-2, -1)) + _psi_if_finite(step, target, t, model)
    return paid - optimal_value(step, solution, loss, t, model)


def _only_the_loss_moves(step: FTRLStep, t: Tensor, mdp: LayeredMDP, *others: Tensor) -> bool:
    """Return whether psi is an entropy, and autograd differentiates in nothing but the loss."""
    if not step.in_logs or step.constraints is not None:
        return False
    if values_are_hidden() or in_forward_mode():
        return False
    fixed = (t, *others, *step.parameters(), *mdp.probabilities)
    return not any(x.requires_grad for x in fixed)


@torch.no_grad()
def _gap(
    step: FTRLStep,
    solution: Solution,
    loss: Tensor,
    target: Tensor,
    t: Tensor,
    initial: Tensor,
) -> Tensor:
    """Return the Fenchel-Young loss of an entropy, `(*batch,)`, without derivatives.

    By duality, ⟨q, loss⟩ + psi(q) = ⟨initial, v⟩ - kappa sum q.
    """
    composition = step.evaluator.composition
    weight, price = entropy_of(composition, composition.values(t))
    pairs, states = _x_log_x(target).sum(-1), _x_log_x(target.sum(-1))
    psi = (weight * pairs + (price - weight) * states).sum(-1)
    best = (initial * solution.value[..., : initial.shape[-1]]).sum(-1)
    paid = (target * loss).sum((-2, -1)) + psi
    return paid - best if step.closed else paid - best + (price * solution.q.sum(-1)).sum(-1)


def _x_log_x(x: Tensor) -> Tensor:
    return x * x.clamp(min=torch.finfo(x.dtype).tiny).log()  # faster than torch.special.entr


#: torch.compile divides the graph here: the derivative of psi is computed by transforms.
_between_graphs = outside_graphs(fenchel_young_loss)


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


def check_demonstrations(mdp: LayeredMDP, states: Tensor, actions: Tensor) -> None:
    """Check that the MDP can produce the trajectories.

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
    if values_are_hidden():
        return
    bounds = torch.tensor([(part.start, part.stop) for part in mdp.layer_slices])
    first, stop = bounds.to(states.device).unbind(-1)
    if at := _first_wrong((states < first) | (states >= stop)):
        here = mdp.layer_slices[at[-1]]
        raise ValueError(
            f"states: {_place_of(at)} is {int(states[at])}, which is not a state of this layer; "
            f"those are {here.start} to {here.stop - 1}"
        )
    inside = (actions >= 0) & (actions < mdp.num_actions)
    if at := _first_wrong(~inside | ~mdp.actions[states, torch.where(inside, actions, 0)]):
        raise ValueError(
            f"actions: {_place_of(at)} is {int(actions[at])}, an action that does not exist in "
            f"{mdp.locate(int(states[at]))}"
        )
    if at := _first_wrong(~(arrivals(mdp, states, actions).detach() > 0)):
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


def arrivals(mdp: LayeredMDP, states: Tensor, actions: Tensor) -> Tensor:
    """Return initial(s_0), P(s_1 | s_0, a_0), ... of each trajectory, `(*batch, N, L)`.

    It is differentiable in the probabilities.
    """
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
    element = f"batch element {tuple(batch)}, " if batch else ""
    return f"{element}trajectory {trajectory}, layer {k}"


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
    states: Tensor,
    actions: Tensor,
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
            layers as everywhere. Batch shapes broadcast.
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
    check_demonstrations(model, states, actions)
    t = step.episode(t)
    solution = step.solve(loss, t, warm_start=warm_start, mdp=mdp)
    loss, index = loss.to(model.dtype), states * model.num_actions + actions  # (*batch, N, L)
    now = torch.as_tensor(t, dtype=model.dtype, device=model.device)
    plain = _only_the_loss_moves(step, now, model) and not (transitions or model.batch_shape)
    if step.closed and plain and moves_of(model).sure and not step.regularizer.places():
        return _path_likelihood(step, solution, loss, index, now)
    logs = _log_policy(step, solution, loss, t, model).flatten(-2)
    batch = torch.broadcast_shapes(logs.shape[:-1], index.shape[:-2])
    index = index.expand(*batch, *index.shape[-2:])
    chosen = logs.expand(*batch, -1).gather(-1, index.flatten(-2)).view(index.shape)
    likelihood = chosen.sum(-1)
    if transitions:
        likelihood = likelihood + arrivals(model, states, actions).log().sum(-1)
    return -likelihood.mean(-1)


def _path_likelihood(
    step: FTRLStep, solution: Solution, loss: Tensor, index: Tensor, t: Tensor
) -> Tensor:
    """Return the negative log-likelihood of paths: kappa = 0, and every move is certain.

    Then the sum of log pi = (v(s) - loss(s, a) - v(s')) / w along a path is (v(s_0) - losses) / w,
    and the gradient is (visits - q) / w.
    """
    composition = step.evaluator.composition
    weight = entropy_of(composition, composition.values(t)).weight.detach()
    flat = index.flatten(-2).long()  # (*batch, N * L)
    visits = loss.new_zeros(*flat.shape[:-1], loss.shape[-2:].numel())
    share = loss.new_full((), 1 / index.shape[-2]).expand(flat.shape)
    visits = visits.scatter_add(-1, flat, share).unflatten(-1, loss.shape[-2:])
    with torch.no_grad():
        paid = torch.where(visits > 0, visits * loss, 0.0).sum((-2, -1))
        value = (paid - solution.value[..., 0]) / weight.squeeze(-1)
    slope = (visits - solution.q) / weight.unsqueeze(-1)
    return Envelope.apply(None, value, slope, solution.value, loss)


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
