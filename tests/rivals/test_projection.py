"""The Kullback-Leibler projection of UOB-REPS against cvxpy and closed forms."""

import warnings
from collections import namedtuple
from typing import Any, NamedTuple

import cvxpy as cp
import numpy as np
import pytest
import torch
from zoo import PROBLEMS, tensor

import torch_occ as occ
from torch_occ import Status
from torch_occ.engine.layout import PAIR, kernel
from torch_occ.reference import clarabel
from torch_occ.rivals import uob_reps
from torch_occ.rivals.beliefs import entries
from torch_occ.step.arrays import model_of

MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)


Case = namedtuple("Case", ["q", "rows", "lower", "upper", "loss", "rate"])


class Given(NamedTuple):
    """What `uob_reps.project` reads of a learner."""

    q: Any
    rows: Any
    lower: Any
    upper: Any
    entry: Any
    estimate: Any
    learning_rate: float
    tolerance: float
    max_steps: int
    scratch: uob_reps.Scratch


@kernel
def run(model, given, certificate):
    found = uob_reps.project(model, given)
    for k in range(4):
        certificate[k] = found[k]
    for i in range(len(given.q)):
        if model.exists[PAIR, i]:
            given.q[i] = given.scratch.pairs[uob_reps.FOUND, i]
            for e in range(given.entry[i], given.entry[i + 1]):
                given.rows[e] = given.scratch.rows[uob_reps.P, e]


def project(mdp, q, rows, lower, upper, loss, rate, max_steps=200):
    """Project q `(S, A)` and its flat rows `(M,)` in place.

    Returns the status, the number of steps, the flow residual and the dual residual.
    """
    model, entry = model_of(mdp, dense=True), entries(mdp)
    certificate = loss.new_zeros(4)
    tables = (x.numpy().reshape(-1) for x in (q, rows, lower, upper))
    limits = (float(rate), 2.0**-35, max_steps)  # eps^(2/3)
    scratch = uob_reps.make_scratch(mdp)
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


