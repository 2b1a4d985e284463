"""Policy optimization: the policy of a state, the dilated bonus, closed forms, and the engine."""

import pytest
import torch
from zoo import PROBLEMS, random_loss, tensor

import torch_occ as occ
from torch_occ.game.learners.dilated import tsallis_policy

MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e3, 1e9])
def test_the_policy_of_a_state_is_the_step_with_one_layer(scale):
    mdp = occ.LayeredMDP([torch.ones(1, 4, 1).double()])
    loss, t = scale * random_loss(mdp, batch=(5,)), 7.0
    expected = occ.FTRLStep(mdp, occ.Tsallis() / occ.InverseSqrt(0.8))(loss, t)
    rate = torch.full((5, 1), 0.8 / t**0.5, dtype=torch.float64)
    found = tsallis_policy(loss, rate, mdp.actions)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_masked_actions_are_not_played():
    mask = torch.tensor([True, False, True])
    found = tsallis_policy(tensor([[1.0, -5.0, 1.0]]), tensor([0.3]), mask)
    torch.testing.assert_close(found, tensor([[0.5, 0.0, 0.5]]), rtol=1e-15, atol=0)


def test_with_one_layer_it_is_tsallis_inf():
    """Bonuses shift all actions alike."""
    mdp = occ.LayeredMDP([torch.ones(1, 4, 1).double()])
    losses = occ.BernoulliLosses(tensor([[0.2, 0.5, 0.6, 0.7]]))
    found = occ.simulate(mdp, occ.PolicyOptimization(mdp, gamma=0.5), losses, 300, [0, 1])
    expected = occ.simulate(mdp, occ.FTRL.tsallis(mdp, 0.5), losses, 300, [0, 1])
    torch.testing.assert_close(found.regret, expected.regret, rtol=1e-9, atol=1e-9)


def started(mdp, **options):
    learner = occ.PolicyOptimization(mdp, **options)
    learner.start(2)
    learner.state["cumulative_loss"] = 9 * random_loss(mdp, seed=5, batch=(2,)) * mdp.actions
    learner.state["inverse"] = 3 + random_loss(mdp, seed=6, batch=(2,))[..., 0]
    return learner


@pytest.mark.parametrize("name", ["random", "masked", "layers"])
def test_the_bonus_is_its_definition(name):
    """By a loop over states, and as a sum over all futures of the policy."""
    mdp = MDP if name == "random" else PROBLEMS[name]().mdp.to_dense()
    learner = started(mdp, gamma=0.9, scale=0.7)
    q = learner.propose(1)
    policy, u = occ.policy_of(mdp, q), q.sum(-1)
    expected = torch.zeros_like(q)
    L = mdp.horizon
    for k in reversed(range(L)):
        for s in range(mdp.layer_slices[k].start, mdp.layer_slices[k].stop):
            spread = (policy[:, s].sqrt() * (1 - policy[:, s])).sum(-1)
            root = learner.state["inverse"][:, s].sqrt()
            own = 0.7 * (1.8 + 1 / 0.9) * (L - k) * spread / (u[:, s] * root)
            for a in range(mdp.num_actions):
                expected[:, s, a] = own
                if k + 1 < L:
                    after = mdp.layer_slices[k + 1]
                    row = mdp.transitions[k][s - mdp.layer_slices[k].start, a]
                    average = (policy[:, after] * expected[:, after]).sum(-1)
                    expected[:, s, a] += (1 + 1 / L) * (row * average).sum(-1)
    found = learner.bonus(q)
    torch.testing.assert_close(found * mdp.actions, expected * mdp.actions, rtol=1e-12, atol=0)


def test_the_proposal_is_an_occupancy_measure_with_the_rates_of_this_episode():
    learner = started(MDP)
    before = learner.state["inverse"].clone()
    q = learner.propose(1)
    assert float(occ.flow_residual(MDP, q).abs().max()) < 1e-15
    torch.testing.assert_close(learner.state["inverse"], before + 1 / q.sum(-1))
    rate = learner.gamma / ((3 - MDP.layer) * learner.state["inverse"].sqrt())
    expected = tsallis_policy(learner.state["cumulative_loss"], rate, MDP.actions)
    torch.testing.assert_close(occ.policy_of(MDP, q), expected, rtol=1e-12, atol=0)


