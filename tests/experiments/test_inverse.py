"""Inverse reinforcement learning: the programs agree, and the experiment runs small."""

import pytest
import torch

import torch_occ as occ
from experiments import inverse
from experiments.inverse import WORLDS, demonstrate, expert, likelihood, match_visits, reference

F64 = torch.float64


@pytest.fixture(scope="module", params=["lake", "cliff"])
def shown(request):
    world = WORLDS[request.param]
    return world, demonstrate(world.mdp, expert(world), 50, 0)


def gradient(loss, reward):
    reward = reward.clone().requires_grad_()
    return torch.autograd.grad(loss(reward), reward)[0]


def test_the_gradient_is_that_of_the_published_recursions(shown):
    world, data = shown
    generator = torch.Generator().manual_seed(0)
    reward = torch.randn(len(world.tables[2]), dtype=F64, generator=generator)
    torch.testing.assert_close(
        gradient(match_visits(world, data), reward), gradient(reference(world, data), reward)
    )


def test_likelihood_and_visits_have_one_gradient_where_moves_are_certain():
    world = WORLDS["cliff"]
    data = demonstrate(world.mdp, expert(world), 50, 0)
    reward = torch.linspace(-1, 1, len(world.tables[2]), dtype=F64)
    torch.testing.assert_close(
        gradient(match_visits(world, data), reward),
        gradient(likelihood(world, data, occ.ConditionalEntropy()), reward),
    )


def test_demonstrations_follow_the_policy():
    world = WORLDS["lake"]
    policy = expert(world)
    data = demonstrate(world.mdp, policy, 20_000, 0)
    q = occ.occupancy(world.mdp, policy)
    torch.testing.assert_close(data.visits(world), world.visits(q), rtol=0.05, atol=0.02)


def test_the_model_of_the_lake():
    lake = inverse.make_lake()
    rows = lake.by_column(torch.rand(3, 4, dtype=F64, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(rows.sum(-1), torch.ones(3, 16, 4, dtype=F64))
    # With enough data of the model itself, maximum likelihood finds its parameters.
    theta = torch.tensor([0.3, 0.5, 0.7, 0.9], dtype=F64)
    counts = 1e4 * lake.by_column(theta).unsqueeze(0)
    torch.testing.assert_close(inverse.most_likely(lake, counts)[0], theta)


@pytest.mark.slow
def test_the_experiment_runs(tmp_path):
    args = inverse.Args(
        worlds=("lake",), demonstrations=20, held_out=20, updates=3, episodes=(10,),
        transition_seeds=2, transition_updates=2, root=tmp_path,
    )  # fmt: skip
    found = inverse.main(args)
    assert "torch_occ, visits" in (found / "inverse.md").read_text()
    assert (found / "inverse.png").read_bytes().startswith(b"\x89PNG")
