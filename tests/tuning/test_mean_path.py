"""The forecast: sums equal plain sums, noise equals brute force, gradients finite differences."""

import pytest
import torch
from zoo import random_loss, random_problem, trajectories

import torch_occ as occ
from torch_occ.step.implicit import Linearization
from torch_occ.tuning.forecast import phases_of, second_moment


@pytest.mark.parametrize("height", [0.0, 0.5, 1.0])
def test_second_moment_equals_the_sum_over_all_trajectories(height):
    mdp, mean = random_problem(3, (3, 2, 2))
    q = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=0.3))(20 * mean, t=20).detach()
    baseline = height * random_loss(mdp, seed=1)
    flat, weights, b = mean.flatten(), q.flatten(), baseline.flatten()
    expected = torch.zeros(len(flat), len(flat), dtype=torch.float64)
    states, actions, chances = trajectories(mdp, q)
    for visited, p in zip(states * mdp.num_actions + actions, chances, strict=True):
        for i in visited:
            for j in visited:
                # Coins: (1 - b)^2 with probability mean, b^2 otherwise.
                square = (
                    flat[i] * (1 - b[i]) ** 2 + (1 - flat[i]) * b[i] ** 2
                    if i == j
                    else (flat[i] - b[i]) * (flat[j] - b[j])
                )
                expected[i, j] += p * square / (weights[i] * weights[j])
    assert torch.allclose(
        second_moment(mdp, q, mean, "bernoulli", baseline), expected, rtol=1e-12, atol=1e-12
    )
    apart = expected - second_moment(mdp, q, mean, "none", baseline)
    assert torch.allclose(apart, torch.diag((flat - flat**2) / weights), atol=1e-12)


def test_linearization_is_the_derivative_of_the_step():
    mdp, mean = random_problem(1, (3, 2, 3))
    psi = occ.jin_luo(mdp, beta=0.5)
    step = occ.FTRLStep(mdp, psi)
    loss, t = 30 * mean, torch.tensor(30.0, dtype=torch.float64)
    pairs = mean.numel()
    jacobian = torch.func.jacrev(lambda loss: step(loss, t))(loss).reshape(pairs, pairs).detach()
    linear = Linearization(step, step(loss, t).detach(), t)
    assert torch.allclose(linear.dense(), -jacobian, rtol=1e-9, atol=1e-14)
    # The bend is the third derivative of psi, which a difference of responses shows.
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(pairs, pairs, dtype=torch.float64, generator=generator)
    C = root @ root.T
    h = 1e-4

    def paired(s):
        q = step(loss + s * mean, t).detach()
        return float((Linearization(step, q, t).dense().detach() * C).sum())

    difference = (paired(h) - paired(-h)) / (2 * h)
    Pi = linear.dense().detach()
    u = (Pi @ mean.flatten()).reshape(mean.shape)
    assert float(linear.bend(u, Pi @ C @ Pi).detach()) == pytest.approx(difference, rel=1e-6)


# A baseline of 1/2 nowhere, everywhere, and in some episodes at some pairs only.
ESTIMATORS = [
    None,
    occ.ReducedVariance(occ.InverseSqrt(0.001)),
    occ.ReducedVariance(occ.InverseSqrt(0.15)),
]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_drift_and_stability_equal_plain_sums_over_every_episode(estimator):
    mdp, mean = random_problem(0, (2, 2, 2))
    psi = occ.jin_luo(mdp, beta=1.0, gamma=0.7)
    episodes = 400
    found = occ.forecast(mdp, psi, mean, episodes, estimator=estimator)
    t = torch.arange(1, episodes + 1, dtype=torch.float64)
    step = occ.FTRLStep(mdp, psi)
    q = step((t - 1)[:, None, None] * mean, t).detach()
    drift = (q * occ.optimal_policy(mdp, mean).gaps).sum((-2, -1)).cumsum(0)
    assert torch.allclose(found.drift, drift[found.episodes - 1], rtol=1e-5)
    linear = Linearization(step, q, t)
    baseline = (
        torch.zeros_like(q)
        if estimator is None
        else torch.where(q >= estimator.threshold(t)[:, None, None], 0.5, 0.0)
    )
    flat, b = mean.flatten(), baseline.flatten(1)
    increments = (
        second_moment(mdp, q, mean, "bernoulli", baseline)
        - (flat - b)[:, :, None] * (flat - b)[:, None]
    )
    Pi, second = linear.dense(), increments + flat[:, None] * flat
    # quadrature does not see at which episode a baseline sets in
    smooth = estimator is not ESTIMATORS[2]
    square = 0.5 * (Pi * second).sum((-2, -1)).cumsum(0)[found.episodes - 1]
    assert torch.allclose(found.stability, square, rtol=1e-4 if smooth else 0.03)
    C = increments.cumsum(0) - increments
    u = (Pi @ flat).unflatten(-1, mean.shape)
    noise = (-0.5 * linear.bend(u, Pi @ C @ Pi)).cumsum(0)
    assert torch.allclose(found.noise, noise[found.episodes - 1], rtol=1e-3 if smooth else 0.05)


