"""The certificate of a step, compiled: residuals that measure how far q is from the solution.

torch_occ.step.solution.Solution defines the dual and the flow residual. The torch twin is the end
of torch_occ.step.newton.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torch_occ.kernels.lanes.vectors import anywhere, where
from torch_occ.kernels.layout import (
    AHEAD,
    BEND,
    COMPLEMENT,
    CURVES,
    GAPS,
    GRADIENT,
    INVERSE,
    PAIR,
    REST,
    ROUNDING,
    SHARE,
    Floats,
    M,
    Model,
    Terms,
    U,
    V,
    W,
    Work,
    ahead,
    inlined,
    part,
    routine,
    span,
)
from torch_occ.kernels.solver.psi import bend_at_one, number_of

TINY = float(np.finfo(np.float64).tiny)


@inlined
def unit_of(model: Model, i: int, complement: bool, pairs: Floats) -> Any:
    """The unit of the dual residual at pair i: q times the curvature of psi.

    A term of another argument contributes its curvature times the smaller of q and that argument.
    """
    q = pairs[PAIR, i]
    unit = q * pairs[PAIR + BEND, i] + min(q, pairs[REST, i]) * pairs[W, i]
    if complement and model.exists[COMPLEMENT, i]:
        unit += min(q, pairs[COMPLEMENT, i]) * pairs[COMPLEMENT + BEND, i]
    return unit


@part
def certify(model: Model, complement: bool, fine: Any, work: Work) -> tuple[Any, Any]:
    """The dual and the flow residual at q, relative to q.

    AHEAD must hold E[v(next state)] for the multipliers in V, and U the inflow of every state.
    `fine` says that ROUNDING holds the estimated rounding errors of the gaps, or in which lanes.
    """
    pairs, states, num_actions = work.pairs, work.states, model.num_actions
    dual, flow, bad = 0.0, 0.0, 0.0
    for s in range(states.shape[1]):
        total = 0.0
        for i in span(s * num_actions, (s + 1) * num_actions):
            if model.exists[PAIR, i]:
                total += pairs[PAIR, i]
                shaping = states[V, s] - pairs[AHEAD, i]  # E'v
                residual = abs(pairs[GRADIENT, i] + pairs[GAPS, i] - shaping)
                unit = unit_of(model, i, complement, pairs)
                if not model.exists[REST, i]:
                    # A state with one action has no choice; its equation only determines v.
                    # Its residual is relative to the terms of the equation.
                    unit = max(
                        unit, abs(pairs[GRADIENT, i]) + abs(pairs[GAPS, i]) + abs(shaping) + TINY
                    )
                elif anywhere(fine):
                    # An error common to all actions of a state does not change q.
                    own = 1.0 - pairs[INVERSE, i] * states[SHARE, s]
                    residual += where(fine, pairs[ROUNDING, i] * own, 0.0)
                error = abs(residual / unit)
                bad += error - error  # stays 0 unless something is not finite
                dual = max(dual, error)
        flow = max(flow, abs(total - states[U, s]) / total)
    return dual + bad, flow


@routine
def fit_multipliers(
    model: Model, complement: bool, fine: Any, wanted: Any, dual: Any, work: Work
) -> Any:
    """Fit the multipliers to q by least squares where `wanted`, and return the dual residual.

    One state after the other, from the last layer to the first, in units of q times the curvature.
    The multipliers of the last Newton step are kept if their residual is not larger.
    """
    start, num_actions, pairs, states = model.start, model.num_actions, work.pairs, work.states
    for k in range(len(start) - 2, -1, -1):
        behind = start[k + 1]
        after = start[k + 2] - behind if k + 2 < len(start) else 0
        for s in range(start[k], behind):
            states[M, s] = states[V, s]
            least, total, weights = np.inf, 0.0, 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    least = min(least, abs(unit_of(model, i, complement, pairs)))
            for i in range(s * num_actions, (s + 1) * num_actions):
                if model.exists[PAIR, i]:
                    pairs[AHEAD, i] = ahead(model.next_state, i, states, V, behind, after)
                    ratio = least / unit_of(model, i, complement, pairs)
                    weight = ratio * ratio
                    total += weight * (pairs[GRADIENT, i] + pairs[GAPS, i] + pairs[AHEAD, i])
                    weights += weight
            states[V, s] = total / weights
    found = certify(model, complement, fine, work)[0]
    better = wanted & (found < dual)
    for s in range(states.shape[1]):
        states[V, s] = where(better, states[V, s], states[M, s])
    return where(better, found, dual)


@part
def is_convex(model: Model, terms: Terms, weights: Floats, work: Work) -> Any:
    """Whether psi is convex along the changes of q that keep E q, at the last factorization.

    It is if every term is convex. Otherwise every state is checked; the twin of
    `torch_occ.step.kkt.is_convex`.
    """
    convex, curves = True, True
    # The numbers of a term follow one another: one, or one per pair.
    each = max(len(weights), len(terms.exponent)) // len(terms.argument)
    for term in range(len(terms.argument)):
        for i in range(each):
            p = number_of(terms, terms.exponent, term, i)
            bend = bend_at_one(terms.function[term], p) * number_of(terms, weights, term, i)
            convex = convex & (bend >= 0.0)
    if anywhere(not convex):
        for s in range(work.states.shape[1]):
            # The state occupancies of the first layer are fixed; their kappa may be negative.
            curves = curves & (work.states[CURVES, s] >= (0.0 if s < model.start[1] else 1.0))
    return convex | curves
