import gc
import itertools
import tracemalloc
from fractions import Fraction
from typing import ClassVar

import pytest
import torch
from games import same, walk
from zoo import PROBLEMS, random_loss

import torch_occ as occ
from torch_occ._support.constants import log_spaced
from torch_occ.game.simulate import simulate
from torch_occ.mdp.layers import invert
from torch_occ.mdp.occupancy import occupancy

MDP = PROBLEMS["masked"]().mdp
MEAN = random_loss(MDP, seed=3)


class Spy(occ.Learner):
    """A policy that wanders, and remembers everything that it saw."""

    def copy(self):
        return self  # the run plays this very one, so that the test sees what it saw

    def start(self, num_seeds):
        self.state, self.seen = {}, []

    def propose(self, t):
        weights = torch.where(self.mdp.actions, random_loss(self.mdp, seed=t % 20) + 0.1, 0.0)
        return occupancy(self.mdp, weights / weights.sum(-1, keepdim=True))[None]

    def observe(self, t, q, feedback):
        self.seen.append((t, q, feedback))


@pytest.mark.parametrize(
    "name", ["masked", "contexts", "layers", "nearly_deterministic", "no_choice"]
)
def test_visits_follow_the_occupancy_and_losses_the_mean(name):
    mdp = PROBLEMS[name]().mdp
    spy, mean = Spy(mdp), random_loss(mdp, seed=8)
    simulate(mdp, spy, occ.BernoulliLosses(mean), 20, range(800))
    expected, variance, visits, losses = (torch.zeros_like(mean) for _ in range(4))
    for _, q, feedback in spy.seen:
        expected, variance = expected + q.sum(0), variance + (q * (1 - q)).sum(0)
        visits += feedback.scatter(torch.ones_like(feedback.losses), q).sum(0)
        losses += feedback.scatter(feedback.losses, q).sum(0)
    assert bool(
        (
            (visits - expected).abs()
            <= 4.5 * variance.sqrt() + 1e-6 * expected + 3 * (variance < 5)
        ).all()
    )
    assert bool((visits[~mdp.actions] == 0).all())
    assert bool(
        ((losses - visits * mean).abs() <= 4.5 * (visits * mean * (1 - mean)).sqrt() + 1).all()
    )


@pytest.mark.parametrize(
    "losses",
    [occ.SwitchingLosses(random_loss(MDP, batch=(2,)), 5, "uniform"), occ.BernoulliLosses(MEAN)],
)
def test_regrets_by_hand(losses):
    spy, checkpoints = Spy(MDP), [1, 4, 13, 30]
    history = simulate(MDP, spy, losses, 30, (2, 7), checkpoints=checkpoints)
    assert history.episodes.tolist() == checkpoints
    assert [t for t, _, _ in spy.seen] == list(range(1, 31))
    total, expected, realised = torch.zeros_like(MEAN), torch.zeros(2), torch.zeros(2)
    for t, q, feedback in spy.seen:
        mean = losses.means(MDP, {}, t, 1, q)[0][0, 0]
        total, expected = total + mean, expected + (q * mean).sum((-2, -1))
        realised = realised + feedback.losses.sum(-1)
        if t in checkpoints:
            best, i = occ.game.comparator(MDP, total), checkpoints.index(t)
            torch.testing.assert_close(history.comparator[:, i], best.expand(2))
            torch.testing.assert_close(history.regret[:, i], expected - best)
            torch.testing.assert_close(history.realised_regret[:, i], realised - best)
    torch.testing.assert_close(history.total_mean, total.expand(2, -1, -1))
    torch.testing.assert_close(history.cumulative_occupancy, sum(q for _, q, _ in spy.seen))
    assert torch.equal(history.last_q, spy.seen[-1][1])


def test_full_information_shows_the_losses_that_are_charged():
    spy = Spy(MDP)
    spy.full_information = True
    simulate(MDP, spy, occ.BernoulliLosses(MEAN), 300, range(4))
    for _, _, feedback in spy.seen:
        assert torch.equal(feedback.gather(feedback.table), feedback.losses)
    tables = torch.cat([feedback.table for _, _, feedback in spy.seen])
    assert float((tables.mean(0) - MEAN).abs().max()) < 4 * 0.5 / 1200**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_uniform_number_draws_the_impossible(dtype):
    cumulative = torch.tensor([[0.0, 0.5, 0.5, 1.0, 1.0]], dtype=dtype)
    # as simulate converts them
    numbers = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2.0**-53], dtype=torch.float64).to(dtype)
    assert invert(cumulative.expand(5, -1), numbers).tolist() == [1, 1, 3, 3, 3]


