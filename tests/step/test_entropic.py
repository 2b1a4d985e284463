"""Entropies in logarithms: against 60 digits, where q falls to zero, and all derivatives."""

import math

import pytest
import torch
from entropies import numbers, solve_exactly, worst_error
from mpmath import mp, mpf
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call
from zoo import masked, random_loss, tensor

import torch_occ as occ
from torch_occ import Status
from torch_occ._support.constants import SQUARE
from torch_occ.regularizers.base import Composition, TabularRegularizer
from torch_occ.regularizers.terms import Term, XLogX
from torch_occ.step import entropic

MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)


def tree() -> occ.LayeredMDP:
    """Two actions lead to two states with certainty; one is left when losses are large."""
    split = torch.eye(2, dtype=torch.float64).reshape(1, 2, 2)
    onward = torch.tensor([[[0.5, 0.5], [1.0, 0.0]], [[0.0, 1.0], [0.0, 1.0]]], dtype=torch.float64)
    return occ.LayeredMDP([split, onward, torch.ones(2, 2, 1, dtype=torch.float64)])


MODELS = {"random": lambda: MDP, "masked": lambda: masked().mdp, "tree": tree}

ENTROPIES = {
    "shannon": occ.Shannon() / occ.Constant(0.7),
    "conditional": occ.ConditionalEntropy() / occ.InverseSqrt(2.0),
    "both": occ.Shannon() * 0.3 + occ.ConditionalEntropy() / occ.InverseSqrt(0.5),
}


def solve_both(
    psi: occ.Regularizer, mdp: occ.LayeredMDP, loss: Tensor, t: float
) -> list[occ.Solution]:
    steps = [occ.FTRLStep(mdp, psi, backend=backend) for backend in ("torch", "engine")]
    with torch.no_grad():
        return [step.solve(loss, t) for step in steps]


def constants(psi: occ.Regularizer, t: float) -> tuple[float, float]:
    with torch.no_grad():
        composition = Composition(psi)
        weight, price = entropic.entropy_of(composition, composition.values(tensor(t)))
    return weight.item() if len(weight) == 1 else weight, price.item()


@pytest.mark.parametrize("psi", ENTROPIES)
def test_a_common_offset_of_the_losses_changes_nothing(psi):
    """Losses of 1e12 and more: sums along an episode must not lose the digits of their gaps."""
    loss = random_loss(MDP, 8.0, seed=2).mul(2.0**12).round().mul(2.0**-12)  # exact beside 2^40
    plain, shifted = (solve_both(ENTROPIES[psi], MDP, loss + x, 50.0) for x in (0.0, 2.0**40))
    for one, other in zip(plain, shifted, strict=True):
        torch.testing.assert_close(one.q, other.q, rtol=1e-11, atol=0)


# -- the solution ----------------------------------------------------------------------------------


def per_state(mdp: occ.LayeredMDP) -> occ.Regularizer:
    """As the dilated entropy of a treeplex; the closed form has one temperature per state."""
    rates = random_loss(mdp, seed=7)[..., 0] + 0.1
    return occ.ConditionalEntropy() / occ.Constant(occ.PerState(mdp, rates))


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6, 1e9, 1e12])
@pytest.mark.parametrize("psi", [*ENTROPIES, "per_state"])
@pytest.mark.parametrize("model", MODELS)
def test_solutions_have_all_their_digits(model, psi, scale):
    mdp = MODELS[model]()
    psi = per_state(mdp) if psi == "per_state" else ENTROPIES[psi]
    loss = random_loss(mdp, scale, seed=1)
    with mp.workdps(60):
        exact = solve_exactly(mdp, loss, *constants(psi, 3.0))
        size = max(abs(v) for v in exact.value)
        for solution in solve_both(psi, mdp, loss, 3.0):
            assert worst_error(solution.q, exact) < 1e-12
            values = zip(solution.value.tolist(), exact.value, strict=True)
            assert max(abs(found - v) for found, v in values) < 1e-14 * size
    assert (solution.q[~mdp.actions] == 0).all()
    if scale > 1e4:
        assert (solution.q[mdp.actions] == 0).any()


