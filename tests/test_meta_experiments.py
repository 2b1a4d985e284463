"""The two experiments about tuning run in their smallest configuration and leave behind what they promise."""

from test_experiments import PNG, run

from experiments.common import write_csv
from experiments.tuning_rivals import BOX, judge, quasi_random, search_points
from experiments.tuning_worlds import Family


def test_meta_gradients(tmp_path):
    small = ["--horizon", "2", "--width", "2", "--actions", "2", "--episodes", "6", "12", "--betas", "3", "--budget", "96"]
    printed = run("meta_gradients", *small, "--root", str(tmp_path))
    (found,) = tmp_path.iterdir()
    assert (found / "gradients.png").read_bytes().startswith(PNG)
    assert "beta = 3, T = 12: 8 seeds, played by engine" in printed
    assert "beta = 3, T = 12, pathwise + score: " in printed
    assert len((found / "gradients.csv").read_text().splitlines()) == 1 + 2 * 4 * 3


def test_meta_tune(tmp_path):
    small = "--horizon 2 --width 2 --actions 2 --episodes 60 --train 1 --test 1 --seeds 3 --betas 10 --gammas 1 --particles 4"
    small += " --steps 2 --starts 1 --rounds 1 --refine-particles 4 --points 3 --again 2 --search-seeds 2 --budget 0.1"
    small += " --guard-mdps 2 --guard-seeds 2 --margins 0 --caution 1 --tradeoff-betas 10 --tradeoff-gammas 1"
    small += " --parts accuracy rivals guard tradeoff"
    printed = run("meta_tune", *small.split(), "--cache", str(tmp_path / "cache"), "--root", str(tmp_path / "runs"))
    (found,) = (tmp_path / "runs").iterdir()
    for name in ("accuracy.png", "landscape.png", "rivals.png", "environments.png", "tradeoff.png"):
        assert (found / name).read_bytes().startswith(PNG)
    assert "by the rule: " in printed
    assert "search of 3 points: 3 points" in printed
    assert "guarded, no worse on every MDP: excess" in printed
    assert "| tuned by gradients " in printed
    assert "% of regret, relative to search of 3 points, no. 1" in printed


def test_a_search_goes_on_where_it_was_interrupted(tmp_path):
    family = Family(30, horizon=2, width=2, actions=2)
    whole = search_points(family, range(98, 100), 4, 2, 2, 0, tmp_path / "whole.csv")
    settings = list(quasi_random(4, 0))
    part = [judge(family, range(98, 100), setting, 1) for setting in settings[:2]]
    rows = [dict(zip(BOX, point.setting, strict=True)) | {"cost": point.cost, "seconds": 1e6} for point in part]
    write_csv(tmp_path / "part.csv", rows)
    rest = search_points(family, range(98, 100), 4, 2, 2, 0, tmp_path / "part.csv")
    assert [point.setting for point in rest.best] == [point.setting for point in whole.best]
    assert [point.cost for point in rest.best] == [point.cost for point in whole.best]
    assert rest.seconds > 2e6  # what was spent before counts
    assert whole.played == 4
    assert len(whole.points) == 2
    for setting in settings:
        assert all(low <= x <= high for x, (low, high) in zip(setting, BOX.values(), strict=True))
