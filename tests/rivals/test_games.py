"""Every rival plays the game of its oracle: in any MDP, against any losses, alone or not."""

import pytest
import rival_oracles as oracles
import torch
from games import same
from zoo import PROBLEMS, Kept, random_loss

import torch_occ as occ
from experiments.distance_to_limit import few_successors

R, T = occ.rivals, 9000
MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)
MEAN = random_loss(MDP, seed=1)


def psi():
    return occ.Tsallis() / occ.InverseSqrt(0.8) + occ.LogBarrier(1.0)


def unknown(widths="practical", **options):
    """An `UnknownFTRL` with widths."""
    return lambda mdp: R.UnknownFTRL(mdp, psi(), widths=R.Widths.of(widths, mdp, T, 0.9), **options)


#: Learners with deterministic policies: their kind in the oracle, if it needs one.
PLANNERS = {
    "kl-ucb": (R.KLUCB, lambda x: oracles.KLUCB(x.mdp)),
    "thompson": (R.Thompson, lambda x: oracles.Thompson(x.mdp)),
    "psrl": (R.PSRL, lambda x: oracles.PSRL(x.mdp)),
    "ucbvi-ch": (lambda mdp: R.UCBVI(mdp, T), lambda x: oracles.Optimist("hoeffding", x)),
    "ucbvi-bf": (
        lambda mdp: R.UCBVI(mdp, T, bonus="bernstein"),
        lambda x: oracles.Optimist("bernstein", x),
    ),
    "sharp": (
        lambda mdp: R.UCBVI(mdp, bonus="sharp", corruption=20.0, delta=0.01),
        lambda x: oracles.Optimist("sharp", x),
    ),
    "euler": (R.EULER, lambda x: oracles.Optimist("euler", x)),
    "strong": (R.StrongEuler, lambda x: oracles.Optimist("strong", x)),
    "layers": (lambda mdp: R.MultiLayerUCBVI(mdp, T), oracles.MultiLayerUCBVI),
}
#: Learners that solve; oracles amplify rounding errors.
SOLVERS = {
    "uob-reps": lambda mdp: R.UOBREPS(
        mdp, T, widths=R.Widths.of("practical", mdp), learning_rate=0.1
    ),
    "printed uob-reps": lambda mdp: R.UOBREPS(mdp, T),
    "plug-in": lambda mdp: R.UnknownFTRL(mdp, psi()),
    "hybrid": lambda mdp: R.UnknownFTRL(mdp, occ.jin_luo(mdp, beta=0.5)),
    "practical": R.UnknownFTRL.practical,
    "restarts": unknown(bonus=True, restart=True),
    "bounds": unknown("uob_reps"),
    "printed": lambda mdp: R.UnknownFTRL.jin_huang_luo(mdp, T),
    "full information": lambda mdp: R.UnknownFTRL.jin_huang_luo(mdp, T, full_information=True),
    "polynomial": lambda mdp: R.UnknownFTRL(
        mdp, occ.Tsallis() / occ.Polynomial(1.0, 0.4), restart=True
    ),
}
LEARNERS = {name: build for name, (build, _) in PLANNERS.items()} | SOLVERS
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
    rival = LEARNERS[name](mdp)
    if name in PLANNERS:
        oracle, precision = PLANNERS[name][1](rival.copy()), {"rtol": 0, "atol": 1e-10}
    else:
        kind = oracles.UOBREPS if isinstance(rival, R.UOBREPS) else oracles.UnknownFTRL
        oracle, precision = kind(rival.copy()), {"rtol": 1e-8, "atol": 1e-9}
    (found, mine), (expected, theirs) = (
        play(mdp, learner, losses, episodes) for learner in (rival, oracle)
    )
    assert (found.backend, expected.backend) == ("engine", "torch")
    for field in ("regret", "comparator", "corruption", "cumulative_occupancy", "last_q"):
        torch.testing.assert_close(getattr(found, field), getattr(expected, field), **precision)
    difference = found.realised_regret - expected.realised_regret
    assert float(difference.abs().max()) < 1e-10  # the same trajectories
    assert float(found.uncertified.max()) == 0
    for field in mine.keys() & theirs.keys():
        # A rival that begins an epoch has the first q of the next one.
        if field not in ("q", "newton_steps", "dual_residual", "flow_residual"):
            own = mine[field].sum(1) if name == "layers" else mine[field]
            torch.testing.assert_close(own, theirs[field], **precision)


#: Games beyond a stochastic and an adaptive one, for learners that may see something new in them.
MORE = {"uniform": ("kl-ucb", "psrl"), "ends": ("kl-ucb", "thompson", "euler")}
MORE |= {"switching": ("strong",), "corrupted": ("sharp", "layers")}


@pytest.mark.parametrize(
    ("name", "game"),
    [(name, game) for name in PLANNERS for game in GAMES if name in MORE.get(game, PLANNERS)],
)
def test_planners_play_the_game_of_their_oracle(name, game):
    check(MDP, name, GAMES[game], 60)


@pytest.mark.parametrize("game", ["bernoulli", "adaptive"])
@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_play_the_game_of_their_oracle(name, game):
    check(MDP, name, GAMES[game], 40)


@pytest.mark.parametrize("problem", ["masked", "contexts", "no_choice", "bandit"])
@pytest.mark.parametrize("name", [*PLANNERS, "uob-reps", "restarts", "full information"])
def test_the_game_is_the_same_in_any_mdp(name, problem):
    mdp = PROBLEMS[problem]().mdp
    check(mdp, name, occ.BernoulliLosses(random_loss(mdp, seed=3)), 20)


@pytest.mark.parametrize("name", ["kl-ucb", "thompson", "psrl"])
def test_deterministic_transitions(name):
    mdp, mean = few_successors(3, 3, 3, 1, 1)
    check(mdp, name, occ.BernoulliLosses(mean), 60)


@pytest.mark.parametrize("name", ["psrl", pytest.param("practical", marks=pytest.mark.slow)])
def test_wide_layers_are_played_without_lanes(name):
    """Compiled anew, so most are slow. Sparse transitions are in the record."""
    mdp = occ.LayeredMDP.random(2, 25, 2, seed=0)
    check(mdp, name, occ.BernoulliLosses(random_loss(mdp)), 3)


@pytest.mark.parametrize("name", ["ucbvi-bf", "sharp", "restarts", "full information"])
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


@pytest.mark.parametrize("name", ["kl-ucb", "thompson"])
def test_one_state_comes_close_to_lai_and_robbins(name):
    """At T = 1e5, the slope is within a factor of 1.6 of the limit (24 seeds)."""
    mdp = occ.LayeredMDP.random(1, 1, 3)
    mean = torch.tensor([[0.3, 0.5, 0.6]], dtype=torch.float64)
    history = occ.simulate(mdp, LEARNERS[name](mdp), occ.BernoulliLosses(mean), 100_000, range(24))
    limit = occ.limits.lower_bound(mdp, mean).value
    late = history.episodes >= 10_000
    log, regret = history.episodes[late].double().log(), history.regret[:, late].mean(0)
    slope = (regret[-1] - regret[0]) / (log[-1] - log[0])
    assert 0.6 * limit < float(slope) < 1.6 * limit
