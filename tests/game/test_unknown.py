"""FTRL for unknown transitions, against a loop over seeds, layers and episodes."""

import math

import pytest
import torch
from beliefs import trajectories
from zoo import PROBLEMS, random_loss

import torch_occ as occ
from torch_occ.mdp.occupancy import occupancy, policy_of, uniform_policy

MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)
LOSSES = occ.BernoulliLosses(random_loss(MDP, seed=3))


def psi():
    return occ.Tsallis() / occ.InverseSqrt(1.0) + occ.LogBarrier(1.0)


PRACTICAL = occ.rivals.Widths.of("practical", MDP)
VARIANTS = {
    "plug-in": {},
    "upper bounds": {"widths": PRACTICAL},
    "practical": {"widths": PRACTICAL, "bonus": occ.rivals.Bonus.practical()},
    "restarts": {"widths": PRACTICAL, "bonus": occ.rivals.Bonus(), "restart": True},
    "plug-in with restarts": {"restart": True, "pseudo_count": 0.5},
    "optimistic transitions": {"widths": PRACTICAL, "optimistic": True},
    "full information": {
        "widths": PRACTICAL,
        "bonus": occ.rivals.Bonus(),
        "estimator": occ.FullInformation(),
        "restart": True,
        "adaptive": 3.0,
    },
    "implicit exploration": {"widths": PRACTICAL, "estimator": occ.ImplicitExploration(0.05)},
}


class Reference:
    """The algorithm for one seed, as it is written: counts, epochs, sums of estimates."""

    def __init__(self, options):
        self.options = {"widths": None, "bonus": None, "restart": False, "optimistic": False}
        self.options |= {"adaptive": None, "pseudo_count": 1.0, "estimator": None} | options
        regularizer = psi()
        if self.options["adaptive"] is not None:
            regularizer = occ.Shannon() / occ.InverseSqrt(1.0)
        self.step = occ.FTRLStep(MDP, regularizer, backend="torch")
        self.m = [torch.zeros_like(P) for P in MDP.transitions]
        self.begin(1)

    def begin(self, t):
        """A new epoch with episode t."""
        options = self.options
        if t == 1 or options["restart"]:
            self.first, self.estimates, self.spread = t, [], 0.0
        self.m_epoch = [m.clone() for m in self.m]
        kappa = options["pseudo_count"]
        self.P = [(m + kappa / m.shape[-1]) / (m.sum(-1, keepdim=True) + kappa) for m in self.m]
        self.visits = torch.cat([m.sum(-1) for m in self.m])
        self.bonus = torch.zeros(7, 3, dtype=torch.float64)
        believed = self.P
        if options["widths"] is not None:
            self.B = []
            for k, (P, m) in enumerate(zip(self.P, self.m, strict=True)):
                n = m.sum(-1, keepdim=True)
                B = ((P / n).sqrt() + 1 / n).clamp(max=1.0)
                self.B.append(torch.where(n > 0, B, 1.0) if k < 2 else torch.zeros_like(P))
            if options["bonus"] is not None:
                self.bonus = options["bonus"](MDP, self.B)
            if options["optimistic"]:
                pairs = zip(self.P, self.B, strict=True)
                believed = [torch.maximum(P - B, 0.05 * P) for P, B in pairs]
        self.mdp = MDP.with_transitions(believed)

    def policy(self, t):
        loss = torch.zeros(7, 3, dtype=torch.float64)
        for estimate in self.estimates:
            loss = loss + estimate - self.bonus
        time = float(t - self.first + 1)
        if self.options["adaptive"] is not None:
            time = self.options["adaptive"] + self.spread / (3 * math.log(21))
        self.q = self.step(loss, time, mdp=self.mdp).detach()
        return policy_of(MDP, self.q)

    def learn(self, t, policy, states, actions, losses, table):
        estimator = self.options["estimator"]
        if isinstance(estimator, occ.FullInformation):
            estimate = table
        else:
            shown = self.q
            if self.options["widths"] is not None:
                u = occ.rivals.upper_occupancy(MDP, policy, self.P, self.B)
                shown = policy * u[:, None]
            bias = 0.0 if estimator is None else estimator.bias
            estimate = torch.zeros_like(policy)
            for s, a, loss in zip(states, actions, losses, strict=True):
                estimate[s, a] = loss / (shown[s, a] + bias)
        if self.options["adaptive"] is not None:
            charged = estimate - self.bonus
            V, advantage = torch.zeros(8, dtype=torch.float64), torch.zeros_like(charged)
            for s in reversed(range(7)):
                k = int(MDP.layer[s])
                rows = self.mdp.transitions[k][s - MDP.layer_slices[k].start]  # (A, S')
                after = V[MDP.layer_slices[k + 1]] if k < 2 else V[-1:]
                Q = charged[s] + rows @ after
                V[s] = policy[s] @ Q
                advantage[s] = Q - V[s]
            sums = [float((self.q * x**2).sum()) for x in (charged, advantage)]
            self.spread += min(sums)
        self.estimates.append(estimate)
        ends = False
        for k, (s, a) in enumerate(zip(states, actions, strict=True)):
            local = s - MDP.layer_slices[k].start
            after = 0 if k == 2 else states[k + 1] - MDP.layer_slices[k + 1].start
            self.m[k][local, a, after] += 1
            ends |= bool(self.m[k][local, a].sum() >= max(1, 2 * self.visits[s, a]))
        if ends:
            self.begin(t + 1)
        return ends


