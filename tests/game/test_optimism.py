"""Optimistic learners and posterior sampling for unknown transitions."""

import math

import pytest
import torch
from games import check_same_game
from zoo import PROBLEMS, Kept, random_loss

import torch_occ as occ

MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
MEAN = random_loss(MDP, seed=1)
BANDIT = PROBLEMS["bandit"]().mdp

LEARNERS = {
    "ucbvi-ch": lambda mdp: occ.rivals.UCBVI(mdp, 9000),
    "ucbvi-bf": lambda mdp: occ.rivals.UCBVI(mdp, 9000, bonus="bernstein"),
    "sharp": lambda mdp: occ.rivals.UCBVI(mdp, bonus="sharp"),
    "corrupted": lambda mdp: occ.rivals.UCBVI(mdp, bonus="sharp", corruption=20.0),
    "negative": lambda mdp: occ.rivals.UCBVI(mdp, bonus="sharp", floor=-1.5, delta=0.01),
    "euler": occ.rivals.EULER,
    "strong": occ.rivals.StrongEuler,
    "psrl": occ.rivals.PSRL,
    "layers": lambda mdp: occ.rivals.MultiLayerUCBVI(mdp, 9000),
}
GAMES = {
    "bernoulli": occ.BernoulliLosses(MEAN),
    "uniform": occ.UniformLosses(MEAN),
    "switching": occ.SwitchingLosses(random_loss(MDP, seed=2, batch=(5,)), 20),
    "corrupted": occ.Corrupted(occ.BernoulliLosses(MEAN), 50.0),
    "adaptive": occ.GreedyAdversary(),
}


# -- the two backends ------------------------------------------------------------------------------


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("name", LEARNERS)
def test_both_backends_play_the_same_game(name, game):
    check_same_game(MDP, LEARNERS[name], GAMES[game], 120)


@pytest.mark.parametrize("problem", ["masked", "contexts", "layers", "bandit"])
@pytest.mark.parametrize("name", LEARNERS)
def test_both_backends_play_the_same_game_in_any_mdp(name, problem):
    mdp = PROBLEMS[problem]().mdp
    check_same_game(mdp, LEARNERS[name], occ.BernoulliLosses(random_loss(mdp, seed=3)), 80)
    check_same_game(mdp, LEARNERS[name], occ.GreedyAdversary(), 40)


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.bits
def test_a_run_continues_where_it_was_interrupted(name, tmp_path):
    class Crash(occ.Callback):
        def on_chunk(self, run):
            if run.t > 5000:
                raise RuntimeError("crash")

    arguments = {"episodes": 9000, "seeds": [3], "backend": "engine"}
    whole = occ.simulate(MDP, LEARNERS[name](MDP), occ.GreedyAdversary(), **arguments)
    saved = {"save_to": tmp_path / "run", "save_every": 0.0}
    with pytest.raises(RuntimeError, match="crash"):
        occ.simulate(
            MDP,
            LEARNERS[name](MDP),
            occ.GreedyAdversary(),
            **arguments,
            **saved,
            callbacks=[Crash()],
        )
    again = occ.simulate(MDP, LEARNERS[name](MDP), occ.GreedyAdversary(), **arguments, **saved)
    for field in ("regret", "realised_regret", "cumulative_occupancy", "last_q"):
        assert torch.equal(getattr(again, field), getattr(whole, field))


@pytest.mark.parametrize("name", LEARNERS)
@pytest.mark.bits
def test_a_seed_plays_the_same_alone_and_among_others(name):
    losses = occ.BernoulliLosses(MEAN)
    for backend in ("torch", "engine"):
        alone, among = (
            occ.simulate(MDP, LEARNERS[name](MDP), losses, 60, seeds, backend=backend)
            for seeds in ([7], [0, 7])
        )
        assert torch.equal(alone.realised_regret[0], among.realised_regret[1])
        assert torch.equal(alone.last_q[0], among.last_q[1])


# -- what they promise -----------------------------------------------------------------------------


