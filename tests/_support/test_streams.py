import itertools

import numpy as np
import pytest
import torch

from torch_occ._support.constants import CHUNK
from torch_occ._support.streams import Purpose, stream, uniforms

KEYS = list(itertools.product((0, 1, 2**40), Purpose, (0, 1, 2, 3)))


def test_other_keys_give_other_numbers():
    rows = np.stack([stream(*key).random(4) for key in KEYS])
    assert len(np.unique(rows)) == rows.size


def test_streams_are_uniform_and_uncorrelated():
    rows = np.stack([stream(*key).random(4000) for key in KEYS])
    error = (1 / 12 / 4000) ** 0.5
    assert np.abs(rows.mean(1) - 0.5).max() < 4.5 * error
    correlations = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlations).max() < 5 * 4000**-0.5


@pytest.mark.bits
def test_a_longer_draw_begins_with_the_shorter_one():
    """RandomWalkLosses relies on it for the last, shorter chunk."""
    for method in ("random", "standard_normal"):
        short, long = (getattr(stream(3, Purpose.WALKS, 0), method)((n, 2, 3)) for n in (5, CHUNK))
        assert np.array_equal(short, long[:5])


@pytest.mark.bits
def test_uniforms_are_those_of_the_streams():
    seeds, chunks = (5, 9, 5), (2, 3)
    numbers = uniforms(seeds, Purpose.TABLES, chunks, (2, 3))
    assert (numbers.shape, numbers.dtype) == ((3, 2 * CHUNK, 2, 3), torch.float64)
    for row, seed in zip(numbers.numpy(), seeds, strict=True):
        for block, chunk in zip(row.reshape(2, CHUNK, 2, 3), chunks, strict=True):
            assert np.array_equal(block, stream(seed, Purpose.TABLES, chunk).random((CHUNK, 2, 3)))


def test_the_numbers_are_pinned():
    """A change here changes every published run."""
    assert stream(7, Purpose.EPISODES, 3).random(2).tolist() == [
        0.3545624228779064,
        0.02177503878672471,
    ]