def case(mdp, seed, width, scale=1.0):
    """A random reference, and bounds of random widths up to `width` around random rows."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(like):
        return torch.rand(like.shape, dtype=torch.float64, generator=generator)

    def rows():
        found = [uniform(p) + 0.05 for p in mdp.transitions]
        return [p / p.sum(-1, keepdim=True) for p in found]

    q = torch.where(mdp.actions, uniform(mdp.actions) + 0.05, 0.0)
    centre = rows()
    return Case(
        torch.cat([part / part.sum() for part in mdp.split(q, -2)]),
        rows(),
        [(p - width * uniform(p)).clamp(min=0) for p in centre],
        [(p + width * uniform(p)).clamp(max=1) for p in centre],
        scale * uniform(mdp.actions),
        0.7,
    )


def solve(mdp, given):
    """q(s,a) and p(s'|s,a) of every layer; certified, after few steps, and between the bounds."""
    q = given.q.clone()
    rows, lower, upper = (torch.cat([p.flatten() for p in x]) for x in given[1:4])
    status, steps, flow, dual = project(mdp, q, rows, lower, upper, given.loss, given.rate)
    assert status == Status.CONVERGED
    assert max(float(flow), float(dual)) <= 1e-12
    assert int(steps) <= 10
    parts = rows.split([p.numel() for p in given.rows])
    found = [x.view_as(p) for x, p in zip(parts, given.rows, strict=True)]
    for p, low, high, exists in zip(
        found[:-1], given.lower, given.upper, mdp.split(mdp.actions, -2), strict=False
    ):
        assert bool(((p >= low) & (p <= high))[exists].all())
        assert float((p.sum(-1) - 1)[exists].abs().max()) <= 1e-15
    return q, found


def agree(mdp, given):
    """Compare with cvxpy; return the share of transitions at a bound."""
    q, rows = solve(mdp, given)
    expected, value = project_cvxpy(mdp, *given)
    total = given.rate * (q * given.loss).sum()
    parts = zip(*(mdp.split(x, -2) for x in (q, given.q)), rows, given.rows, expected, strict=True)
    for w, reference, p, r, theirs in parts:
        x, y = w.unsqueeze(-1) * p, reference.unsqueeze(-1) * r
        torch.testing.assert_close(x, theirs, rtol=0, atol=1e-8)
        total += (torch.xlogy(x, torch.where(x > 0, x / y, 1.0)) - x + y).sum()
    assert abs(float(total) - value) < 1e-10
    layers = list(zip(rows, given.lower, given.upper, strict=True))[:-1]  # the last has no choice
    active = sum(int(((p <= low) | (p >= high)).sum()) for p, low, high in layers)
    return active / sum(p.numel() for p, _, _ in layers)


def test_it_is_cvxpy_with_any_number_of_active_bounds():
    widths = (0.01, 0.03, 0.12, 0.25, 1.0, 20.0)
    shares = [agree(MDP, case(MDP, seed, width)) for seed, width in enumerate(widths)]
    assert max(shares) > 0.6
    assert min(shares) < 0.1
    for name in ("masked", "layers"):
        mdp = PROBLEMS[name]().mdp.to_dense()
        agree(mdp, case(mdp, 5, 0.3))


def test_impossible_successors_stay_impossible():
    rows = [p.clone() for p in MDP.transitions]
    rows[1][0, 1, 2] = 0.0
    rows = [p / p.sum(-1, keepdim=True) for p in rows]
    bounds = {"lower": [0.5 * p for p in rows], "upper": [(2 * p).clamp(max=1) for p in rows]}
    agree(MDP, case(MDP, 4, 0.5)._replace(rows=rows, **bounds))


@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_large_losses_take_few_steps(scale):
    solve(MDP, case(MDP, 3, 0.3, scale))


def test_a_failure_says_what_it_is():
    q, *rows, loss, rate = case(MDP, 3, 0.3, 5.0)
    tables = [torch.cat([p.flatten() for p in x]) for x in rows]
    status, steps, *_ = project(MDP, q, *tables, loss, rate, max_steps=2)
    assert (status, steps) == (Status.MAX_STEPS, 2)


def test_values_that_differ_too_much_are_not_certified():
    """Two successors underflow, and what is left of the row is lost with them."""
    mdp = occ.LayeredMDP([torch.full((1, 1, 4), 0.25).double(), torch.ones(4, 1, 1).double()])
    p, end = mdp.transitions
    loss = tensor([0.0, 0.0, 1e3, 1e6, 1e9]).unsqueeze(-1)
    tables = [torch.cat([p.flatten(), x.flatten()]) for x in (end, 0 * end, end)]
    tables = [tables[0], tables[1] * 0.1, tables[2].clone()]
    tables[2][:4] = 0.35
    status, _, flow, _ = project(mdp, torch.ones(5, 1).double(), *tables, loss, 1)
    assert status != Status.CONVERGED
    assert not flow <= 1e-12


@pytest.mark.parametrize("distance", [1e-4, 1e-7, 1e-9, 1e-12, 0.0, -1e-9, -1e-7])
def test_bounds_that_are_only_just_active(distance):
    """The Newton step crosses a kink, so a short one need not be the last."""
    given = case(MDP, 2, 0.5)
    q, found = solve(MDP, given)
    upper = [x.clone() for x in given.upper]
    for k in (0, 1):
        upper[k][:, 1] = torch.maximum(found[k] + distance, given.lower[k])[:, 1]
        upper[k][:, 1, 0] = given.upper[k][:, 1, 0]
    again, _ = solve(MDP, given._replace(upper=upper))
    if distance >= 0:
        torch.testing.assert_close(again, q, rtol=1e-11, atol=0)


def test_one_layer_is_exponentiated_gradient():
    mdp = occ.LayeredMDP([torch.ones(2, 4, 1).double()], initial=tensor([0.3, 0.7]))
    given = case(mdp, 0, 0.5)
    weights = given.q * (-given.rate * given.loss).exp()
    expected = mdp.initial[:, None] * weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(solve(mdp, given)[0], expected, rtol=1e-15, atol=0)


def test_without_widths_it_is_the_step_of_o_reps():
    """The mirror step with Shannon's entropy: the loss is less the logarithm of the reference."""
    P = list(MDP.transitions)
    given = case(MDP, 0, 0.5)._replace(rows=P, lower=P, upper=P)
    q, rows = solve(MDP, given)
    expected = occ.FTRLStep(MDP, occ.Shannon())(given.rate * given.loss - given.q.log())
    torch.testing.assert_close(q, expected, rtol=1e-12, atol=0)
    assert all(map(torch.equal, rows, P))