def test_at_one_layer_the_sharp_bonus_is_ucb1_with_its_logarithm():
    """Played by hand: mean loss - sqrt(log(2 K t^2 / delta) / (2 n)), every arm once first."""
    table = torch.rand(300, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    visits, losses = [0] * 4, [0.0] * 4
    for t in range(1, 301):
        log = float(torch.tensor(2 * 4 / 0.1 * float(t) ** 2, dtype=torch.float64).log())
        seen = [
            losses[a] / visits[a] - math.sqrt(log / (2 * visits[a])) if visits[a] else -math.inf
            for a in range(4)
        ]
        arm = seen.index(min(seen))
        visits[arm] += 1
        losses[arm] += float(table[t - 1, 0, arm])
    for backend in ("torch", "engine"):
        learner, kept = occ.rivals.UCBVI(BANDIT, bonus="sharp", floor=-math.inf), Kept()
        occ.simulate(
            BANDIT, learner, occ.TableLosses(table), 300, backend=backend, callbacks=[kept]
        )
        found = kept.learner
        assert found.state["visits"].flatten().tolist() == visits
        assert found.state["losses"].flatten().tolist() == losses
        log = float(found.log(torch.tensor(301.0, dtype=torch.float64)))
        index = [losses[a] / visits[a] - math.sqrt(log / (2 * visits[a])) for a in range(4)]
        assert found.plan(301).lower.flatten().tolist() == index


@pytest.mark.parametrize("name", ["sharp", "euler", "strong"])
def test_lower_values_are_below_the_optimal_ones(name):
    """In 1,000 short runs: delta = 0.1 allows 100 violations at any time, and there are none.

    The upper values of EULER and StrongEuler are above the values of the policies played.
    """
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=4)
    mean = random_loss(mdp, seed=5)
    best = occ.optimal_policy(mdp, mean).value
    learner = {
        "sharp": occ.rivals.UCBVI(mdp, bonus="sharp"),
        "euler": occ.rivals.EULER(mdp),
        "strong": occ.rivals.StrongEuler(mdp),
    }[name]
    violated = torch.zeros(1000, dtype=torch.bool)

    class Look(occ.Callback):
        def on_checkpoint(self, run):
            bounds = run.learner.plan(run.t + 1)
            violated.logical_or_((bounds.value > best + 1e-12).any(-1))
            high = (bounds.upper * bounds.policy).nan_to_num(posinf=0.0).sum(-1)
            violated.logical_or_((high < best - 1e-12).any(-1))

    occ.simulate(
        mdp,
        learner,
        occ.BernoulliLosses(mean),
        120,
        range(1000),
        checkpoints=range(1, 121),
        callbacks=[Look()],
    )
    assert int(violated.sum()) <= 10


def test_strong_optimism_means_no_positive_surplus():
    """Q_lower <= loss + P V_lower with the true P, wherever Q_lower is not clipped at 0."""
    learner, surplus = occ.rivals.StrongEuler(MDP), []

    class Look(occ.Callback):
        def on_checkpoint(self, run):
            bounds = run.learner.plan(run.t + 1)
            for k, P in enumerate(MDP.transitions[:-1]):
                here, after = MDP.layer_slices[k], MDP.layer_slices[k + 1]
                ahead = torch.einsum("sap,np->nsa", P, bounds.value[:, after])
                low = bounds.lower[:, here]
                surplus.append(torch.where(low > 0, low - MEAN[here] - ahead, -1.0).max())

    occ.simulate(MDP, learner, occ.BernoulliLosses(MEAN), 20_000, range(20), callbacks=[Look()])
    assert max(surplus) <= 0


def test_known_corruption_keeps_the_bounds_valid():
    """The budget makes the optimal actions look bad; the bonus covers it, and only then."""
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=4)
    mean = random_loss(mdp, seed=5) * 0.5
    best = occ.optimal_policy(mdp, mean).value
    losses = occ.Corrupted(occ.BernoulliLosses(mean), 200.0, "targeted", target=mean)
    broken = {}

    class Look(occ.Callback):
        def on_checkpoint(self, run):
            above = (run.learner.plan(run.t + 1).value > best + 1e-12).any(-1)
            broken.setdefault(run.learner.corruption, above.clone()).logical_or_(above)

    for known in (0.0, 200.0):
        learner = occ.rivals.UCBVI(mdp, bonus="sharp", corruption=known)
        occ.simulate(mdp, learner, losses, 400, range(50), callbacks=[Look()])
    assert not bool(broken[200.0].any())
    assert bool(broken[0.0].any())


