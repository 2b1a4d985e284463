"""The experiments about tuning, in their smallest configuration."""

import numpy as np
import pytest
from scripts import PNG, run

from experiments.both_worlds_play import Ratio
from experiments.common import write_csv
from experiments.tuning_rivals import BOX, judge, quasi_random, search_points
from experiments.tuning_worlds import Family

pytestmark = pytest.mark.slow


def test_meta_gradients(tmp_path):
    small = [
        "--horizon",
        "2",
        "--width",
        "2",
        "--actions",
        "2",
        "--episodes",
        "6",
        "12",
        "--betas",
        "3",
        "--budget",
        "96",
    ]
    printed = run("meta_gradients", *small, "--root", str(tmp_path))
    (found,) = tmp_path.iterdir()
    assert (found / "gradients.png").read_bytes().startswith(PNG)
    assert "beta = 3, T = 12: 8 seeds, " in printed
    assert "beta = 3, T = 12, pathwise + score: " in printed
    assert len((found / "gradients.csv").read_text().splitlines()) == 1 + 2 * 4 * 3


def test_meta_tune(tmp_path):
    small = "--horizon 2 --width 2 --actions 2 --episodes 60 --train 1 --test 1 --seeds 3"
    small += " --betas 10 --gammas 1 --particles 4 --recipe.steps 2 --recipe.starts 1"
    small += " --recipe.rounds 1 --recipe.points 6 --recipe.particles 4"
    small += " --points 3 --again 2 --search-seeds 2 --budget 0.1"
    where = ["--cache", str(tmp_path / "cache"), "--root", str(tmp_path / "runs")]
    printed = run("meta_tune", *small.split(), *where)
    (found,) = (tmp_path / "runs").iterdir()
    for name in ("accuracy.png", "landscape.png", "rivals.png"):
        assert (found / name).read_bytes().startswith(PNG)
    assert "by the rule: " in printed
    assert "search of 3 points: 3 points" in printed
    assert "| tuned " in printed
    assert "| paper's appendix " in printed
    assert "% of regret, relative to search of 3 points, no. 1" in printed


def test_both_worlds(tmp_path):
    small = "--horizon 2 --width 2 --actions 2 --episodes 60 --train 2 --test 2 --seeds 3"
    small += " --steps 2 --rounds 1 --points 2"
    small += " --guard-seeds 2 --frontier 0.2 0.4 --frontier-seeds 2"
    where = ["--cache", str(tmp_path / "cache"), "--root", str(tmp_path / "runs")]
    printed = run("both_worlds", *small.split(), *where)
    (found,) = (tmp_path / "runs").iterdir()
    for name in ("frontier.png", "held_out.png", "environments.png"):
        assert (found / name).read_bytes().startswith(PNG)
    assert "under the guard, 4 points" in printed
    assert "greedy adversary: regret relative to the paper's" in printed
    points, rows = (
        (found / f"{name}.csv").read_text().splitlines() for name in ("points", "held_out")
    )
    assert sum(line.endswith("True") for line in points) == 1
    assert len(rows) == 1 + 4 * 5  # environments and contestants
    assert len((found / "frontier.csv").read_text().splitlines()) == 1 + 3 * 2 + 1
    # What was tuned is played again without tuning, from the cache.
    gamma = next(line.split(",")[0] for line in points if line.endswith("True"))
    beta = printed.partition("beta = ")[2].partition("\n")[0].split()[0]
    again = run(
        "both_worlds", *small.split(), *where, "--parts", "held_out", "--setting", beta, gamma
    )
    assert (
        again.partition("mean regret over")[2].partition("written")[0]
        == printed.partition("mean regret over")[2].partition("written")[0]
    )


def test_ratios_have_the_error_of_both_sides():
    rng = np.random.default_rng(0)
    drawn = [[(rng.normal(30, 3, 20), rng.normal(10, 2, 20)) for _ in range(3)] for _ in range(400)]
    found = [Ratio.mean([Ratio.of(x, y) for x, y in pairs]) for pairs in drawn]
    assert np.mean([ratio.value for ratio in found]) == pytest.approx(3, rel=0.01)
    assert np.mean([ratio.error for ratio in found]) == pytest.approx(
        np.std([ratio.value for ratio in found]), rel=0.1
    )


def test_a_search_goes_on_where_it_was_interrupted(tmp_path):
    family = Family(30, horizon=2, width=2, actions=2)
    whole = search_points(family, range(98, 100), 4, 2, 2, 0, tmp_path / "whole.csv")
    settings = list(quasi_random(4, 0))
    part = [judge(family, range(98, 100), setting, 1) for setting in settings[:2]]
    rows = [
        dict(zip(BOX, point.setting, strict=True)) | {"cost": point.cost, "seconds": 1e6}
        for point in part
    ]
    write_csv(tmp_path / "part.csv", rows)
    rest = search_points(family, range(98, 100), 4, 2, 2, 0, tmp_path / "part.csv")
    assert [point.setting for point in rest.best] == [point.setting for point in whole.best]
    assert [point.cost for point in rest.best] == [point.cost for point in whole.best]
    assert rest.seconds > 2e6  # what was spent before counts
    assert whole.played == 4
    assert len(whole.points) == 2
    for setting in settings:
        assert all(low <= x <= high for x, (low, high) in zip(setting, BOX.values(), strict=True))
