import math

import pytest
import torch
from theory_cases import F64, bandit, check, masked

import torch_occ as occ
from experiments.statements import draw_policy
from torch_occ import theory

MDP = occ.LayeredMDP.random(3, 2, 3, seed=1)
MEAN = torch.rand(
    MDP.num_states, MDP.num_actions, dtype=F64, generator=torch.Generator().manual_seed(3)
)
SEEDS, T = 8, 120


def recorded(parameters, episodes=T, mdp=MDP, mean=MEAN):
    recorder = theory.Recorder()
    learner, losses = occ.FTRL(mdp, parameters.regularizer(mdp)), occ.BernoulliLosses(mean)
    every = {"checkpoints": range(1, episodes + 1), "callbacks": [recorder]}
    history = occ.simulate(mdp, learner, losses, episodes, range(SEEDS), **every)
    return recorder.trajectory, history


@pytest.fixture(scope="module")
def run():
    parameters = theory.Parameters.paper(MDP)
    trajectory, history = recorded(parameters)
    best = occ.occupancy(MDP, occ.optimal_policy(MDP, MEAN).policy)
    u = theory.runs.comparator_point(trajectory.q[0], best, T)
    return trajectory, history, best, u, theory.decompose(MDP, parameters, trajectory, u)


def test_a_recorder_needs_every_episode():
    learner, losses = occ.FTRL(MDP, occ.jin_luo(MDP)), occ.BernoulliLosses(MEAN)
    some = {"checkpoints": [1, 2, 9], "callbacks": [theory.Recorder()]}
    with pytest.raises(ValueError, match="needs every episode, but episode 3 was skipped"):
        occ.simulate(MDP, learner, losses, 9, range(2), **some)


def check_run(mdp, found, trajectory, best, mean):
    """Every lemma along a run, for states of one action too."""
    parameters, q, count = found.parameters, trajectory.q, len(trajectory.q)
    check(*theory.smooth_update(mdp, q, found.tilde_q))
    check(found.simple_decomposition(), found.bound_stability(), *found.bound_penalty())
    check(found.key_lemma())
    check(*theory.proper_comparator(mdp, q[0], best, count * mean, parameters, count))


def test_every_lemma_along_a_run(run):
    trajectory, _, best, _, found = run
    check_run(MDP, found, trajectory, best, MEAN)
    t = torch.arange(1, T + 1, dtype=F64).unsqueeze(-1)
    check(*theory.step_length(MDP, trajectory.q, found.tilde_q, found.parameters, t))
    check(found.short_estimate())


def test_the_stability_term_is_the_difference_of_values(run):
    """<q_t, estimate_t> + F_t(q_t) - G_t(tilde q_t), as it is defined."""
    trajectory, _, _, _, found = run
    total, psi = trajectory.estimate.cumsum(0), found.parameters.regularizer(MDP)
    t = torch.arange(1, T + 1, dtype=F64).unsqueeze(-1).expand(T, SEEDS)

    def G(q):
        return ((q * total).sum((-2, -1)) + psi(q, t, MDP)).detach()

    before, atol = G(trajectory.q), 1e-13 * float(G(trajectory.q).abs().max())
    torch.testing.assert_close(found.stability, before - G(found.tilde_q), rtol=0, atol=atol)


def test_bound_stability_loses_a_factor_16(run):
    """G_t(q_t) - G_t(tilde q_t) is half a squared norm."""
    *_, found = run
    ratio = (found.stability / (8 * found.norm_step))[found.norm_step > 0]
    assert 0.02 < float(ratio.max()) < 1 / 16 * 1.01


def test_bound_penalty_is_no_equality_but_its_slack_is_known(run):
    """lem:bound_penalty as printed, with =, is false: the sides differ by more than rounding."""
    *_, found = run
    inequality, exact = found.bound_penalty()
    check(inequality, exact)
    assert bool((inequality.slack > 1e6 * inequality.rounding).all())
    torch.testing.assert_close(inequality.slack, found.lost.sum(0), rtol=1e-8, atol=0)


