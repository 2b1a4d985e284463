"""Learners that do not know the transitions are given the layout, and nothing that tells more."""

import pytest
import torch
from zoo import PROBLEMS, random_loss

import torch_occ as occ
from torch_occ.game.simulate import TorchPlayer
from torch_occ.mdp.occupancy import occupancy

MDP = occ.LayeredMDP.random(horizon=3, width=3, num_actions=3, seed=0)
LOSSES = occ.BernoulliLosses(random_loss(MDP, seed=3))
EPISODES = 40


def trajectories(mdp, t, n):
    """Some trajectory of n runs."""
    generator = torch.Generator().manual_seed(t)
    states = [torch.randint(s.start, s.stop, (n,), generator=generator) for s in mdp.layer_slices]
    rows = torch.stack(states, -1)
    weights = mdp.actions[rows].double() + 0.0
    actions = torch.multinomial(weights.flatten(0, 1), 1, generator=generator).view_as(rows)
    losses = torch.rand(n, mdp.horizon, dtype=torch.float64, generator=generator)
    table = torch.rand(n, *mdp.actions.shape, dtype=torch.float64, generator=generator)
    return occ.Feedback(rows, actions, losses, table)


class Softmax(occ.rivals.CountingLearner):
    """A user's blind learner: exponential weights of the losses and of the believed next ones."""

    def start(self, num_seeds):
        super().start(num_seeds)
        self.state["scores"] = self._zeros(num_seeds)

    def propose_policy(self, t):
        belief = self.mdp.with_transitions(self.transitions())
        scores = occ.optimal_policy(belief, self.state["scores"], in_order=True).Q
        return (-scores / t**0.5).softmax(-1)

    def observe(self, t, q, feedback):
        self.state["scores"] = self.state["scores"] + feedback.scatter(feedback.losses, q)
        super().observe(t, q, feedback)


class Policies(occ.Callback):
    """Keeps what the learner proposed and what it was given, in every episode."""

    def __init__(self):
        self.proposed, self.given, self.q = [], [], []

    def on_start(self, run):
        learner, ask, learn = run.learner, run.learner.propose_policy, run.learner.observe

        def propose_policy(t):
            policy = ask(t)
            self.proposed.append(policy.expand(len(run.seeds), -1, -1).clone())
            return policy

        def observe(t, q, feedback):
            self.given.append(q.clone())
            self.q.append(run.q.clone())
            learn(t, q, feedback)

        learner.propose_policy, learner.observe = propose_policy, observe


def test_the_same_trajectories_lead_to_the_same_policies(monkeypatch):
    """On two MDPs with one layout and other probabilities: the policies have the same bits."""
    seen = []
    for seed in (0, 1):
        mdp = occ.LayeredMDP.random(horizon=3, width=3, num_actions=3, seed=seed)
        episodes = iter(range(1, EPISODES + 1))
        monkeypatch.setattr(
            TorchPlayer, "walk", lambda *_, e=episodes, m=mdp: trajectories(m, next(e), 4)
        )
        kept = Policies()
        losses = occ.BernoulliLosses(random_loss(mdp, seed=3))
        options = {"callbacks": [kept], "backend": "torch"}
        occ.simulate(mdp, Softmax(mdp), losses, EPISODES, range(4), **options)
        seen.append(kept)
    one, other = seen
    assert len(one.proposed) == EPISODES
    assert all(map(torch.equal, one.proposed, other.proposed))
    assert not torch.equal(one.proposed[0], one.proposed[-1])  # it learns
    assert not torch.equal(one.q[-1], other.q[-1])  # the MDPs do differ


def test_the_simulation_computes_q_and_shows_the_policy():
    kept = Policies()
    options = {"callbacks": [kept], "backend": "torch"}
    history = occ.simulate(MDP, Softmax(MDP), LOSSES, EPISODES, range(3), **options)
    for proposed, given, q in zip(kept.proposed, kept.given, kept.q, strict=True):
        assert torch.equal(proposed, given)
        assert torch.equal(q, occupancy(MDP, proposed, in_order=True))
    assert torch.equal(history.last_q, kept.q[-1])
    expected = sum((q * LOSSES.mean).sum((-2, -1)) for q in kept.q)
    torch.testing.assert_close(
        history.regret[:, -1], expected - history.comparator[:, -1], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", ["masked", "contexts", "layers", "no_choice", "corridor"])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_blind_mdp_has_the_layout_and_uniform_rows(name, sparse):
    mdp = PROBLEMS[name]().mdp
    blind = (mdp.to_sparse() if sparse else mdp).blind()
    assert blind.is_blind
    assert not mdp.is_blind
    assert blind.layout_difference(mdp) is None
    assert torch.equal(blind.initial, mdp.initial)
    assert not blind.is_sparse
    for layer, mask in zip(blind.transitions, mdp.split(mdp.actions, 0), strict=True):
        assert torch.equal(layer, mask.double().unsqueeze(-1).expand_as(layer) / layer.shape[-1])
    assert blind.blind() is blind
    assert blind.to(dtype=torch.float32).is_blind
    assert not blind.with_transitions(mdp.to_dense().transitions).is_blind
    history = occ.simulate(
        mdp, Softmax(mdp), occ.BernoulliLosses(random_loss(mdp)), 20, (0, 1), backend="torch"
    )
    assert history.finished
