"""FTRLStep on the engine: the same derivatives as the torch path in every mode, the same errors."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jacrev, vmap
from zoo import PROBLEMS, REGULARIZERS, refused_by_the_engine

import torch_occ as occ

MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
LOSS = 30 * torch.rand(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
DIRECTION = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def pair(mdp=MDP, psi=None):
    psi = occ.jin_luo(mdp, beta=0.5) if psi is None else psi
    return occ.FTRLStep(mdp, psi, backend="torch"), occ.FTRLStep(mdp, psi, backend="engine")


def gradients(step, loss, t, direction):
    loss, t = (
        loss.detach().clone().requires_grad_(),
        torch.as_tensor(t, dtype=torch.float64).clone().requires_grad_(),
    )
    solution = step.solve(loss, t, check=False)
    objective = (direction * solution.q).sum() + 0.1 * solution.value.sum()
    return solution, torch.autograd.grad(
        objective, [loss, t, *step.parameters()], allow_unused=True, materialize_grads=True
    )


@pytest.mark.parametrize(
    ("regularizer", "problem"),
    [*((name, "layers") for name in REGULARIZERS), *(("jin_luo", name) for name in PROBLEMS)],
)
def test_gradients_are_the_same(regularizer, problem):
    mdp, loss, t = PROBLEMS[problem]()
    psi = REGULARIZERS[regularizer](mdp)
    if refused_by_the_engine(mdp, psi):
        return
    direction = torch.randn(
        loss.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    (expected_from, expected), (found_from, found) = (
        gradients(step, loss, t, direction) for step in pair(mdp, psi)
    )
    assert (expected_from.backend, found_from.backend) == ("torch", "engine")
    if bool(expected_from.converged.all()):
        for ours, theirs in zip(found, expected, strict=True):
            scale = float(theirs.abs().max())
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9 * scale)
    else:
        assert all(bool(x.isnan().any()) for x in found[:1])


def test_batched_parameters_and_a_batched_start_have_the_right_gradients():
    psi = occ.jin_luo(MDP, beta=torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    losses = torch.stack([LOSS, 2 * LOSS]).unsqueeze(1)  # (2, 1, S, A) against (3,)
    direction = torch.randn(
        2, 3, 7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5)
    )
    (_, expected), (solution, found) = (
        gradients(step, losses, 7.0, direction) for step in pair(MDP, psi)
    )
    assert (solution.backend, solution.q.shape) == ("engine", (2, 3, 7, 3))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10 * float(theirs.abs().max()))


def test_forward_over_reverse_needs_no_second_graph():
    found = []
    for step in pair():
        with forward_ad.dual_level():
            loss = forward_ad.make_dual(LOSS.clone().requires_grad_(), DIRECTION)
            (gradient,) = torch.autograd.grad(
                (step(loss, 30.0) ** 2).sum() + 0.5 * (loss**2).sum(), loss
            )
            found.append(forward_ad.unpack_dual(gradient).tangent)
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    assert not torch.equal(found[0], DIRECTION)  # the step has a part in it


def test_transforms_go_to_the_torch_path():
    _, step = pair()
    plain = occ.FTRLStep(MDP, step.regularizer, backend="torch")
    assert torch.equal(vmap(lambda loss: step(loss, 3.0))(LOSS[None])[0], plain(LOSS[None], 3.0)[0])
    assert jacrev(lambda loss: step(loss, 3.0)[0])(LOSS).shape == (3, 7, 3)


def test_an_empty_batch_is_empty():
    for step in pair():
        loss = LOSS.expand(0, 7, 3).clone().requires_grad_()
        q = step(loss, 3.0)
        assert q.shape == (0, 7, 3)
        assert torch.autograd.grad(q.sum(), loss)[0].shape == (0, 7, 3)


def test_who_solves():
    class Custom(occ.SeparableRegularizer):
        def pair(self, x):
            return -x.sqrt()

    wide = occ.LayeredMDP.random(2, 160, 2, seed=0)
    scattered = wide.to_sparse()

    def solve(step, mdp):
        return step.solve(torch.zeros(mdp.actions.shape, dtype=mdp.dtype), 1.0).backend

    assert solve(occ.FTRLStep(MDP, occ.jin_luo(MDP)), MDP) == "engine"
    assert solve(occ.FTRLStep(MDP, Custom()), MDP) == "torch"
    assert solve(occ.FTRLStep(wide, occ.jin_luo(wide)), wide) == "torch"
    assert solve(occ.FTRLStep(wide, occ.jin_luo(wide), backend="engine"), wide) == "engine"
    assert solve(occ.FTRLStep(scattered, occ.jin_luo(scattered)), scattered) == "engine"
    single = occ.FTRLStep(MDP, occ.jin_luo(MDP)).to(torch.float32)
    assert solve(single, single.mdp) == "torch"
    assert solve(single.to(torch.float64), single.mdp) == "engine"
