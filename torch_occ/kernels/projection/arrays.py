"""The arrays of a projection.

Tables over transitions are flat, `(M,)`, layer after layer, as in torch_occ.game.beliefs.counts:
the successors of pair i are the entries `entry[i]`, ..., `entry[i + 1] - 1`. Scratch memory has one
row per quantity.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_occ.kernels.layout import Bools, Floats, Ints, Model

# Rows of `Scratch.pairs`.
LOG_WEIGHT = 0  # log w̃ - rate * loss
POLICY = 1
PAIR_ROWS = 2

# Rows of `Scratch.states`.
GUESS = 0  # g, the guess of log w(s)
TRIAL = 1  # g after a step
VALUE = 2  # v
OCCUPANCY = 3  # u
OFF = 4  # log u - g
MEAN = 5  # Lambda, the logarithmic mean of u and w
FORCE = 6  # u - w, then with the pull of the layers before
STEP = 7  # dg
MOVE = 8  # dv
FALL = 9  # exp(least v of the layer - v)
ROOT = 10  # the root of Lambda
SPARE = 11
STATE_ROWS = 12

# Rows of `Scratch.rows`.
P = 0  # the transitions
FREE = 1  # the same where no bound is active, else zero
ROW_ROWS = 2


class Layers(NamedTuple):
    """The layout of the layers; no transitions."""

    num_actions: int
    start: Ints  # (L + 1,), the first state of every layer
    exists: Bools  # (S * A,)
    initial: Floats  # (S_0,)
    entry: Ints  # (S * A + 1,), the first entry of each pair in a flat table, and M


class Reference(NamedTuple):
    """A reference q(s,a) p(s'|s,a), which the projection replaces, and the bounds."""

    q: Floats  # (S * A,)
    rows: Floats  # (M,)
    lower: Floats  # (M,)
    upper: Floats  # (M,)


class Scratch(NamedTuple):
    """Scratch memory of one projection."""

    pairs: Floats  # (PAIR_ROWS, S * A)
    states: Floats  # (STATE_ROWS, S)
    rows: Floats  # (ROW_ROWS, M)
    onward: Floats  # (S, widest), the transitions of the policy
    scaled: Floats  # (S, widest), Y of every layer
    inverse: Floats  # (S, widest), (I + Y)^-1 of every layer
    squares: Floats  # (3 * widest, widest), matrices of a layer


def layers_of(model: Model) -> Layers:
    """The layers of a model; its transitions are left out."""
    sizes = np.append(np.diff(model.start), 1)  # the last layer leads to one terminal state
    after = np.repeat(sizes[1:], sizes[:-1] * model.num_actions)
    entry = np.concatenate([[0], np.cumsum(after)])
    return Layers(model.num_actions, model.start, model.exists[0].copy(), model.initial, entry)


def make_scratch(layers: Layers) -> Scratch:
    """Allocate scratch memory."""
    num_pairs, num_states = len(layers.exists), int(layers.start[-1])
    widest = int(np.diff(layers.start).max())
    return Scratch(
        np.zeros((PAIR_ROWS, num_pairs)),
        np.zeros((STATE_ROWS, num_states)),
        np.zeros((ROW_ROWS, int(layers.entry[-1]))),
        np.zeros((num_states, widest)),
        np.zeros((num_states, widest)),
        np.zeros((num_states, widest)),
        np.zeros((3 * widest, widest)),
    )
