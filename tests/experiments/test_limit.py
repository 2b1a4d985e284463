"""The experiment on the distance to the limit, small."""

import csv

import pytest

import torch_occ as occ
from experiments import distance_to_limit, limit_worlds

pytestmark = pytest.mark.slow


def test_distance_to_limit(tmp_path, capsys):
    args = distance_to_limit.Args(
        episodes=60, seeds=2, fast_seeds=3, processes=1, actions=2, smallest_gap=0.01, root=tmp_path
    )
    directory = distance_to_limit.main(args)
    assert (directory / "limit.png").read_bytes().startswith(b"\x89PNG")
    found = list(csv.DictReader((directory / "slopes.csv").read_text().splitlines()))
    assert len(found) == 15
    seeds = {row["learner"]: int(row["seeds"]) for row in found}
    assert (seeds["KL-UCB"], seeds["Tsallis"]) == (3, 2)
    limits = {row["world"]: float(row["limit"]) for row in found}
    for name, (mdp, mean) in distance_to_limit.worlds(args).items():
        assert limits[name] == occ.limits.lower_bound(mdp, mean).value
    for row in found:
        assert float(row["lower"]) <= float(row["slope_over_limit"]) <= float(row["upper"])
    printed = capsys.readouterr().out
    assert (directory / "report.txt").read_text() in printed
    assert list((directory / "limit").glob("events.*"))


@pytest.mark.parametrize("successors", [1, 2])
def test_worlds_have_hidden_states_and_no_small_gaps(successors):
    mdp, mean = limit_worlds.world_with_hidden_states(3, 3, 3, successors, 1, 0.05)
    assert bool(mdp.reachable.all())
    plan = occ.optimal_policy(mdp, mean)
    q = occ.occupancy(mdp, plan.policy)
    assert int((q.sum(-1) == 0).sum()) >= 2
    assert float(plan.gaps[plan.policy == 0].min()) >= 0.05