@pytest.mark.parametrize("episodes", [1, 2, 9, 1000, 12345, 10**6])
def test_checkpoints_are_log_spaced(episodes):
    points = log_spaced(episodes)
    assert points == sorted(set(points))
    assert points[0] == 1
    assert points[-1] == episodes
    late = [(b / a) for a, b in itertools.pairwise(points[:-1]) if a > 100]
    assert all(abs(ratio - 10**0.05) < 0.02 for ratio in late)


def learner(name, mdp=MDP):
    return occ.FTRL(mdp, occ.jin_luo(mdp, beta=0.5)) if name == "ftrl" else occ.FollowTheLeader(mdp)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", ["ftrl", "leader"])
def test_seeds_are_independent_and_reproducible(name):
    episodes = 12 if name == "ftrl" else 40
    together = simulate(MDP, learner(name), walk(), episodes, (5, 0, 3), backend="torch")
    same(together, simulate(MDP, learner(name), walk(), episodes, (5, 0, 3), backend="torch"))
    for i, seed in enumerate((5, 0, 3)):
        alone = simulate(MDP, learner(name), walk(), episodes, (seed,), backend="torch")
        for field in ("regret", "realised_regret", "corruption", "cumulative_occupancy"):
            assert torch.equal(getattr(together, field)[i], getattr(alone, field)[0]), field


@pytest.mark.parametrize(("backend", "episodes"), [("engine", 200_000), ("torch", 2100)])
def test_sums_over_many_episodes_lose_nothing_to_rounding(backend, episodes, monkeypatch):
    """Without compensation the regret of 200,000 episodes is off by 1e-11."""
    monkeypatch.setattr("torch_occ.game.simulate.BLOCK", 1)  # of torch
    learner, losses = occ.FixedPolicy(MDP), occ.BernoulliLosses(MEAN)
    found = simulate(MDP, learner, losses, episodes, checkpoints=[episodes], backend=backend)
    pairs = zip(learner.q.flatten().tolist(), MEAN.flatten().tolist(), strict=True)
    exact = sum(Fraction(a) * Fraction(b) for a, b in pairs)
    spent = Fraction(float(found.regret[0, -1])) + Fraction(float(found.comparator[0, -1]))
    assert abs(spent / (episodes * exact) - 1) < (2e-15 if backend == "torch" else 1e-13)
    torch.testing.assert_close(found.total_mean[0], episodes * MEAN, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        found.cumulative_occupancy[0], episodes * learner.q, rtol=1e-13, atol=0
    )


@pytest.mark.usefixtures("small_chunks")
def test_memory_does_not_grow_with_episodes():
    class Memory(occ.Callback):
        used: ClassVar[list[int]] = []

        def on_chunk(self, run):
            gc.collect()  # NumPy's generators wait for it
            self.used.append(tracemalloc.get_traced_memory()[0])

    gc.freeze()  # what there was before need not be looked at again
    tracemalloc.start()
    try:
        options = {"checkpoints": [80], "callbacks": [Memory()], "backend": "torch"}
        simulate(MDP, occ.FollowTheLeader(MDP), walk(), 80, **options)
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    assert len(Memory.used) == 10
    assert Memory.used[-2] < Memory.used[2] + 20_000


class Halves(occ.LossProcess):
    """A user's process with noise of its own: 0 or twice the mean, for means up to 1/2."""

    def means(self, mdp, state, t0, n, q):
        return torch.full_like(MEAN, 0.25)[None, None], state

    def draw(self, mean, uniform):
        return torch.where(uniform < 0.5, 2 * mean, 0.0)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_a_users_own_noise_is_drawn_by_every_backend(backend):
    history = simulate(MDP, learner("ftrl"), Halves(), 20, range(4), backend=backend)
    # multiples of 1/2, and not 40/4 for every seed
    suffered = history.realised_regret[:, -1] + history.comparator[:, -1]
    assert len(suffered.unique()) > 1
    assert torch.equal((2 * suffered).round(), 2 * suffered)