@pytest.mark.parametrize("name", VARIANTS)
def test_the_learner_is_the_loop_as_written(name):
    options = VARIANTS[name]
    regularizer = occ.Shannon() / occ.InverseSqrt(1.0) if "adaptive" in options else psi()
    learner = occ.rivals.UnknownFTRL(MDP, regularizer, **options)
    learner.start(2)
    loops = [Reference(options) for _ in range(2)]
    epochs = [1, 1]
    for t in range(1, 26):
        found, feedback = learner.propose_policy(t), trajectories(MDP, t, 2)
        for i, loop in enumerate(loops):
            expected = loop.policy(t)
            torch.testing.assert_close(found[i], expected, rtol=1e-8, atol=1e-12)
            seen = [x[i].tolist() for x in feedback[:3]]
            epochs[i] += loop.learn(t, expected, *seen, feedback.table[i])
        learner.observe(t, found, feedback)
        assert learner.state["epochs"].tolist() == epochs
        assert not bool(learner.diagnostics()["uncertified"].any())
    assert 5 < epochs[0] < 26


def test_with_the_true_transitions_the_plug_in_is_ftrl():
    """A belief that is the truth and never changes, in a whole run."""

    class Told(occ.rivals.UnknownFTRL):
        def start(self, num_seeds):
            super().start(num_seeds)
            true = torch.cat([P.flatten() for P in MDP.transitions])
            self.state["belief"] = true.expand(num_seeds, -1).clone()
            self.state["epoch_visits"] = self.state["epoch_visits"] + torch.inf
            q = occupancy(MDP, uniform_policy(MDP), in_order=True)
            self.state["q"] = q.expand_as(self.state["q"]).clone()

    options = {"seeds": range(3), "backend": "torch"}
    found = occ.simulate(MDP, Told(MDP, psi()), LOSSES, 60, **options)
    expected = occ.simulate(MDP, occ.FTRL(MDP, psi()), LOSSES, 60, **options)
    torch.testing.assert_close(found.realised_regret, expected.realised_regret, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.regret, expected.regret, rtol=1e-9, atol=1e-9)


def test_printed_constants():
    T = 2000
    bandit = occ.rivals.UnknownFTRL.jin_huang_luo(MDP, T)
    assert bandit.restart
    assert bandit.divides_by_bounds
    assert bandit.bonus == occ.rivals.Bonus(1.0, 1.0, False)
    assert bandit.widths.source == (2.0, 14 / 3, (0, 0), False, False, 4.0)
    assert bandit.widths.iota == pytest.approx((math.log(T**4 * 21),) * 3, rel=1e-13)
    q = occ.interior_point(MDP)
    expected = -math.sqrt(9.0) * q.sqrt().sum() - 128 * 3**4 * q.log().sum()
    torch.testing.assert_close(bandit.step.regularizer(q, 9.0), expected)
    full = occ.rivals.UnknownFTRL.jin_huang_luo(MDP, T, full_information=True)
    assert full.full_information
    assert not full.divides_by_bounds
    assert full.widths.iota == pytest.approx((math.log(T**3 * 21),) * 3, rel=1e-13)
    full.start(1)
    M = 7.0
    full.state["spread"][:] = M
    _, time = full.loss_and_time(1)  # 1 / eta^2
    eta = math.sqrt(3 * math.log(21) / (64 * 3**5 * math.log(21) + M))
    assert float(time) == pytest.approx(eta**-2, rel=1e-13)


@pytest.mark.parametrize("name", ["masked", "contexts", "layers", "no_choice", "bandit"])
def test_every_layout_is_played(name):
    mdp = PROBLEMS[name]().mdp
    losses = occ.BernoulliLosses(random_loss(mdp))
    for learner in (
        occ.rivals.UnknownFTRL(mdp, occ.jin_luo(mdp)),
        occ.rivals.UnknownFTRL.practical(mdp),
        occ.rivals.UnknownFTRL.jin_huang_luo(mdp, 20),
        occ.rivals.UnknownFTRL.jin_huang_luo(mdp, 20, full_information=True),
    ):
        history = occ.simulate(mdp, learner, losses, 20, (0, 1), backend="torch")
        assert not bool(history.uncertified.any())


def test_bad_input():
    with pytest.raises(ValueError, match=r"Jin, Huang and Luo needs the number of episodes T"):
        occ.rivals.UnknownFTRL.jin_huang_luo(MDP)
    with pytest.raises(ValueError, match="widths: a bonus needs confidence widths"):
        occ.rivals.UnknownFTRL(MDP, psi(), bonus=occ.rivals.Bonus())
    with pytest.raises(ValueError, match="optimistic transitions needs confidence widths"):
        occ.rivals.UnknownFTRL(MDP, psi(), optimistic=True)
    with pytest.raises(ValueError, match="optimistic transitions replace it"):
        occ.rivals.UnknownFTRL(
            MDP, psi(), widths=PRACTICAL, bonus=occ.rivals.Bonus(), optimistic=True
        )
    with pytest.raises(ValueError, match="pseudo_count: FTRL needs a positive one"):
        occ.rivals.UnknownFTRL(MDP, psi(), pseudo_count=0.0)
    with pytest.raises(ValueError, match="adaptive: expected a number of at least 1"):
        occ.rivals.UnknownFTRL(MDP, psi(), adaptive=0.5)
    with pytest.raises(TypeError, match=r"widths: expected for example occ.rivals.Widths.of"):
        occ.rivals.UnknownFTRL(MDP, psi(), widths="practical")
    with pytest.raises(TypeError, match="regularizer"):
        occ.rivals.UnknownFTRL(MDP, 3)
    with pytest.raises(ValueError, match="made without confidence widths"):
        occ.rivals.UnknownFTRL(MDP, psi()).confidence()
    learner = occ.rivals.UnknownFTRL.jin_huang_luo(MDP, 100)
    with pytest.raises(ValueError, match="UnknownFTRL was made for 100 episodes, but 101 were"):
        occ.simulate(MDP, learner, LOSSES, 101)
