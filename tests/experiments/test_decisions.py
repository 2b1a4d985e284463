"""Decision-focused learning: the losses are what they claim, and the experiment runs small."""

import pytest
import torch

import torch_occ as occ
from experiments import decisions
from experiments.decisions import METHODS, Problem, soft_margin, spo_plus, train

pytest.importorskip("pyepo")
pytest.importorskip("gurobipy")


@pytest.fixture(scope="module")
def problem():
    return Problem(grid=4, degree=4, noise=0.5, points=40, seeds=(3,))


def batch_of(problem):
    data = problem.data[0].map(lambda x: x[0, :8])
    generator = torch.Generator().manual_seed(0)
    predicted = data.c + 0.3 * torch.randn(data.c.shape, generator=generator)
    return predicted.requires_grad_(), data


def gradient(loss, predicted, data):
    return torch.autograd.grad(loss(predicted, data), predicted)[0]


def test_regrets_are_those_of_pyepo(problem, capfd):
    from pyepo.data.dataset import optDataset
    from pyepo.metric import regret

    test = problem.data[2]
    network = torch.nn.Linear(5, test.c.shape[-1])
    data = optDataset(problem.model, test.x[0].numpy(), test.c[0].numpy())
    torch.testing.assert_close(data.sols, test.w[0])
    expected = regret(network, problem.model, torch.utils.data.DataLoader(data, batch_size=100))
    assert problem.regrets(network(test.x), test) == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_the_soft_margin_has_the_gradient_of_the_fenchel_young_loss(problem, temperature):
    predicted, data = batch_of(problem)
    mdp = problem.mdp
    step = occ.FTRLStep(mdp, occ.ConditionalEntropy() / occ.Constant(1 / temperature))

    def fenchel_young(predicted, data):
        losses, target = mdp.losses(2 * predicted - data.c), mdp.occupancy_of(data.w)
        return occ.fenchel_young_loss(step, losses, target).mean() / 2

    torch.testing.assert_close(
        gradient(soft_margin(temperature)(problem), predicted, data),
        gradient(fenchel_young, predicted, data),
    )


def test_a_cold_soft_margin_is_half_of_spo_plus(problem):
    predicted, data = batch_of(problem)
    torch.testing.assert_close(
        2 * gradient(soft_margin(1e-4)(problem), predicted, data),
        gradient(spo_plus(problem), predicted, data),
    )


def test_soft_targets_vanish_for_a_perfect_prediction(problem):
    _, data = batch_of(problem)
    found = gradient(soft_margin(2.0, 2.0)(problem), data.c.clone().requires_grad_(), data)
    assert float(found.abs().max()) < 1e-6


def test_both_solvers_train_the_same_predictor(problem):
    other = Problem(4, 4, 0.5, 40, (3,), solver="dynamic")
    for name in ("SPO+", "PFY", "DBB"):
        a, b = train(problem, METHODS[name], 2), train(other, METHODS[name], 2)
        assert a.test == pytest.approx(b.test, rel=1e-5)


def test_seeds_are_trained_together_as_alone():
    both = train(Problem(4, 4, 0.5, 40, (3, 5), "dynamic"), METHODS["SPO+"], 2)
    for i, seed in enumerate((3, 5)):
        alone = train(Problem(4, 4, 0.5, 40, (seed,), "dynamic"), METHODS["SPO+"], 2)
        assert both.test[i] == pytest.approx(alone.test[0], rel=1e-4)


@pytest.mark.slow
def test_the_experiment_runs_and_continues(tmp_path, monkeypatch):
    options = {"degrees": (1, 4), "noises": (0.5,), "points": (40,), "seeds": (0, 1), "grid": 3}
    options |= {"solver": "dynamic", "epochs": 2, "root": tmp_path}
    found = decisions.main(decisions.Args(**options, timing_grids=(3,)))
    assert len(list((found / "cells").iterdir())) == 2 * len(METHODS)
    text = (found / "decisions.md").read_text()
    assert "| margin 1" in text
    assert "against" in text
    assert (found / "decisions.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(decisions, "run", lambda cell: pytest.fail("was trained again"))
    decisions.main(decisions.Args(**options))
