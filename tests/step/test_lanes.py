"""Batches in lanes: neighbours do not change the bits of an element; every element with its MDP."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from other_machine import OtherMachine
from torch.distributions import constraints

import torch_occ as occ
from torch_occ.regularizers.base import TabularRegularizer
from torch_occ.regularizers.terms import Term, XLogX

MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
MDPS = {"dense": MDP, "sparse": MDP.to_sparse()}
COUNT = 17
T = torch.linspace(1.0, 300.0, COUNT, dtype=torch.float64)


def random(seed, *shape):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# From easy to hard: different numbers of Newton steps, and losses that are shaped finely.
LOSSES = random(1, COUNT, 7, 3) * torch.logspace(-1, 5, COUNT, dtype=torch.float64)[:, None, None]
WEIGHTS = random(2, COUNT, 7, 3)

REGULARIZERS = {
    "Jin and Luo": lambda: occ.jin_luo(MDP, beta=0.5),
    "Shannon": lambda: occ.Shannon() / occ.InverseSqrt(),
    "a power": lambda: occ.Tsallis(0.7) / occ.InverseSqrt() + occ.LogBarrier(0.1),
    "1 - q": lambda: occ.HybridComplement(0.5) / occ.InverseSqrt() + occ.LogBarrier(1.0),
}


def run(step, chosen, mdp=None, tensors=()):
    """Everything that belongs to an element: q, v, certificate, and derivatives."""
    losses, t = LOSSES[chosen].requires_grad_(), T[chosen].requires_grad_()
    own = [x[chosen].detach().requires_grad_() for x in tensors]
    given = None if mdp is None else mdp.with_transitions(own[1:], own[0])
    solution = step.solve(losses, t, mdp=given)
    assert solution.backend == "engine"
    objective = (WEIGHTS[chosen] * solution.q).sum() + 0.1 * solution.value.sum()
    found = torch.autograd.grad(objective, [losses, t, *own])
    return (solution.q, solution.value, solution.certificate, *found)


def same(found, expected, chosen):
    return all(torch.equal(x, y[chosen]) for x, y in zip(found, expected, strict=True))


@pytest.mark.bits
@pytest.mark.parametrize("kind", MDPS)
@pytest.mark.parametrize("name", REGULARIZERS)
def test_an_element_has_the_same_bits_in_every_batch(name, kind):
    step = occ.FTRLStep(MDPS[kind], REGULARIZERS[name]())
    with OtherMachine():
        expected = run(step, torch.arange(COUNT))
        for chosen in (torch.arange(8), torch.tensor([COUNT - 1])):
            assert same(run(step, chosen)[:4], expected[:4], chosen)  # without that in t
    expected = run(step, torch.arange(COUNT))
    for count in range(1, COUNT + 1):
        chosen = torch.arange(COUNT - count, COUNT)
        assert same(run(step, chosen), expected, chosen)
    for seed in range(3):
        chosen = torch.randperm(COUNT, generator=torch.Generator().manual_seed(seed))
        assert same(run(step, chosen), expected, chosen)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert same(run(step, torch.arange(COUNT)), expected, torch.arange(COUNT))
    finally:
        torch.set_num_threads(threads)


class Entropies(TabularRegularizer):
    """q log q + w q(s) log q(s), solved in logarithms if w <= 0, by another solver else."""

    arg_constraints: ClassVar = {"w": constraints.real}

    def __init__(self, w):
        super().__init__(w=w)

    def table(self):
        return Term("pair", XLogX(), 1.0), Term("state", XLogX(), 1.0, "w")


@pytest.mark.bits
def test_entropies_and_other_terms_in_one_batch():
    w = torch.linspace(-1.0, 1.0, COUNT, dtype=torch.float64)

    def solve(first, stop):
        step = occ.FTRLStep(MDP, Entropies(w[first:stop]), backend="engine")
        return step.solve(1e-3 * LOSSES[first:stop])[:3]

    expected = solve(0, COUNT)
    assert not bool(expected[2][:, 0].any())
    for i in range(COUNT):
        assert same(solve(i, i + 1), expected, slice(i, i + 1))


# -- batches of MDPs -------------------------------------------------------------------------------


def worlds(count=COUNT):
    """The initial distributions and transitions of different MDPs."""
    found = [occ.LayeredMDP.random(3, 3, 3, seed=seed) for seed in range(count)]
    return [torch.stack(tensors) for tensors in zip(*(m.probabilities for m in found), strict=True)]


@pytest.mark.bits
@pytest.mark.parametrize("name", REGULARIZERS)
def test_an_element_with_its_own_mdp_has_the_same_bits_in_every_batch(name):
    step, tensors = occ.FTRLStep(MDP, REGULARIZERS[name]()), worlds()
    expected = run(step, torch.arange(COUNT), MDP, tensors)
    for count in range(1, COUNT + 1, 5):
        chosen = torch.arange(COUNT - count, COUNT)
        assert same(run(step, chosen, MDP, tensors), expected, chosen)
    chosen = torch.randperm(COUNT, generator=torch.Generator().manual_seed(0))
    assert same(run(step, chosen, MDP, tensors), expected, chosen)


@pytest.mark.parametrize("name", REGULARIZERS)
def test_batches_of_mdps_are_those_of_the_torch_path(name):
    psi, tensors = REGULARIZERS[name](), worlds()
    tensors[1][4:7] *= 0.9  # mass is lost on the way; such MDPs have groups of their own
    losses = (LOSSES.clamp(max=1e3)).requires_grad_()
    tensors = [x.requires_grad_() for x in tensors]
    mdp, answers = MDP.with_transitions(tensors[1:], tensors[0]), []
    for backend in ("torch", "engine"):
        step = occ.FTRLStep(MDP, psi, backend=backend)
        solution = step.solve(losses, T, mdp=mdp)
        assert solution.backend == backend
        assert bool(solution.converged.all())
        objective = (WEIGHTS * solution.q).sum() + 0.1 * solution.value.sum()
        inputs = [losses, *tensors, *psi.parameters()]
        found = torch.autograd.grad(objective, inputs, allow_unused=True, materialize_grads=True)
        answers.append((solution.q, solution.value, *found))
    for theirs, ours in zip(*answers, strict=True):
        scale = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * scale)


def test_batched_mdps_of_the_step_itself_and_shared_layers():
    _, *layers = worlds(6)
    mdp = occ.LayeredMDP([layers[0].reshape(2, 3, 1, 3, 3), layers[1][0], layers[2][0]])
    assert mdp.batch_shape == (2, 3)
    psi, losses = occ.jin_luo(mdp, beta=0.5), LOSSES[:3]
    steps = [occ.FTRLStep(mdp, psi, backend=backend) for backend in ("torch", "engine")]
    expected, found = (step.solve(losses, 5.0) for step in steps)
    assert (found.backend, found.q.shape) == ("engine", (2, 3, 7, 3))
    torch.testing.assert_close(found.q, expected.q, rtol=1e-9, atol=0)
    again = steps[1].solve(losses, 5.0, warm_start=found.q)
    torch.testing.assert_close(again.q, found.q, rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", [*MDPS, "differentiated", "wide"])
def test_probabilities_that_change_in_place_are_read_again(kind):
    """By both backends, also if budgets or gradients are asked for."""
    mdp = MDPS.get(kind, occ.LayeredMDP.random(3, 30, 2, seed=0) if kind == "wide" else MDP)
    if kind == "differentiated":
        mdp = mdp.with_transitions([p.clone().requires_grad_() for p in mdp.transitions])
    mdp = copy.deepcopy(mdp)
    loss = 3 * random(4, *mdp.actions.shape)
    budgets = occ.Budgets(loss[None], torch.tensor([9.0], dtype=torch.float64))
    steps = [occ.FTRLStep(mdp, occ.jin_luo(MDP), backend=name) for name in ("engine", "torch")]
    answers = []
    for change in (False, True):
        if change:
            with torch.no_grad():
                for p in mdp.probabilities[1:-1]:
                    p.copy_(p.view(-1, mdp.layer_sizes[1]).flip(-1).view_as(p))
        found, expected = (step.solve(loss, 3.0).q for step in steps)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)
        limited = (step.solve(loss, 3.0, constraints=budgets).q for step in steps)
        torch.testing.assert_close(*limited, rtol=1e-7, atol=1e-12)
        answers.append(found)
    assert not torch.allclose(*answers)
