"""Variates of learners that sample: their distributions, and the same in both backends."""

import numpy as np
import pytest
import torch
from scipy import stats

from torch_occ.engine import draws as compiled
from torch_occ.rivals import sampling

SHAPES = (0.05, 1 / 3, 1.0, 1.5, 7.0, 300.0, 1e6)


def test_uniform_numbers_of_other_keys_are_other_numbers():
    keys = np.stack([sampling.keys_of((0, 1, 2**62), t, 50) for t in (0, 1, 2, 10**6)])
    numbers = np.stack([sampling.uniform(keys, counter) for counter in range(50)])
    assert len(np.unique(numbers)) == numbers.size
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 1e-3


@pytest.mark.bits
def test_uniform_numbers_are_the_same_bits_in_both_backends():
    seeds, t = (0, 3, 2**62), 12_345
    keys = sampling.keys_of(seeds, t, 7)
    for n, seed in enumerate(seeds):
        for item in range(7):
            key = np.uint64(compiled.key_of(seed, t, item))  # Numba returns an int
            assert key == keys[n, item]
            for counter in (0, 1, 5):
                assert compiled.uniform(key, counter) == sampling.uniform(keys, counter)[n, item]


@pytest.mark.parametrize("shape", SHAPES)
def test_gammas_have_the_distribution(shape):
    keys = sampling.keys_of(range(20), 4, 1000)
    found = sampling.gammas(keys, np.full(keys.shape, shape))
    assert stats.kstest(found.ravel(), stats.gamma(shape).cdf).pvalue > 1e-3


@pytest.mark.parametrize("shape", SHAPES)
def test_gammas_are_the_same_in_both_backends(shape):
    keys = sampling.keys_of((5,), 9, 500)
    found = sampling.gammas(keys, np.full(keys.shape, shape))[0]
    twins = np.array([compiled.gamma(key, shape) for key in keys[0]])
    np.testing.assert_allclose(twins, found, rtol=1e-12)


def test_betas_have_the_distribution_and_the_twin():
    a, b = (
        torch.tensor([[1.0, 3.0, 40.0, 9e5]] * 4000),
        torch.tensor([[1.0, 0.5, 70.0, 1e5]] * 4000),
    )
    found = sampling.betas(range(4000), 77, a.double(), b.double()).numpy()
    for i in range(4):
        expected = stats.beta(float(a[0, i]), float(b[0, i]))
        assert stats.kstest(found[:, i], expected.cdf).pvalue > 1e-3
        twin = compiled.beta(3999, 77, i, float(a[0, i]), float(b[0, i]))
        np.testing.assert_allclose(twin, found[3999, i], rtol=1e-12)
    assert np.abs(np.corrcoef(found.T) - np.eye(4)).max() < 0.08
