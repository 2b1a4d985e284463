"""The experiments that play games, in their smallest configuration."""

import csv
import json
import pickle
from pathlib import Path

import pytest
import torch

import torch_occ as occ
from experiments import (
    bandit,
    best_of_both_worlds,
    common,
    corruption,
    distance_to_limit,
    regularizers,
    theory,
    unknown,
)

pytestmark = pytest.mark.slow

SMALLEST = {"episodes": 30, "seeds": 2, "processes": 1, "tensorboard": False}
ON_MDP = SMALLEST | {"horizon": 2, "width": 2, "actions": 2}


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def check_run(directory: Path, figure: str, count: int) -> None:
    """Configuration, figure, and a history for every game that can be read again."""
    assert json.loads((directory / "config.json").read_text())["episodes"] == SMALLEST["episodes"]
    assert (directory / figure).read_bytes().startswith(b"\x89PNG")
    found = [occ.History.load(path) for path in directory.glob("*/*/history.npz")]
    assert len(found) == count
    assert all(
        history.finished and history.regret.shape[0] == 2 and not history.uncertified.any()
        for history in found
    )


def test_best_of_both_worlds(tmp_path, capsys):
    args = best_of_both_worlds.Args(**ON_MDP, budget=10.0, root=tmp_path)
    directory = best_of_both_worlds.main(args)
    check_run(directory, "regret.png", 28)
    assert len(rows(directory / "growth.csv")) == 28
    printed = capsys.readouterr().out
    assert "What this run shows" in printed
    assert "What it does not show" in printed
    assert (directory / "report.txt").read_text() in printed


def test_corruption(tmp_path, capsys):
    args = corruption.Args(**ON_MDP, budgets=(5.0, 10.0, 20.0), root=tmp_path)
    directory = corruption.main(args)
    check_run(directory, "corruption.png", 16)
    spent = [float(row["spent"]) for row in rows(directory / "corruption.csv")][:4]
    assert spent == pytest.approx([0, 5, 10, 20])
    assert "exponent of C" in capsys.readouterr().out


def test_regularizers(tmp_path, capsys):
    directory = regularizers.main(regularizers.Args(**ON_MDP, root=tmp_path))
    check_run(directory, "regularizers.png", 14)
    names = {row["learner"] for row in rows(directory / "regularizers.csv")}
    assert names >= {"mine", "Shannon", "hybrid + log-barrier"}
    assert "lowest regret" in capsys.readouterr().out


def test_bandit(tmp_path, capsys):
    directory = bandit.main(bandit.Args(**SMALLEST, arms=3, runs=200, root=tmp_path))
    check_run(directory, "bandit.png", 18)
    for row in rows(directory / "published.csv"):  # 200 runs only, so three half-widths
        published, ours, lower = (float(row[name]) for name in ("published", "ours", "lower"))
        assert abs(published - ours) < 3 * (ours - lower) + 0.05 * published, row
    assert "| UCB1 " in capsys.readouterr().out


def test_unknown(tmp_path, capsys):
    directory = unknown.main(unknown.Args(**ON_MDP, root=tmp_path))
    check_run(directory, "unknown.png", 32)
    found = rows(directory / "unknown.csv")
    assert len(found) == 20
    assert {row["twin"] for row in found} == set(
        unknown.twins(unknown.Args(), occ.LayeredMDP.random(2, 2, 2, seed=0))
    )
    assert "twin that knows P" in capsys.readouterr().out


def test_games_can_be_sent_to_another_process():
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=0)
    args = best_of_both_worlds.Args()
    for losses in best_of_both_worlds.environments(args).values():
        for learner in best_of_both_worlds.learners(args, mdp).values():
            game = pickle.loads(pickle.dumps(common.Game("here", "it", learner, losses)))
            assert torch.equal(game.learner.mdp.transitions[0], mdp.transitions[0])


def test_theory(tmp_path, capsys):
    options = ON_MDP | {"tensorboard": True, "mdps": 2, "sizes": ((1, 1, 2), (2, 2, 2))}
    args = theory.Args(**options, root=tmp_path)
    directory = theory.main(args)
    assert json.loads((directory / "config.json").read_text())["episodes"] == 30
    for figure in ("theory.png", "tightness.png"):
        assert (directory / figure).read_bytes().startswith(b"\x89PNG")
    assert {row["game"] for row in rows(directory / "runs.csv")} == {"stochastic", "adversarial"}
    statements = rows(directory / "statements.csv")
    assert len({row["label"] for row in statements}) == len(statements) >= 45
    assert all(row["violations"] == "0" for row in statements)
    assert len(list(directory.glob("*/events.out.tfevents.*"))) == 2
    printed = capsys.readouterr().out
    assert f"{len(statements)} of {len(statements)} statements hold in every instance." in printed


def test_distance_to_limit(tmp_path, capsys):
    options = SMALLEST | {"episodes": 60, "actions": 2, "fast_seeds": 3, "smallest_gap": 0.01}
    args = distance_to_limit.Args(**options, root=tmp_path)
    directory = distance_to_limit.main(args)
    assert (directory / "limit.png").read_bytes().startswith(b"\x89PNG")
    found = rows(directory / "slopes.csv")
    assert len(found) == 15
    seeds = {row["learner"]: int(row["seeds"]) for row in found}
    assert (seeds["KL-UCB"], seeds["Tsallis"]) == (3, 2)
    limits = {row["world"]: float(row["limit"]) for row in found}
    for name, (mdp, mean) in distance_to_limit.worlds(args).items():
        assert limits[name] == occ.limits.lower_bound(mdp, mean).value
    for row in found:
        assert float(row["lower"]) <= float(row["slope_over_limit"]) <= float(row["upper"])
    assert "slope / C" in capsys.readouterr().out


@pytest.mark.parametrize("successors", [1, 2])
def test_worlds_have_hidden_states_and_no_small_gaps(successors):
    mdp, mean = distance_to_limit.world_with_hidden_states(3, 3, 3, successors, 1, 0.05)
    assert bool(mdp.reachable.all())
    plan = occ.optimal_policy(mdp, mean)
    q = occ.occupancy(mdp, plan.policy)
    assert int((q.sum(-1) == 0).sum()) >= 2
    assert float(plan.gaps[plan.policy == 0].min()) >= 0.05
