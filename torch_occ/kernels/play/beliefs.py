"""Transitions that are learned, compiled, for one seed: counts, epochs, widths, occupancy bounds.

This is the compiled twin of torch_occ.game.beliefs, which has the formulas; tests compare the two.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ.kernels.layout import PAIR, Floats, Ints, Model, U, Work, kernel
from torch_occ.kernels.solver.transitions import likelihoods, successor

# Entries of `Belief.epoch`.
NUMBER, FIRST = 0, 1


class Confidence(NamedTuple):
    """Settings of a belief, as torch_occ.game.beliefs.widths and `UnknownFTRL` have them."""

    pseudo_count: float
    bounded: bool  # whether there are widths; if not, the settings below are not used
    c1: float
    c2: float
    fewer: Floats  # (2,), subtracted from the visits in the denominators
    variance: bool
    iota: Floats  # (L,)
    scale: float  # of the bonus; 0 if there is none
    share: float
    remaining: bool
    floor: float  # of optimistic transitions, relative to the empirical ones; 1 if there are none


class Belief(NamedTuple):
    """What a learner knows about the transitions; the first six are its state.

    Tables over transitions are flat, as in torch_occ.game.beliefs.counts.
    """

    counts: Floats  # (M,)
    visits: Floats  # (S * A,)
    epoch_visits: Floats  # (S * A,)
    transitions: Floats  # (M,)
    widths: Floats  # (M,), or empty
    epoch: Floats  # (2,), the number of the epoch and its first episode
    bonus: Floats  # (S * A,)
    entry: Ints  # (S * A,), the first entry of each pair in a flat table
    # (2, S * A, widest): the smallest probabilities of the confidence set, and what they may grow
    box: Floats
    room: Floats  # (S * A,), the probability that the smallest ones leave over
    ahead: Floats  # (S,), scratch: values of states
    order: Ints  # (widest,), scratch: successors by value


@kernel
def estimate_transitions(model: Model, confidence: Confidence, belief: Belief) -> None:
    """Begin an epoch: the empirical transitions, their widths, and the bonus of every pair."""
    start, num_actions, layers = model.start, model.num_actions, len(model.start) - 1
    kappa, fewer = confidence.pseudo_count, confidence.fewer
    for k in range(layers):
        width = start[k + 2] - start[k + 1] if k + 1 < layers else 1
        iota = confidence.iota[k]
        reach = float(layers - 1 - k if confidence.remaining else layers)
        for i in range(start[k] * num_actions, start[k + 1] * num_actions):
            m, total = belief.visits[i], 0.0
            belief.epoch_visits[i] = m
            if not model.exists[PAIR, i]:
                continue
            for e in range(belief.entry[i], belief.entry[i] + width):
                p = 1.0 / width
                if m + kappa > 0.0:
                    p = (belief.counts[e] + kappa / width) / (m + kappa)
                belief.transitions[e] = p
                if confidence.bounded:
                    B = 0.0
                    if width > 1:
                        B = 1.0
                        if m > (1.0 if confidence.variance else 0.0):
                            spread = p * (1.0 - p) if confidence.variance else p
                            B = confidence.c1 * np.sqrt(spread * iota / max(m - fewer[0], 1.0))
                            B = min(1.0, B + confidence.c2 * iota / max(m - fewer[1], 1.0))
                    belief.widths[e] = B
                    total += B
            if confidence.scale > 0.0:
                belief.bonus[i] = confidence.scale * reach * min(confidence.share * total, 1.0)


@kernel
def spread_belief(model: Model, confidence: Confidence, belief: Belief) -> None:
    """Write the believed transitions into the model, and the box of the confidence set."""
    start, num_actions, layers = model.start, model.num_actions, len(model.start) - 1
    for k in range(layers - 1):
        width = start[k + 2] - start[k + 1]
        for i in range(start[k] * num_actions, start[k + 1] * num_actions):
            if not model.exists[PAIR, i]:
                continue
            left = 1.0
            for j in range(width):
                p = belief.transitions[belief.entry[i] + j]
                believed = p
                if confidence.bounded:
                    B = belief.widths[belief.entry[i] + j]
                    least = max(0.0, p - B)
                    belief.box[0, i, j], belief.box[1, i, j] = least, min(1.0, p + B) - least
                    left -= least
                    believed = p if confidence.floor >= 1.0 else max(p - B, confidence.floor * p)
                model.next_state[i, j] = believed
                model.arrivals[j, i] = believed
            belief.room[i] = max(left, 0.0)


@kernel
def upper_bound(model: Model, belief: Belief, policy: Floats, target: int, layer: int) -> float:
    """u(target), the upper occupancy bound of a state of this layer (Comp-UOB)."""
    start, num_actions, box, f = model.start, model.num_actions, belief.box, belief.ahead
    if layer == 0:
        return model.initial[target]
    for k in range(layer - 1, -1, -1):
        first = start[k + 1]
        width, there = start[k + 2] - first, target - first
        if k + 1 < layer:
            sort_successors(belief, first, width)
        for s in range(start[k], first):
            total = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if policy[i] > 0.0:
                    value, left = 0.0, belief.room[i]
                    if k + 1 == layer:  # all that is left goes to the target
                        value = box[0, i, there] + min(box[1, i, there], left)
                    else:
                        for n in range(width):
                            j = belief.order[n]
                            more = min(box[1, i, j], left)
                            left -= more
                            value += (box[0, i, j] + more) * f[first + j]
                    total += policy[i] * value
            f[s] = total
    u = 0.0
    for s in range(start[1]):
        u += model.initial[s] * f[s]
    return u


@kernel
def sort_successors(belief: Belief, first: int, width: int) -> None:
    """Sort the states of a layer by decreasing value into `belief.order`."""
    for j in range(width):
        n = j
        while n > 0 and belief.ahead[first + belief.order[n - 1]] < belief.ahead[first + j]:
            belief.order[n] = belief.order[n - 1]
            n -= 1
        belief.order[n] = j


@kernel
def doubled(belief: Belief, path: Ints) -> bool:
    """Whether a pair of the path has doubled its visits since the epoch began."""
    for k in range(len(path)):
        if belief.visits[path[k]] >= max(1.0, 2.0 * belief.epoch_visits[path[k]]):
            return True
    return False


@kernel
def occupy_by(model: Model, policy: Floats, q: Floats, work: Work) -> None:
    """Write the occupancy measure of a policy into q."""
    start, num_actions, states = model.start, model.num_actions, work.states
    for s in range(start[-1]):
        states[U, s] = model.initial[s] if s < start[1] else 0.0
    for k in range(len(start) - 1):
        width = start[k + 2] - start[k + 1] if k + 2 < len(start) else 0
        for s in range(start[k], start[k + 1]):
            for i in range(s * num_actions, (s + 1) * num_actions):
                q[i] = states[U, s] * policy[i]
                if width > 0 and q[i] > 0.0:
                    shares, begin, size = likelihoods(model.next_state, i, width)
                    for j in range(size):
                        there = successor(model.next_state, i, j, start[k + 1])
                        states[U, there] += q[i] * shares[begin + j]
