"""Environments that contradict their own tables, each in one way."""

import re

import numpy as np
import pytest
import torch

import torch_occ as occ
from torch_occ.mdp.importers import Bets

gymnasium = pytest.importorskip("gymnasium")


def refused(*fragments):
    return pytest.raises(
        ValueError, match="(?s)contradicts the environment.*" + ".*".join(map(re.escape, fragments))
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("FrozenLake-v1", {}),
        ("CliffWalkingSlippery-v1", {}),
        ("CliffWalking-v1", {}),
        ("Taxi-v4", {"is_rainy": True}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_truth_passes(name, options):
    for seed in range(3):
        occ.LayeredMDP.from_gymnasium(name, 5, options=options, verify=3000, seed=seed)


class Lying(gymnasium.Wrapper):
    """Plays an environment, and changes what a step returns."""

    def __init__(self, env, change):
        super().__init__(env)
        self.change, self.count = change, 0

    def reset(self, **arguments):
        self.count = 0
        return self.env.reset(**arguments)

    def step(self, action):
        self.count += 1
        return self.change(self, *self.env.step(action))


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (
            lambda self, s, r, end, cut, info: (s, r - 0.01, end, cut, info),
            ("reward -0.01", "excludes"),
        ),
        (lambda self, s, r, end, cut, info: (s, r, False, cut, info), ("excludes",)),
        (lambda self, s, r, end, cut, info: (s ^ 1, r, end, cut, info), ("led to", "excludes")),
        (
            lambda self, s, r, end, cut, info: (s, r, end, cut or self.count == 3, info),
            ("step 3 of 8 was cut off",),
        ),
        # Only from the fifth step on: the table has no clock.
        (
            lambda self, s, r, end, cut, info: (0 if self.count > 4 else s, r, end, cut, info),
            ("led to", "excludes"),
        ),
    ],
    ids=["reward", "no end", "state", "cut off", "late"],
)
def test_a_wrapper_that_changes_the_dynamics_is_found(change, fragments):
    with refused(*fragments):
        occ.LayeredMDP.from_gymnasium(Lying(gymnasium.make("FrozenLake-v1"), change), 8)


def slips(rate):
    """A lake that slips otherwise than it says."""
    env, other = gymnasium.make("FrozenLake-v1"), gymnasium.make("FrozenLake-v1", success_rate=rate)
    step = env.unwrapped.step

    def lying_step(action):
        said, env.unwrapped.P = env.unwrapped.P, other.unwrapped.P
        try:
            return step(action)
        finally:
            env.unwrapped.P = said

    env.unwrapped.step = lying_step
    return env


def test_frequencies_that_are_not_the_probabilities_are_found():
    with refused("outcomes of probabilities (0.333, 0.333, 0.333) were seen with frequencies (0."):
        occ.LayeredMDP.from_gymnasium(slips(0.45), 8)
    occ.LayeredMDP.from_gymnasium(slips(1 / 3), 8)


def test_a_change_of_mind_that_the_table_does_not_know():
    with pytest.raises(ValueError, match="fickle_passenger=True does not do what its table says"):
        occ.LayeredMDP.from_gymnasium("Taxi-v4", 3, options={"fickle_passenger": True})
    # The same without looking at the option: it is seen by playing.
    env = gymnasium.make("Taxi-v4", fickle_passenger=True)
    flag = iter([False])
    kind = type(env.unwrapped)
    hidden = type(
        "Hidden",
        (kind,),
        {"fickle_passenger": property(lambda self: next(flag, True), lambda self, value: None)},
    )
    env.unwrapped.__class__ = hidden
    with refused("led to", "excludes"):
        occ.LayeredMDP.from_gymnasium(env, 6)


def test_an_initial_distribution_that_is_not_the_one_played():
    env = gymnasium.make("FrozenLake-v1")
    env.unwrapped.initial_state_distrib = np.eye(16)[0]
    reset = env.unwrapped.reset

    def elsewhere(*, seed=None, options=None):
        _, info = reset(seed=seed)
        env.unwrapped.s = 1
        return 1, info

    env.unwrapped.reset = elsewhere
    with refused("reset() gave state 1"):
        occ.LayeredMDP.from_gymnasium(env, 3)

    class Uneven(gymnasium.Wrapper):
        def reset(self, *, seed=None, options=None):
            state, info = self.env.reset(seed=seed)
            return (state, info) if state < 250 else self.env.reset()

    with refused("initial states"):
        occ.LayeredMDP.from_gymnasium(Uneven(gymnasium.make("Taxi-v4")), 3)


def test_an_environment_whose_state_cannot_be_set_is_played_from_its_start():
    class Private(gymnasium.Env):
        """A coin: state 1 with probability 3/4, although 1/2 is published."""

        observation_space, action_space = gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(1)
        P = {s: {0: [(0.5, 0, 0.0, False), (0.5, 1, 1.0, False)]} for s in range(2)}  # noqa: RUF012
        initial_state_distrib = np.array([1.0, 0.0])
        bias = 0.75

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return 0, {}

        def step(self, action):
            s = int(self.np_random.random() < self.bias)
            return s, float(s), False, False, {}

    with refused("probabilities (0.5, 0.5) were seen with frequencies (0."):
        occ.LayeredMDP.from_gymnasium(Private(), 5)
    Private.bias = 0.5
    assert occ.LayeredMDP.from_gymnasium(Private(), 5).layer_sizes == (1, 2, 2, 2, 2)


def test_nothing_is_drawn_on_a_screen():
    env = gymnasium.make("FrozenLake-v1")
    env.unwrapped.render_mode = "human"
    with pytest.raises(ValueError, match="would draw its check"):
        occ.LayeredMDP.from_gymnasium(env, 3)


def test_the_wealth_of_a_bet_against_the_truth_is_a_martingale():
    """E[wealth] = 1 after any number of bets, exactly: summed over all sequences of outcomes."""
    p, total = (0.7, 0.2, 0.1), 0.0
    for sequence in np.ndindex(3, 3, 3, 3):
        bets, probability = Bets(), 1.0
        for i in sequence:
            bets.place("coin", p, i)
            probability *= p[i]
        total += probability * np.exp(bets.log_wealth)
    assert total == pytest.approx(1.0, abs=1e-12)
    assert torch.get_default_dtype() == torch.float32
