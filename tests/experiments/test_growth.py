import math

import pytest
import torch

from experiments.growth import (
    Fit,
    bootstrap,
    fits_log_better,
    growth,
    late,
    log_slope,
    power_slope,
    ratio_band,
    resampled_means,
    slope,
)

T = torch.unique(torch.logspace(0, 4, 81).round()).double()


def noisy(curve, seeds=32, scale=0.05):
    """Copies of a curve, each with its own factor."""
    factors = 1 + scale * torch.randn(
        seeds, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    return factors * curve


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0])
def test_exponent_of_a_power_is_that_power(power):
    found = growth(T, noisy(3 * T**power))
    assert found.exponent.value == pytest.approx(power, abs=1e-12)
    assert found.exponent.lower <= found.exponent.value + 1e-12
    assert found.exponent.upper >= found.exponent.value - 1e-12


def test_slope_over_log_t_and_the_better_model():
    found = growth(T, noisy(5 + 7 * T.log()))
    assert found.per_log.lower < 7 < found.per_log.upper
    assert found.exponent.upper < 0.5
    assert found.log_share == 1.0
    assert growth(T, noisy(5 + T.sqrt())).log_share == 0.0


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


def test_slope_ignores_the_intercept():
    x = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    assert float(slope(x, 4 - 3 * x)) == pytest.approx(-3)


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


def test_nonpositive_regret_has_no_exponent_but_a_slope():
    found = growth(T, noisy(-T.log()))
    assert not found.exponent.exists
    assert found.exponent.text() == "-"
    assert found.per_log.exists


def test_one_seed_has_no_width():
    found = growth(T, T.sqrt()[None])
    assert found.exponent.lower == found.exponent.upper == pytest.approx(0.5)


def test_same_seed_same_resamples():
    curves = noisy(T)
    assert torch.equal(resampled_means(curves, 50, seed=3), resampled_means(curves, 50, seed=3))
    assert not torch.equal(resampled_means(curves, 50, seed=3), resampled_means(curves, 50, seed=4))
    assert bootstrap(log_slope, T, curves, seed=3) == bootstrap(log_slope, T, curves, seed=3)


def test_statistics_take_batches():
    curves = torch.stack([T.sqrt(), T.log() + 1, -T])
    assert power_slope(T, curves).isnan().tolist() == [False, False, True]
    assert fits_log_better(T, curves)[:2].tolist() == [0.0, 1.0]


def test_bad_windows_are_named():
    with pytest.raises(ValueError, match="fraction"):
        late(T, T[None], 1.0)
    with pytest.raises(ValueError, match="three checkpoints"):
        late(T[-2:], T[None, -2:], 0.0)


def test_fits_print_themselves():
    assert Fit(0.5, 0.41, 0.6).text() == "0.50 [0.41, 0.60]"
