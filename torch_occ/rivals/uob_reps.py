"""UOB-REPS (Jin, Jin, Luo, Sra and Yu, 2020): mirror descent over a confidence set of transitions.

For adversarial losses, bandit feedback and unknown transitions. With q_t over triples (s, a, s'),

    play         pi_t(a|s) proportional to q_t(s,a)
    estimate     loss_t(s,a) 1{(s,a) visited} / (u_t(s,a) + gamma),   u_t by Comp-UOB
    update       counts; if a count has doubled, a new epoch and a new confidence set
    q_{t+1}      = argmin over q in Delta(set) of eta ⟨q, estimate⟩ + KL(q || q_t)

The set is that of the current epoch, after the update. q_1 is uniform over the triples of a layer,
and the first set contains all transitions.

**The projection** is compiled: one problem in every lane. It is

    argmin over q in Delta of rate ⟨q, loss⟩ + KL(q || reference)

Delta holds the occupancy measures q(s,a,s') = w(s,a) p(s'|s,a) with lower <= p <= upper, and the
reference is w̃ p̃. Only the flow constraints couple the rows of transitions. With their multipliers
v(s), and v = 0 at the end, every row is solved in closed form:

    G(s,a; v) = min of sum_s' p(s') (log(p(s') / p̃(s')) + v(s'))   over lower <= p <= upper,

with p = clip(c exp(log p̃ - v), lower, upper), where c makes the sum one. Then

    w(s,a) = w̃(s,a) exp(v(s) - rate * loss(s,a) - G(s,a; v)),
    D(v)   = sum_s initial(s) v(s) - sum w(s,a),     dD/dv(s) = inflow of w - w(s).

D is concave. Instead of v, the iteration moves g(s) = log w(s). A pass backward through the layers
gives v, the policy and p; a pass forward gives the occupancy u of that policy under p, so every
iterate satisfies all constraints. It is solved when log u = g.

**Newton's method.** With P the transitions of the policy, dv = dg + P dv, and dD = ⟨u - w, dg⟩. The
direction maximizes ⟨u - w, dg⟩ - 1/2 ⟨dg, Lambda dg⟩ - 1/2 ⟨dv, N dv⟩, where N is what the changes
of policies and of p contribute to the Hessian, block-diagonal over layers:

    ((I - P)' Lambda (I - P) + N) dv = (I - P)' (u - w),     dg = dv - P dv,

with a matrix that couples neighbouring layers only. Lambda is the logarithmic mean of u and w. At
the solution it is w, which is Newton's method; if N = 0, the direction is log u - g, which solves
the equation at once, however large it is. Lambda and N are positive, so it is an ascent direction;
steps are halved until D has grown enough.

Tables over transitions are flat, `(M,)`, layer after layer: the successors of pair i are the
entries `entry[i]`, ..., `entry[i + 1] - 1`. Scratch memory has one row per quantity.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_occ._support import constants
from torch_occ.engine.lanes import anywhere, exp, log, sqrt, where
from torch_occ.engine.layout import PAIR, Floats, Ints, Model, Work, finite, routine
from torch_occ.engine.learners import note_solve
from torch_occ.engine.play import Game, Tally, observe, propose
from torch_occ.mdp.checks import check_that
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.rivals import beliefs
from torch_occ.rivals.beliefs import CountingLearner, Widths
from torch_occ.step.solution import Options

# Rows of `Scratch.pairs`.
LOG_WEIGHT = 0  # log w̃ - rate * loss
POLICY = 1
FOUND = 2  # q(s,a) of the projection

# Rows of `Scratch.states`.
GUESS = 0  # g, the guess of log w(s)
TRIAL = 1  # g after a step
VALUE = 2  # v
OCCUPANCY = 3  # u
OFF = 4  # log u - g
MEAN = 5  # Lambda, the logarithmic mean of u and w
STEP = 6  # dg
MOVE = 7  # dv; at first (I - P)'(u - w)
FALL = 8  # exp(least v of the layer - v)
STATE_ROWS = 9

# Rows of `Scratch.rows`.
P = 0  # the transitions
FREE = 1  # the same where no bound is active, else zero

_EPS, _SMALLEST = np.finfo(np.float64).eps, np.finfo(np.float64).tiny
_SMALLEST_STEP = _SMALLEST / _EPS

#: The smallest share of the growth that the slope promises with which a step is accepted, and how
#: often a step is halved; after that, the iteration goes on from its end.
ENOUGH, BACKTRACKS = 1e-4, 40


class Scratch(NamedTuple):
    """Scratch memory of one projection, or of one in every lane."""

    pairs: Floats  # (3, S * A)
    states: Floats  # (STATE_ROWS, S)
    rows: Floats  # (2, M)
    #: (S, 2 * widest), the matrix of the Newton step, then its Cholesky factor. Row s has the
    #: columns of the layer before and of the layer of s, up to s.
    matrix: Floats


def make_scratch(mdp: LayeredMDP) -> Scratch:
    """Allocate scratch memory."""
    size, count, widest = mdp.actions.numel(), mdp.num_states, max(mdp.layer_sizes)
    shapes = (3, size), (STATE_ROWS, count), (2, beliefs.num_transitions(mdp)), (count, 2 * widest)
    return Scratch(*map(np.zeros, shapes))


# -- One row of transitions: clip(c z, lower, upper) with z = p̃ exp(least v - v) ------------------


@routine
def fit_row(learner: Any, i: int, after: int, least: Any) -> None:
    """Write p and its free part of pair i, and G into row POLICY.

    `after` is the first state of the next layer, and `least` the smallest v there.
    """
    scratch, lower, upper = learner.scratch, learner.lower, learner.upper
    p, first, stop = scratch.rows, learner.entry[i], learner.entry[i + 1]
    total, inside = 0.0, True
    for e in range(first, stop):
        fall = scratch.states[FALL, after + e - first]
        z = where(upper[e] > 0.0, learner.rows[e] * fall, 0.0)
        p[FREE, e] = z  # until c is known
        total += z
    for e in range(first, stop):
        share = p[FREE, e] / total
        p[P, e] = share
        inside = inside & (lower[e] <= share) & (share <= upper[e])
    scratch.pairs[POLICY, i] = least - log(total)
    if anywhere(not inside):
        clip_row(learner, i, after, least, inside)
    else:
        for e in range(first, stop):
            p[FREE, e] = p[P, e]


@routine
def clip_row(learner: Any, i: int, after: int, least: Any, inside: Any) -> None:
    """`fit_row` where a bound is active; lanes that are inside keep their p and G."""
    scratch, rows, lower, upper = learner.scratch, learner.rows, learner.lower, learner.upper
    p, first, stop = scratch.rows, learner.entry[i], learner.entry[i + 1]
    low, high = narrow(learner, first, stop)
    rest, total, cost = 1.0, 0.0, 0.0
    for e in range(first, stop):
        z = p[FREE, e]
        down = (z == 0.0) | (lower[e] / z >= high)
        up = (not down) & (upper[e] / z <= low)
        bound = where(down, lower[e], where(up, upper[e], 0.0))
        p[P, e], p[FREE, e] = where(inside, p[P, e], bound), where(down | up, 0.0, z)
        total += p[FREE, e]
        rest -= bound
        if anywhere(bound > 0.0):
            ratio = log(where(bound > 0.0, bound / rows[e], 1.0))
            cost += bound * (ratio + scratch.states[VALUE, after + e - first])
    rest = max(rest, _SMALLEST)
    for e in range(first, stop):
        z = p[FREE, e]
        share = min(max(rest * (z / total), lower[e]), upper[e])
        p[P, e] = where(inside | (z == 0.0), p[P, e], share)
        p[FREE, e] = where(inside, p[P, e], where(z == 0.0, 0.0, share))
    cost += where(total > 0.0, rest * (log(rest / total) + least), 0.0)
    scratch.pairs[POLICY, i] = where(inside, scratch.pairs[POLICY, i], cost)


@routine
def narrow(learner: Any, first: int, stop: int) -> tuple[Any, Any]:
    """The neighbouring breakpoints of the sum of clip(c z, lower, upper) around one."""
    least, z, lower, upper = 0.0, learner.scratch.rows, learner.lower, learner.upper
    for e in range(first, stop):
        least += lower[e]
    low, high = 0.0, where(least >= 1.0, 0.0, np.inf)  # all at their lower bounds
    for twice in range(2 * first, 2 * stop):
        e = twice // 2
        middle = (lower[e] if twice % 2 == 0 else upper[e]) / z[FREE, e]
        between = (low < middle) & (middle < high)
        if anywhere(between):
            total = 0.0
            for other in range(first, stop):
                total += min(max(middle * z[FREE, other], lower[other]), upper[other])
            low = where(between & (total < 1.0), middle, low)
            high = where(between & (not (total < 1.0)), middle, high)
    return low, high


# -- The pass backward and the pass forward through the layers -------------------------------------


@routine
def solve_rows(model: Model, learner: Any) -> Any:
    """Solve the rows backward and follow the policy forward, for the guess in TRIAL; return D."""
    start, num_actions, scratch = model.start, model.num_actions, learner.scratch
    pairs, states, depth, dual = scratch.pairs, scratch.states, len(model.start) - 1, 0.0
    entry = learner.entry
    for k in range(depth - 1, -1, -1):
        least = np.inf
        if k + 1 < depth:
            for s in range(start[k + 1], start[k + 2]):
                least = min(least, states[VALUE, s])
            for s in range(start[k + 1], start[k + 2]):
                states[FALL, s] = exp(least - states[VALUE, s])
        for s in range(start[k], start[k + 1]):
            most, total = -np.inf, 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    if k + 1 < depth:
                        fit_row(learner, i, start[k + 1], least)
                    else:  # the terminal state is certain
                        scratch.rows[P, entry[i]] = 1.0
                        pairs[POLICY, i] = -log(learner.rows[entry[i]])
                    pairs[POLICY, i] = pairs[LOG_WEIGHT, i] - pairs[POLICY, i]
                    most = max(most, pairs[POLICY, i])
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    pairs[POLICY, i] = exp(pairs[POLICY, i] - most)
                    total += pairs[POLICY, i]
            for i in range(s * num_actions, (s + 1) * num_actions):
                pairs[POLICY, i] = pairs[POLICY, i] / total
            states[VALUE, s] = states[TRIAL, s] - most - log(total)
    # The occupancy of the policy, log u - g, and D.
    for s in range(start[depth]):
        states[OCCUPANCY, s] = model.initial[s] if s < start[1] else 0.0
    for s in range(start[1]):
        dual += model.initial[s] * states[VALUE, s]
    for k in range(depth - 1):
        for i in range(start[k] * num_actions, start[k + 1] * num_actions):
            if model.exists[PAIR, i]:
                mass = states[OCCUPANCY, i // num_actions] * pairs[POLICY, i]
                for e in range(entry[i], entry[i + 1]):
                    states[OCCUPANCY, start[k + 1] + e - entry[i]] += mass * scratch.rows[P, e]
    for s in range(start[depth]):
        states[OFF, s] = log(states[OCCUPANCY, s]) - states[TRIAL, s]
        dual -= exp(states[TRIAL, s])
    return dual


@routine(inline=True)
def greatest(most: Any, x: Any) -> Any:
    """max(most, |x|), and NaN if x is."""
    return where(abs(x) <= most, most, abs(x))


# -- The Newton direction --------------------------------------------------------------------------


@routine
def find_direction(model: Model, entry: Ints, scratch: Scratch) -> tuple[Any, Any]:
    """Write dg into STEP; return the slope of D along it and the largest |dg|."""
    start, states = model.start, scratch.states
    num_actions, depth, slope, moved = model.num_actions, len(start) - 1, 0.0, 0.0
    for s in range(start[depth]):
        off = states[OFF, s]
        series = 1.0 + off * (0.5 + off * (1.0 / 6.0 + off * (1.0 / 24.0 + off / 120.0)))
        growth = where(abs(off) < 1e-2, series, (exp(off) - 1.0) / off)
        states[MEAN, s] = exp(states[GUESS, s]) * growth
        states[MOVE, s] = states[MEAN, s] * off
    for k in range(depth):
        assemble(model, entry, k, scratch)
        eliminate(model, k, scratch)
    for k in range(depth - 1, -1, -1):
        low = start[max(k - 1, 0)]
        for s in range(start[k + 1] - 1, start[k] - 1, -1):
            states[MOVE, s] /= scratch.matrix[s, s - low]
            for j in range(low, s):
                states[MOVE, j] -= scratch.matrix[s, j - low] * states[MOVE, s]
    for k in range(depth):
        for s in range(start[k], start[k + 1]):
            step = states[MOVE, s]
            for i in range(s * num_actions, (s + 1) * num_actions):
                for e in range(entry[i], entry[i + 1] if k + 1 < depth else entry[i]):
                    after = start[k + 1] + e - entry[i]
                    step -= scratch.pairs[POLICY, i] * scratch.rows[P, e] * states[MOVE, after]
            states[STEP, s] = step
            slope += states[MEAN, s] * states[OFF, s] * step
            moved = greatest(moved, step)
    return slope, moved


@routine(inline=True)
def assemble(model: Model, entry: Ints, k: int, scratch: Scratch) -> None:
    """Write the rows of layer k of the matrix, and its part of the right-hand side into MOVE."""
    start, states, rows, matrix = model.start, scratch.states, scratch.rows, scratch.matrix
    low, here, num_actions = start[max(k - 1, 0)], start[k], model.num_actions
    for s in range(here, start[k + 1]):
        for j in range(low, s):
            matrix[s, j - low] = 0.0
        matrix[s, s - low] = states[MEAN, s]
    for i in range(low * num_actions, here * num_actions):
        if model.exists[PAIR, i]:
            before, first, free = i // num_actions, entry[i], 0.0
            weight = states[MEAN, before] * scratch.pairs[POLICY, i]
            for e in range(first, entry[i + 1]):
                free += rows[FREE, e]
            share = where(free > 0.0, weight / free, 0.0)
            for s in range(here, start[k + 1]):
                x, y = weight * rows[P, first + s - here], share * rows[FREE, first + s - here]
                states[MOVE, s] -= x * states[OFF, before]
                matrix[s, before - low] -= x
                matrix[s, s - low] += y * free
                for j in range(here, s + 1):
                    e = first + j - here
                    matrix[s, j - low] += x * rows[P, e] - y * rows[FREE, e]


@routine(inline=True)
def eliminate(model: Model, k: int, scratch: Scratch) -> None:
    """The Cholesky factor of the rows of layer k, and the substitution forward in MOVE."""
    start, move, matrix = model.start, scratch.states, scratch.matrix
    low = start[max(k - 1, 0)]
    for s in range(start[k], start[k + 1]):
        for j in range(low, s + 1):
            first = low if j >= start[k] else start[max(k - 2, 0)]
            total = matrix[s, j - low]
            for c in range(low, j):
                total -= matrix[s, c - low] * matrix[j, c - first]
            matrix[s, j - low] = sqrt(total) if j == s else total / matrix[j, j - first]
            if j < s:
                move[MOVE, s] -= matrix[s, j - low] * move[MOVE, j]
        move[MOVE, s] /= matrix[s, s - low]


# -- The projection; nothing is allocated ----------------------------------------------------------


@routine
def project(model: Model, learner: Any) -> tuple[Any, Any, Any, Any]:
    """Write the projection into rows FOUND and P; return status, steps, flow and dual residual.

    The flow residual is the largest |sum of q - 1| of a layer: q follows its own rows forward, so
    all that can be wrong is that a row does not sum to one.
    """
    start, scratch, tolerance = model.start, learner.scratch, learner.tolerance
    states, pairs, flow, dual = scratch.states, scratch.pairs, 0.0, 0.0
    for s in range(start[-1]):  # the weights, and the guess: the occupancies of the reference
        mass = 0.0
        for i in range(s * model.num_actions, (s + 1) * model.num_actions):
            if model.exists[PAIR, i]:
                loss = learner.learning_rate * learner.estimate[i]
                pairs[LOG_WEIGHT, i] = log(learner.q[i]) - loss
                mass += learner.q[i]
        states[TRIAL, s] = log(mass)
    status, steps = maximize(model, learner)
    for k in range(len(start) - 1):
        total = 0.0
        for s in range(start[k], start[k + 1]):
            dual = greatest(dual, states[OFF, s])
            for i in range(s * model.num_actions, (s + 1) * model.num_actions):
                pairs[FOUND, i] = 0.0
                if model.exists[PAIR, i]:
                    pairs[FOUND, i] = states[OCCUPANCY, s] * pairs[POLICY, i]
                    total += pairs[FOUND, i]
        flow = greatest(flow, total - 1.0)
    certified = (status == float(constants.STALLED)) & (dual <= tolerance) & (flow <= tolerance)
    return where(certified, float(constants.CONVERGED), status), steps, flow, dual


@routine(inline=True)
def maximize(model: Model, learner: Any) -> tuple[Any, Any]:
    """Maximize D from the guess in TRIAL; return the status, STALLED at the end, and the steps."""
    scratch, num_states = learner.scratch, model.start[-1]
    states, dual = scratch.states, solve_rows(model, learner)
    status, steps, running = constants.MAX_STEPS + 0.0, 0.0, True
    best, patience = np.inf, float(constants.STALL_AFTER)
    for _ in range(learner.max_steps):
        smallest, off = np.inf, 0.0
        for s in range(num_states):
            states[GUESS, s] = states[TRIAL, s]
            smallest = min(smallest, states[OCCUPANCY, s])
        tiny = running & (smallest < _SMALLEST_STEP)
        status, running = where(tiny, float(constants.UNDERFLOW), status), running & (not tiny)
        slope, moved = find_direction(model, learner.entry, scratch)
        wild = running & (not finite(moved))
        status, running = where(wild, float(constants.NOT_FINITE), status), running & (not wild)
        if not anywhere(running):
            break
        length, found = 1.0, dual
        for _ in range(BACKTRACKS):
            for s in range(num_states):
                move = where(running, length * states[STEP, s], 0.0)
                states[TRIAL, s] = states[GUESS, s] + move
            found = solve_rows(model, learner)
            # Close to the solution, D changes less than its rounding errors.
            grown = (moved <= 1e-3) | (found >= dual + ENOUGH * length * slope)
            if not anywhere(running & (not grown)):
                break
            length = where(running & (not grown), 0.5 * length, length)
        dual = found
        steps += where(running, 1.0, 0.0)
        faster = (moved < 0.5 * best) | (moved > 0.1)
        patience = where(faster, float(constants.STALL_AFTER), patience - 1.0)
        best = min(best, moved)
        # A short step leaves only rounding errors, unless a bound became active on its way.
        for s in range(num_states):
            off = greatest(off, states[OFF, s])
        done = ((moved <= np.sqrt(_EPS)) & (off <= learner.tolerance)) | (patience <= 0.0)
        status = where(running & done, float(constants.STALLED), status)
        running = running & (not done)
        if not anywhere(running):
            break
    return status, steps


# -- The learner -----------------------------------------------------------------------------------


_OWN = {"rows": Floats, "learning_rate": float, "tolerance": float, "max_steps": int}
_FIELDS = beliefs.COUNTING | _OWN | {"scratch": Scratch}

#: The compiled form of `UOBREPS`.
CompiledUOBREPS: Any = NamedTuple("CompiledUOBREPS", [*_FIELDS.items()])  # type: ignore[misc]


class UOBREPS(CountingLearner):
    """UOB-REPS, for adversarial losses and unknown transitions.

    The learning rate and the bias are eta = gamma = sqrt(L ln(L S A / delta) / (T S A)), where S A
    is the number of existing pairs; the constant is quoted from memory. The widths are those of
    eq. (5) of the paper, and the empirical transitions have no pseudo-counts. Its regret is
    O(L S sqrt(A T ln(T S A / delta))) with probability 1 - O(delta).

    The state has, beyond that of `CountingLearner`, `q` `(N, S, A)` and `rows` `(N, M)`, the
    transitions inside q_t, and `estimate` `(N, S, A)`, that of the last episode.

    Args:
        mdp: only its layout and its initial distribution are used.
        episodes: T, which the algorithm must know.
        delta: the probability of failure, in (0, 1).
        learning_rate: eta, if not the above.
        bias: gamma, if not the above.
        widths: the confidence widths, if not those of the paper, for example
            `Widths.of("practical", mdp)`.

    Raises:
        ValueError: if an argument is out of range.
    """

    compiled = CompiledUOBREPS

    def __init__(
        self,
        mdp: LayeredMDP,
        episodes: int,
        delta: float = 0.1,
        *,
        learning_rate: float | None = None,
        bias: float | None = None,
        widths: Widths | None = None,
    ) -> None:
        super().__init__(mdp, pseudo_count=0.0)
        if isinstance(episodes, bool) or not isinstance(episodes, int) or episodes < 1:
            raise ValueError(
                "episodes: UOB-REPS needs the number of episodes, an integer of at least 1, got "
                f"{episodes!r}"
            )
        if not 0 < delta < 1:
            raise ValueError(f"delta: UOB-REPS needs a number in (0, 1), got {delta}")
        L, pairs = mdp.horizon, self.mdp.num_pairs
        printed = math.sqrt(L * math.log(L * pairs / delta) / (episodes * pairs))
        self.episodes, self.delta = episodes, delta
        self.learning_rate = printed if learning_rate is None else learning_rate
        self.bias = printed if bias is None else bias
        for name, rate in (("learning_rate", self.learning_rate), ("bias", self.bias)):
            check_that(0 < rate < math.inf, name, "a positive number", rate)
        self.widths = Widths.of("uob_reps", self.mdp, episodes, delta) if widths is None else widths
        self.max_episodes = self.widths.episodes or None
        self.options = Options()

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        layers = self.mdp.split(self.mdp.actions.to(self.mdp.dtype), 0)
        q = torch.cat([pairs / pairs.sum() for pairs in layers])
        self.state["q"] = q.expand(num_seeds, -1, -1).clone()
        rows = beliefs.join_transitions(self.mdp.transitions)
        self.state |= {"rows": rows.expand(num_seeds, -1).clone(), "estimate": 0 * self.state["q"]}

    def settings(self) -> dict[str, Any]:
        tolerance, steps = self.options.tolerance_in(torch.float64), self.options.max_steps
        own = {"tolerance": tolerance, "max_steps": steps, "scratch": make_scratch(self.mdp)}
        return super().settings() | own


@propose.register(CompiledUOBREPS)
def _propose_projected(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    if t == 0:
        beliefs.bound_transitions(game.model, learner)
    if game.before + t > 0:
        status, steps, flow, dual = project(game.model, learner)
        good = status == float(constants.CONVERGED)  # a projection that failed is left out
        for i in range(len(learner.q)):
            learner.q[i] = where(good, learner.scratch.pairs[FOUND, i], learner.q[i])
            if game.model.exists[PAIR, i]:
                for e in range(learner.entry[i], learner.entry[i + 1]):
                    learner.rows[e] = where(good, learner.scratch.rows[P, e], learner.rows[e])
        note_solve(game.before + t + 1, status, steps, flow, dual, tally)
    beliefs.write_policy(game.model.num_actions, learner.policy, learner)


@observe.register(CompiledUOBREPS)
def _observe_estimates(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    beliefs.estimate_losses(game, True, learner)
    beliefs.count_episode(game, t, learner)
