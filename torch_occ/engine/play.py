"""The episode loop, compiled: the adversary answers, the learner proposes, walks and observes.

A compiled learner is a named tuple of arrays and numbers: its state, its settings and scratch
memory. Two functions are registered for its type, `propose` and `observe`. They have the parameters
of the functions of these names below, and are plain functions, which Numba compiles together with
the loop. `propose` writes the occupancy measure of the episode into `tally.q`; or the pair that
every state plays into a field `choice`; or a policy into a field `policy`. From the last two, the
loop computes q with the true transitions. `observe` reads the trajectory from the game.

torch_occ.game.players fills the fields by their names. Both backends read the same random numbers
and play the same game.
"""

from __future__ import annotations

from inspect import signature
from typing import Annotated, Any, NamedTuple

from torch_occ._support.constants import BLOCK, TIE
from torch_occ.engine import layout as at
from torch_occ.engine.lanes import (
    anywhere,
    in_lanes,
    lane,
    where,
)
from torch_occ.engine.layout import (
    Floats,
    Ints,
    Model,
    Work,
    by_learner,
    dispatch,
    inlined,
    kernel,
    likelihoods,
    routine,
    successor,
)

NOISE = {"none": 0, "bernoulli": 1, "uniform": 2}

#: Fields with one number per pair, `(S * A,)`, or per state, `(S,)`. If the learner's state has
#: no such name, it is scratch memory. Other shapes are declared in the same way, for example as
#: Annotated[Floats, 2, "pairs"].
PerPair = Annotated[Floats, "pairs"]
PerState = Annotated[Floats, "states"]


class Game(NamedTuple):
    """The episodes of one call for N seeds, and what an episode shows to the learner.

    Seeds have rows and not lanes, except in `means`.
    """

    model: Model
    means: Floats  # (n or 1, S * A); with a greedy adversary one row, which is overwritten
    numbers: Floats  # (N, chunk, L, 3), uniform
    tables: Floats  # (N, chunk, S * A), uniform, under full information; else (N, 0, 0)
    first: int  # the row of the first episode in numbers and tables
    episodes: int  # n
    before: int  # the number of the previous episode
    noise: int
    greedy: bool  # whether `GreedyAdversary` sets the means after the first episode
    states: Ints  # (N, L), the trajectory of the episode: its states,
    pairs: Ints  # (N, L), its pairs,
    losses: Floats  # (N, L), and its losses
    table: Floats  # (N, S * A), the losses of all pairs under full information; else (N, 0)


class Tally(NamedTuple):
    """The running sums, by the names that `Simulation.sums` has, and q; pairs are flat.

    The first four have two rows, for blocks of episodes that are complete, and for the last one.
    """

    cumulative_occupancy: Annotated[Floats, 2, "pairs"]
    total_mean: Annotated[Floats, 2, "pairs"]
    expected: Floats  # (2, 1)
    realised: Floats  # (2, 1)
    q: PerPair
    # (S * A, S * A), as `losses.second_moments`; (0, 0) if it is not needed
    second_moment: Floats
    # These are (1,).
    newton_steps: Floats
    uncertified: Floats
    dual_residual: Floats
    flow_residual: Floats
    first_uncertified: Floats  # the episode of the first step without certificate, 0 if none
    first_status: Floats  # and its status


