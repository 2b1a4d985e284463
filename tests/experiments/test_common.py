"""What the experiments share: fits of growth, files, tables and games."""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import torch_occ as occ
from experiments import common
from experiments.common import Game, Runs, growth, late, ratio_band

T = torch.unique(torch.logspace(0, 4, 81).round()).double()


def noisy(curve, seeds=32, scale=0.05):
    """Copies of a curve, each with its own factor."""
    factors = 1 + scale * torch.randn(
        seeds, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    return factors * curve


def test_exponent_slope_and_the_better_model():
    for power in (0.25, 0.5, 1.0):
        found = growth(T, noisy(3 * T**power)).exponent
        assert list(found) == pytest.approx([power] * 3, abs=1e-12)
    found = growth(T, noisy(5 + 7 * T.log()))
    assert found.per_log.lower < 7 < found.per_log.upper
    assert found.exponent.upper < 0.5
    assert (found.log_share, growth(T, noisy(5 + T.sqrt())).log_share) == (1.0, 0.0)
    found = growth(T, noisy(-T.log()))  # nonpositive regret has a slope only
    assert (found.exponent.exists, found.exponent.text()) == (False, "-")
    assert found.per_log.exists


def test_a_ratio_has_a_band_over_seeds_that_are_resampled_together():
    generator = torch.Generator().manual_seed(3)
    reference = T.sqrt() * torch.rand(12, 1, dtype=torch.float64, generator=generator)
    for factor in (1.0, 2.5):  # the same seeds: the ratio is certain, although both are noisy
        for x in ratio_band(factor * reference, reference):
            torch.testing.assert_close(x, torch.full_like(T, factor))
    other = T.sqrt() * torch.rand(12, 1, dtype=torch.float64, generator=generator)
    value, lower, upper = ratio_band(other, reference)
    torch.testing.assert_close(value, other.mean(0) / reference.mean(0))
    assert bool((lower < value).all())
    assert bool((value < upper).all())
    reference[:, 0] = -1.0
    assert [bool(x[:2].isnan()[0]) for x in ratio_band(other, reference)] == [True] * 3
    assert not bool(ratio_band(other, reference).value[1:].isnan().any())


def test_intervals_cover_the_truth_as_often_as_they_say():
    """100 experiments of 30 seeds each; regret is normal around sqrt T at every checkpoint."""
    generator, hits = torch.Generator().manual_seed(1), 0
    for _ in range(100):
        curves = T.sqrt() * (
            1 + 0.2 * torch.randn(30, len(T), dtype=torch.float64, generator=generator)
        )
        fit = growth(T, curves, resamples=200).exponent
        hits += fit.lower <= 0.5 <= fit.upper
    assert 85 <= hits <= 100  # 95 expected; percentile intervals of 30 seeds are a little short


def test_only_the_late_window_counts():
    early = torch.where(T < 1000, T, 1000 + T.log() - math.log(1000))
    assert growth(T, noisy(early), fraction=0.1).exponent.upper < 0.01
    t, curves = late(T, noisy(T), 0.5)
    assert float(t[0]) >= 5000
    assert curves.shape == (32, len(t))


@dataclass
class Args:
    root: Path


def test_run_directories_are_never_shared(tmp_path):
    found = {common.begin("x", Args(tmp_path), 3) for _ in range(3)}
    assert len(found) == 3
    assert all(path.name.startswith("x__3__") for path in found)
    assert all([x.name for x in path.iterdir()] == ["config.json"] for path in found)


def test_csv_and_table(tmp_path):
    common.write_csv(tmp_path / "nothing.csv", [])
    common.write_csv(tmp_path / "a.csv", [{"x": 1, "y": None}, {"x": 2.5, "y": "z"}])
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    assert (tmp_path / "a.csv").read_text() == "x,y\n1,\n2.5,z\n"
    text = common.table(["", "n"], [["a", "10"], ["bc", "2"]])
    assert text == "|    |  n |\n|----|---:|\n| a  | 10 |\n| bc |  2 |"
    expected = "10.4 days, 2 h, 10 min, 240 s, 12.3 s, 12.3 ms, 4.2 µs"
    times = (9e5, 7200.0, 600.0, 240.0, 12.3456, 0.0123, 4.2e-6)
    assert ", ".join(map(common.seconds, times)) == expected


def test_tensorboard_logs(tmp_path):
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=0)
    losses = occ.BernoulliLosses(common.loss_with_gap(mdp, 0.4, 0))
    game = Game("here", "a & b", occ.FixedPolicy(mdp), losses, pictures=True)
    found = common.play_all([game], Runs(10, 2, processes=1), tmp_path)
    assert list(found) == [("here", "a & b")]
    assert len(list(tmp_path.glob("here/a-b/events.out.tfevents.*"))) == 1


def test_every_suboptimal_action_has_the_gap_asked_for():
    mdp = occ.LayeredMDP.random(4, 3, 3, seed=2)
    gaps = occ.optimal_policy(mdp, common.loss_with_gap(mdp, 0.3, 5)).gaps
    assert sorted({round(float(gap), 12) for gap in gaps.flatten()}) == [0.0, 0.3]
    assert ((gaps < 1e-9).sum(-1) == 1).all()
