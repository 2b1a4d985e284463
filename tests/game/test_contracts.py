"""A run believes no learner, loss process or estimator, and warns of steps without certificate."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from zoo import PROBLEMS, Kept, random_loss

import torch_occ as occ
from torch_occ.game.losses import Stationary
from torch_occ.mdp.occupancy import interior_point, occupancy

MDP = PROBLEMS["masked"]().mdp
MEAN = random_loss(MDP, seed=3)
LOSSES = occ.BernoulliLosses(MEAN)
Q = interior_point(MDP)
NAN = float("nan")


class Proposes(occ.Learner):
    """A good q up to episode 3, another one then."""

    def __init__(self, bad):
        super().__init__(MDP)
        self.bad = bad

    def propose(self, t):
        return Q[None] if t < 4 else self.bad


def test_a_q_of_moderate_accuracy_is_taken():
    for nearly in (Q[None] * (1 + 1e-7), Q[None] - 1e-9 * MDP.actions):
        assert occ.simulate(MDP, Proposes(nearly), LOSSES, 5).finished


ZERO = torch.zeros(2, dtype=torch.float64)
GOOD = {"newton_steps": ZERO + 2, "dual_residual": ZERO, "flow_residual": ZERO, "uncertified": ZERO}


class Diagnosed(Proposes):
    def __init__(self, found):
        super().__init__(Q[None])
        self.found = found

    def diagnostics(self):
        return self.found


def test_right_diagnostics_are_recorded():
    history = occ.simulate(MDP, Diagnosed(GOOD), LOSSES, 3, (5, 9))
    assert history.newton_steps[:, -1].tolist() == [2.0, 2.0]
    bad = Diagnosed(GOOD | {"uncertified": torch.tensor([0.0, 1.0])})
    with pytest.warns(occ.game.UncertifiedWarning) as caught:
        occ.simulate(MDP, bad, LOSSES, 3, (5, 9), checkpoints=[3])
    first, last = (str(warning.message) for warning in caught)
    assert first.startswith("Diagnosed: the step of episode 1, seed 9, was not certified. The run")
    assert last.startswith("Diagnosed: 3 of 6 steps")


class Careless(occ.Learner):
    """Works in the memory that it proposed, and in what it is shown."""

    full_information = True

    def start(self, num_seeds):
        self.state = {"q": Q.expand(num_seeds, -1, -1).clone()}

    def propose(self, t):
        return self.state["q"]

    def observe(self, t, q, feedback):
        self.state["q"].copy_(
            occupancy(MDP, torch.eye(2, dtype=torch.float64)[MDP.actions.long().argmax(-1)])
        )
        feedback.table.fill_(7.0)
        feedback.losses.fill_(7.0)


def test_a_learner_that_works_in_shared_memory_changes_no_record():
    losses = Stationary(MEAN)
    history = occ.simulate(MDP, Careless(MDP), losses, 1)
    assert torch.equal(history.last_q[0], Q)
    assert torch.equal(history.cumulative_occupancy[0], Q)
    assert float(history.realised_regret[0, 0] + history.comparator[0, 0]) <= 2.0
    assert torch.equal(losses.mean, MEAN)


# -- steps without certificate -----------------------------------------------------------------


class Concave(occ.SeparableRegularizer):
    def pair(self, x):
        return -x.square()


def hurried(psi, max_steps=1):
    """A learner whose steps end before they have converged."""
    learner = occ.FTRL(MDP, psi)
    learner.step = occ.FTRLStep(MDP, psi, max_steps=max_steps)
    return learner


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_steps_without_certificate_are_warned_of(backend):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner, options = hurried(occ.jin_luo(MDP, beta=0.5)), {"checkpoints": [30]}
        history = occ.simulate(MDP, learner, LOSSES, 30, (5, 9), backend=backend, **options)
    assert [warning.category for warning in caught] == [occ.game.UncertifiedWarning] * 2
    assert all(warning.filename == __file__ for warning in caught)
    first, last = (str(warning.message) for warning in caught)
    assert first.startswith(
        "FTRL: the step of episode 1, seed 5, was not certified: MAX_STEPS, the iteration limit "
        "was reached"
    )
    count = int(history.uncertified[:, -1].sum())
    assert count >= 2
    assert last.startswith(f"FTRL: {count} of 60 steps were not certified")


def test_both_backends_name_the_same_first_step():
    """As many Newton steps as the first episode needs are too few for a later one."""
    enough = int(
        occ.simulate(MDP, occ.FTRL(MDP, occ.Tsallis()), LOSSES, 1, (5, 9)).newton_steps.max()
    )
    words = {}
    for backend in ("torch", "engine"):
        with pytest.warns(occ.game.UncertifiedWarning) as caught:
            occ.simulate(MDP, hurried(occ.Tsallis(), enough), LOSSES, 20, (5, 9), backend=backend)
        words[backend] = [str(warning.message) for warning in caught]
    assert words["torch"] == words["engine"]
    assert "episode 1," not in words["torch"][0]


def test_a_regularizer_that_is_not_convex_is_warned_of_and_an_error_if_asked_for():
    with pytest.warns(occ.game.UncertifiedWarning, match=r"is not convex|20 of 20"):
        occ.simulate(MDP, occ.FTRL(MDP, Concave()), LOSSES, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error", occ.game.UncertifiedWarning)
        with pytest.raises(occ.game.UncertifiedWarning, match="episode 1"):
            occ.simulate(MDP, occ.FTRL(MDP, Concave()), LOSSES, 20)


# -- the caller's learner ----------------------------------------------------------------------


def snapshot(learner):
    values = {name: float(value) for name, value in learner.step.state_dict().items()}
    return values, learner.state, learner.step.backend, learner.step.solve(MEAN, 1).backend


@pytest.mark.parametrize("backend", ["torch", "engine", "auto"])
def test_the_callers_learner_is_left_alone(backend):
    class Meddles(occ.Callback):
        def on_checkpoint(self, run):
            with torch.no_grad():
                run.learner.step.regularizer.terms[1].beta.mul_(1.5)

    learner, kept = occ.FTRL(MDP, occ.jin_luo(MDP)), Kept()
    before = snapshot(learner)
    history = occ.simulate(MDP, learner, LOSSES, 20, backend=backend, callbacks=[Meddles(), kept])
    assert snapshot(learner) == before
    assert kept.learner is not learner
    assert kept.learner.mdp is MDP
    assert torch.equal(kept.learner.state["q"], history.last_q)
    again = occ.simulate(MDP, learner, LOSSES, 20, backend=backend, callbacks=[Meddles()])
    assert torch.equal(again.regret, history.regret)


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_one_learner_serves_many_threads(backend):
    episodes = 20 if backend == "torch" else 2000
    for learner in (occ.FTRL(MDP, occ.jin_luo(MDP, beta=0.5)), occ.FollowTheLeader(MDP)):
        barrier = threading.Barrier(4)

        def play(seed, learner=learner, wait=int):
            wait()
            return occ.simulate(MDP, learner, LOSSES, episodes, (seed,), backend=backend).regret

        expected = [play(seed) for seed in range(4)]
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda seed, p=play, b=barrier: p(seed, wait=b.wait), range(4))
            assert all(map(torch.equal, found, expected))


# -- ties --------------------------------------------------------------------------------------


def test_ties_are_broken_by_the_lowest_index():
    charge = occ.GreedyAdversary().means
    bandit = occ.LayeredMDP([torch.ones(1, 3, 1, dtype=torch.float64)])
    third = np.nextafter(1 / 3, 1)
    for q, favourite in (
        ([1 / 3, third, 1 / 3], 0),
        ([0.3, 0.35 - 1e-12, 0.35], 1),
        ([0.3, 0.35 - 1e-6, 0.35 + 1e-6], 2),
    ):
        means, _ = charge(bandit, {}, 1, 1, torch.tensor([[q]], dtype=torch.float64))
        assert means.flatten().tolist() == [float(i == favourite) for i in range(3)]


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_a_leader_does_not_follow_rounding_errors(backend):
    """Both first actions cost 1, but 0.7 + 0.2 + 0.1 is less than that in floating point."""
    first = torch.tensor([[[0.1, 0.2, 0.7], [0.7, 0.2, 0.1]]], dtype=torch.float64)
    mdp = occ.LayeredMDP([first, torch.ones(3, 2, 1, dtype=torch.float64)])
    losses = occ.BernoulliLosses(mdp.layer[:, None].repeat(1, 2).double())
    history = occ.simulate(mdp, occ.FollowTheLeader(mdp), losses, 100, range(3), backend=backend)
    assert history.last_q[:, 0].tolist() == [[1.0, 0.0]] * 3


def test_a_state_that_is_never_visited_is_charged_where_it_has_an_action():
    q = torch.zeros(1, 4, 2, dtype=torch.float64)
    means, _ = occ.GreedyAdversary().means(MDP, {}, 1, 1, q)
    assert bool((means[0, 0].sum(-1) == 1).all())
    assert bool((means[0, 0][~MDP.actions] == 0).all())