def test_starts_may_have_zeros_and_do_not_matter():
    loss = random_loss(MDP, 1e4)
    for backend in ("torch", "engine"):
        step = occ.FTRLStep(MDP, ENTROPIES["shannon"], backend=backend)
        cold = step.solve(loss).q.detach()
        assert (cold == 0).any()
        for start in (cold, torch.zeros_like(loss), torch.full_like(loss, 1e-300)):
            found = step.solve(loss, warm_start=start).q
            torch.testing.assert_close(found, cold, rtol=1e-12, atol=0)


def test_warm_starts_need_few_steps():
    step = occ.FTRLStep(MDP, ENTROPIES["shannon"], backend="engine")
    loss = random_loss(MDP, 30.0)
    warm = step.solve(loss * 1.001, warm_start=step(loss).detach())
    assert warm.steps <= 2


def test_single_precision():
    mdp, loss = MDP.to(dtype=torch.float32), random_loss(MDP, 300.0)
    psi = occ.Shannon() / occ.Constant(0.7)
    expected = occ.FTRLStep(MDP, psi)(loss).detach()
    found = occ.FTRLStep(mdp, psi.to(torch.float32))(loss.float()).double()
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_sparse_models_are_solved_in_logarithms_too():
    sparse, loss = MDP.to_sparse(), random_loss(MDP, 1e4)
    for psi in ENTROPIES.values():
        expected = occ.FTRLStep(MDP, psi, backend="engine")(loss, 1)
        for backend in ("torch", "engine"):
            found = occ.FTRLStep(sparse, psi, backend=backend)(loss, 1)
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)
    thin, loss = tree().to_sparse(), random_loss(tree(), 1e6)
    found, expected = (solve_both(ENTROPIES["shannon"], x, loss, 1.0)[1] for x in (thin, tree()))
    torch.testing.assert_close(found.value, expected.value, rtol=1e-13, atol=0)


def test_wide_models_say_so_when_a_whole_state_is_lost():
    """Their Jacobian is not formed; pairs may fall to zero all the same."""
    width = SQUARE + 1
    split = torch.eye(2, dtype=torch.float64).reshape(1, 2, 2)
    spread = torch.full((2, 2, width), 1 / width, dtype=torch.float64)
    last = torch.ones(width, 2, 1, dtype=torch.float64)
    mdp, psi = occ.LayeredMDP([split, spread, last]), occ.Shannon()
    loss = torch.zeros(mdp.num_states, 2, dtype=torch.float64)
    loss[5:, 0] = 1e5
    solution = occ.FTRLStep(mdp, psi, backend="engine").solve(loss)
    assert (solution.q == 0).any()
    loss[0, 0] = 1e5
    solution = occ.FTRLStep(mdp, psi, backend="engine").solve(loss, check=False)
    assert solution.status == Status.UNDERFLOW


# -- derivatives -----------------------------------------------------------------------------------


def differences(
    mdp: occ.LayeredMDP, loss: Tensor, direction: Tensor, weights: tuple, push: float
) -> tuple[Tensor, Tensor]:
    """How q and v move along the direction while w and kappa are pushed: by differences."""
    h, (weight, price) = mpf(10) ** -25, weights
    rows = list(zip(numbers(loss), numbers(direction), strict=True))
    ends = []
    for sign in (1, -1):
        moved = [[x + sign * h * d for x, d in zip(*row, strict=True)] for row in rows]
        ends.append(solve_exactly(mdp, moved, weight + sign * h * push, price + sign * h * push))
    slope_q = [
        [float((mp.exp(a) - mp.exp(b)) / (2 * h)) for a, b in zip(*pair, strict=True)]
        for pair in zip(ends[0].log_q, ends[1].log_q, strict=True)
    ]
    slope_v = [float((a - b) / (2 * h)) for a, b in zip(ends[0].value, ends[1].value, strict=True)]
    return tensor(slope_q), tensor(slope_v)


