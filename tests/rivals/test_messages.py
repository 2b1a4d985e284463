"""Bad input: a message names the argument, the value and what to do. More are in the record."""

import pytest
import torch
from zoo import random_loss

import torch_occ as occ

R = occ.rivals
MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)
COUNTS = [torch.ones_like(P) for P in MDP.transitions]


def psi():
    return occ.Tsallis() / occ.InverseSqrt(1.0)


def play(learner, episodes):
    return occ.simulate(MDP, learner, occ.BernoulliLosses(random_loss(MDP)), episodes)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: R.empirical_transitions(MDP, COUNTS, -1), "pseudo_count: expected .* got -1"),
        (lambda: R.CountingLearner(MDP, pseudo_count=-1), "pseudo_count: expected .* got -1"),
        (lambda: R.empirical_transitions(MDP, COUNTS[1:]), "counts: expected one tensor per layer"),
        (
            lambda: R.empirical_transitions(MDP, (COUNTS[0], COUNTS[1][..., :-1], COUNTS[2])),
            r"counts\[1\]: expected shape",
        ),
        (lambda: R.Widths.of("uob_reps", MDP, delta=0.1), "uob_reps need the number of episodes"),
        (lambda: R.Widths.of("uob_reps", MDP, 9, 1.5), r"a number in \(0, 1\), got 1.5"),
        (lambda: R.Widths.of("unknown", MDP), "widths: expected one of jin_huang_luo"),
        (
            lambda: play(R.UnknownFTRL.jin_huang_luo(MDP, 100), 101),
            "UnknownFTRL was made for 100 episodes, but 101 were",
        ),
        (lambda: R.UOBREPS(MDP, None), "UOB-REPS needs the number of episodes.* got None"),
        (lambda: R.UOBREPS(MDP, 9, learning_rate=-1.0), r"learning_rate: .* got -1\.0"),
        (lambda: R.UOBREPS(MDP, 9, bias=0.0), r"bias: expected a positive number, got 0\.0"),
        (lambda: R.UCBVI(MDP, bonus="bernstein"), "bonus='bernstein' needs the number"),
        (lambda: R.UCBVI(MDP, 10, delta=0.0), "UCBVI needs a probability between 0 and 1"),
        (lambda: R.MultiLayerUCBVI(MDP, 9, delta=1.0), "MultiLayerUCBVI needs a probability"),
        (lambda: R.UCBVI(MDP, bonus="sharp", corruption=-1.0), "corruption: expected a finite"),
        (lambda: R.UCBVI(MDP, 9, bonus="bernstein", corruption=1.0), "estimates variances"),
    ],
)
def test_bad_values_are_explained(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_bad_types_are_explained():
    with pytest.raises(TypeError, match="regularizer: expected for example"):
        R.UnknownFTRL(MDP, 3)
    with pytest.raises(TypeError, match=r"episodes of UCBVI .*: expected a whole number"):
        R.UCBVI(MDP, 10.5)


def test_rivals_play_in_the_engine_only():
    losses = occ.BernoulliLosses(random_loss(MDP))
    message = r"backend: PSRL plays in the engine only, and not in torch; use backend='auto'"
    with pytest.raises(ValueError, match=message):
        occ.simulate(MDP, R.PSRL(MDP), losses, 3, backend="torch")
    single = MDP.to(dtype=torch.float32)
    message = "learner: EULER plays in the engine only, but the engine works in float64"
    with pytest.raises(ValueError, match=message):
        occ.simulate(single, R.EULER(single), occ.BernoulliLosses(random_loss(MDP).float()), 3)

    class Slow(occ.Schedule):
        def forward(self, t):
            return 1 / (1 + t.log())

    with pytest.raises(ValueError, match="not powers of t"):
        play(R.UnknownFTRL(MDP, occ.Tsallis() / Slow()), 3)
