"""Numbers that torch and the engine share; this module imports neither torch nor Numba."""

from __future__ import annotations

import numpy as np

#: Episodes per chunk of random numbers. It is part of the definition of a run: another value gives
#: other random numbers.
CHUNK = 256

#: Episodes whose losses are added up before the sum is added to that of all earlier ones.
BLOCK = 1024


def log_spaced(episodes: int, per_decade: int = 20) -> list[int]:
    """Integers from 1 to `episodes`, evenly spaced in the logarithm, including the last."""
    exponents = np.arange(0, np.log10(max(episodes, 1)), 1 / per_decade)
    return sorted({*np.round(10**exponents).astype(int).tolist(), episodes})


# How a solve ended; torch_occ.step.solution.Status says what to do about each.
CONVERGED, MAX_STEPS, STALLED, UNDERFLOW, NOT_FINITE, NOT_CONVEX, INFEASIBLE = range(7)

#: An inexact Newton step by conjugate gradients stops at an error of this factor times the square
#: of min(1, initial error). Errors are relative to q(s). The initial error may be many times the
#: change of q(s), in large games for example. If a step is not known to a tenth, its change counts.
FORCING = 0.01

#: The largest number of iterations of conjugate gradients. By the bound on the eigenvalues in
#: torch_occ.step.system, one or two hundred should be enough.
MAX_ITERATIONS = 1000

#: How often conjugate gradients are started, each time from the true residual.
RESTARTS = 3

#: The iteration has stalled after this many Newton steps that do not halve the relative change.
STALL_AFTER = 6

#: Two numbers whose order decides between actions are tied if their relative difference is less
#: than this; then the action with the lowest index is chosen. In symmetric problems, rounding would
#: break ties differently on every backend and machine. Real differences are hardly ever this small.
TIE = 1e-9

#: Steps of entropies represent state occupancies below this value only by their logarithms. Such
#: states are called dead. LOG_DEAD is log(DEAD).
DEAD = 1e-250
LOG_DEAD = -575.6462732485114
#: Gaps of more than this many w leave an action of an entropy no positive q, with a wide margin.
OPEN = 1500.0

#: The first Newton steps of an entropy, this many, have full length however long they are.
FULL_STEPS = 8

#: The widest layer for which a step of an entropy forms matrices over the states of a layer.
SQUARE = 256

#: A sum of curvatures that is negative counts as zero if its absolute value is at most this factor
#: times the sum of the absolute values.
NOISE = 1e-8

#: Stands for the curvature of an action without alternatives if that is 0, as at ends of games.
FLAT = 1e-100

#: The increment and the two multipliers of SplitMix64, the hash behind the random numbers of
#: learners that sample.
GOLDEN = 0x9E3779B97F4A7C15
MIX_ONE, MIX_TWO = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
