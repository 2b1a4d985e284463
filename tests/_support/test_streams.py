import itertools

import numpy as np
import pytest
import torch

from torch_occ._support.constants import CHUNK
from torch_occ._support.streams import Purpose, stream, uniforms

KEYS = list(itertools.product((0, 1, 2**40), Purpose, (0, 1, 2, 3)))


@pytest.mark.parametrize(("seed", "purpose", "chunk"), KEYS[::5])
@pytest.mark.bits
def test_the_same_key_gives_the_same_numbers(seed, purpose, chunk):
    first = stream(seed, purpose, chunk).random(50)
    stream(seed + 1, purpose, chunk).random(7)  # nobody else's draws matter
    assert np.array_equal(first, stream(seed, purpose, chunk).random(50))


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
def test_uniforms_are_batched_over_seeds():
    numbers = uniforms((5, 9, 5), Purpose.EPISODES, (2, 3), (3,))
    assert numbers.shape == (3, 2 * CHUNK, 3)
    assert numbers.dtype == torch.float64
    assert torch.equal(numbers[0], numbers[2])
    assert not torch.equal(numbers[0], numbers[1])
    assert torch.equal(numbers[1:2], uniforms((9,), Purpose.EPISODES, (2, 3), (3,)))
    assert bool(((numbers >= 0) & (numbers < 1)).all())


def test_uniforms_are_those_of_the_streams():
    numbers = uniforms((5, 9), Purpose.TABLES, (2, 3), (2, 3)).view(2, 2, CHUNK, 2, 3).numpy()
    for row, seed in zip(numbers, (5, 9), strict=True):
        for block, chunk in zip(row, (2, 3), strict=True):
            assert np.array_equal(block, stream(seed, Purpose.TABLES, chunk).random((CHUNK, 2, 3)))


def test_the_numbers_are_pinned():
    """A change here changes every published run."""
    assert stream(7, Purpose.EPISODES, 3).random(2).tolist() == [
        0.3545624228779064,
        0.02177503878672471,
    ]


def test_negative_seeds_are_refused():
    with pytest.raises(ValueError, match=r"seeds: expected non-negative integers, got -1"):
        uniforms((0, -1), Purpose.TABLES, (0,), (1,))
