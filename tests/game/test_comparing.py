import math

import pytest
import torch
from zoo import PROBLEMS, random_loss

import torch_occ as occ

MDP = PROBLEMS["masked"]().mdp
LOSSES = occ.BernoulliLosses(random_loss(MDP, seed=3))


def learners():
    return {
        "FTRL": occ.FTRL.tsallis(MDP),
        "UCB_1 & co": occ.OptimisticValueIteration(MDP),
        "uniform": occ.FixedPolicy(MDP),
    }


@pytest.fixture(scope="module")
def comparison():
    return occ.compare_learners(MDP, learners(), LOSSES, 50, range(5), backend="torch")


def test_every_learner_plays_as_it_would_alone(comparison):
    for name, learner in learners().items():
        alone = occ.simulate(MDP, learner, LOSSES, 50, range(5), backend="torch")
        assert torch.equal(alone.regret, comparison.histories[name].regret)


def test_differences_are_paired_by_seed(comparison):
    regrets = {name: history.regret[:, -1] for name, history in comparison.histories.items()}
    found = comparison.differences()["uniform"]
    samples = regrets["uniform"] - regrets["FTRL"]
    assert found.mean == pytest.approx(float(samples.mean()), rel=1e-12)
    assert found.standard_error == pytest.approx(float(samples.std()) / math.sqrt(5), rel=1e-12)
    low, high = found.interval
    assert high - low == pytest.approx(2 * 2.776445 * found.standard_error, rel=1e-6)
    assert set(comparison.differences()) == {"UCB_1 & co", "uniform"}


def test_tables_and_figure(comparison):
    lines = str(comparison).splitlines()
    assert len(lines) == 5
    assert "baseline" in lines[2]
    assert str(comparison.final()["uniform"]) in lines[4]
    assert r"UCB\_1 \& co" in comparison.latex()
    assert comparison.latex().count(r"\\") == 4
    assert len(comparison.plot("title").axes) == 2
    (right,) = comparison.plot("title").axes[1:]
    shown = [text.get_text() for text in right.get_legend().get_texts()]
    assert shown[:3] == [*comparison.histories]


def test_a_table_of_every_curve_has_the_learner_in_its_first_column(comparison):
    found = comparison.to_dataframe()
    assert list(found.columns[:3]) == ["learner", "seed", "episode"]
    assert found.index.is_unique
    for name, history in comparison.histories.items():
        own = found[found.learner == name].drop(columns="learner").reset_index(drop=True)
        assert own.equals(history.to_dataframe())
