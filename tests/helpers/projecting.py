"""The Kullback-Leibler projection of UOB-REPS for one reference: the kernel, and in cvxpy."""

import warnings
from typing import Any, NamedTuple

import cvxpy as cp
import numpy as np
import torch

from torch_occ.engine.layout import PAIR, kernel
from torch_occ.reference import clarabel
from torch_occ.rivals import projection
from torch_occ.rivals.beliefs import entries
from torch_occ.step.arrays import model_of


class Given(NamedTuple):
    """What `projection.project` reads of a learner."""

    q: Any
    rows: Any
    lower: Any
    upper: Any
    entry: Any
    estimate: Any
    learning_rate: float
    tolerance: float
    max_steps: int
    scratch: projection.Scratch


@kernel
def run(model, given, certificate):
    found = projection.project(model, given)
    for k in range(4):
        certificate[k] = found[k]
    for i in range(len(given.q)):
        if model.exists[PAIR, i]:
            given.q[i] = given.scratch.pairs[projection.FOUND, i]
            for e in range(given.entry[i], given.entry[i + 1]):
                given.rows[e] = given.scratch.rows[projection.P, e]


def project(mdp, q, rows, lower, upper, loss, rate, max_steps=200):
    """Project q `(S, A)` and its flat rows `(M,)` in place.

    Returns the status, the number of steps, the flow residual and the dual residual.
    """
    model, entry = model_of(mdp, dense=True), entries(mdp)
    certificate = loss.new_zeros(4)
    tables = (x.numpy().reshape(-1) for x in (q, rows, lower, upper))
    limits = (float(rate), 2.0**-35, max_steps)  # eps^(2/3)
    scratch = projection.make_scratch(model.start, entry)
    given = Given(*tables, entry, loss.numpy().reshape(-1), *limits, scratch)
    run(model, given, certificate.numpy())
    return certificate


def project_cvxpy(mdp, q, transitions, lower, upper, loss, rate):
    """The projection with one variable per (s, a, s'), as in its definition: q and the value."""
    inflow = mdp.initial.numpy()
    variables, constraints, objective = [], [], 0
    parts = zip(
        *(mdp.split(x, -2) for x in (q, loss, mdp.actions)),
        *(transitions, lower, upper),
        strict=True,
    )
    for weight, cost, mask, p, low, high in parts:
        pairs = mask.nonzero()  # (m, 2), the existing pairs
        reference = (weight.unsqueeze(-1) * p)[mask].numpy()  # (m, n)
        x = cp.Variable(reference.shape)
        total = cp.sum(x, axis=1)
        across = cp.reshape(total, (len(pairs), 1), order="C") @ np.ones((1, p.shape[-1]))
        states = (pairs[:, :1] == torch.arange(len(mask))).double().numpy().T  # (S_k, m)
        constraints += [states @ total == inflow]
        constraints += [x >= cp.multiply(low[mask].numpy(), across)]
        constraints += [x <= cp.multiply(high[mask].numpy(), across)]
        objective += float(rate) * (cost[mask].numpy() @ total)
        # What is impossible under the reference is zero; its upper bound says so.
        possible = reference > 0
        divergence = cp.kl_div(x, np.where(possible, reference, 1.0))
        objective += cp.sum(cp.multiply(possible, divergence))
        inflow = cp.sum(x, axis=0)
        variables.append((x, mask))
    problem = cp.Problem(cp.Minimize(objective), constraints)
    with warnings.catch_warnings():
        # If Clarabel cannot certify the digits asked for, it returns its best point.
        warnings.filterwarnings("ignore", "Solution may be inaccurate", UserWarning)
        # With its usual steps of 0.99 Clarabel stalls at errors of up to 1e-7 in some problems.
        problem.solve(solver="CLARABEL", max_step_fraction=0.95, **clarabel(1e-13))
    found = []
    for x, mask in variables:
        whole = torch.zeros(*mask.shape, x.shape[1], dtype=torch.float64)
        whole[mask] = torch.as_tensor(x.value)
        found.append(whole)
    return tuple(found), float(problem.value)