@pytest.mark.parametrize("backend", ["torch", "engine"])
@pytest.mark.parametrize("scale", [5.0, 1e4])
@pytest.mark.parametrize("model", MODELS)
def test_first_derivatives(model, scale, backend):
    """Reverse and forward, of q and v, where pairs and where whole states have fallen to zero."""
    mdp = MODELS[model]()
    loss, direction = random_loss(mdp, scale, seed=1), random_loss(mdp, seed=2) - 0.5
    direction = torch.where(mdp.actions, direction, 0.0)
    eta = 0.7
    psi = occ.Shannon() / occ.Constant(tensor(eta)) + occ.ConditionalEntropy() * 2
    step = occ.FTRLStep(mdp, psi, backend=backend)
    (rate,) = step.parameters()
    push = 0.3 * eta * eta  # d(1 / eta) = -0.3
    with mp.workdps(60):
        weights = (1 / mpf(eta) + 2, 1 / mpf(eta))
        by_loss = differences(mdp, loss, direction, weights, 0.0)
        by_both = differences(mdp, loss, direction, weights, mpf(-0.3))
    weight_q, weight_v = random_loss(mdp, seed=3), random_loss(mdp, seed=4)[:, 0]

    tracked = loss.clone().requires_grad_()
    solution = step.solve(tracked)
    outcome = (weight_q * solution.q).sum() + (weight_v * solution.value).sum()
    in_loss, in_rate = torch.autograd.grad(outcome, [tracked, rate])
    expected = [(weight_q * q).sum() + (weight_v * v).sum() for q, v in (by_loss, by_both)]
    torch.testing.assert_close((in_loss * direction).sum(), expected[0], rtol=1e-11, atol=1e-12)
    along = (in_loss * direction).sum() + in_rate * push
    torch.testing.assert_close(along, expected[1], rtol=1e-10, atol=1e-10)

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(loss, direction)
        ((name, _),) = step.named_parameters()
        moved = functional_call(
            step, {name: forward_ad.make_dual(rate.detach(), tensor(push))}, (dual,)
        )
        tangent = forward_ad.unpack_dual(moved).tangent
    torch.testing.assert_close(tangent, by_both[0], rtol=1e-9, atol=1e-12)


def test_nothing_is_nan_where_everything_has_fallen_to_zero():
    for backend in ("torch", "engine"):
        for mdp in (MDP, tree()):
            loss = random_loss(mdp, 1e9).requires_grad_()
            step = occ.FTRLStep(mdp, ENTROPIES["shannon"], backend=backend)
            solution = step.solve(loss)
            outcome = solution.q.square().sum() + solution.value.sum()
            (first,) = torch.autograd.grad(outcome, loss, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), loss)
            assert first.isfinite().all()
            assert second.isfinite().all()
            assert (
                torch.autograd.grad(step(loss)[solution.q == 0].sum(), loss)[0].abs() < 1e-280
            ).all()


