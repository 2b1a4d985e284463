"""Numbers that kernels share with their twins in torch. This module needs neither torch nor Numba."""

from __future__ import annotations

# How a solve ended; torch_occ.step.solution.Status has what to do about each.
CONVERGED, MAX_STEPS, STALLED, UNDERFLOW, NOT_FINITE, NOT_CONVEX = 0, 1, 2, 3, 4, 5

#: An unfinished Newton step by conjugate gradients may leave this part of the error that it found, and at most the square of that error.
FORCING = 0.01

#: Iterations of conjugate gradients after which a solve is given up. The bound in torch_occ.step.iterative allows for a hundred or two.
MAX_ITERATIONS = 1000

#: How often conjugate gradients start again from the true residual.
RESTARTS = 3

#: Newton steps without halving the relative change before the iteration is called stalled.
STALL_AFTER = 6

#: Where a choice depends on the order of two numbers, they are tied if they differ by less than
#: this share of them, and the action with the lowest index wins. Symmetric problems have ties that
#: rounding breaks in another way on every backend and machine; real differences are hardly ever so
#: small.
TIE = 1e-9

#: State occupancies below this are only handled through their logarithms, in the steps of entropies.
DEAD = 1e-250
LOG_DEAD = -575.6462732485114

#: So many Newton steps of an entropy have their full length, even if they are long ones.
FULL_STEPS = 8

#: Up to so many states, the Jacobian of an entropy's equations is formed.
SQUARE = 256

#: A curvature below zero by less than this, relative to what it is the sum of, is zero.
NOISE = 1e-8
