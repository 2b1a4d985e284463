import pytest
import torch
from zoo import PROBLEMS, random_loss, tensor

import torch_occ as occ
from torch_occ._support.constants import CHUNK
from torch_occ.game.losses import Stationary
from torch_occ.mdp.occupancy import interior_point, optimal_policy

MDP = occ.LayeredMDP.random(horizon=3, width=2, num_actions=3, seed=4)
MEAN = random_loss(MDP)
TABLES = random_loss(MDP, batch=(3,))
PROCESSES = {
    "bernoulli": lambda: occ.BernoulliLosses(MEAN),
    "uniform": lambda: occ.UniformLosses(MEAN),
    "table": lambda: occ.TableLosses(random_loss(MDP, batch=(600,))),
    "switching": lambda: occ.SwitchingLosses(TABLES, 7, "uniform"),
    "walk": lambda: occ.RandomWalkLosses(0.3, "bernoulli"),
    "greedy": lambda: occ.GreedyAdversary(),
    "constrained": lambda: occ.StochasticallyConstrained(MEAN),
    "front": lambda: occ.Corrupted(occ.BernoulliLosses(MEAN), 100.0),
    "front walk": lambda: occ.Corrupted(occ.RandomWalkLosses(0.1), 50.0),
    "spread": lambda: occ.Corrupted(occ.UniformLosses(MEAN), 20.0, "uniform", episodes=500),
    "targeted": lambda: occ.Corrupted(occ.BernoulliLosses(MEAN), 77.7, "targeted", target=MEAN),
    "targeted switching": lambda: occ.Corrupted(
        occ.SwitchingLosses(TABLES, 9), 33.0, "targeted", target=TABLES[0]
    ),
}
every_process = pytest.mark.parametrize("name", PROCESSES)


def play(process, episodes, seeds, mdp=MDP, chunk=CHUNK):
    """The means `(T, N, S, A)` and the final state, asked for as `simulate` asks."""
    state, q = process.start(mdp, seeds), interior_point(mdp).expand(len(seeds), -1, -1)
    rows, t = [], 0
    while t < episodes:
        n = min(process.stride, chunk - t % chunk, episodes - t)
        means, state = process.means(mdp, state, t + 1, n, q)
        assert len(means) in (1, n)
        rows.append(means.expand(n, len(seeds), -1, -1))
        t += n
    return torch.cat(rows), state


@every_process
@pytest.mark.bits
def test_a_shorter_run_is_the_beginning_of_a_longer_one(name):
    assert torch.equal(
        play(PROCESSES[name](), 300, (0, 5))[0], play(PROCESSES[name](), 600, (0, 5))[0][:300]
    )


@pytest.mark.parametrize("name", [name for name in PROCESSES if "walk" not in name])
@pytest.mark.parametrize("chunk", [1, 50, 10**6])
def test_chunks_do_not_matter(name, chunk):
    torch.testing.assert_close(
        play(PROCESSES[name](), 300, (0,))[0],
        play(PROCESSES[name](), 300, (0,), chunk=chunk)[0],
        rtol=0,
        atol=1e-10,
    )


@pytest.mark.parametrize("noise", ["none", "bernoulli", "uniform"])
def test_draws_have_the_mean(noise):
    mean, n = tensor([0.0, 0.03, 0.3, 0.5, 0.8, 1.0]), 20_000
    uniform = torch.rand(n, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses = Stationary(mean, noise).draw(mean.expand(n, -1), uniform)
    half = torch.minimum(mean, 1 - mean)
    deviation = {
        "none": 0 * mean,
        "bernoulli": (mean * (1 - mean)).sqrt(),
        "uniform": half / 3**0.5,
    }[noise]
    assert bool(((losses.mean(0) - mean).abs() <= 4 * deviation / n**0.5 + 1e-12).all())
    torch.testing.assert_close(losses.std(0), deviation, rtol=0.05, atol=1e-12)


def test_the_walk_is_reflected():
    means, _ = play(occ.RandomWalkLosses(0.4), 2000, (0, 1))
    assert float(means.min()) < 0.01
    assert float(means.max()) > 0.99
    torch.testing.assert_close(means.mean((0, 1)), torch.full_like(MEAN, 0.5), rtol=0, atol=0.06)
    small, _ = play(occ.RandomWalkLosses(1e-3), 600, (0,))
    # far from the walls: a plain Gaussian walk, across the chunk's edge too
    moves = torch.cat([small[:1] - 0.5, small.diff(dim=0)])
    assert abs(float(moves.std()) - 1e-3) < 3e-5
    assert float(moves.abs().max()) < 5e-3


@pytest.mark.parametrize("swing", [0.0, 0.3, 0.9])
def test_stochastically_constrained_gaps_never_move(swing):
    process = occ.StochasticallyConstrained(MEAN, swing, 1.5)
    means, _ = play(process, 400, (0,))
    gaps = optimal_policy(MDP, process.gap_table).gaps
    torch.testing.assert_close(
        optimal_policy(MDP, means[:, 0]).gaps, gaps.expand(400, -1, -1), rtol=0, atol=1e-14
    )
    level = means[0, 0] - process.gap_table  # of every other layer
    torch.testing.assert_close(level, swing * (MDP.layer % 2)[:, None].expand_as(level).double())
    changes = (means[1:, 0] != means[:-1, 0]).any(-1).any(
        -1
    ).nonzero().flatten() + 1  # phases of 1, 2, 3, 4, 6, 8, ... episodes
    assert changes[:6].tolist() == ([1, 3, 6, 10, 16, 24] if swing else [])


def spent_on(mdp, corrupted, clean):
    difference = torch.where(mdp.actions, corrupted - clean, 0.0).abs()
    return 2 * sum(layer.amax((-2, -1)) for layer in mdp.split(difference, -2))  # (T, N)


@pytest.mark.parametrize("budget", [0.0, 1.3, 40.0, 1e9])
@pytest.mark.parametrize("strategy", ["front", "uniform", "targeted"])
@pytest.mark.parametrize("base", ["bernoulli", "walk", "table"])
def test_corruption_is_what_the_means_say(base, strategy, budget):
    process = occ.Corrupted(PROCESSES[base](), budget, strategy, episodes=500, target=MEAN)
    means, state = play(process, 500, (0, 4))
    spent = spent_on(MDP, means, play(PROCESSES[base](), 500, (0, 4))[0])
    torch.testing.assert_close(state["corruption"], spent.sum(0), rtol=1e-9, atol=1e-9)
    assert bool((state["corruption"] <= budget * (1 + 1e-12)).all())
    assert bool(((means >= 0) & (means <= 1)).all())
    if budget in (1.3, 40.0):
        torch.testing.assert_close(spent.sum(0), tensor([budget, budget]), rtol=1e-9, atol=0)
        if strategy == "uniform":
            torch.testing.assert_close(
                spent, torch.full_like(spent, budget / 500), rtol=1e-6, atol=1e-12
            )
        else:
            assert bool((spent[100:] == 0).all())
    if strategy == "targeted" and budget == 1e9:
        best = optimal_policy(MDP, MEAN).policy > 0
        assert bool((means[..., best] == 1).all())


def test_corruption_of_pairs_that_do_not_exist_costs_nothing():
    mdp = PROBLEMS["masked"]().mdp
    mean = 0.4 * mdp.actions.double()
    means, state = play(occ.Corrupted(occ.BernoulliLosses(mean), 1e9), 10, (0,), mdp)
    torch.testing.assert_close(
        state["corruption"], spent_on(mdp, means, mean).sum(0), rtol=1e-12, atol=0
    )
