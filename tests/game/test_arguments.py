"""A wrong argument of `simulate` is named before the first episode, with what to pass instead.

More messages are in the record, to the word.
"""

import pytest
import torch

import torch_occ as occ
from torch_occ._support.streams import check_memory

MDP = occ.LayeredMDP.random(horizon=2, width=2, num_actions=2, seed=0)
MEAN = torch.full((3, 2), 0.5, dtype=torch.float64)
LOSSES = occ.BernoulliLosses(MEAN)
LEARNER = occ.FollowTheLeader(MDP)
TABLE = occ.TableLosses(MEAN.expand(4, -1, -1))
OTHER = occ.LayeredMDP.random(horizon=2, width=2, num_actions=2, seed=1)


class Still(occ.LossProcess):
    def means(self, mdp, state, t0, n, q):
        return MEAN[None, None], state


def process(**attributes):
    return type("Process", (Still,), attributes)()


class Uninitialized(occ.Learner):
    def __init__(self, mdp):
        pass


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learner": Uninitialized(MDP)}, r"Uninitialized has no mdp; call super\(\).__init__"),
        ({"losses": occ.LossProcess()}, "LossProcess: write means"),
        ({"losses": process(noise="bernouli")}, "noise: expected .* got 'bernouli'"),
        ({"losses": process(stride=0)}, "Process.stride to be a positive integer, got 0"),
        ({"losses": process(start=lambda *_: None)}, "Process.start returned NoneType; expected"),
        ({"seeds": [0.5]}, r"seeds: expected integers, .* got \[0.5\]"),
        ({"seeds": [0, 1, 0]}, "seeds: 0 occurs twice; equal seeds play equal runs"),
        ({"seeds": [2**64]}, r"seeds: expected integers below 2\*\*64, got 1844674"),
        ({"callbacks": occ.ProgressBar()}, r"for example \[occ.ProgressBar\(\)\], got P"),
        ({"callbacks": [occ.ProgressBar]}, "got the class ProgressBar; make an object"),
        ({"checkpoints": []}, "checkpoints: expected at least one episode"),
        ({"checkpoints": [0, 3]}, "checkpoints: expected episodes from 1 to 5, got 0"),
        ({"checkpoints": [2, 6]}, "checkpoints: expected episodes from 1 to 5, got 2 to 6"),
        ({"seeds": ()}, "seeds: expected at least one"),
        ({"learner": occ.FixedPolicy(OTHER)}, "learner: was made for another MDP"),
        ({"losses": occ.Corrupted(TABLE, 1.0)}, "losses: the table has 4 episodes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_wrong_arguments_are_named(changed, message, backend):
    arguments = {"learner": LEARNER, "losses": LOSSES, "episodes": 5, "backend": backend} | changed
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        occ.simulate(MDP, **arguments)


def test_numbers_of_numpy_and_torch_are_welcome():
    seeds = torch.arange(2).numpy()
    episodes = torch.tensor(5)
    history = occ.simulate(MDP, LEARNER, LOSSES, episodes, seeds, backend="torch")
    assert history.seeds == (0, 1)
    assert int(history.episodes[-1]) == 5


def centred(baseline):
    return type(
        "Centred", (occ.game.CentredEstimator,), {"baseline": lambda self, q, t: baseline}
    )()


@pytest.mark.parametrize("baseline", [0.5, torch.zeros(4, 2, dtype=torch.float64)])
def test_a_baseline_has_the_shape_of_q(baseline):
    learner = occ.FTRL(MDP, occ.jin_luo(MDP), centred(baseline))
    message = r"Centred.baseline at episode 1: expected a tensor that broadcasts to \(1, 3, 2\)"
    with pytest.raises(ValueError, match=message):
        occ.simulate(MDP, learner, LOSSES, 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: occ.FTRL(MDP, occ.jin_luo(MDP), occ.ImportanceWeighted),
            "estimator: expected an occ.Estimator",
        ),
        (lambda: occ.LogBarrier("1"), "LogBarrier: beta: expected a number or a tensor, got '1'"),
        (lambda: occ.LayeredMDP.from_arrays([[[1.0]]], [0.0], "3"), "horizon: expected a whole"),
        (
            lambda: occ.grid(learner="ftrl"),
            r"learner: expected a list, got 'ftrl'; write \['ftrl'\]",
        ),
        (lambda: occ.tune(lambda psi: psi, occ.jin_luo(MDP)), "objective: returns Sum, not occ"),
    ],
)
def test_wrong_parts_are_named_when_they_are_put_together(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_more_seeds_than_memory_are_refused_with_a_way_out():
    with pytest.raises(MemoryError, match=r"need .* GB of random numbers.*play fewer seeds"):
        check_memory(10**10, 9)
