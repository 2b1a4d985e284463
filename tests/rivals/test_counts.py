"""Counts of transitions: by hand, on masked layouts, and through a run."""

import pytest
import torch
from beliefs import random_counts, visits_of
from zoo import PROBLEMS, random_loss

import torch_occ as occ
from torch_occ.rivals import beliefs as counting

MDP = PROBLEMS["layers"]().mdp


@pytest.mark.parametrize("name", ["masked", "contexts", "layers"])
def test_flat_tables_and_layers_are_inverse(name):
    mdp = PROBLEMS[name]().mdp
    table = random_counts(mdp, (3, 2))
    flat = counting.join_transitions(table)
    assert flat.shape == (3, 2, counting.num_transitions(mdp))
    assert all(map(torch.equal, counting.split_transitions(mdp, flat), table))
    assert [layer.shape[-3:] for layer in table] == [p.shape[-3:] for p in mdp.transitions]


def test_every_transition_of_an_episode_is_counted_at_its_place():
    """A loop over seeds and layers, against the vectorized count of a run."""
    table = [torch.zeros(5, *shape) for shape in counting.transition_shapes(MDP)]

    class Loop(occ.rivals.CountingLearner):
        def propose_policy(self, t):
            return occ.uniform_policy(self.mdp)[None]

        def observe(self, t, q, feedback):
            super().observe(t, q, feedback)
            for i, (states, actions) in enumerate(
                zip(feedback.states.tolist(), feedback.actions.tolist(), strict=True)
            ):
                for k, (s, a) in enumerate(zip(states, actions, strict=True)):
                    last = k + 1 == MDP.horizon
                    after = 0 if last else states[k + 1] - MDP.layer_slices[k + 1].start
                    table[k][i, s - MDP.layer_slices[k].start, a, after] += 1
            assert all(
                torch.equal(mine, counted.float())
                for mine, counted in zip(table, self.counted(), strict=True)
            )
            visits = visits_of(MDP, self.counted())
            assert torch.equal(visits, self.state["visits"])

    losses = occ.BernoulliLosses(random_loss(MDP))
    assert occ.simulate(MDP, Loop(MDP), losses, 30, range(5)).finished


def test_empirical_transitions_by_hand():
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=0)
    m = (
        torch.tensor([[[3.0, 1.0], [0.0, 0.0]]], dtype=torch.float64),
        torch.tensor([[[4.0], [0.0]], [[1.0], [2.0]]], dtype=torch.float64),
    )
    first, last = occ.rivals.empirical_transitions(mdp, m)
    expected = torch.tensor([[[3.5 / 5, 1.5 / 5], [0.5, 0.5]]], dtype=torch.float64)
    assert torch.equal(first, expected)
    assert torch.equal(last, torch.ones(2, 2, 1, dtype=torch.float64))
    plain, _ = occ.rivals.empirical_transitions(mdp, m, pseudo_count=0.0)
    assert torch.equal(plain, torch.tensor([[[0.75, 0.25], [0.5, 0.5]]], dtype=torch.float64))


@pytest.mark.parametrize("kappa", [0.0, 0.5, 1.0])
def test_empirical_transitions_are_transitions(kappa):
    mdp = PROBLEMS["masked"]().mdp
    m = random_counts(mdp, (7,))
    rows = occ.rivals.empirical_transitions(mdp, m, pseudo_count=kappa)
    checked = occ.LayeredMDP(rows, actions=mdp.actions, initial=mdp.initial)  # validates them
    if kappa:
        assert bool(checked.reachable.all())
    for row, mask in zip(rows, mdp.split(mdp.actions, 0), strict=True):
        assert not bool(row[:, ~mask].any())


def test_epochs_double():
    """Seed by seed: m_i stays until a visited pair reaches max(1, 2 m_i)."""
    began = {0: [], 1: []}

    class Epochs(occ.rivals.CountingLearner):
        def propose_policy(self, t):
            return occ.uniform_policy(self.mdp)[None]

        def observe(self, t, q, feedback):
            before = {name: value.clone() for name, value in self.state.items()}
            new = self.record(t, feedback)
            for i in range(2):
                pairs = list(zip(feedback.states[i], feedback.actions[i], strict=True))
                now, then = self.state["visits"][i], before["epoch_visits"][i]
                assert bool(new[i]) == any(
                    float(now[s, a]) >= max(1.0, 2 * float(then[s, a])) for s, a in pairs
                )
                if bool(new[i]):
                    began[i].append(t + 1)
                    assert torch.equal(self.state["epoch_visits"][i], now)
                    assert float(self.state["epoch_start"][i]) == t + 1
                    m = tuple(layer[i] for layer in self.counted())
                    empirical = occ.rivals.empirical_transitions(self.mdp, m)
                    assert all(
                        torch.equal(layer[i], row)
                        for layer, row in zip(self.transitions(), empirical, strict=True)
                    )
                else:
                    for name in ("epoch_visits", "belief", "epochs", "epoch_start"):
                        assert torch.equal(self.state[name][i], before[name][i])
                assert float(self.state["epochs"][i]) == 1 + len(began[i])

    losses = occ.BernoulliLosses(random_loss(MDP))
    occ.simulate(MDP, Epochs(MDP), losses, 200, range(2))
    limit = MDP.num_pairs * (1 + torch.tensor(200.0).log2())
    assert all(5 < len(starts) <= limit for starts in began.values())


def test_bad_input():
    m = random_counts(MDP)
    with pytest.raises(ValueError, match="pseudo_count: expected a number of at least 0, got -1"):
        occ.rivals.empirical_transitions(MDP, m, pseudo_count=-1)
    with pytest.raises(ValueError, match="pseudo_count"):
        occ.rivals.CountingLearner(MDP, pseudo_count=-1)
    with pytest.raises(ValueError, match="counts: expected one tensor per layer"):
        occ.rivals.empirical_transitions(MDP, m[1:])
    with pytest.raises(ValueError, match=r"counts\[1\]: expected shape"):
        occ.rivals.empirical_transitions(MDP, (m[0], m[1][..., :-1], *m[2:]))
