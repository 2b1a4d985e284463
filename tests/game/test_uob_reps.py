"""UOB-REPS: one episode by hand, closed forms, settings, and the engine."""

import math

import pytest
import torch
from beliefs import trajectories
from zoo import PROBLEMS, random_loss, tensor

import torch_occ as occ
from torch_occ.rivals.beliefs import split_transitions

MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)


def learned(learner, episodes, num_seeds=2):
    """Give a learner some trajectories; return them."""
    learner.start(num_seeds)
    given = []
    for t in range(1, episodes + 1):
        policy = learner.propose_policy(t)
        given.append(trajectories(learner.mdp, t, num_seeds))
        learner.observe(t, policy, given[-1])
    return given


def test_the_first_policy_is_uniform_and_every_transition_is_possible():
    mdp = PROBLEMS["masked"]().mdp
    learner = occ.rivals.UOBREPS(mdp, 100)
    learner.start(3)
    expected = occ.uniform_policy(mdp).expand(3, -1, -1)
    torch.testing.assert_close(learner.propose_policy(1), expected, rtol=1e-15, atol=0)
    for q in mdp.split(learner.state["q"], -2):
        torch.testing.assert_close(q.sum((-2, -1)), torch.ones(3).double(), rtol=1e-15, atol=0)
    lower, upper = (
        split_transitions(learner.mdp, learner.state[name]) for name in ("lower", "upper")
    )
    assert all(bool((low == 0).all()) for low in lower[:-1])
    for high, mask in zip(upper[:-1], mdp.split(mdp.actions, 0), strict=False):
        assert bool((high[:, mask] == 1).all())


def test_the_constants_are_those_of_the_paper():
    learner = occ.rivals.UOBREPS(MDP, 1000, delta=0.05)
    expected = math.sqrt(3 * math.log(3 * 21 / 0.05) / (1000 * 21))
    assert learner.learning_rate == learner.bias == pytest.approx(expected, rel=1e-14)
    assert learner.widths.iota == (pytest.approx(math.log(1000 * 21 / 0.05)),) * 3
    assert learner.widths.source[:3] == (2, 14 / 3, (1, 1))


def test_an_episode_by_hand():
    """The estimate with upper occupancy bounds of the old set, the projection onto the new one."""
    learner = occ.rivals.UOBREPS(MDP, 50, widths=occ.rivals.Widths.of("practical", MDP))
    learned(learner, 30, num_seeds=1)
    before = {name: value.clone() for name, value in learner.state.items()}
    policy, episode = learner.propose_policy(31), trajectories(MDP, 31, 1)
    reach = occ.rivals.upper_occupancy(
        learner.mdp, policy, learner.transitions(), learner.confidence()
    )
    loss = torch.zeros(7, 3).double()
    for s, a, x in zip(episode.states[0], episode.actions[0], episode.losses[0], strict=True):
        loss[s, a] = x / (policy[0, s, a] * reach[0, s] + learner.bias)
    learner.observe(31, policy, episode)

    counts = [m[0] for m in learner.counted()]
    assert sum(int(m.sum()) for m in counts) == 31 * 3
    visits = torch.cat([m.sum(-1) for m in counts])
    new = visits >= (2 * before["epoch_visits"][0]).clamp(min=1)
    assert bool(new.any()) == (float(learner.state["epochs"]) > float(before["epochs"]))
    belief = [p[0] for p in learner.transitions()]
    widths = [b[0] for b in learner.confidence()]
    lower = [(p - b).clamp(min=0) for p, b in zip(belief, widths, strict=True)]
    upper = [(p + b).clamp(max=1) for p, b in zip(belief, widths, strict=True)]
    rows = split_transitions(MDP, before["rows"][0])
    q = before["q"][0]
    expected = occ.KLProjection(MDP)(q, rows, lower, upper, loss, learner.learning_rate)[0]
    torch.testing.assert_close(learner.state["q"][0], expected, rtol=1e-12, atol=0)
    assert float(learner.state["flow_residual"]) < 1e-12


def test_one_layer_is_exponential_weights_with_implicit_exploration():
    """No transitions: u is the policy itself (Exp3-IX)."""
    mdp = occ.LayeredMDP([torch.ones(1, 4, 1).double()])
    learner = occ.rivals.UOBREPS(mdp, 100, learning_rate=0.3, bias=0.05)
    given = learned(learner, 20)
    scores = torch.zeros(2, 4).double()
    policy = torch.full((2, 4), 0.25).double()
    for episode in given:
        estimate = episode.losses / (policy.gather(-1, episode.actions) + 0.05)
        scores = scores.scatter_add(-1, episode.actions, -0.3 * estimate)
        policy = scores.softmax(-1)
    torch.testing.assert_close(learner.propose_policy(21)[:, 0], policy, rtol=1e-12, atol=0)