def test_the_estimate_of_values_is_unbiased():
    """The mean over all trajectories, weighted by their probabilities, is the value Q."""
    from zoo import trajectories

    learner = occ.PolicyOptimization(MDP, scale=0.0)
    learner.start(1)
    learner.state["cumulative_loss"] = 3 * random_loss(MDP, seed=5, batch=(1,))
    q, loss = learner.propose(1), random_loss(MDP, seed=1)
    states, actions, chances = trajectories(MDP, q[0])
    n = len(states)
    learner.state["cumulative_loss"] = torch.zeros(n, 7, 3).double()
    learner.state["inverse"] = learner.state["inverse"].expand(n, -1)
    episode = occ.Feedback(states, actions, loss[states, actions], None)
    learner.observe(1, q.expand(n, -1, -1), episode)
    found = (chances[:, None, None] * learner.state["cumulative_loss"]).sum(0)
    policy = occ.policy_of(MDP, q[0])
    Q, behind = [], None
    for k in reversed(range(3)):
        now = MDP.split(loss, 0)[k]
        now = now if behind is None else now + MDP.transitions[k] @ behind
        behind = (MDP.split(policy, 0)[k] * now).sum(-1)
        Q.insert(0, now)
    torch.testing.assert_close(found, torch.cat(Q), rtol=1e-12, atol=0)


@pytest.mark.parametrize("losses", ["stochastic", "greedy"])
@pytest.mark.parametrize("name", ["random", "masked", "sparse"])
def test_both_backends_play_the_same_game(name, losses):
    mdp = PROBLEMS["masked"]().mdp if name == "masked" else MDP
    mdp = mdp.to_sparse() if name == "sparse" else mdp
    process = occ.GreedyAdversary() if losses == "greedy" else occ.BernoulliLosses(random_loss(mdp))
    found, expected = (
        occ.simulate(mdp, occ.PolicyOptimization(mdp), process, 100, [1, 2], backend=backend)
        for backend in ("engine", "torch")
    )
    torch.testing.assert_close(found.last_q, expected.last_q, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.realised_regret, expected.realised_regret)
    torch.testing.assert_close(found.regret, expected.regret, rtol=1e-7, atol=1e-7)


@pytest.mark.bits
def test_a_run_continues_to_the_same_bits(tmp_path, small_chunks):
    losses, learner = occ.BernoulliLosses(random_loss(MDP)), occ.PolicyOptimization(MDP)
    whole = occ.simulate(MDP, learner, losses, 100, [3, 4])
    assert whole.regret[1:].equal(occ.simulate(MDP, learner, losses, 100, [4]).regret)

    class Stop(occ.Callback):
        def on_chunk(self, run):
            if run.t >= 40:
                raise KeyboardInterrupt

    path = tmp_path / "run.pt"
    with pytest.raises(KeyboardInterrupt):
        occ.simulate(MDP, learner, losses, 100, [3, 4], save_to=path, callbacks=[Stop()])
    continued = occ.simulate(MDP, learner, losses, 100, [3, 4], save_to=path)
    assert continued.regret.equal(whole.regret)


def test_it_learns_in_both_worlds():
    mean = 0.3 + 0.4 * (torch.arange(3) != 1).double().expand(7, 3)
    learner, episodes = occ.PolicyOptimization(MDP), 20_000
    uniform = episodes * 3 * 0.4 * 2 / 3
    found = occ.simulate(MDP, learner, occ.BernoulliLosses(mean), episodes, [0, 1])
    assert float(found.regret[:, -1].max()) < 0.05 * uniform
    assert float((found.regret[:, -1] - found.regret[:, -3]).max()) < 0.1 * float(
        found.regret[:, -3].min()
    )
    found = occ.simulate(MDP, learner, occ.GreedyAdversary(), episodes, [0, 1])
    assert float(found.regret[:, -1].max()) < 0.2 * uniform


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0.0}, "gamma: expected a positive number, got 0.0"),
        ({"scale": -1.0}, "scale: expected a number of at least 0, got -1.0"),
    ],
)
def test_errors_name_the_argument(options, message):
    with pytest.raises(ValueError, match=message):
        occ.PolicyOptimization(MDP, **options)


def test_unreachable_states_are_refused():
    transitions = [p.clone() for p in MDP.transitions]
    transitions[0] = tensor([0.0, 0.5, 0.5]).expand(1, 3, 3)
    with pytest.raises(ValueError, match=r"cannot be reached.*layer 1, state 0"):
        occ.PolicyOptimization(occ.LayeredMDP(transitions))
