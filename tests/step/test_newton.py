"""The solver: correct and certified solutions, batches, and a true status when a solve fails."""

import pytest
import torch
from oracle import EXACT, dense_newton, flow_matrix
from torch import Tensor
from zoo import PROBLEMS, REGULARIZERS, corridor, layers, random_loss

import torch_occ as occ
from torch_occ import Status

pytestmark = pytest.mark.usefixtures("both_backends")


def close(found: Tensor, expected: Tensor, rtol: float) -> None:
    torch.testing.assert_close(
        found.detach(), expected.detach(), rtol=rtol, atol=0, equal_nan=False
    )


class Pairwise(occ.SeparableRegularizer):
    """sum of f(q(s, a))."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def pair(self, x):
        return self.function(x)


# -- right answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_exact_answers(name):
    (mdp, loss, t), psi, q = EXACT[name]()
    close(occ.FTRLStep(mdp, psi)(loss, t), q, 1e-13)


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_every_regularizer_on_every_problem(problem, regularizer):
    mdp, loss, t = PROBLEMS[problem]()
    psi = REGULARIZERS[regularizer](mdp)
    solution = occ.FTRLStep(mdp, psi).solve(loss, t)
    q, actions = solution.q.detach(), mdp.actions
    assert solution.converged
    assert solution.status == Status.CONVERGED
    assert (q[actions] > 0).all()
    assert (q[~actions] == 0).all()
    assert 1 <= solution.steps <= 50
    # The decrement belongs to the iterate before the last: about the root of the error.
    assert 0 <= solution.decrement < 1e-4
    assert 0 <= solution.dual_residual < 1e-12

    source = torch.cat(
        [mdp.initial, torch.zeros(mdp.num_states - mdp.layer_sizes[0], dtype=torch.float64)]
    )
    flow_residual = ((flow_matrix(mdp) @ q[actions] - source) / q.sum(-1)).abs().max()
    assert flow_residual < 1e-14
    assert abs(flow_residual - solution.flow_residual) < 1e-14
    again, value = dense_newton(mdp, psi, loss, t, q)
    close(again[actions], q[actions], 1e-12)
    torch.testing.assert_close(
        solution.value, value, rtol=1e-12, atol=1e-12 * float(value.detach().abs().max())
    )


class Statewise(occ.StatewiseRegularizer):
    def per_state(self, q_s):
        return (q_s * (q_s / q_s.sum(-1, keepdim=True)).log()).sum(-1)


class Joint(occ.JointRegularizer):
    def joint(self, q):
        x, u = torch.where(q > 0, q, 1.0), q.sum(-1)
        return (x * x.log()).sum((-2, -1)) - (u * u.log()).sum(-1)


@pytest.mark.parametrize("twin", [Statewise(), Joint()], ids=["statewise", "joint"])
@pytest.mark.parametrize("problem", ["masked", "contexts", "no_choice"])
def test_states_that_feel_nothing_are_solved_at_every_level(problem, twin):
    """The conditional entropy of a state with one action is zero, and so is its curvature.

    Its q follows from the flow.
    """
    mdp, loss, t = PROBLEMS[problem]()
    close(
        occ.FTRLStep(mdp, twin)(loss, t),
        occ.FTRLStep(mdp, occ.ConditionalEntropy())(loss, t),
        1e-11,
    )


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.bits
def test_a_hard_element_does_not_spoil_its_neighbours():
    """One element underflows and one takes many steps; the others stop early and do not change."""
    mdp, loss, t = corridor()
    step = occ.FTRLStep(mdp, occ.Tsallis(0.99) / occ.Constant(0.5))
    losses = torch.stack([0.001 * loss, 1e9 * loss, loss, 0.01 * loss])
    batch = step.solve(losses, t, check=False)
    assert batch.status.tolist() == [
        Status.CONVERGED,
        Status.UNDERFLOW,
        Status.CONVERGED,
        Status.CONVERGED,
    ]
    assert batch.steps[2] > 3 * batch.steps[0]
    for i in (0, 2, 3):
        solo = step.solve(losses[i], t)
        close(batch.q[i], solo.q, 1e-12)
        assert batch.steps[i] == solo.steps
    assert batch.q.isfinite().all()
    assert batch.dual_residual[1] > 1
    calm = step.solve(0.001 * loss.expand(4, -1, -1), t)
    assert torch.equal(batch.q[0], calm.q[0])  # to the bit, however long the others went on


# -- honesty ---------------------------------------------------------------------------------------

FAILURES = {
    "too_few_steps": (occ.Shannon(), layers, 1.0, 1, {Status.MAX_STEPS}),
    "no_steps_needed_but_one": (occ.Shannon(), PROBLEMS["no_choice"], 1.0, 1, {Status.CONVERGED}),
    "falls_like_the_loss_to_minus_100": (occ.Tsallis(0.99), layers, 1e9, 200, {Status.UNDERFLOW}),
    "overflowing": (
        Pairwise(lambda x: (1 / x).exp()),
        PROBLEMS["contexts"],
        1.0,
        200,
        {Status.NOT_FINITE},
    ),
    "not_a_number": (Pairwise(lambda x: x * torch.nan), layers, 1.0, 200, {Status.NOT_FINITE}),
    "concave": (Pairwise(lambda x: -(x**2)), layers, 0.0, 200, {Status.NOT_CONVEX}),
    "not_convex": (
        Pairwise(lambda x: (20 * x).cos()),
        layers,
        0.01,
        200,
        {Status.NOT_CONVEX, Status.NOT_FINITE, Status.STALLED, Status.MAX_STEPS},
    ),
    "linear": (Pairwise(lambda x: x), layers, 1.0, 200, {Status.NOT_CONVEX}),
    "solution_on_the_boundary": (Pairwise(lambda x: x**2), layers, 1.0, 200, {Status.UNDERFLOW}),
    "no_barrier_left": (occ.LogBarrier(0.0), layers, 1.0, 200, {Status.NOT_CONVEX}),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_says_what_it_is(name):
    psi, problem, scale, max_steps, expected = FAILURES[name]
    mdp, loss, t = problem()
    solution = occ.FTRLStep(mdp, psi, max_steps=max_steps).solve(scale * loss, t, check=False)
    assert Status(int(solution.status)) in expected
    assert solution.steps <= max_steps
    assert (solution.q[mdp.actions] > 0).all()


def test_a_tolerance_out_of_reach_is_reported_as_stalled():
    mdp, loss, t = layers()
    solution = occ.FTRLStep(mdp, occ.jin_luo(mdp), tolerance=1e-30).solve(loss, t, check=False)
    assert solution.status == Status.STALLED
    assert solution.dual_residual < 1e-12


WILD = {
    "exponential": lambda x: (50 * x).exp() / 50 + x * x.log(),
    "kink": lambda x: torch.nn.functional.softplus((x - 0.3) / 1e-3) + x * x.log(),
    "sharp_kink": lambda x: torch.nn.functional.softplus((x - 0.3) / 1e-4) + x * x.log(),
    "inverse_fourth_power": lambda x: x**-4,
    "essential_singularity": lambda x: (0.1 / x).exp(),
}


@pytest.mark.parametrize("name", WILD)
@pytest.mark.parametrize("scale", [0.01, 0.3])
def test_wild_third_derivatives_are_tamed_by_backtracking(name, scale):
    mdp, loss, t = layers()
    psi = Pairwise(WILD[name])
    solution = occ.FTRLStep(mdp, psi).solve(scale * loss, t)
    assert solution.steps < 50
    close(dense_newton(mdp, psi, scale * loss, t, solution.q)[0], solution.q, 1e-9)


# -- starts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", ["masked", "layers", "nearly_deterministic", "corridor"])
def test_warm_start_gives_the_same_answer_in_fewer_steps(problem):
    mdp, loss, t = PROBLEMS[problem]()
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=0.1))
    last = step(loss, t)
    cold = step.solve(1.001 * loss, 1.001 * t)
    warm = step.solve(1.001 * loss, 1.001 * t, warm_start=last)
    # A warm start needs to be positive, nothing else.
    anything = step.solve(1.001 * loss, 1.001 * t, warm_start=random_loss(mdp, 1e-3) + 1e-9)
    assert warm.steps < cold.steps
    close(warm.q, cold.q, 1e-12)
    close(anything.q, cold.q, 1e-12)
    assert step.solve(loss, t, warm_start=last).steps == 1