def objective(mdp, psi, episodes, estimator=None):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.psi = psi

        def forward(self, mean):
            return occ.forecast(
                mdp, self.psi, mean, episodes, estimator=estimator, per_decade=1.0
            ).final

    module = Module()

    def call(alpha, beta, gamma, mean):
        named = {
            "psi.terms.0.regularizer.alpha": alpha,
            "psi.terms.0.factor.gamma": gamma,
            "psi.terms.1.beta": beta,
        }
        return torch.func.functional_call(module, named, (mean,))

    return call


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradcheck_in_the_parameters_and_the_means(estimator):
    mdp, mean = random_problem(0, (2, 2, 2))
    inputs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.5, 0.7, 1.3)]
    call = objective(mdp, occ.jin_luo(mdp), 20, estimator)
    assert torch.autograd.gradcheck(
        call, (*inputs, mean.requires_grad_()), eps=1e-5, atol=1e-6, rtol=1e-6
    )


def test_gradient_at_a_million_episodes_equals_finite_differences():
    mdp, mean = random_problem(0, (3, 3, 3))
    call = objective(mdp, occ.jin_luo(mdp), 10**6)
    theta = torch.tensor([0.577, 1.0, 1.0], dtype=torch.float64)
    inputs = theta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(call(*inputs, mean), inputs)
    for i in range(3):
        h = 1e-3 * theta[i]
        steps = [theta + k * h * torch.eye(3, dtype=torch.float64)[i] for k in (-2, -1, 1, 2)]
        low2, low, high, high2 = (float(call(*x, mean).detach()) for x in steps)
        assert float(gradient[i]) == pytest.approx(
            (low2 - 8 * low + 8 * high - high2) / (12 * float(h)), rel=1e-6
        )


def test_batches_of_mdps_and_parameters_equal_single_forecasts():
    worlds = [random_problem(seed, (2, 2, 2)) for seed in (0, 1)]
    stacked = occ.tuning.stack([mdp for mdp, _ in worlds])
    means = torch.stack([mean for _, mean in worlds])
    betas = torch.tensor([[0.5], [2.0], [8.0]], dtype=torch.float64)
    found = occ.forecast(stacked, occ.jin_luo(stacked, beta=betas), means, 1000)
    assert found.final.shape == (3, 2)
    for i, beta in enumerate(betas.flatten().tolist()):
        for j, (mdp, mean) in enumerate(worlds):
            alone = occ.forecast(mdp, occ.jin_luo(mdp, beta=beta), mean, 1000)
            assert torch.allclose(found.regret[i, j], alone.regret, rtol=1e-9)


def test_phases_are_the_means_that_the_processes_give():
    mdp, mean = random_problem(0, (2, 2, 2))
    bernoulli = occ.BernoulliLosses(mean)
    processes = [
        bernoulli,
        occ.SwitchingLosses(torch.stack([mean, 1 - mean]), 30),
        occ.StochasticallyConstrained(mean, swing=0.5),
        occ.Corrupted(bernoulli, 25.0, "front"),
        occ.Corrupted(bernoulli, 40.0, "targeted", target=mean),
        occ.Corrupted(bernoulli, 10.0, "uniform", episodes=50),
    ]
    episodes = 120
    for process in processes:
        phases = phases_of(mdp, process, episodes)
        state, given = process.start(mdp, [0]), []
        for t in range(1, episodes + 1):
            means, state = process.means(mdp, state, t, 1, occ.interior_point(mdp)[None])
            given.append(means[0, 0])
        seen = phases.means[phases.at(torch.arange(1, episodes + 1))]
        assert torch.allclose(seen, torch.stack(given), atol=1e-9), type(process).__name__
        assert phases.noise == process.noise


def test_a_path_without_certificate_is_not_a_number():
    mdp, mean = random_problem(0, (2, 2, 2))
    etas = torch.tensor([1.0, 1e160], dtype=torch.float64)  # the second one underflows
    found = occ.forecast(mdp, occ.Tsallis(0.99) / occ.Constant(etas), mean, 100)
    assert found.certified.tolist() == [True, False]
    assert found.regret[0].isfinite().all()
    assert found.regret[1].isnan().all()
    assert not bool(found.reliable[1])
