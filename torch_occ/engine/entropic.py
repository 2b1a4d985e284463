"""Backward and forward passes in logarithms, for the step of an entropy.

The backward pass computes multipliers and policy, the forward pass the logarithms of the state
occupancies. If a state is dead (its occupancy is below `DEAD`), Newton's system is solved relative
to u, layer by layer. The torch form is torch_occ.step.entropic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_occ._support.constants import (
    CONVERGED,
    DEAD,
    FULL_STEPS,
    LOG_DEAD,
    MAX_STEPS,
    NOT_FINITE,
    OPEN,
    STALL_AFTER,
    STALLED,
    UNDERFLOW,
)
from torch_occ.engine import layout as at
from torch_occ.engine.lanes import anywhere, exp, lane, lanes_of, log, sqrt, where
from torch_occ.engine.layout import (
    Floats,
    Ints,
    Model,
    Solver,
    Terms,
    Work,
    ahead,
    choose,
    dispatch,
    finite,
    in_logs,
    inlined,
    likelihoods,
    routine,
    span,
    successor,
    unsigned,
)
from torch_occ.engine.linear import arrive, factorize, solve
from torch_occ.engine.newton import (
    COARSE,
    EPS,
    LEFT,
    LIKELY,
    ROOT_EPS,
    SMALLEST,
    TINY,
    descend,
    descend_within,
    floor_pairs,
    has_budgets,
    usable,
)
from torch_occ.engine.psi import X_LOG_X, derive, number_of
from torch_occ.engine.shaping import shape_loss, shape_rarely

# Rows of the scratch memory that have another meaning in the steps of other regularizers.
LOG_POLICY = at.GRADIENT  # of pairs: log pi
GUESS = at.SLOPE  # of states: the guess of log u
FOUND = at.OTHERS  # of states: log u from the forward pass
WEIGHT, LAST = at.FITTED, at.LIFT  # of states: w, and the last step of the guess
RARE = 1e-40  # conjugate gradients do not see rarer states


@routine(inline=True)
def look_ahead(model: Model, price: Any, work: Work) -> None:
    """Soft value iteration: writes V, log pi, and pi into the row PAIR."""
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    exists = model.exists
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for s in span(start[k], behind):
            first, stop, least, total = s * num_actions, (s + 1) * num_actions, np.inf, 0.0
            weight, inverse = states[WEIGHT, s], 1.0 / states[WEIGHT, s]
            for i in span(first, stop):
                if exists[at.PAIR, i]:
                    cost = pairs[at.GAPS, i] + ahead(
                        model.next_state, i, states, at.V, behind, after
                    )
                    pairs[LOG_POLICY, i] = cost
                    least = min(least, cost)
            for i in span(first, stop):
                excess = (least - pairs[LOG_POLICY, i]) * inverse if exists[at.PAIR, i] else -np.inf
                pairs[LOG_POLICY, i] = excess
                pairs[at.PAIR, i] = exp(excess)
                total += pairs[at.PAIR, i]
            shift, share = log(total), 1.0 / total
            for i in span(first, stop):
                pairs[LOG_POLICY, i] -= shift
                pairs[at.PAIR, i] *= share
            states[at.V, s] = price * (1.0 + states[GUESS, s]) + least - weight * shift


@routine(inline=True)
def look_back(model: Model, work: Work) -> Any:
    """Write the occupancies of the policy: q, u in row U, and log u.

    The row PAIR must hold the policy on entry. Returns whether no state is dead, or in which lanes.
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    alive = True
    for k in range(len(start) - 1):
        arrive(model, at.PAIR, k, work)
        rare = False
        for s in span(start[k], start[k + 1]):
            rare = rare | (not (states[at.U, s] > DEAD))
            states[FOUND, s] = log(states[at.U, s])
        alive = alive & (not rare)
        for n in range(lanes_of(work.notes) if anywhere(rare) else 0):
            if lane(rare, n):
                gather_logs(lane(model, n), k, lane(work, n))
        for s in span(start[k], start[k + 1]):
            for i in span(s * num_actions, (s + 1) * num_actions):
                pairs[at.PAIR, i] *= states[at.U, s]
            if anywhere(not (states[at.U, s] > DEAD)):
                for i in span(s * num_actions, (s + 1) * num_actions):
                    small = exp(states[FOUND, s] + pairs[LOG_POLICY, i])
                    pairs[at.PAIR, i] = where(states[at.U, s] > DEAD, pairs[at.PAIR, i], small)
    return alive


