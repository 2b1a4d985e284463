"""Draws of the compiled leaps have their distributions, from independent streams."""

import numpy as np
import pytest
from numba import njit
from scipy import stats

from torch_occ.engine.draws import FEW, binomial_drawn, normal_drawn


@njit
def binomials(times, count, p, own):
    return np.array([binomial_drawn(count, p, own, 0) for _ in range(times)])


@njit
def normals(times, own, lanes):
    return np.array([[normal_drawn(own, n) for n in lanes] for _ in range(times)])


def generators(count=8):
    return np.random.SeedSequence(0).generate_state(count, np.uint64)


FEWER = [(1, 0.4), (7, 0.9), (12, 0.5), (400, 0.01), (10**9, 3e-9)]
MORE = [(30, 0.5), (40, 0.71), (1000, 0.02), (10**4, 0.3), (10**6, 0.999), (10**12, 0.25)]


@pytest.mark.parametrize(("count", "p"), FEWER + MORE)
def test_binomial_numbers_have_the_distribution(count, p):
    """Both methods: by inversion below a mean of FEW, by rejection above it; p from 0 to 1."""
    assert (count * min(p, 1 - p) < FEW) == ((count, p) in FEWER)  # both methods are tested
    own, expected = generators(1), stats.binom(count, p)
    found = binomials(20_000, float(count), p, own)
    assert np.array_equal(found, np.round(found))
    assert found.min() >= 0
    assert found.max() <= count
    # Equal cells of the distribution, as far as its steps allow.
    edges = np.unique(expected.ppf(np.linspace(0, 1, 31)[1:-1]))
    shares = np.diff(np.concatenate([[0.0], expected.cdf(edges), [1.0]]))
    cells = np.bincount(np.searchsorted(edges, found), minlength=len(shares))
    assert min(cells.sum() * shares[shares > 0]) > 5
    assert stats.chisquare(cells[shares > 0], cells.sum() * shares[shares > 0]).pvalue > 1e-3


def test_certain_events_need_no_random_numbers():
    own = generators(1)
    before = own.copy()
    assert binomials(1, 9.0, 0.0, own) == 0.0
    assert binomials(1, 9.0, 1.0, own) == 9.0
    assert np.array_equal(own, before)


def test_normal_numbers_have_the_distribution():
    own = generators(1)
    found = normals(20_000, own, np.arange(1))[:, 0]
    assert stats.kstest(found, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(found[1:], found[:-1])[0, 1]) < 0.03


def test_streams_are_independent_and_their_own():
    own = generators()
    found = normals(3000, own, np.arange(8))
    assert np.abs(np.corrcoef(found.T) - np.eye(8)).max() < 0.08
    alone = generators()
    assert np.array_equal(normals(10, alone, np.array([5]))[:, 0], found[:10, 5])
    assert np.array_equal(np.delete(alone, 5), np.delete(generators(), 5))