def test_along_a_run_with_masks_and_a_state_of_one_action():
    mdp, generator = masked(), torch.Generator().manual_seed(0)
    mean = torch.rand(mdp.num_states, mdp.num_actions, dtype=F64, generator=generator)
    parameters = theory.Parameters.paper(mdp)
    trajectory, _ = recorded(parameters, 40, mdp, mean)
    best = occ.occupancy(mdp, occ.optimal_policy(mdp, mean).policy)
    u = theory.runs.comparator_point(trajectory.q[0], best, 40)
    found = theory.decompose(mdp, parameters, trajectory, u)
    check_run(mdp, found, trajectory, best, mean)


# -- single steps ----------------------------------------------------------------------------------


def test_with_a_small_beta_the_update_is_not_smooth():
    """lem:smooth_update needs its log-barrier: else one loss more than halves a rare action."""
    mdp = bandit(2)
    loss = torch.tensor([[0.0, 40.0]], dtype=F64)
    for beta, smooth in ((64.0, True), (1e-6, False)):
        parameters = theory.Parameters(0.7, beta, 1.0)
        step = occ.FTRLStep(mdp, parameters.regularizer(mdp))
        q = step(loss, 1.0).detach()
        hit = torch.tensor([[0.0, 1.0]], dtype=F64) / q
        below, above = theory.smooth_update(mdp, q, theory.tilde(step, q, loss + hit, 1.0))
        assert bool(below.holds) == smooth
        assert bool(above.holds)


def test_g_as_printed_forgets_the_losses():
    """eq:tilde_q_def prints <q_t, hat L_t> + psi_t(q), which argmin psi_t minimizes.

    After a while that is not within a factor 2 of q_t.
    """
    mdp, parameters = bandit(2), theory.Parameters.paper(bandit(2))
    step = occ.FTRLStep(mdp, parameters.regularizer(mdp))
    q = step(torch.tensor([[0.0, 1e4]], dtype=F64), 100.0).detach()
    printed = step(torch.zeros(1, 2, dtype=F64), 100.0).detach()
    assert printed.tolist() == [pytest.approx([0.5, 0.5])]
    _, above = theory.smooth_update(mdp, q, printed)
    assert not bool(above.holds)


def test_norms_without_their_squares():
    """eq:earlier_argument prints |x|_H >= |x|_{H_L} = beta sum ( ... )^2.

    The last is the square of the norm, and much smaller here.
    """
    mdp, parameters, t = bandit(2), theory.Parameters.paper(bandit(2)), torch.tensor(1.0, dtype=F64)
    q, other = torch.tensor([[0.5, 0.5]], dtype=F64), torch.tensor([[0.501, 0.499]], dtype=F64)
    barrier, whole = theory.step_length(mdp, q, other, parameters, t)
    check(barrier, whole)
    printed = math.sqrt(float(barrier.left))  # |x|_{H_L}
    assert float(barrier.left) < 0.1 * printed


def test_close_hessian_is_the_largest_eigenvalue_of_the_pencil():
    """Against dense matrices, and with masks."""
    actions = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
    first = torch.tensor([[[0.3, 0.7], [0.5, 0.5], [1.0, 0.0]]], dtype=F64)
    for mdp in (MDP, occ.LayeredMDP([first, torch.ones(2, 3, 1, dtype=F64)], actions=actions)):
        generator = torch.Generator().manual_seed(5)
        q, t = occ.interior_point(mdp), torch.tensor(40.0, dtype=F64)
        p = (q + occ.occupancy(mdp, draw_policy(mdp, generator))) / 2
        parameters, exists = theory.Parameters(0.7, 3.0, 1.0), mdp.actions.flatten()
        at_q, at_p = (
            theory.hessian_of_step(mdp, x, parameters, t)[exists][:, exists] for x in (q, p)
        )
        expected = float(torch.linalg.eigvals(torch.linalg.solve(at_q, at_p / 4)).real.max())
        found = theory.close_hessian(mdp, q, p, parameters, t)
        check(found)
        assert float(found.left) == pytest.approx(expected, rel=1e-10)