@routine
def gather_logs(model: Model, k: int, work: Work) -> None:
    """Compute log u of the dead states of layer k, as a sum relative to its largest term."""
    start, num_actions, states = model.start, model.num_actions, work.states
    for s in range(start[k], start[k + 1]):
        states[at.M, s] = np.log(model.initial[s]) if k == 0 else -np.inf
        states[at.PULL, s] = 1.0 if k == 0 else 0.0
    width = start[k + 1] - start[k]
    for summing in range(2 if k > 0 else 0):
        for i in range(start[k - 1] * num_actions, start[k] * num_actions):
            own = states[FOUND, i // num_actions] + work.pairs[LOG_POLICY, i]
            shares, begin, size = likelihoods(model.next_state, i, width)
            for j in range(size if model.exists[at.PAIR, i] else 0):
                if shares[begin + j] > 0.0:
                    s = successor(model.next_state, i, j, start[k])
                    log = own + np.log(shares[begin + j])
                    if summing:
                        states[at.PULL, s] += np.exp(log - states[at.M, s])
                    else:
                        states[at.M, s] = max(states[at.M, s], log)
    for s in range(start[k], start[k + 1]):
        if not states[at.U, s] > DEAD:
            states[FOUND, s] = states[at.M, s] + np.log(states[at.PULL, s])
            states[at.U, s] = np.exp(states[FOUND, s])


@routine
def turn_dead(model: Model, weight: float, price: float, work: Work) -> None:
    """Write the Newton direction minus (log u - guess) into M, and the change of u into U.

    The form of `invert_jacobian` in torch_occ.step.entropic, which has the names. For m states that
    follow n states, R has the vector n behind it, and row j of `table` has I + C R, rho' and C n.
    When the system is solved, the last two are `forth` and `turn` n.
    """
    start, num_actions, table, states = model.start, model.num_actions, work.jacobian, work.states
    layers, end, widest = len(start) - 1, states.shape[1], table.shape[1] // 2
    C, R = table[end : end + widest], table[end + widest : end + 2 * widest]
    onward, product = table[end + 2 * widest : end + 3 * widest], table[end + 3 * widest :]
    for k in range(layers - 1, -1, -1):
        here, there = start[k], start[k + 1]
        n, m = there - here, start[k + 2] - there if k + 1 < layers else 0
        onward[:, :], C[:, :], table[there : there + m, :] = 0.0, 0.0, 0.0
        for i in range(here * num_actions, there * num_actions if m > 0 else 0):
            s, log = i // num_actions, work.pairs[LOG_POLICY, i]
            shares, first, size = likelihoods(model.next_state, i, m)
            for x in range(size if model.exists[at.PAIR, i] else 0):
                if shares[first + x] > 0.0:
                    j = successor(model.next_state, i, x, there)
                    onward[s - here, j - there] += np.exp(log) * shares[first + x]
                    rho = np.exp(log + states[FOUND, s] - states[FOUND, j]) * shares[first + x]
                    table[j, m + s - here] += rho
                    for y in range(size):
                        other = successor(model.next_state, i, y, there) - there
                        C[j - there, other] += rho * shares[first + y] / weight
        for j in range(m):
            row = table[there + j]
            row[j] += 1.0
            for s in range(n):
                for i in range(m):
                    C[j, i] -= row[m + s] * onward[s, i] / weight
            for r in range(m):
                for i in range(m):
                    row[i] += C[j, r] * R[r, i]
                row[m + n] += C[j, r] * R[r, m]
        solve_pivoting(table[there : there + m], m + n + 1)
        for j in range(m):
            for i in range(n + 1):
                product[j, i] = 0.0
                for r in range(m):
                    product[j, i] += R[j, r] * table[there + r, m + i]
            product[j, n] = R[j, m] - product[j, n]
        for s in range(n):
            for i in range(n + 1):
                R[s, i] = price if i == s else 0.0
            R[s, n] += states[FOUND, here + s] - states[GUESS, here + s]
            for j in range(m):
                for i in range(n + 1):
                    R[s, i] += onward[s, j] * product[j, i]
    for k in range(layers):
        before, m = start[max(k - 1, 0)], start[k + 1] - start[k]
        for s in range(start[k], start[k + 1]):
            states[at.PULL, s] = table[s, m + start[k] - before] if k > 0 else 0.0
            for r in range(before, start[k]):
                states[at.PULL, s] += table[s, m + r - before] * states[at.PULL, r]
            states[at.M, s] = -price * states[at.PULL, s]
            states[at.U, s] = states[at.M, s] * np.exp(states[FOUND, s])


@routine
def solve_pivoting(rows: Floats, columns: int) -> None:
    """Solve the linear systems in m rows in place, by Gauss-Jordan elimination with pivoting."""
    for column in range(len(rows)):
        pivot = column
        for row in range(column + 1, len(rows)):
            if abs(rows[row, column]) > abs(rows[pivot, column]):
                pivot = row
        scale = 1.0 / rows[pivot, column]
        for j in range(column, columns):
            rows[pivot, j], rows[column, j] = rows[column, j], scale * rows[pivot, j]
        for row in range(len(rows)):
            factor = 0.0 if row == column else rows[row, column]
            for j in range(column, columns):
                rows[row, j] -= factor * rows[column, j]


@routine(inline=True)
def unit(log_u: Any) -> Any:
    """The unit of errors of log u: 1, or log u / LOG_DEAD in dead states."""
    return max(log_u * (1.0 / LOG_DEAD), 1.0)


@routine(inline=True)
def certify_logs(model: Model, price: Any, fine: Any, work: Work) -> tuple[Any, Any]:
    """The dual and the flow residual, as in torch_occ.step.entropic; `fine` as in `certify`."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    dual, flow, rounding = 0.0, 0.0, 0.0
    for s in range(states.shape[1]):
        log_u, weight, total = states[FOUND, s], states[WEIGHT, s], 0.0
        error = where(price > 0.0, abs(log_u - states[GUESS, s]) / unit(log_u), 0.0)
        dual = max(dual, price / weight * error) + (error - error)
        common = 0.0
        for i in span(s * num_actions, (s + 1) * num_actions if anywhere(fine) else 0):
            common += exp(pairs[LOG_POLICY, i]) * pairs[at.ROUNDING, i]
        for i in span(s * num_actions, (s + 1) * num_actions):
            total += pairs[at.PAIR, i]
            if anywhere(fine):
                # The form of `spread_errors` in torch_occ.step.newton.
                own = exp(pairs[LOG_POLICY, i]) * pairs[at.ROUNDING, i]
                error = ((pairs[at.ROUNDING, i] - own) + abs(common - own)) / weight
                # Rounding may hide that a gap is small, and q positive.
                close = pairs[at.GAPS, i] - pairs[at.ROUNDING, i] < OPEN * weight
                close = close & (states[at.U, s] > SMALLEST)
                counts = fine & ((pairs[at.PAIR, i] > SMALLEST) | close)
                rounding = max(rounding, where(counts, error, 0.0))
        flow = max(
            flow, where(log_u > LOG_DEAD, abs(total - states[at.U, s]) / states[at.U, s], 0.0)
        )
    return max(dual, rounding), flow


# -- The FTRL step of an entropy in logarithms, compiled, for one problem --------------------------
#
# This is the compiled form of torch_occ.step.entropic, which derives the formulas; tests compare
# the two. The unknown of the iteration is log u, the logarithm of the state occupancy, so q may
# underflow to zero.
#
# The Newton direction is found in one of two ways:
#
# - While no state occupancy is below `DEAD`, by the linear system that all regularizers share
# (torch_occ.engine.linear). Its factors are kept from one episode to the next. Conjugate gradients
# do not see states below `RARE`, which they therefore count as dead.
# - Otherwise by a system for relative changes of u, for layers of up to `SQUARE` states.
#
# Other kernels call `follow` for any psi. Regularizers that are not entropies are passed on to
# `torch_occ.engine.newton.descend`. If no entropy is possible, nothing of this is compiled.


@routine
def _settle_or_descend(
    model: Model, solver: Solver, loss: Floats, running: Any, work: Work
) -> tuple[Any, Any, Any, Any, Any]:
    """Minimize from q where `running`; psi is an entropy in all these lanes, or in none."""
    if anywhere(running & (entropy_of(solver.terms, solver.weights)[0] > 0.0)):
        return settle(model, solver, loss, running, work)
    return descend(model, solver, loss, running, work)


def _way(*kinds: Any) -> Any:
    """The way to solve, by the types of the arguments; entropies with budgets as other psi."""
    if has_budgets(*kinds):
        return descend_within
    return _settle_or_descend if in_logs(*kinds) else descend


#: Minimize from q, for any psi; the arguments are those of `newton.descend`.
follow = dispatch(descend.py_func, _way)  # type: ignore[attr-defined]


@inlined
def follow_or_restart(
    model: Model, solver: Solver, loss: Floats, work: Work
) -> tuple[Any, Any, Any, Any, Any]:
    """`follow` from q, and from the middle if that fails; the compiled form of `FTRLStep.solve`.

    A warm start may lie too close to the boundary; the middle is a safe start. If both attempts
    fail, the result is that of the first.
    """
    pairs, notes, middle = work.pairs, work.notes, solver.middle
    used = notes[at.USED] > 0.0
    found = follow(model, solver, loss, used, work)
    failed = used & (found[0] != CONVERGED)
    if anywhere(failed):
        for i in range(len(middle)):
            pairs[at.KEPT, i] = pairs[at.PAIR, i]
            pairs[at.PAIR, i] = where(failed, middle[i], pairs[at.PAIR, i])
        notes[at.ERROR] = where(failed, np.inf, notes[at.ERROR])
        notes[at.GUESSED] = where(failed, 0.0, notes[at.GUESSED])
        again = follow(model, solver, loss, failed, work)
        lost = failed & (again[0] != CONVERGED)
        for i in range(len(middle)):
            pairs[at.PAIR, i] = where(lost, pairs[at.KEPT, i], pairs[at.PAIR, i])
        notes[at.ERROR] = where(lost, np.inf, notes[at.ERROR])
        notes[at.GUESSED] = where(lost, 0.0, notes[at.GUESSED])
        found = (
            where(failed & (not lost), again[0], found[0]),
            where(failed & (not lost), again[1], found[1]),
            where(failed & (not lost), again[2], found[2]),
            where(failed & (not lost), again[3], found[3]),
            where(failed & (not lost), again[4], found[4]),
        )
    return found


@routine(inline=True)
def _entropy_of(terms: Terms, weights: Floats) -> tuple[Any, Any]:
    """(w, kappa) as in torch_occ.step.entropic; (0, 0) if psi is not an entropy of that form.

    If w depends on the state, kappa must be 0, and the result has the smallest w.
    """
    count, least, largest, others = len(terms.argument), np.inf, 0.0, False
    for k in range(count):
        others = others or terms.function[k] != X_LOG_X
        others = others or (terms.argument[k] != at.PAIR and terms.argument[k] != at.STATE)
    for i in range(len(weights) // count):
        weight, price = weight_at(terms, weights, i)
        good = (price >= 0.0) & (price <= weight) & (weight < np.inf)
        good = good & ((price == 0.0) | (len(weights) == count))
        least, largest = where(good, min(least, weight), 0.0), max(largest, price)
    good = (least > 0.0) & (not others)
    return where(good, least, 0.0), where(good, largest, 0.0)


@routine(inline=True)
def weight_at(terms: Terms, weights: Floats, pair: int) -> tuple[Any, Any]:
    """(w, kappa) at a pair."""
    weight, price = 0.0, 0.0
    for k in range(len(terms.argument)):
        own = number_of(terms, weights, k, pair)
        if terms.argument[k] == at.PAIR:
            weight += own
        price += own
    return weight, price


@routine(inline=True)
def _no_entropy(terms: Terms, weights: Floats) -> tuple[Any, Any]:
    return 0.0, 0.0


entropy_of = choose(in_logs, _entropy_of, _no_entropy)


@routine
def settle(
    model: Model, solver: Solver, loss: Floats, running: Any, work: Work
) -> tuple[Any, Any, Any, Any, Any]:
    """Solve log u(guess) = guess by Newton's method; returns the same as `descend`."""
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    terms, weights, tolerance, max_steps, _, _ = solver
    stale, status, steps, patience = work.notes[at.ERROR], MAX_STEPS + 0.0, 0.0, STALL_AFTER + 0.0
    best, decrement, solved, (weight, price) = np.inf, 0.0, running, entropy_of(terms, weights)
    length, before, moved, left = 1.0, np.inf, np.inf, 0.0
    # The relative change of a policy is that of log u in all layers behind, added up.
    reach = max(price / weight * (len(model.start) - 1), 1.0)
    refresh = not (stale <= usable(work.notes[at.RECENT]))
    fine = not (EPS * shape_loss(model, loss, work) <= COARSE * tolerance * weight)
    if anywhere(fine):
        shape_rarely(model, loss, fine, work)
    for s in range(states.shape[1]):
        states[WEIGHT, s] = weight_at(terms, weights, s * num_actions)[0]
    anew = work.notes[at.GUESSED] == 0.0  # otherwise the guess of the last step is used
    if anywhere(anew):
        for s in range(states.shape[1]):
            total = 0.0
            for i in span(s * num_actions, (s + 1) * num_actions):
                total += pairs[at.PAIR, i]
            states[GUESS, s] = where(anew, log(max(total, TINY)), states[GUESS, s])
    # With price = 0, the step has a closed form that does not depend on the guess.
    closed = running & (price == 0.0)
    status, steps = where(closed, STALLED, status), where(closed, 1.0, steps)
    running = running & (not closed) & (steps < max_steps)
    while True:
        look_ahead(model, price, work)
        alive = look_back(model, work)
        if len(model.arrivals) == 0 and len(work.jacobian) > 0:
            for s in range(states.shape[1]):
                alive = alive & (states[at.U, s] > RARE)
        if len(work.jacobian) == 0:
            status = where(running & (not alive), UNDERFLOW, status)
            running = running & alive
        if not anywhere(running):
            break
        if anywhere(running & alive):
            refresh = (refresh | (stale == np.inf)) & running & alive
            if anywhere(refresh):
                for s in range(states.shape[1]):
                    states[0, s] = where(refresh, states[at.U, s], states[0, s])
                    states[at.BEND, s] = (price - weight) / states[at.U, s]
                    for i in span(s * num_actions, (s + 1) * num_actions):
                        pairs[at.D, i] = weight / max(pairs[at.PAIR, i], SMALLEST)
                        pairs[at.W, i] = 0.0
                factorize(model, refresh, work)
                stale = where(refresh, 0.0, stale)
            for s in range(states.shape[1]):
                states[at.V, s] = 0.0  # the start of an iterative solver
                states[at.M, s] = (states[GUESS, s] - states[FOUND, s]) * states[0, s]
                for i in span(s * num_actions, (s + 1) * num_actions):
                    pairs[at.FORCE, i] = price * (states[GUESS, s] - states[FOUND, s])
                    pairs[at.AHEAD, i] = 0.0
            solve(model, None, work, states[at.M])
            for s in range(states.shape[1]):
                states[at.M, s] = states[at.U, s] * states[at.SHARE, s] / weight
        dead = running & (not alive)
        for n in range(lanes_of(work.notes)):
            if lane(dead, n):
                turn_dead(lane(model, n), lane(weight, n), lane(price, n), lane(work, n))
        stale = where(dead, np.inf, stale)
        squared, size, change = 0.0, 0.0, 0.0
        for s in range(states.shape[1]):
            off, scale = states[FOUND, s] - states[GUESS, s], 1.0 / unit(states[FOUND, s])
            states[at.M, s] += off
            squared -= price * off * states[at.U, s]
            size += off * scale * (off * scale)
            change = max(change, abs(states[at.M, s]) * scale) + (states[at.M, s] - states[at.M, s])
        # Half of a long step is taken back, up to four times, if it was no progress.
        back = (steps > FULL_STEPS) & (moved > 0.1) & (length > 0.1) & (not (size < before))
        length, moved = where(back, 0.5 * length, 1.0), where(back, 1.0, change)
        before = where(back, before, size)
        status = where(running & (not finite(moved)), NOT_FINITE, status)
        running = running & finite(moved)
        decrement = where(running, squared, decrement)
        for s in range(states.shape[1]):
            states[LAST, s] = where(back, states[LAST, s], states[at.M, s])
            step = where(back, -length, 1.0) * states[LAST, s]
            states[GUESS, s] = where(running, states[GUESS, s] + step, states[GUESS, s])
        patience = where((moved < 0.5 * best) | (moved > 0.1), STALL_AFTER, patience - 1.0)
        best = min(best, moved)
        following = (where(alive, stale, 0.0) + reach * moved) * moved
        left = where(running, reach * following, left)
        done = (patience == 0.0) | ((moved <= ROOT_EPS) & (left <= LEFT))
        recent = max(moved, 0.9 * work.notes[at.RECENT])
        work.notes[at.RECENT] = where(running & (steps == 0.0), recent, work.notes[at.RECENT])
        status = where(running & done, STALLED, status)  # until certified below
        steps = where(running, steps + 1.0, steps)
        stale = where(running, stale + 2.0 * reach * moved, stale)
        refresh = not (stale * following <= LIKELY)
        running = running & (not done) & (steps < max_steps)
    work.notes[at.ERROR] = where(solved, stale, work.notes[at.ERROR])
    work.notes[at.GUESSED] = where(solved, 1.0, work.notes[at.GUESSED])
    work.notes[at.ROOTED] = where(solved, 0.0, work.notes[at.ROOTED])
    dual, flow = certify_logs(model, price, fine, work)
    good = (status == STALLED) & (dual <= tolerance) & (flow <= tolerance) & (left <= tolerance)
    for s in range(states.shape[1]):
        states[at.V, s] += states[at.PLAN, s]
    return where(good, CONVERGED, status), steps, sqrt(max(decrement, 0.0)), flow, max(dual, left)


# -- Linear systems: the derivatives of a step -----------------------------------------------------


@routine
def _solve_any(model: Model, terms: Terms, weights: Floats, source: Floats, work: Work) -> None:
    floor_pairs(model, work)
    derive(model, terms, weights, np.inf, work)
    factorize(model, work.notes[at.GUESSED] == work.notes[at.GUESSED], work)
    solve(model, source, work)


@routine
def _solve_any_or_softly(
    model: Model, terms: Terms, weights: Floats, source: Floats, work: Work
) -> None:
    """With kappa = 0, the system is solved by one pass back and one forth.

    Let m(s) = sum_a pi G with G = P m - x, and u(s) = r(s) + sum u(s',a) P(s|s',a). Then
    u(s,a) = u(s) pi - q (G - m(s)) / w.
    """
    weight, price = entropy_of(terms, weights)
    if anywhere(not ((weight > 0.0) & (price == 0.0))):
        _solve_any(model, terms, weights, source, work)
        return
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    floor_pairs(model, work)
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for s in span(start[k], behind):
            total, mean = 0.0, 0.0
            for i in span(s * num_actions, (s + 1) * num_actions):
                seen = ahead(model.next_state, i, states, at.V, behind, after) - pairs[at.FORCE, i]
                pairs[at.TRIAL, i] = seen
                total += pairs[at.PAIR, i]
                mean += pairs[at.PAIR, i] * seen
            states[0, s], states[at.V, s] = total, mean / total
    for k in range(len(start) - 1):
        arrive(model, at.DQ, k, work)
        for s in span(start[k], start[k + 1]):
            inverse = 1.0 / weight_at(terms, weights, s * num_actions)[0]
            share = (source[s] + (states[at.U, s] if k > 0 else 0.0)) / states[0, s]
            for i in span(s * num_actions, (s + 1) * num_actions):
                bend = (pairs[at.TRIAL, i] - states[at.V, s]) * inverse
                pairs[at.DQ, i] = pairs[at.PAIR, i] * (share - bend)


#: Solve H(q) u - E'm = x, E u = r for x in FORCE and the source r: u in DQ, m in V.
linear = choose(in_logs, _solve_any_or_softly, _solve_any)


# -- Losses for learning: how far a solution is from a target --------------------------------------


class Aim(NamedTuple):
    """What solutions are compared with: targets z, or trajectories, whose mean visits are z."""

    targets: Floats  # (N * S * A or S * A,); empty with trajectories
    logs: Floats  # log z; kernels would compute them one by one
    # (N or 1, trajectories, L), numbers of all layers; -1 after the end of a trajectory
    states: Ints
    actions: Ints
    empirical: bool  # whether z need not be a flow, but has mass one per layer
    value: Floats  # (N,), out
    error: Floats  # (N,), out: how far z is from what it must be; infinite if it cannot be used


TARGET, LOGS = at.TRIAL, at.M  # of pairs: z; of states: sum_a z log z


@routine
def read_target(model: Model, aim: Aim, e: int, own: Work) -> None:
    """Write the target of element e into the row TARGET, and sum_a z log z into the row LOGS."""
    num_pairs, targets, logs, i = own.pairs.shape[1], own.pairs[TARGET], own.states[LOGS], 0
    begin = e * num_pairs if len(aim.targets) > num_pairs else 0
    for s in range(own.states.shape[1]):
        total = 0.0
        for _ in range(model.num_actions):
            targets[i] = aim.targets[unsigned(begin + i)]
            total += targets[i] * aim.logs[unsigned(begin + i)]
            i += 1
        logs[s] = total


@routine
def read_paths(model: Model, aim: Aim, e: int, own: Work) -> float:
    """Write the mean visits of element e into the row TARGET.

    Return zero, or infinity if the MDP cannot produce a trajectory.
    """
    start, num_actions, num_pairs = model.start, model.num_actions, own.pairs.shape[1]
    _, count, horizon = aim.states.shape
    row = min(e, len(aim.states) - 1)
    for i in range(num_pairs):
        own.pairs[TARGET, i] = 0.0
    for j in range(count):
        before, ended = 0, False
        for k in range(horizon):
            s, a = aim.states[row, j, k], aim.actions[row, j, k]
            if s == -1 and a == -1:
                ended = True
                continue
            if ended or s < start[k] or s >= start[k + 1] or a < 0 or a >= num_actions:
                return np.inf
            chance = model.initial[s] if k == 0 else 0.0
            if k > 0:
                shares, begin, size = likelihoods(model.next_state, before, start[k + 1] - start[k])
                for n in range(size):
                    if successor(model.next_state, before, n, start[k]) == s:
                        chance += shares[begin + n]
            before = s * num_actions + a
            if not (chance > 0.0 and model.exists[at.PAIR, before]):
                return np.inf
            own.pairs[TARGET, before] += 1.0 / count
    return 0.0


@routine(inline=True)
def compare(
    model: Model, solver: Solver, aim: Aim, solved: Any, elements: Ints, work: Work
) -> None:
    """Write the losses of solutions, and replace q by their derivatives by the predicted losses.

    For targets z, it is the Fenchel-Young loss, whose derivative is z - q,

        w sum z log(pi_z / pi) + kappa sum (z(s) log(z(s) / u(s)) - z(s) + u(s)) + ⟨v, E z - b⟩.

    For trajectories with mean visits z, it is - sum z log pi. The derivative is (z - y) / w with
    y = pi (z(s) - w x(s)), where x is the inflow of this derivative.
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    value, likelihood = 0.0, aim.states.shape[1] > 0
    work.notes[at.ERROR] = 0.0
    for n in range(len(elements)):
        if likelihood:
            lane(work.notes, n)[at.ERROR] = read_paths(model, aim, elements[n], lane(work, n))
        else:
            read_target(model, aim, elements[n], lane(work, n))
    error = where(solved, work.notes[at.ERROR], np.inf)
    for k in range(len(start) - 1):
        arrive(model, at.PAIR, k, work)
        layer = 0.0
        for s in span(start[k], start[k + 1]):
            weight, price = weight_at(solver.terms, solver.weights, s * num_actions)
            mass, total, most, cross = 0.0, 0.0, 0.0, 0.0
            for i in span(s * num_actions, (s + 1) * num_actions):
                z = pairs[TARGET, i]
                mass, total, most = mass + pairs[at.PAIR, i], total + z, max(most, z)
                if model.exists[at.PAIR, i]:
                    error = where(z >= 0.0, error, np.inf)
                    cross -= z * pairs[LOG_POLICY, i]
                else:
                    error = max(error, abs(z))
            inflow, share, scale = states[at.U, s] if k > 0 else 0.0, 1.0, 1.0
            if likelihood:
                share, scale = (total - weight * inflow) / mass, 1.0 / weight
                error = where(mass > DEAD, error, np.inf)
                value += cross
            else:
                whole = states[LOGS, s]
                cross += whole
                if anywhere(most < total):  # otherwise one action has all of it
                    whole = total * log(max(total, TINY))
                off, outer = total - mass - inflow, whole - total * (1.0 + states[FOUND, s]) + mass
                value += weight * (cross - whole) + price * outer + off * states[at.V, s]
                error = where(aim.empirical, error, max(error, abs(off)))
            layer += total
            for i in span(s * num_actions, (s + 1) * num_actions):
                pairs[at.PAIR, i] = (pairs[TARGET, i] - share * pairs[at.PAIR, i]) * scale
        error = where(aim.empirical, max(error, abs(layer - 1.0)), error)
    for n in range(len(elements)):
        aim.value[elements[n]], aim.error[elements[n]] = lane(value, n), lane(error, n)