@by_learner
def propose(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    """Choose what to play in episode `game.before + t + 1`."""


@by_learner
def observe(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    """Learn from the trajectory of the episode, or from its table of losses."""


@kernel
def play(game: Game, tally: Tally, learner: Any, work: Work, width: Any) -> None:
    """Play n episodes, with one seed per lane unless the width is None; see `in_lanes`.

    In lanes, the means and the floats of tally, learner and work have a last axis of lanes, except
    those that their classes declare as `Shared`. There may be fewer seeds than lanes.
    """
    tally, learner, work = in_lanes(tally, width), in_lanes(learner, width), in_lanes(work, width)
    means = in_lanes(game.means, width)
    for t in range(game.episodes):
        if t > 0 and game.greedy:
            favour(game.model, tally.q, means)
        propose(game, t, tally, learner, work)
        occupy(game.model, tally.q, learner, work)
        record(game, t, means, tally)
        walk(game, t, means, tally, learner)
        observe(game, t, tally, learner, work)
        if (game.before + t + 1) % BLOCK == 0:
            close_block(tally.cumulative_occupancy)
            close_block(tally.total_mean)
            close_block(tally.expected)
            close_block(tally.realised)


# -- the adversary ---------------------------------------------------------------------------------


@routine
def favour(model: Model, q: Floats, means: Floats) -> None:
    """Write the mean losses of `GreedyAdversary` after q into `means`.

    The mean is 1 for the likeliest action of each state, and 0 for the others. Ties are broken as
    in `torch_occ.mdp.occupancy.likeliest`.
    """
    num_actions = model.num_actions
    for first in range(0, len(q), num_actions):
        most, open_ = 0.0, True
        for i in range(first, first + num_actions):
            most = max(most, q[i])
        for i in range(first, first + num_actions):
            chosen = open_ & (q[i] >= (1.0 - TIE) * most) & model.exists[at.PAIR, i]
            means[0, i] = where(chosen, 1.0, 0.0)
            open_ = open_ & (not chosen)


# -- the sums --------------------------------------------------------------------------------------


@routine(inline=True)
def record(game: Game, t: int, means: Floats, tally: Tally) -> None:
    """Add q, the means and the expected loss of an episode to the sums."""
    row, expected = min(t, len(means) - 1), 0.0
    for i in range(len(tally.q)):
        expected += tally.q[i] * means[row, i]
        tally.cumulative_occupancy[1, i] += tally.q[i]
        tally.total_mean[1, i] += means[row, i]
    tally.expected[1, 0] += expected
    if len(tally.second_moment) > 0:
        for n in range(len(game.pairs)):
            add_moments(game, t, row, lane(means, n), lane(tally.second_moment, n))


@routine
def close_block(sums: Floats) -> None:
    """Add the sum of the last block to that of all before; what rounding takes away stays there.

    Otherwise sums over 1e7 episodes, and the regret as their difference, lose seven digits.
    """
    for i in range(sums.shape[1]):
        before, block = sums[0, i], sums[1, i]
        total = before + block
        added = total - before
        sums[0, i], sums[1, i] = total, (before - (total - added)) + (block - added)


@inlined
def add_moments(game: Game, t: int, row: int, means: Floats, total: Floats) -> None:
    """Add E[loss_i loss_j] of an episode to the total.

    If the means do not change, the sum over all episodes of the call is added at t = 0.
    """
    if game.greedy or len(means) > 1:
        add_products(game.noise, means, row, 1.0, total)
    elif t == 0:
        add_products(game.noise, means, row, float(game.episodes), total)


@routine
def add_products(noise: int, means: Floats, row: int, times: float, total: Floats) -> None:
    """Add `times` E[loss_i loss_j] for i <= j, as `losses.second_moments`."""
    for i in range(len(total)):
        mean = means[row, i]
        if mean > 0.0:
            weight, square = times * mean, mean * mean
            if noise == 1:
                square = mean
            elif noise == 2:
                square += min(mean, 1 - mean) ** 2 / 3
            total[i, i] += times * square
            for j in range(i + 1, len(total)):
                total[i, j] += weight * means[row, j]


# -- the policy, and its trajectory ----------------------------------------------------------------


@routine(inline=True)
def occupy_by(model: Model, policy: Floats, chosen: bool, q: Floats, work: Work) -> None:
    """Write the occupancy measure of a policy, or of the pair chosen in every state, into q."""
    start, num_actions, states = model.start, model.num_actions, work.states
    for s in range(start[-1]):
        states[at.U, s] = model.initial[s] if s < start[1] else 0.0
    for k in range(len(start) - 1):
        width = start[k + 2] - start[k + 1] if k + 2 < len(start) else 0
        for s in range(start[k], start[k + 1]):
            for i in range(s * num_actions, (s + 1) * num_actions):
                own = where(policy[s] == float(i), 1.0, 0.0) if chosen else policy[i]
                mass = states[at.U, s] * own
                q[i] = mass
                if width > 0 and anywhere(mass > 0.0):
                    shares, begin, size = likelihoods(model.next_state, i, width)
                    for j in range(size):
                        there = successor(model.next_state, i, j, start[k + 1])
                        states[at.U, there] += mass * shares[begin + j]


def by_proposal(function: Any) -> Any:
    """A function that kernels call, chosen by what its parameter `learner` proposes.

    The function returns three parts: for learners with a field `choice`, with a field `policy`,
    and with neither of them.
    """
    by_choice, by_policy, by_q = function()
    place = [*signature(by_q.py_func).parameters].index("learner")

    def pick(*kinds: Any) -> Any:
        fields = kinds[place].fields
        return by_choice if "choice" in fields else by_policy if "policy" in fields else by_q

    return dispatch(by_q.py_func, pick)


@by_proposal
def occupy() -> Any:
    """Write the occupancy measure of what the learner proposes into q."""

    @routine(inline=True)
    def by_choice(model: Model, q: Floats, learner: Any, work: Work) -> None:
        occupy_by(model, learner.choice, True, q, work)

    @routine(inline=True)
    def by_policy(model: Model, q: Floats, learner: Any, work: Work) -> None:
        occupy_by(model, learner.policy, False, q, work)

    @routine(inline=True)
    def by_q(model: Model, q: Floats, learner: Any, work: Work) -> None:
        pass

    return by_choice, by_policy, by_q


@by_proposal
def pair_drawn() -> Any:
    """The pair that seed n plays in state s, drawn with a uniform number unless it is chosen."""

    @routine(inline=True)
    def by_choice(model: Model, tally: Tally, learner: Any, n: int, s: int, uniform: float) -> int:
        return int(lane(learner.choice, n)[s])

    @routine(inline=True)
    def by_q(model: Model, tally: Tally, learner: Any, n: int, s: int, uniform: float) -> int:
        first = s * model.num_actions
        return first + index_drawn(lane(tally.q, n), first, model.num_actions, uniform)

    return by_choice, by_q, by_q


@routine(inline=True)
def walk(game: Game, t: int, means: Floats, tally: Tally, learner: Any) -> None:
    """Play one trajectory per seed, write it into the game, and add up its losses.

    Seeds take their steps in turns, since the steps of one trajectory must wait for each other.
    """
    model, noise, row = game.model, game.noise, min(t, len(means) - 1)
    layers, full = len(model.start) - 1, game.table.shape[1] > 0
    for n in range(len(game.pairs)):
        charged, last = lane(means, n), game.numbers[n, game.first + t, layers - 1, 2]
        for i in range(game.table.shape[1]):
            game.table[n, i] = draw(noise, charged[row, i], game.tables[n, game.first + t, i])
        game.states[n, 0] = index_drawn(model.initial, 0, model.start[1], last)
    for k in range(layers):
        for n in range(len(game.pairs)):
            uniforms = game.numbers[n, game.first + t, k]
            i = pair_drawn(model, tally, learner, n, game.states[n, k], uniforms[0])
            mean = lane(means, n)[row, i]
            loss = game.table[n, i] if full else draw(noise, mean, uniforms[1])
            game.pairs[n, k], game.losses[n, k] = i, loss
            lane(tally.realised, n)[1, 0] += loss
            if k + 1 < layers:
                game.states[n, k + 1] = state_drawn(model, i, k, uniforms[2])


@inlined
def state_drawn(model: Model, pair: int, k: int, uniform: float) -> int:
    """Draw the state of layer k + 1 that follows a pair, from a uniform number."""
    first = model.start[k + 1]
    shares, begin, size = likelihoods(model.next_state, pair, model.start[k + 2] - first)
    return successor(model.next_state, pair, index_drawn(shares, begin, size, uniform), first)


@routine(inline=True)
def draw(noise: int, mean: float, uniform: float) -> float:
    """Draw a loss with this mean from a uniform number, as `LossProcess.draw`."""
    if noise == 1:
        return 1.0 if uniform < mean else 0.0
    if noise == 2:
        return mean + min(mean, 1 - mean) * (2 * uniform - 1)
    return mean


@routine(inline=True)
def index_drawn(shares: Floats, first: int, size: int, uniform: float) -> int:
    """Draw an index with probabilities proportional to some entries, from a uniform number.

    The rule is that of `torch_occ._support.streams.invert`.
    """
    total = 0.0
    for j in range(first, first + size):
        total += shares[j]
    target = min(uniform, 1 - 2.0**-50) * total
    cumulative, index = 0.0, 0
    for j in range(first, first + size - 1):
        cumulative += shares[j]
        index += cumulative <= target
    return index


# -- two learners in a game ------------------------------------------------------------------------


class Side(NamedTuple):
    """One player of a game for one seed; the game has Z ends."""

    game: Game
    tally: Tally
    last: Ints  # (Z,), the last pair of the player before the end, or -1
    path: Ints  # (Z, L), all of them, by layer, or -1
    losses: Floats  # (Z,)
    learner: Any
    work: Work


@kernel
def play_both(odds: Floats, numbers: Floats, first: Side, second: Side) -> None:
    """Play n episodes with uniform numbers `(n,)`; end z has the probability odds(z) q(z) q(z)."""
    for t in range(len(numbers)):
        move(t, first)
        move(t, second)
        end, rest = 0, min(numbers[t], 1 - 2.0**-50)
        for z in range(len(odds)):
            mass = odds[z] * chance_of(first, z) * chance_of(second, z)
            if mass > 0.0:
                end = z
                if rest < mass:
                    break
                rest -= mass
        learn(t, first, end)
        learn(t, second, end)


@routine(inline=True)
def move(t: int, side: Side) -> None:
    """Let a player propose, and add its strategy to the sum."""
    propose(side.game, t, side.tally, side.learner, side.work)
    occupy(side.game.model, side.tally.q, side.learner, side.work)
    for i in range(len(side.tally.q)):
        side.tally.cumulative_occupancy[1, i] += side.tally.q[i]
    if (side.game.before + t + 1) % BLOCK == 0:
        close_block(side.tally.cumulative_occupancy)


@routine(inline=True)
def chance_of(side: Side, end: int) -> float:
    """q of the last pair before an end; 1 if there is none."""
    return side.tally.q[side.last[end]] if side.last[end] >= 0 else 1.0


@routine(inline=True)
def learn(t: int, side: Side, end: int) -> None:
    """Write the trajectory to an end, with the loss on the last pair, and observe."""
    game, q = side.game, side.tally.q
    for k in range(game.pairs.shape[1]):
        pair = side.path[end, k]
        game.states[0, k] = pair // game.model.num_actions
        game.losses[0, k] = side.losses[end] if pair == side.last[end] else 0.0
        if pair < 0:
            pair, game.losses[0, k] = game.model.start[k + 1] * game.model.num_actions - 1, 0.0
            while not q[pair] > 0.0:  # the layer has the mass 1
                pair -= 1
        game.pairs[0, k] = pair
    observe(game, t, side.tally, side.learner, side.work)
