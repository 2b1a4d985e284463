"""gym_control and sweep, small."""

import csv
import json

import numpy as np
import pytest
import torch

import torch_occ as occ
from experiments import gym_control, sweep

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["lake:8", "slippery:6", "cliff:14", "trip:12", "big-lake:14"])
def test_the_best_policy_does_in_the_environment_what_is_predicted(name):
    task = gym_control.make_task(name)
    mdp = task.mdp
    plan = occ.optimal_policy(mdp, mdp.loss)
    predicted = float(mdp.expected_return(occ.occupancy(mdp, plan.policy)))
    returns = gym_control.play_policy(task, plan.policy, 300, seed=0)
    if task.world.noise == "none":
        assert set(returns) == {round(predicted)}
    else:
        assert returns.std() > 0
        assert abs(returns.mean() - predicted) < 4 * returns.std() / np.sqrt(300)


def test_gym_control(tmp_path, capsys):
    args = gym_control.Args(
        games=("lake:6", "trip:2"), episodes=20, seeds=2, rollouts=50, processes=1,
        tensorboard=False, alone=300, root=tmp_path,
    )  # fmt: skip
    directory = gym_control.main(args)
    with (directory / "gym_control.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["game"], row["learner"]) for row in rows] == [
        ("lake:6", gym_control.FTRL),
        ("lake:6", gym_control.LEADER),
        ("trip:2", gym_control.FTRL),
        ("trip:2", gym_control.LEADER),
    ]
    assert all(row["agrees"] == "True" for row in rows)
    assert float(rows[2]["regret_in_rewards"]) == pytest.approx(
        30 * float(rows[2]["regret_in_losses"])
    )
    figures = list(directory.glob("*.png"))
    assert len(figures) == 2  # of the lake
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures)
    assert "4 of 4 predictions" in capsys.readouterr().out
    assert json.loads((directory / "config.json").read_text())["rollouts"] == 50


# -- sweep ----------------------------------------------------------------------------------------

SMALL = {"mdps": ("random:2x2x2",), "episodes": 20, "seeds": 2, "tensorboard": False}


def test_parameters_multiply_only_the_learners_that_have_them():
    args = sweep.Args(
        **SMALL | {"mdps": ("random:2x2x2", "gym:FrozenLake-v1:3")},
        learners=("jin-luo", "tsallis", "ucb"),
    )
    cells = sweep.cells(args)
    per_mdp = 2 * (1 * 2 * 3 + 3 + 1)
    assert len(cells) == 2 * per_mdp
    assert {cell["losses"] for cell in cells if cell["mdp"].startswith("gym")} == {"rewards"}
    assert all(("beta" in cell) == (cell["learner"] == "jin-luo") for cell in cells)


def test_sweep(tmp_path, capsys):
    args = sweep.Args(
        **SMALL, learners=("ucb", "uniform"), losses=("bernoulli", "greedy"), root=tmp_path
    )
    directory = sweep.main(args)
    with (directory / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    config = {"mdp": "random:2x2x2", "losses": "bernoulli", "learner": "ucb"}
    played = sweep.play(config | {"episodes": 20, "seed": 1}, tmp_path)
    assert float(rows[1]["regret"]) == played["regret"]
    assert "| random:2x2x2 | bernoulli | ucb " in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["random:3x3", "gym:NoSuchLake-v1:3", "gym:FrozenLake-v1:many", "chess"]
)
def test_an_mdp_that_cannot_be_made_is_an_error_before_anything_runs(name, tmp_path):
    with pytest.raises(ValueError, match="mdps: "):
        sweep.main(sweep.Args(**SMALL | {"mdps": (name,)}, root=tmp_path))
    assert not list(tmp_path.iterdir())


def test_every_learner_and_every_loss_can_be_played():
    mdp = sweep.make_mdp("random:2x2x2")
    for name in (
        "jin-luo",
        "tsallis",
        "log-barrier",
        "o-reps",
        "ucb",
        "follow-the-leader",
        "uniform",
    ):
        config = {"learner": name, "alpha": 0.5, "beta": 1.0, "gamma": 1.0, "episodes": 5}
        assert isinstance(sweep.make_learner(config, mdp), occ.Learner)
    for name in ("bernoulli", "constrained", "corrupted", "greedy"):
        losses = sweep.make_losses(name, mdp)
        assert torch.isfinite(occ.simulate(mdp, occ.FixedPolicy(mdp), losses, 5).regret).all()