def test_slow_layers_keep_the_optimal_actions():
    """With C = 400, no layer with 2^r >= C excludes the best arm, and they exclude the other."""
    bandit = occ.LayeredMDP([torch.ones(1, 2, 1, dtype=torch.float64)])
    mean = torch.tensor([[0.1, 0.9]], dtype=torch.float64)
    losses = occ.Corrupted(occ.BernoulliLosses(mean), 400.0, "targeted", target=mean)
    learner, kept = occ.rivals.MultiLayerUCBVI(bandit, 20_000), Kept()
    assert learner.layers == 15
    history = occ.simulate(bandit, learner, losses, 20_000, range(20), callbacks=[kept])
    assert float(history.corruption[:, -1].min()) == pytest.approx(400)
    possible = kept.learner.state["possible"] > 0
    assert possible.shape == (20, 15, 1, 2)
    assert bool(possible[:, 8:, 0, 0].all())  # 2^9 >= 400
    allowed = kept.learner.allowed(torch.zeros(20, dtype=torch.long))
    assert bool(allowed[:, 0, 0].all())
    assert not bool(allowed[:, 0, 1].any())  # slow layers have excluded the bad arm
    assert float(history.regret[:, -1].max()) < 100


def test_layers_are_drawn_with_halving_probabilities():
    learner = occ.rivals.MultiLayerUCBVI(MDP, 60)
    learner.seeds = tuple(range(20_000))
    learner.start(20_000)
    shares = torch.bincount(learner.drawn(5), minlength=6) / 20_000
    expected = torch.tensor([1 / 2 + 1 / 64, *(0.5**r for r in range(2, 7))])
    torch.testing.assert_close(shares, expected, rtol=0, atol=4 * (0.25 / 20_000) ** 0.5)


def test_the_logarithm_of_the_printed_bonuses_is_that_of_the_paper():
    learner = occ.rivals.UCBVI(MDP, 1000, delta=0.05)
    t = torch.tensor([1.0, 900.0], dtype=torch.float64)
    assert learner.log(t).tolist() == [math.log(5 * 7 * 3 * (3 * 1000) / 0.05)] * 2
    expected = [math.log(2 * 7 * 3 * t**2 / 0.1) for t in (1, 900)]
    assert occ.rivals.EULER(MDP).log(t).tolist() == pytest.approx(expected, rel=1e-15)


@pytest.mark.slow
def test_the_order_of_the_learners():
    """RIVALS.md, section A, at a tenth of its T: each learner's regret, and their order."""
    from experiments.common import loss_with_gap

    mdp = occ.LayeredMDP.random(3, 3, 3, seed=1)
    losses, T = occ.BernoulliLosses(loss_with_gap(mdp, 0.4, 1)), 10_000
    expected = {
        occ.rivals.UCBVI(mdp, T): 10_474,
        occ.rivals.StrongEuler(mdp): 4_496,
        occ.rivals.UCBVI(mdp, T, bonus="bernstein"): 4_119,
        occ.rivals.EULER(mdp): 2_362,
        occ.rivals.UCBVI(mdp, bonus="sharp"): 887,
        occ.rivals.PSRL(mdp): 89,
    }
    found = [
        float(occ.simulate(mdp, learner, losses, T, range(1, 5)).regret[:, -1].mean())
        for learner in expected
    ]
    assert found == sorted(found, reverse=True)
    for regret, value in zip(found[:-1], expected.values(), strict=False):
        assert regret == pytest.approx(value, rel=0.1)
    assert found[-1] < 130


# -- posterior sampling ----------------------------------------------------------------------------


