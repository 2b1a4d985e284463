"""The episode loop of UOB-REPS, compiled, for one seed.

This is the compiled twin of `torch_occ.rivals.uob_reps.UOBREPS`, played by
torch_occ.game.torch_player. Both backends read the same random numbers and play the same
game.
"""

from __future__ import annotations

from typing import NamedTuple

from torch_occ._support.constants import CONVERGED
from torch_occ.engine.layout import PAIR, Floats, Model, Work, kernel
from torch_occ.engine.play_old import (
    DUAL_RESIDUAL,
    FIRST_STATUS,
    FIRST_UNCERTIFIED,
    FLOW_RESIDUAL,
    NEWTON_STEPS,
    REALISED,
    UNCERTIFIED,
    Rules,
    enter,
    favour,
)
from torch_occ.engine.play_old import (
    FlatTally as Tally,
)
from torch_occ.engine.play_unknown import (
    FIRST,
    NUMBER,
    Belief,
    Confidence,
    Course,
    Memory,
    doubled,
    estimate_transitions,
    occupy_by,
    spread_belief,
    venture,
)
from torch_occ.engine.projection import Layers, Reference, Scratch, project

# Entries of `Mirror.last`, in the order of torch_occ.game.checks.DIAGNOSTICS.
STEPS, DUAL, FLOW, FAILED, STATUS = 0, 1, 2, 3, 4


class Mirror(NamedTuple):
    """The projection of one seed; the reference and `last` are the learner's state."""

    rate: float
    layers: Layers
    reference: Reference  # q_t, its transitions, and their bounds
    last: Floats  # (5,), the diagnostics of the last projection
    scratch: Scratch


@kernel
def play_uob_reps(
    truth: Model,
    believed: Model,  # scratch memory for `spread_belief`
    course: Course,
    confidence: Confidence,
    belief: Belief,
    memory: Memory,
    mirror: Mirror,
    before: int,  # the number of the previous episode
    means: Floats,  # (n or 1, S * A); with a greedy adversary one row, which is overwritten
    numbers: Floats,  # (n, L, 3)
    tables: Floats,  # (0, 0)
    rules: Rules,
    tally: Tally,  # its q is that of the true model
    work: Work,
) -> None:
    """Play n episodes."""
    scalars, last = tally.scalars, mirror.last
    spread_belief(believed, confidence, belief)
    for n in range(len(numbers)):
        t, row = before + n + 1, min(n, len(means) - 1)
        if n > 0 and rules.greedy:
            favour(truth, tally.q, means)
        normalize(truth, mirror.reference.q, memory)
        occupy_by(truth, memory.policy, tally.q, work)
        scalars[NEWTON_STEPS] += last[STEPS]
        scalars[UNCERTIFIED] += last[FAILED]
        scalars[DUAL_RESIDUAL] = max(scalars[DUAL_RESIDUAL], last[DUAL])
        scalars[FLOW_RESIDUAL] = max(scalars[FLOW_RESIDUAL], last[FLOW])
        if last[FAILED] != 0.0 and scalars[FIRST_UNCERTIFIED] == 0.0:
            scalars[FIRST_UNCERTIFIED], scalars[FIRST_STATUS] = t, last[STATUS]
        enter(rules, means, row, n, len(numbers), 1, tally)
        scalars[REALISED] += venture(
            truth, believed, course, belief, memory, rules, n, means, row, numbers, tables
        )
        if doubled(belief, memory.path):
            belief.epoch[NUMBER] += 1.0
            belief.epoch[FIRST] = t + 1.0
            estimate_transitions(believed, confidence, belief)
            spread_belief(believed, confidence, belief)
            bound(truth, belief, mirror)
        status, last[STEPS], last[FLOW], last[DUAL] = project(
            mirror.layers,
            mirror.reference,
            memory.estimate,
            mirror.rate,
            rules.tolerance,
            rules.max_steps,
            mirror.scratch,
        )
        last[STATUS], last[FAILED] = status, 0.0 if status == CONVERGED else 1.0


@kernel
def normalize(model: Model, q: Floats, memory: Memory) -> None:
    """The policy of q."""
    for first in range(0, len(q), model.num_actions):
        total = 0.0
        for i in range(first, first + model.num_actions):
            total += q[i]
        for i in range(first, first + model.num_actions):
            memory.policy[i] = q[i] / total


@kernel
def bound(model: Model, belief: Belief, mirror: Mirror) -> None:
    """The bounds of the confidence set."""
    for i in range(len(belief.visits)):
        if model.exists[PAIR, i]:
            for e in range(mirror.layers.entry[i], mirror.layers.entry[i + 1]):
                p, B = belief.transitions[e], belief.widths[e]
                mirror.reference.lower[e] = max(0.0, p - B)
                mirror.reference.upper[e] = min(1.0, p + B)
