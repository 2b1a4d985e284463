"""How a solve ended, for both backends."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """How a solve ended."""

    CONVERGED = 0
    MAX_STEPS = 1
    STALLED = 2
    UNDERFLOW = 3
    NOT_FINITE = 4
    NOT_CONVEX = 5

    @property
    def advice(self) -> str:
        """What it means and what to do."""
        return _ADVICE[self]


_ADVICE = {
    Status.CONVERGED: "solved and certified",
    Status.MAX_STEPS: "the iteration limit was reached; raise max_steps, or start closer with warm_start",
    Status.STALLED: "rounding stopped the progress short of the tolerance; rescale the loss, or accept a larger tolerance",
    Status.UNDERFLOW: "an occupancy fell below the smallest floating-point number; add a LogBarrier, or a smaller learning rate",
    Status.NOT_FINITE: "a derivative of the regularizer overflowed; check that it is finite and convex inside Omega",
    Status.NOT_CONVEX: "the regularizer curves downwards at the point found, so this may be no minimum; "
    "check that it is convex: the signs of its weights, the curvature of its functions",
}