def test_probabilities_and_t_are_differentiated():
    """With flushed zeros, against differences; the value of a lost state included."""
    mdp, loss = tree(), random_loss(tree(), 3e3, seed=5)
    step = occ.FTRLStep(mdp, occ.Shannon() / occ.InverseSqrt(1.3))
    p = mdp.transitions[1].clone().requires_grad_()
    t = tensor(2.0).requires_grad_()

    def outcome(p: Tensor, t: Tensor) -> Tensor:
        model = mdp.with_transitions([mdp.transitions[0], p, mdp.transitions[2]])
        solution = step.solve(loss, t, mdp=model)
        assert (solution.q == 0).any()
        return solution.q.square().sum() + 1e-3 * solution.value.sum()

    in_p, in_t = torch.autograd.grad(outcome(p, t), [p, t])
    direction = torch.zeros_like(p)
    direction[0, 0] = tensor([1.0, -1.0])
    h = 1e-6
    with torch.no_grad():
        by_p = (outcome(p + h * direction, t) - outcome(p - h * direction, t)) / (2 * h)
        by_t = (outcome(p, t + h) - outcome(p, t - h)) / (2 * h)
    torch.testing.assert_close((in_p * direction).sum(), by_p, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(in_t, by_t, rtol=1e-6, atol=1e-8)


# -- the closed form, and state terms that dominate ------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_closed_form_takes_plain_operations_of_any_type(dtype, scale):
    mdp = occ.LayeredMDP.random(24, 24, 4, seed=0)
    loss = random_loss(mdp, scale, batch=(2,))
    expected = occ.FTRLStep(mdp, occ.ConditionalEntropy(), backend="engine")(loss)
    step = occ.FTRLStep(mdp.to(dtype=dtype), occ.ConditionalEntropy(), backend="torch")
    q = step(loss.to(dtype))
    error = 1e-11 if dtype == torch.float64 else 2e-3
    torch.testing.assert_close(q.double(), expected, rtol=error, atol=error * 1e-3)


def test_third_derivatives_of_the_closed_form():
    step = occ.FTRLStep(MDP, occ.ConditionalEntropy(), backend="torch")
    loss, direction = random_loss(MDP, 3.0).requires_grad_(), random_loss(MDP, seed=2)

    def nth(x: Tensor, n: int) -> Tensor:
        found = (step(x) * direction).sum()
        for _ in range(n):
            (slope,) = torch.autograd.grad(found, x, create_graph=True)
            found = (slope * direction).sum()
        return found

    h = 1e-4
    ends = [nth((loss + s * h * direction).detach().requires_grad_(), 2) for s in (1, -1)]
    torch.testing.assert_close(nth(loss, 3), (ends[0] - ends[1]) / (2 * h), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("psi", ["conditional", "shannon"])
def test_derivatives_in_single_probabilities(psi):
    """Each entry of P moves alone, so that rows do not sum to one: both backends agree."""
    found = []
    for backend in ("torch", "engine"):
        step = occ.FTRLStep(MDP, ENTROPIES[psi], backend=backend)
        p = [x.clone().requires_grad_() for x in MDP.transitions]
        solution = step.solve(random_loss(MDP, 5.0), 2.0, mdp=MDP.with_transitions(p))
        found.append(torch.autograd.grad(solution.q.square().sum(), p[:2]))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


class Crowd(TabularRegularizer):
    """The sum of q(s) log q(s): visits to crowded states cost more."""

    def table(self) -> tuple[Term, ...]:
        return (Term("state", XLogX(), 1.0),)


@pytest.mark.parametrize("backend", ["auto", "torch", "engine"])
def test_what_is_certified_beside_huge_values_is_right(backend):
    """Found by experiments.fuzz: rounding of values that belong to states must not reach q."""
    # A dead state is the first of its layer, and has a value of -1e6.
    to = torch.eye(2, dtype=torch.float64)
    dead = occ.LayeredMDP([to[None, [0, 1, 1]], torch.ones(2, 3, 1, dtype=torch.float64)])
    one = occ.LayeredMDP([torch.ones(1, 2, 1, dtype=torch.float64)])
    cases = (
        (dead, [[1e6, 0.0, 3.1], [0.0] * 3, [0.0] * 3], occ.Shannon() / occ.Constant(60.0), 186.0),
        (one, [[5.0, 0.0]], occ.Shannon() + Crowd() * 9249191.4, 5.0),
    )
    for mdp, loss, psi, gap in cases:
        solution = occ.FTRLStep(mdp, psi, backend=backend).solve(tensor(loss), check=False)
        if bool(solution.converged) or backend == "auto":
            ratio = solution.q[0, 2 if mdp is dead else 0] / solution.q[0, 1]
            assert ratio.item() == pytest.approx(math.exp(-gap), rel=1e-11, abs=0)


def beach(size: int = 10, horizon: int = 15) -> tuple[occ.LayeredMDP, Tensor]:
    """The beach bar: walk on a circle towards the bar, which is in the middle of the beach."""
    kernel = torch.zeros(size, 3, size, dtype=torch.float64)
    for s in range(size):
        for a in range(3):
            for step, p in ((-1, 0.05), (0, 0.9), (1, 0.05)):
                kernel[s, a, (s + a - 1 + step) % size] += p
    initial = torch.full((size,), 1 / size, dtype=torch.float64)
    mdp = occ.LayeredMDP([kernel] * (horizon - 1) + [kernel.new_ones(size, 3, 1)], initial=initial)
    far = (torch.arange(size) - size // 2).abs().double() / size
    loss = far[:, None] + tensor([0.1, 0.0, 0.1])
    return mdp, loss.repeat(horizon, 1)


def exploitability(mdp: occ.LayeredMDP, loss: Tensor, q: Tensor) -> float:
    cost = loss + (1 + q.sum(-1).log()).unsqueeze(-1)
    best = occ.optimal_policy(mdp, cost).value[mdp.layer_slices[0]]
    return float((q * cost).sum() - (mdp.initial * best).sum())


def test_stages_that_run_out_are_no_certificate(monkeypatch):
    """Found by experiments.fuzz: the solution of an earlier stage belongs to another w."""
    monkeypatch.setattr("torch_occ.step.entropic.STAGES", 2)
    mdp, loss = beach()
    step = occ.FTRLStep(mdp, occ.ConditionalEntropy() * 1e-4 + Crowd(), backend="torch")
    assert int(step.solve(loss, check=False).status) == occ.Status.MAX_STEPS


@pytest.mark.parametrize(
    ("weight", "tolerance", "most"), [(1e-2, None, 1e-2), (1e-4, None, 1e-4), (2e-8, 1e-5, 5e-8)]
)
def test_a_mean_field_game_is_solved_at_low_temperatures(weight, tolerance, most):
    """kappa = 1 is larger than w by up to eight orders of magnitude."""
    mdp, loss = beach()
    psi = occ.ConditionalEntropy() * weight + Crowd()
    step = occ.FTRLStep(mdp, psi, backend="torch", tolerance=tolerance)
    tracked = loss.clone().requires_grad_()
    solution = step.solve(tracked)
    assert abs(exploitability(mdp, loss, solution.q.detach())) < most
    if weight == 1e-2:
        direction, h = random_loss(mdp, seed=3), 1e-5
        (gradient,) = torch.autograd.grad((solution.q * direction).sum(), tracked)
        ends = [(step(loss + s * h * direction) * direction).sum() for s in (1, -1)]
        expected = (ends[0] - ends[1]) / (2 * h)
        torch.testing.assert_close((gradient * direction).sum(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("backend", ["engine", "torch"])
def test_a_vanishing_barrier_leads_to_the_equilibrium_of_a_crowd(backend):
    """The crowd is up to 1e10 times as steep as the barrier."""
    (mdp, loss), q = beach(40, 8), None
    for k in range(1, 7):
        psi = occ.LogBarrier(100.0**-k) + Crowd()
        q = occ.FTRLStep(mdp, psi, backend=backend, tolerance=0.01)(loss, warm_start=q).detach()
    assert 0 < exploitability(mdp, loss, q) < 2e-9


def test_o_reps_far_beyond_its_horizon():
    """Planned as 2,000 episodes, q fell below 1e-290 and no step was certified any more."""
    mean = random_loss(MDP, seed=1)
    learner = occ.FTRL.o_reps(MDP, 2_000)
    history = occ.simulate(MDP, learner, occ.BernoulliLosses(mean), 20_000, seeds=[0, 1])
    assert history.backend == "engine"
    assert history.uncertified.sum() == 0
    assert float(history.dual_residual.max()) < 1e-11
    assert math.isfinite(float(history.regret.sum()))


@pytest.mark.parametrize("psi", ["shannon", "both"])
def test_forecasts_and_leaps_go_on_where_q_falls_to_zero(psi):
    mean, psi = random_loss(MDP, seed=1), ENTROPIES[psi]
    forecast = occ.forecast(MDP, psi, mean, 10**5)
    assert bool(forecast.certified)
    assert forecast.regret.isfinite().all()
    assert occ.leap(MDP, psi, mean, 10**3, particles=4).regret.isfinite().all()