def test_psrl_draws_from_the_posterior():
    learner = occ.rivals.PSRL(MDP)
    learner.seeds = tuple(range(4000))
    learner.start(4000)
    state = learner.state
    state["visits"] += 7.0
    state["losses"] += 2.0
    counts = torch.arange(state["counts"].shape[-1], dtype=torch.float64) % 5
    state["counts"] = state["counts"] + counts
    loss, transitions = learner.sample(9)
    torch.testing.assert_close(
        loss.mean(0), torch.full_like(loss[0], 3 / 9), rtol=0, atol=5 * (2 / 9 / 10 / 4000) ** 0.5
    )
    first = 0
    for p, (here, after) in zip(transitions, [(1, 3), (3, 3), (3, 1)], strict=True):
        shape = counts[first : first + here * 3 * after].view(here, 3, after) + 1 / after
        first += here * 3 * after
        torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]))
        torch.testing.assert_close(
            p.mean(0), shape / shape.sum(-1, keepdim=True), rtol=0, atol=0.04
        )
    again, _ = learner.sample(9)
    other, _ = learner.sample(10)
    assert torch.equal(loss, again)
    assert not bool((loss == other).any())


# -- blindness and bad input -----------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNERS)
def test_policies_are_a_function_of_what_was_observed(name):
    """Trajectories of one MDP, replayed by learners of two, give the same policies."""
    other = occ.LayeredMDP.random(3, 3, 3, seed=8)
    learners = [LEARNERS[name](mdp) for mdp in (MDP, other)]
    for learner in learners:
        assert learner.mdp.is_blind
        learner.start(3)
    generator = torch.Generator().manual_seed(0)
    for t in range(1, 40):
        one, two = (learner.propose_policy(t) for learner in learners)
        assert torch.equal(one, two)
        states = torch.stack(
            [torch.randint(s.start, s.stop, (3,), generator=generator) for s in MDP.layer_slices],
            -1,
        )
        actions = torch.randint(0, 3, (3, 3), generator=generator)
        losses = torch.rand(3, 3, dtype=torch.float64, generator=generator)
        for learner in learners:
            learner.observe(t, one, occ.Feedback(states, actions, losses, None))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: occ.rivals.UCBVI(MDP),
            "UCBVI with bonus='hoeffding' needs the number of episodes",
        ),
        (lambda: occ.rivals.UCBVI(MDP, bonus="bernstein"), "bonus='bernstein' needs the number"),
        (lambda: occ.rivals.UCBVI(MDP, 0), "episodes of UCBVI .*: expected at least 1, got 0"),
        (lambda: occ.rivals.UCBVI(MDP, 10, bonus="freedman"), "hoeffding, bernstein, sharp"),
        (lambda: occ.rivals.UCBVI(MDP, 10, delta=0.0), "UCBVI needs a probability between 0 and 1"),
        (lambda: occ.rivals.StrongEuler(MDP, delta=1.5), "StrongEuler needs a probability"),
        (
            lambda: occ.rivals.MultiLayerUCBVI(MDP, None),
            "MultiLayerUCBVI needs the number of episodes",
        ),
        (
            lambda: occ.rivals.MultiLayerUCBVI(MDP, 9, delta=1.0),
            "MultiLayerUCBVI needs a probability",
        ),
        (
            lambda: occ.rivals.UCBVI(MDP, bonus="sharp", corruption=-1.0),
            "corruption: expected a finite",
        ),
        (
            lambda: occ.rivals.UCBVI(MDP, 9, bonus="bernstein", corruption=1.0),
            "estimates variances",
        ),
        (
            lambda: occ.rivals.UCBVI(MDP, bonus="sharp", floor=0.5),
            "floor: expected a number of at most",
        ),
        (lambda: occ.rivals.UCBVI(MDP, bonus="sharp", floor=-math.inf), "more than one layer"),
    ],
)
def test_bad_settings_are_explained(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_number_of_episodes_is_a_whole_number():
    with pytest.raises(TypeError, match=r"episodes of UCBVI .*: expected a whole number"):
        occ.rivals.UCBVI(MDP, 10.5)


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_more_episodes_than_the_bounds_were_made_for(backend):
    with pytest.raises(ValueError, match="UCBVI was made for 50 episodes, but 60"):
        occ.simulate(MDP, occ.rivals.UCBVI(MDP, 50), occ.BernoulliLosses(MEAN), 60, backend=backend)
