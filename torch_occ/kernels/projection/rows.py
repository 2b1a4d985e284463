"""One row of transitions: the distribution closest to a reference between its bounds.

This is the compiled twin of torch_occ.step.projection.rows, which has the formulas. With
z = p̃ exp(least v - v), the minimizer is clip(c z, lower, upper). Instead of sorting the breakpoints
of the sum in c, the bracket of c is narrowed at one breakpoint after the other.
"""

from __future__ import annotations

import numpy as np

from torch_occ.kernels.layout import kernel
from torch_occ.kernels.projection.arrays import FALL, FREE, VALUE, P, Reference, Scratch

_SMALLEST = np.finfo(np.float64).tiny


@kernel
def fit_row(
    reference: Reference,
    first: int,  # the first entry of the row
    size: int,
    after: int,  # the first state of the next layer
    least: float,  # the smallest v there
    scratch: Scratch,
) -> float:
    """Write p and its free part, and return G; NaN if a number underflows."""
    p, states = scratch.rows, scratch.states
    total, inside = 0.0, True
    for j in range(size):
        z = 0.0
        if reference.upper[first + j] > 0.0:
            z = reference.rows[first + j] * states[FALL, after + j]
            if z < _SMALLEST:  # the torch twin compares logarithms
                return np.nan
        p[FREE, first + j] = z  # until c is known
        total += z
    for j in range(size):
        share = p[FREE, first + j] / total
        p[P, first + j] = share
        inside = inside and reference.lower[first + j] <= share <= reference.upper[first + j]
    if inside:
        for j in range(size):
            p[FREE, first + j] = p[P, first + j]
        return least - np.log(total)
    low, high = narrow(reference, first, size, scratch)
    rest, total, cost = 1.0, 0.0, 0.0
    for j in range(size):
        z, lower, upper = (
            p[FREE, first + j],
            reference.lower[first + j],
            reference.upper[first + j],
        )
        bound = -1.0
        if z == 0.0:
            bound = 0.0
        elif lower / z >= high:
            bound = lower
        elif upper / z <= low:
            bound = upper
        p[P, first + j] = bound
        if bound < 0.0:
            total += z
        else:
            rest -= bound
            if bound > 0.0:
                ratio = np.log(bound / reference.rows[first + j])
                cost += bound * (ratio + states[VALUE, after + j])
    rest = max(rest, _SMALLEST)
    for j in range(size):
        if p[P, first + j] < 0.0:
            share = rest * (p[FREE, first + j] / total)
            share = min(max(share, reference.lower[first + j]), reference.upper[first + j])
            p[P, first + j] = p[FREE, first + j] = share
        else:
            p[FREE, first + j] = 0.0
    if total > 0.0:
        cost += rest * (np.log(rest / total) + least)
    return cost


@kernel
def narrow(reference: Reference, first: int, size: int, scratch: Scratch) -> tuple[float, float]:
    """The neighbouring breakpoints of the sum of clip(c z, lower, upper) around one."""
    low, high = 0.0, np.inf
    least = 0.0
    for j in range(size):
        least += reference.lower[first + j]
    if least >= 1.0:
        return 0.0, 0.0  # all at their lower bounds
    for j in range(2 * size):
        z = scratch.rows[FREE, first + j // 2]
        if z > 0.0:
            bound = reference.lower if j % 2 == 0 else reference.upper
            middle = bound[first + j // 2] / z
            if low < middle < high:
                total = 0.0
                for i in range(first, first + size):
                    share = middle * scratch.rows[FREE, i]
                    total += min(max(share, reference.lower[i]), reference.upper[i])
                if total < 1.0:
                    low = middle
                else:
                    high = middle
    return low, high
