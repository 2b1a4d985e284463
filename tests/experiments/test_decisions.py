"""Decision-focused learning: the losses are what they claim, and the experiment runs small."""

import numpy as np
import pytest
import torch

import torch_occ as occ
from experiments import decisions
from experiments.decisions import KINDS, METHODS, Problem, fallback, soft_margin, spo_plus, train

pytest.importorskip("pyepo")


@pytest.fixture(scope="module")
def problem():
    return Problem("4 x 4", degree=4, noise=0.5, points=40, seeds=(3,))


def batch_of(problem):
    data = problem.data[0].map(lambda x: x[0, :8])
    generator = torch.Generator().manual_seed(0)
    predicted = data.c + 0.3 * torch.randn(data.c.shape, generator=generator)
    return predicted.requires_grad_(), data


def gradient(loss, predicted, data):
    return torch.autograd.grad(loss(predicted, data), predicted)[0]


def test_data_and_regrets_are_those_of_pyepo(problem, capfd):
    pytest.importorskip("gurobipy")
    from pyepo.data.dataset import optDataset
    from pyepo.data.shortestpath import genData
    from pyepo.metric import regret

    test = problem.data[1]
    x, c = genData(40 + 1000, 5, (4, 4), 4, 0.5, 3)
    np.testing.assert_allclose(test.c[0], c[40:] / c[:40].mean(), rtol=1e-5)
    model = Problem(*list(vars(problem).values())[:5], solver="gurobi").model
    data = optDataset(model, x[40:], test.c[0].numpy())
    torch.testing.assert_close(data.sols, test.w[0])
    network = torch.nn.Linear(5, test.c.shape[-1])
    expected = regret(network, model, torch.utils.data.DataLoader(data, batch_size=100))
    found = problem.regrets(network.weight.T[None], network.bias[None, None], test)
    assert float(found.mean()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_dynamic_program_finds_the_best_plans(kind):
    graph = Problem(kind, 2, 0.5, 40, (0,)).graph
    costs = torch.randn(20, graph.size, generator=torch.Generator().manual_seed(0)).double()
    policy = occ.optimal_policy(graph.mdp, graph.losses(costs)).policy
    torch.testing.assert_close(graph.best(costs), graph.use(occ.occupancy(graph.mdp, policy)))


def test_the_knapsack_is_the_best_subset():
    graph = decisions.knapsack(6)
    weights = np.random.RandomState(0).randint(3, 9, 6)
    values = torch.rand(6, generator=torch.Generator().manual_seed(0)).double()
    subsets = torch.cartesian_prod(*[torch.arange(2.0).double()] * 6)
    fits = subsets[subsets @ torch.tensor(weights).double() <= 4 * weights.sum() // 10]
    torch.testing.assert_close(graph.best(-values), fits[(fits @ values).argmax()])


def test_the_soft_margin_has_the_gradient_of_the_fenchel_young_loss(problem):
    predicted, data = batch_of(problem)
    mdp = problem.graph.mdp
    step = occ.FTRLStep(mdp, 2.0 * occ.ConditionalEntropy())

    def fenchel_young(predicted, data):
        losses, target = mdp.losses(2 * predicted - data.c), mdp.occupancy_of(data.w)
        return occ.fenchel_young_loss(step, losses, target).mean()

    found = gradient(soft_margin(problem, 2.0), predicted, data)
    torch.testing.assert_close(found, gradient(fenchel_young, predicted, data))


def test_a_cold_soft_margin_is_spo_plus(problem):
    predicted, data = batch_of(problem)
    found = gradient(soft_margin(problem, 1e-4), predicted, data)
    torch.testing.assert_close(found, gradient(spo_plus(problem), predicted, data))


def test_seeds_are_trained_together_as_alone():
    together = Problem("4 x 4", 4, 0.5, 40, (3, 5))
    both = train(together, spo_plus(together), 0.03, 0.5)
    for i, seed in enumerate((3, 5)):
        own = Problem("4 x 4", 4, 0.5, 40, (seed,))
        alone = train(own, spo_plus(own), 0.03, 0.5)
        assert [x[i] for x in both.test] == pytest.approx([x[0] for x in alone.test], rel=1e-4)


def test_only_what_beats_least_squares_in_cross_validation_is_taken():
    problem = Problem("4 x 4", 1, 0.5, 40, (0, 1))
    own = fallback(problem)
    cell = decisions.Cell("", "5 x 5", 1, 0.5, 40, (0, 1))
    worse, better = ([[0.01, -0.01]], [[0.9, 0.8]]), ([[-0.01, 0.01]], [[0.7, 0.6]])
    given = {"least squares": own, "SPO+": worse, "torch_occ": better}
    saved = {cell._replace(method=name): decisions.Trained(*x) for name, x in given.items()}
    (row,) = decisions.rows(saved)
    assert row.regrets["SPO+"].tolist() == pytest.approx([100 * own.test[0][0], 80])
    assert row.regrets["torch_occ"].tolist() == pytest.approx([70, 100 * own.test[0][1]])
    assert row.kept == 0.5


@pytest.mark.slow
def test_the_experiment_runs_and_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(decisions, "CHECKS", (1, 2))
    options = {"kinds": ("5 x 5",), "degrees": (1, 4), "points": (40,), "seeds": (0, 1)}
    found = decisions.main(decisions.Args(**options, timing_grids=(3,), root=tmp_path))
    assert len(list((found / "cells").iterdir())) == 2 * (1 + len(METHODS))
    text = (found / "decisions.md").read_text()
    assert "| torch_occ " in text
    assert "| RFY" in text
    assert (found / "decisions.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(decisions, "run", lambda cell: pytest.fail("was trained again"))
    decisions.main(decisions.Args(**options, root=tmp_path))
