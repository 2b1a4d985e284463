"""Rivals that plan play the game of their oracle; the record has the bits of all rivals."""

from functools import partial

import pytest
import rival_oracles as oracles
import torch
from games import same
from zoo import PROBLEMS, Kept, random_loss

import torch_occ as occ

R, T = occ.rivals, 9000
MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)
MEAN = random_loss(MDP, seed=1)


def psi():
    return occ.Tsallis() / occ.InverseSqrt(0.8) + occ.LogBarrier(1.0)


def unknown(widths="practical", **options):
    """An `UnknownFTRL` with widths."""
    return lambda mdp: R.UnknownFTRL(mdp, psi(), widths=R.Widths.of(widths, mdp, T, 0.9), **options)


OPTIMISTS = {
    "hoeffding": lambda mdp: R.UCBVI(mdp, T),
    "bernstein": lambda mdp: R.UCBVI(mdp, T, bonus="bernstein"),
    "sharp": lambda mdp: R.UCBVI(mdp, bonus="sharp", corruption=20.0, delta=0.01),
    "euler": R.EULER,
    "strong": R.StrongEuler,
}
PLANNERS = {name: (build, partial(oracles.Optimist, name)) for name, build in OPTIMISTS.items()}
PLANNERS["kl-ucb"] = R.KLUCB, lambda x: oracles.KLUCB(x.mdp)
OTHERS = {
    "thompson": R.Thompson,
    "psrl": R.PSRL,
    "layers": lambda mdp: R.MultiLayerUCBVI(mdp, T),
    "uob-reps": lambda x: R.UOBREPS(x, T, widths=R.Widths.of("practical", x), learning_rate=0.1),
    "plug-in": lambda mdp: R.UnknownFTRL(mdp, psi()),
    "restarts": unknown(bonus=True, restart=True),
}
LEARNERS = {name: build for name, (build, _) in PLANNERS.items()} | OTHERS
GAMES = {
    "bernoulli": occ.BernoulliLosses(MEAN),
    "uniform": occ.UniformLosses(MEAN),
    "ends": occ.BernoulliLosses(MEAN.round()),
    "switching": occ.SwitchingLosses(random_loss(MDP, seed=2, batch=(5,)), 20),
    "corrupted": occ.Corrupted(occ.BernoulliLosses(MEAN), 50.0),
    "adaptive": occ.GreedyAdversary(),
}


def play(mdp, learner, losses, episodes, seeds=(0, 7, 3), **options):
    kept = Kept()
    history = occ.simulate(mdp, learner, losses, episodes, seeds, callbacks=[kept], **options)
    return history, kept.learner.state


def check(mdp, name, losses, episodes):
    """The rival and its oracle play the same game."""
    rival, precision = LEARNERS[name](mdp), {"rtol": 0, "atol": 1e-10}
    both = rival, PLANNERS[name][1](rival.copy())
    (found, mine), (expected, theirs) = (play(mdp, x, losses, episodes) for x in both)
    assert (found.backend, expected.backend) == ("engine", "torch")
    for field in ("regret", "realised_regret", "corruption", "cumulative_occupancy", "last_q"):
        torch.testing.assert_close(getattr(found, field), getattr(expected, field), **precision)
    for field in mine.keys() & theirs.keys():
        torch.testing.assert_close(mine[field], theirs[field], **precision)


#: Games beyond a stochastic and an adaptive one, for learners that may see something new in them.
MORE = {"uniform": ("kl-ucb",), "ends": ("kl-ucb", "euler")}
MORE |= {"switching": ("strong",), "corrupted": ("sharp",)}


@pytest.mark.parametrize(
    ("name", "game"),
    [(name, game) for name in PLANNERS for game in GAMES if name in MORE.get(game, PLANNERS)],
)
def test_planners_play_the_game_of_their_oracle(name, game):
    check(MDP, name, GAMES[game], 60)


def test_strong_bounds_above_zero_are_those_of_the_oracle():
    """Without a choice, and with losses of 1, bonuses soon are smaller than values."""
    ones = torch.ones(4, 1, dtype=torch.float64)
    check(occ.LayeredMDP.random(2, 3, 1, seed=0), "strong", occ.BernoulliLosses(ones), 200)


@pytest.mark.parametrize("problem", ["masked", "contexts", "no_choice", "bandit"])
@pytest.mark.parametrize("name", LEARNERS)
def test_any_mdp_is_played(name, problem):
    mdp = PROBLEMS[problem]().mdp
    losses = occ.BernoulliLosses(random_loss(mdp, seed=3))
    if name in PLANNERS:
        check(mdp, name, losses, 20)
    found, _ = play(mdp, LEARNERS[name](mdp), losses, 60)
    assert not bool(found.cumulative_occupancy[:, ~mdp.actions].any())
    assert float(found.uncertified.max()) == 0
    assert float(found.regret[:, -1].abs().max()) <= 60 * mdp.horizon


@pytest.mark.parametrize("name", ["kl-ucb", pytest.param("euler", marks=pytest.mark.slow)])
def test_wide_layers_are_played_without_lanes(name):
    """Compiled anew, so most are slow. Sparse transitions are in the record."""
    mdp = occ.LayeredMDP.random(2, 25, 2, seed=0)
    check(mdp, name, occ.BernoulliLosses(random_loss(mdp)), 3)


@pytest.mark.parametrize("name", ["bernstein", "sharp", "restarts", "layers"])
@pytest.mark.bits
def test_a_run_continues_and_a_seed_plays_in_any_company_to_the_same_bits(
    name, tmp_path, monkeypatch
):
    """Interrupted at the edge of a chunk. Learners with other states are in the record."""
    monkeypatch.setattr("torch_occ.game.players.EnginePlayer.chunks", 1)
    monkeypatch.setitem(globals(), "T", 300)

    class Stop(occ.Callback):
        def on_chunk(self, run):
            if run.t < T:
                raise KeyboardInterrupt

    def game(seeds, **options):
        return occ.simulate(
            MDP, LEARNERS[name](MDP), GAMES["adaptive"], T, seeds, checkpoints=[20, T], **options
        )

    whole, path = game([3, 5, 8]), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        game([3, 5, 8], save_to=path, callbacks=[Stop()])
    same(whole, game([3, 5, 8], save_to=path))
    other = game([1, 2, 4, 5])
    assert torch.equal(other.regret[-1], whole.regret[1])
    assert torch.equal(other.last_q[-1], whole.last_q[1])


@pytest.mark.parametrize("name", [name for name in LEARNERS if name not in ("kl-ucb", "thompson")])
def test_rivals_hold_no_probabilities(name):
    """Policies are a function of what was observed: the MDP is blind, and with it the copy."""
    learner = LEARNERS[name](MDP)
    assert learner.mdp.is_blind
    for inner in vars(learner).values():
        assert inner is not MDP
        assert getattr(inner, "mdp", None) is not MDP
