"""`check_regularizer` accepts what the step can solve, and says what is wrong with the rest."""

import pytest

import torch_occ as occ

MDP = occ.LayeredMDP.random(2, 2, 2, seed=0)


class Inverse(occ.SeparableRegularizer):
    def pair(self, x):
        return 1e-3 / x


class PerState(occ.StatewiseRegularizer):
    def per_state(self, q):
        return -q.log().sum(-1) + q.sum(-1) ** 2


class Joint(occ.JointRegularizer):
    def joint(self, q):
        return -q.log().sum((-2, -1)) + (q**2).sum((-2, -1))


@pytest.mark.parametrize(
    ("psi", "t"),
    [(occ.jin_luo(MDP, beta=1.0), 7), (Inverse() + occ.Shannon(), None), (PerState(), None),
     (Joint(), None), (occ.ConditionalEntropy(), None)],
)  # fmt: skip
def test_good_regularizers_pass(psi, t):
    found = occ.check_regularizer(psi, MDP, t)
    assert found["gradient"] < 1e-4
    assert found["hessian"] < 1e-6
    assert found["convexity"] > 0
    assert found["dual_residual"] < 4e-11


class Flat(occ.SeparableRegularizer):
    def pair(self, x):
        return x**2


class Hill(occ.SeparableRegularizer):
    def pair(self, x):
        return x.log()


class Detached(occ.SeparableRegularizer):
    def pair(self, x):
        return x.detach() * x.log()


class Undefined(occ.SeparableRegularizer):
    def pair(self, x):
        return (x - 10).log()


@pytest.mark.parametrize(
    ("psi", "message"),
    [
        (Flat(), "not steep.*has a limit.*add a LogBarrier"),
        (Hill(), "not convex on Omega.*has the eigenvalue -"),
        (Detached(), "its gradient differs from finite differences.*without detach"),
        (Undefined(), "psi is nan.*it must be finite wherever"),
    ],
)
def test_bad_ones_are_named(psi, message):
    with pytest.raises(ValueError, match=message):
        occ.check_regularizer(psi, MDP)
