"""The learners of torch_occ.game, compiled for the loop of torch_occ.engine.play.

The formulas are in the docstrings of the learners' own classes.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from torch_occ._support.constants import CHUNK, CONVERGED, TIE
from torch_occ.engine import layout as at
from torch_occ.engine.entropic import follow_or_restart
from torch_occ.engine.lanes import Shared, anywhere, lane, sqrt, where
from torch_occ.engine.layout import Bools, Floats, Model, Solver, Work, ahead, finite, routine
from torch_occ.engine.newton import EXCESS, spend
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose

# -- a fixed policy --------------------------------------------------------------------------------


class CompiledFixed(NamedTuple):
    """`FixedPolicy`."""

    q: PerPair


@propose.register(CompiledFixed)
def _propose_fixed(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    if t == 0:
        for i in range(len(learner.q)):
            tally.q[i] = learner.q[i]


@observe.register(CompiledFixed)
def _observe_nothing(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    pass


# -- learners that plan with averages --------------------------------------------------------------


class CompiledEmpirical(NamedTuple):
    """`FollowTheLeader` and `OptimisticValueIteration`."""

    visits: PerPair
    losses: PerPair  # sums of the observed losses
    scale: float  # of the optimism sqrt(log t / visits); 0 for follow-the-leader
    floor: float  # the index of pairs without visits, and the lower bound of every index
    logs: Shared  # (n + 1,), log t
    mean: PerPair
    root: PerPair
    choice: PerState


@propose.register(CompiledEmpirical)
def _propose_empirical(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    if t == 0:
        average(learner, learner.floor)
    index, radius = work.pairs, learner.scale * np.sqrt(learner.logs[t + 1])
    for i in range(len(learner.mean)):
        index[at.TRIAL, i] = learner.mean[i]
        if learner.scale > 0.0:
            index[at.TRIAL, i] = max(learner.mean[i] - radius * learner.root[i], learner.floor)
    plan(game.model, learner.choice, work)


@observe.register(CompiledEmpirical)
def observe_averages(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    """Count the visits of every seed, and their losses."""
    for n in range(len(game.pairs)):
        own = lane(learner, n)
        for k in range(game.pairs.shape[1]):
            count_visit(own, game.pairs[n, k], game.losses[n, k])


@routine(inline=True)
def average(learner: Any, unseen: float) -> None:
    """Write the mean losses, and 1 / sqrt(visits), 0 without visits.

    They follow from the state, and are kept because an episode changes few of them. `unseen` stands
    for means without visits.
    """
    for i in range(len(learner.mean)):
        visits = max(learner.visits[i], 1.0)
        known = learner.visits[i] > 0.0
        learner.mean[i] = where(known, learner.losses[i] / visits, unseen)
        learner.root[i] = where(known, 1.0 / sqrt(visits), 0.0)


@routine(inline=True)
def count_visit(learner: Any, i: int, loss: float) -> None:
    """Count a visit of a pair and its loss, for one seed."""
    learner.visits[i] += 1.0
    learner.losses[i] += loss
    learner.mean[i] = learner.losses[i] / learner.visits[i]
    learner.root[i] = 1.0 / np.sqrt(learner.visits[i])


@routine(inline=True)
def plan(model: Model, choice: Floats, work: Work) -> None:
    """Backward induction for the loss in row TRIAL of the pairs, which becomes Q.

    `choice` receives the pair that each state plays.
    """
    start, num_actions, states, pairs = model.start, model.num_actions, work.states, work.pairs
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for s in range(start[k], behind):
            for i in range(s * num_actions, (s + 1) * num_actions):
                pairs[at.TRIAL, i] += ahead(model.next_state, i, states, at.PLAN, behind, after)
            states[at.PLAN, s], choice[s] = cheapest_pair(
                model.exists[at.PAIR], pairs, at.TRIAL, s * num_actions, (s + 1) * num_actions
            )


@routine(inline=True)
def cheapest_pair(
    allowed: Bools, costs: Floats, row: int, first: int, stop: int
) -> tuple[Any, Any]:
    """The least cost of a pair that is allowed, and that pair.

    Ties are broken as in `torch_occ.mdp.occupancy.cheapest`.
    """
    best, chosen, open_ = np.inf, -1.0, True
    for i in range(first, stop):
        if allowed[i]:
            best = min(best, costs[row, i])
    limit = where(finite(best), best + TIE * max(1.0, abs(best)), best)
    for i in range(first, stop):
        if allowed[i]:
            here = open_ & (costs[row, i] <= limit)
            chosen, open_ = where(here, float(i), chosen), open_ & (not here)
    return best, chosen


# -- follow the regularized leader -----------------------------------------------------------------

IMPORTANCE_WEIGHTED, IMPLICIT_EXPLORATION, REDUCED_VARIANCE, FULL_INFORMATION = 0, 1, 2, 3


class CompiledFTRL(NamedTuple):
    """`FTRL`."""

    q: PerPair
    cumulative_loss: PerPair
    solver: Solver
    weights: Shared  # (n + 1, K or K * S * A)
    estimator: int
    # (n + 1,): the bias of implicit exploration, or the threshold of the reduced-variance estimator
    bias: Shared
    multipliers: Annotated[Floats, 0]  # (m,), of the budgets
    budget_excess: Annotated[Floats, 0]  # (1,); empty without budgets


@propose.register(CompiledFTRL)
def _propose_ftrl(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    weigh(learner.solver, learner.weights, t, work)
    take_multipliers(learner.solver.budgets, learner)
    take_step(game.model, game, t, learner.cumulative_loss, learner, tally, work)
    note_spending(learner.solver.budgets, learner, work)


@observe.register(CompiledFTRL)
def _observe_ftrl(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    estimator, bias = learner.estimator, learner.bias[t + 1]
    if estimator == REDUCED_VARIANCE:
        for i in range(len(learner.q)):
            learner.cumulative_loss[i] += where(learner.q[i] >= bias, 0.5, 0.0)
    for n in range(len(game.pairs)):
        q, total = lane(learner.q, n), lane(learner.cumulative_loss, n)
        if estimator == FULL_INFORMATION:
            for i in range(len(total)):
                total[i] += game.table[n, i]
        else:
            for k in range(game.pairs.shape[1]):
                i, loss = game.pairs[n, k], game.losses[n, k]
                if estimator == IMPORTANCE_WEIGHTED:
                    total[i] += loss / q[i]
                elif estimator == IMPLICIT_EXPLORATION:
                    total[i] += loss / (q[i] + bias)
                else:
                    total[i] += (loss - (0.5 if q[i] >= bias else 0.0)) / q[i]


@routine(inline=True)
def take_multipliers(budgets: Any, learner: CompiledFTRL) -> None:
    """Start from the multipliers of the last episode."""
    if budgets is not None:
        for j in range(len(learner.multipliers)):
            budgets.y[j] = learner.multipliers[j]


@routine(inline=True)
def note_spending(budgets: Any, learner: CompiledFTRL, work: Work) -> None:
    """Keep the multipliers, and the largest excess over a limit so far."""
    if budgets is not None:
        spend(budgets, work)
        for j in range(len(learner.multipliers)):
            learner.multipliers[j], excess = budgets.y[j], budgets.rows[EXCESS, j]
            learner.budget_excess[0] = max(learner.budget_excess[0], excess)


@routine(inline=True)
def weigh(solver: Solver, weights: Floats, t: int, work: Work) -> None:
    """Take the weights of episode t, and note their largest relative change."""
    most = 0.0
    for k in range(weights.shape[1]):
        solver.weights[k] = weights[t + 1, k]
        change = abs(weights[t + 1, k] - weights[t, k])
        if change > 0.0:
            most = max(most, change / abs(weights[t, k]))
    work.notes[at.ERROR] += most


@routine(inline=True)
def take_step(
    model: Model, game: Game, t: int, loss: Floats, learner: Any, tally: Tally, work: Work
) -> None:
    """Solve for the learner's next q, starting from its last, or from the middle if that fails.

    q is an occupancy measure of the model, which need not be the true one.
    """
    episode = game.before + t + 1
    # Nothing is kept from one chunk to the next, so that a run can continue from a file.
    if (episode - 1) % CHUNK == 0:
        work.notes[at.ERROR], work.notes[at.RECENT], work.notes[at.GUESSED] = np.inf, 0.0, 0.0
    used = work.notes[at.USED] > 0.0
    solve_lanes(model, episode, used, loss, learner, tally, work)


@routine(inline=True)
def solve_lanes(
    model: Model, episode: int, lanes: Any, loss: Floats, learner: Any, tally: Tally, work: Work
) -> None:
    """Solve in some lanes only; nothing changes in the others."""
    solver, q, used = learner.solver, learner.q, work.notes[at.USED]
    work.notes[at.USED] = where(lanes, used, 0.0)
    for i in range(len(q)):
        work.pairs[at.PAIR, i] = q[i]
    status, steps, _, flow, dual = follow_or_restart(model, solver, loss, work)
    for i in range(len(q)):
        q[i] = work.pairs[at.PAIR, i]
        tally.q[i] = work.pairs[at.PAIR, i]
    work.notes[at.USED] = used
    status, steps = where(lanes, status, CONVERGED + 0.0), where(lanes, steps, 0.0)
    note_solve(episode, status, steps, where(lanes, flow, 0.0), where(lanes, dual, 0.0), tally)


@routine(inline=True)
def note_solve(episode: int, status: Any, steps: Any, flow: Any, dual: Any, tally: Tally) -> None:
    """Add what a solve found to the sums."""
    failed = status != CONVERGED
    tally.newton_steps[0] += steps
    tally.uncertified[0] += where(failed, 1.0, 0.0)
    tally.dual_residual[0] = max(tally.dual_residual[0], dual)
    tally.flow_residual[0] = max(tally.flow_residual[0], flow)
    fresh = failed & (tally.first_uncertified[0] == 0.0)
    tally.first_uncertified[0] = where(fresh, float(episode), tally.first_uncertified[0])
    tally.first_status[0] = where(fresh, status, tally.first_status[0])


# -- FTRL with a budgeted shift --------------------------------------------------------------------

HARD, SMOOTH, FROZEN = 0, 1, 2
TINY = float(np.finfo(np.float64).tiny)


class CompiledShifted(NamedTuple):
    """`ShiftedFTRL`."""

    q: PerPair
    cumulative_loss: PerPair
    visits: PerPair
    losses: PerPair
    shift: PerPair  # e_t
    stability: Floats  # (L,), B of every layer
    ledger: Floats  # (1,), X
    refused: Floats  # (1,), the number of episodes in which the ledger was closed
    solver: Solver
    weights: Shared  # (n + 1, K or K * S * A)
    cap: float
    budget: float
    rule: int
    threshold: float
    in_game: bool
    reach: PerPair  # in a game, the sum of 1{s} / q(s)
    mean: PerPair
    loss: PerPair  # of the step
    last: PerPair  # e_{t-1}


@propose.register(CompiledShifted)
def _propose_shifted(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    episode = game.before + t + 1
    weigh(learner.solver, learner.weights, t, work)
    room = write_shift(game.model, float(episode), learner)
    take_step(game.model, game, t, learner.loss, learner, tally, work)
    spent = spent_by(learner)
    refused = (spent > room) & (learner.rule == FROZEN) & (work.notes[at.USED] > 0.0)
    if anywhere(refused):
        # Keep the last shift: the ledger does not change, and the step is taken again.
        for i in range(len(learner.q)):
            back = where(refused, learner.last[i] - learner.shift[i], 0.0)
            learner.shift[i] += back
            learner.loss[i] += back
        solve_lanes(game.model, episode, refused, learner.loss, learner, tally, work)
        learner.refused[0] += where(refused, 1.0, 0.0)
    learner.ledger[0] = where(refused, learner.ledger[0], spent)


@observe.register(CompiledShifted)
def _observe_shifted(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    episode = float(game.before + t + 1)
    hinted, least = episode >= learner.threshold, learner.threshold / episode
    add_stability(game.model, episode, learner)
    if hinted:
        for i in range(len(learner.q)):
            learner.mean[i] = where(learner.q[i] >= least, learner.mean[i], 0.0)
            if not learner.in_game:
                learner.cumulative_loss[i] += learner.mean[i]
    for n in range(len(game.pairs)):
        own = lane(learner, n)
        for k in range(game.pairs.shape[1]):
            i, loss, state = game.pairs[n, k], game.losses[n, k], game.states[n, k]
            if learner.in_game:
                if state < 0:  # the player did not get there
                    continue
                reach_state(state, game.model.num_actions, hinted, own)
            hint = own.mean[i] if hinted else 0.0
            own.cumulative_loss[i] += (loss - hint) / own.q[i]
            own.losses[i] += loss
            own.visits[i] += 1.0


@routine
def reach_state(state: int, num_actions: int, hinted: bool, learner: CompiledShifted) -> None:
    """Note a visit of a state in a game, where hints count 1{s visited} / q(s) times."""
    first, total = state * num_actions, 0.0
    for i in range(first, first + num_actions):
        total += learner.q[i]
    for i in range(first, first + num_actions):
        learner.reach[i] += 1.0 / total
        learner.cumulative_loss[i] += learner.mean[i] / total if hinted else 0.0


@routine
def write_shift(model: Model, episode: float, learner: CompiledShifted) -> Any:
    """Write the shift and the loss of the step; return b (1 + B), the room of the ledger."""
    start, num_actions, total, share = model.start, model.num_actions, 1.0, 1.0
    for k in range(len(learner.stability)):
        total += learner.stability[k]
    room, spent = learner.budget * total, learner.ledger[0]
    if learner.rule == HARD:
        closed = (spent > room) | (learner.refused[0] > 0.0)
        learner.refused[0] += where(closed, 1.0, 0.0)
        share = where(closed, 0.0, 1.0)
    elif learner.rule == SMOOTH:
        share = max(1.0 - max(spent, 0.0) / max(room, TINY), 0.0)
        learner.refused[0] += where(share > 0.0, 0.0, 1.0)
    hinted = episode >= learner.threshold
    times = episode - 1.0 if hinted else episode
    for k in range(len(learner.stability)):
        most = learner.cap * (1.0 + learner.stability[k])
        for i in range(start[k] * num_actions, start[k + 1] * num_actions):
            learner.last[i], mean = learner.shift[i], learner.mean[i]
            if model.exists[at.PAIR, i]:
                mean = learner.losses[i] / (1.0 + learner.visits[i])
                learner.mean[i] = mean
                if learner.in_game:
                    mean *= learner.reach[i] / max(episode - 1.0, 1.0)
                apart = times * mean - learner.cumulative_loss[i]
                learner.shift[i] = max(min(apart, most), -most) * share
            hint = mean if hinted else 0.0
            learner.loss[i] = learner.cumulative_loss[i] + learner.shift[i] + hint
    return room


@routine
def spent_by(learner: CompiledShifted) -> Any:
    """X_t = X_{t-1} + ⟨q_t, e_{t-1} - e_t⟩."""
    spent = learner.ledger[0]
    for i in range(len(learner.q)):
        spent += learner.q[i] * (learner.last[i] - learner.shift[i])
    return spent


@routine
def add_stability(model: Model, episode: float, learner: CompiledShifted) -> None:
    """B of every layer grows by sum sqrt(q / t) (1 - pi)."""
    start, num_actions, q = model.start, model.num_actions, learner.q
    scale = 1.0 / np.sqrt(episode)
    for k in range(len(learner.stability)):
        grown = 0.0
        for first in range(start[k] * num_actions, start[k + 1] * num_actions, num_actions):
            total = 0.0
            for i in range(first, first + num_actions):
                total += q[i]
            inverse = where(total > 0.0, 1.0 / total, 0.0)
            for i in range(first, first + num_actions):
                grown += sqrt(q[i]) * (1.0 - q[i] * inverse)
        learner.stability[k] += scale * grown