def test_a_seed_alone_plays_as_among_others():
    losses = occ.BernoulliLosses(random_loss(MDP))
    learner = occ.rivals.UOBREPS(MDP, 40)
    both = occ.simulate(MDP, learner, losses, 40, [3, 4], backend="torch")
    alone = occ.simulate(MDP, learner, losses, 40, [4], backend="torch")
    torch.testing.assert_close(both.regret[1:], alone.regret, rtol=1e-9, atol=1e-9)
    assert float(both.uncertified.max()) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episodes": 0}, r"episodes: UOB-REPS needs the number of episodes.* got 0"),
        ({"episodes": None}, r"episodes: UOB-REPS needs the number of episodes.* got None"),
        ({"delta": 1.0}, r"delta: UOB-REPS needs a number in \(0, 1\), got 1\.0"),
        ({"learning_rate": -1.0}, r"learning_rate: expected a positive number, got -1\.0"),
        ({"bias": 0.0}, r"bias: expected a positive number, got 0\.0"),
    ],
)
def test_errors_say_what_it_needs(options, message):
    with pytest.raises(ValueError, match=message):
        occ.rivals.UOBREPS(MDP, **({"episodes": 10} | options))


def test_the_first_episode_begins_an_epoch():
    learner = occ.rivals.UOBREPS(MDP, 10)
    learned(learner, 1)
    assert tensor([2.0, 2.0]).equal(learner.state["epochs"])


# -- the engine ------------------------------------------------------------------------------------


def in_torch(mdp, episodes, **options):
    """A learner whose projection is solved in torch."""
    learner = occ.rivals.UOBREPS(mdp, episodes, **options)
    learner.project.use("torch")
    return learner


@pytest.mark.parametrize("losses", ["stochastic", "greedy"])
@pytest.mark.parametrize("name", ["random", "masked", "contexts", "layers", "sparse"])
def test_both_backends_play_the_same_game(name, losses):
    mdp = PROBLEMS[name]().mdp if name in ("masked", "contexts", "layers") else MDP
    mdp = mdp.to_sparse() if name == "sparse" else mdp
    process = occ.GreedyAdversary() if losses == "greedy" else occ.BernoulliLosses(random_loss(mdp))
    options = {"widths": occ.rivals.Widths.of("practical", mdp), "learning_rate": 0.1}
    found = occ.simulate(mdp, occ.rivals.UOBREPS(mdp, 60, **options), process, 60, [1, 2])
    expected = occ.simulate(mdp, in_torch(mdp, 60, **options), process, 60, [1, 2], backend="torch")
    assert (found.backend, expected.backend) == ("engine", "torch")
    torch.testing.assert_close(found.last_q, expected.last_q, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.realised_regret, expected.realised_regret)
    torch.testing.assert_close(found.regret, expected.regret, rtol=1e-9, atol=1e-9)
    # Rounding decides at times whether one more step is needed.
    assert float((found.newton_steps - expected.newton_steps).abs().max()) <= 1
    assert float(found.flow_residual.max()) < 1e-12
    assert float(found.uncertified.max()) == 0


class State(occ.Callback):
    """Keeps the learner's last state."""

    def on_end(self, run, history):
        self.state = run.learner.state


def test_both_backends_end_in_the_same_state():
    ends = []
    for backend in ("engine", "torch"):
        ends.append(State())
        losses = occ.BernoulliLosses(random_loss(MDP))
        options = {"backend": backend, "callbacks": [ends[-1]]}
        occ.simulate(MDP, occ.rivals.UOBREPS(MDP, 50), losses, 50, [1, 2], **options)
    mine, theirs = (end.state for end in ends)
    assert {*mine} == {*theirs}
    for name in {*mine} - {"dual_residual", "flow_residual", "newton_steps"}:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-9, atol=1e-12)


@pytest.mark.bits
def test_a_seed_has_the_same_bits_alone_and_a_run_continues_to_them(tmp_path, small_chunks):
    losses, learner = occ.BernoulliLosses(random_loss(MDP)), occ.rivals.UOBREPS(MDP, 100)
    whole = occ.simulate(MDP, learner, losses, 100, [3, 4])
    alone = occ.simulate(MDP, learner, losses, 100, [4])
    assert whole.regret[1:].equal(alone.regret)

    class Stop(occ.Callback):
        def on_chunk(self, run):
            if run.t >= 40:
                raise KeyboardInterrupt

    path = tmp_path / "run.pt"
    with pytest.raises(KeyboardInterrupt):
        occ.simulate(MDP, learner, losses, 100, [3, 4], save_to=path, callbacks=[Stop()])
    continued = occ.simulate(MDP, learner, losses, 100, [3, 4], save_to=path)
    assert continued.regret.equal(whole.regret)
    assert continued.last_q.equal(whole.last_q)


def test_it_learns():
    mdp, episodes = MDP, 20_000
    mean = 0.3 + 0.4 * (torch.arange(3) != 1).double().expand(7, 3)
    found = occ.simulate(
        mdp, occ.rivals.UOBREPS(mdp, episodes), occ.BernoulliLosses(mean), episodes, [0]
    )
    uniform = episodes * 3 * 0.4 * 2 / 3
    assert float(found.regret[0, -1]) < 0.15 * uniform
    assert float(found.uncertified[0, -1]) == 0
