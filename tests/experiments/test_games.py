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
ON_MDP = {"horizon": 2, "width": 2, "actions": 2}


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture
def played(tmp_path, capsys):
    """Run an experiment; its directory has the configuration, the figure and all histories."""

    def run(experiment, figure, count, *said, **options):
        directory = experiment.main(experiment.Args(**SMALLEST | options, root=tmp_path))
        config = json.loads((directory / "config.json").read_text())
        assert config["episodes"] == SMALLEST["episodes"]
        assert (directory / figure).read_bytes().startswith(b"\x89PNG")
        found = [occ.History.load(path) for path in directory.glob("*/*/history.npz")]
        assert len(found) == count
        for history in found:
            assert history.finished
            assert history.regret.shape[0] == 2
            assert not history.uncertified.any()
        run.printed = capsys.readouterr().out
        assert all(text in run.printed for text in said)
        return directory

    return run


def test_best_of_both_worlds(played):
    said = ("What this run shows", "What it does not show")
    directory = played(best_of_both_worlds, "regret.png", 28, *said, **ON_MDP, budget=10.0)
    assert len(rows(directory / "growth.csv")) == 28
    assert (directory / "report.txt").read_text() in played.printed


def test_corruption(played):
    budgets = (5.0, 10.0, 20.0)
    directory = played(corruption, "corruption.png", 16, "exponent of C", **ON_MDP, budgets=budgets)
    spent = [float(row["spent"]) for row in rows(directory / "corruption.csv")][:4]
    assert spent == pytest.approx([0, *budgets])


def test_regularizers(played):
    directory = played(regularizers, "regularizers.png", 14, "lowest regret", **ON_MDP)
    names = {row["learner"] for row in rows(directory / "regularizers.csv")}
    assert names >= {"mine", "Shannon", "hybrid + log-barrier"}


def test_bandit(played):
    directory = played(bandit, "bandit.png", 18, "| UCB1 ", arms=3, runs=200)
    for row in rows(directory / "published.csv"):  # 200 runs only, so three half-widths
        published, ours, lower = (float(row[name]) for name in ("published", "ours", "lower"))
        assert abs(published - ours) < 3 * (ours - lower) + 0.05 * published, row


def test_unknown(played):
    directory = played(unknown, "unknown.png", 32, "twin that knows P", **ON_MDP)
    found, mdp = rows(directory / "unknown.csv"), occ.LayeredMDP.random(2, 2, 2, seed=0)
    assert len(found) == 20
    assert {row["twin"] for row in found} == set(unknown.twins(unknown.Args(), mdp))


def test_games_can_be_sent_to_another_process():
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=0)
    args = best_of_both_worlds.Args()
    for losses in best_of_both_worlds.environments(args).values():
        for learner in best_of_both_worlds.learners(args, mdp).values():
            game = pickle.loads(pickle.dumps(common.Game("here", "it", learner, losses)))
            assert torch.equal(game.learner.mdp.transitions[0], mdp.transitions[0])


def test_theory(tmp_path, capsys):
    options = SMALLEST | ON_MDP | {"tensorboard": True, "mdps": 2, "sizes": ((1, 1, 2), (2, 2, 2))}
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
