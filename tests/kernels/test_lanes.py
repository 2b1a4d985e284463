"""Vectors, masks and arrays in lanes: every operation does in each lane what NumPy does."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numba import njit

from torch_occ.engine.lanes import (
    FEW_LANES,
    LANES,
    anywhere,
    exp,
    in_lanes,
    lane,
    lanes_for,
    lanes_of,
    log,
    pack,
    power,
    sqrt,
    unpack,
    where,
    zeros,
)

WIDTHS = (1, FEW_LANES, LANES)


@njit(error_model="numpy")
def arithmetic(x: Any, y: Any, out: Any) -> None:
    out[0] = x[0] + y[0] * 2.0 - 1
    out[1] = -x[0] / y[0]
    out[2] = abs(x[0] - y[0])
    out[3] = max(x[0], y[0]) + min(x[0], 0.5)
    out[4] = where((x[0] < y[0]) & (not (x[0] <= 0.25)), x[0], 7)
    out[5] = where((x[0] >= y[0]) | (x[0] == y[0]), 1.0, where(x[0] != y[0], 2.0, 3.0))
    out[6] = sqrt(x[0]) + log(x[0])
    out[7] = exp(x[0]) + power(x[0], y[0])
    total = 0.0
    for i in range(len(x)):
        total += x[i] * y[i]
    out[8] = total


@njit
def arithmetic_in_lanes(x: Any, y: Any, out: Any, width: Any) -> None:
    arithmetic(in_lanes(x, width), in_lanes(y, width), in_lanes(out, width))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_lane_computes_what_a_number_computes(width):
    generator = np.random.default_rng(0)
    x, y, out = (zeros(n, lanes=width) for n in (5, 5, 9))
    x[:], y[:] = generator.random(x.shape), generator.random(y.shape)
    y[0, 0] = x[0, 0]
    arithmetic_in_lanes(x, y, out, (0,) * width)
    for n in range(width):
        alone = np.zeros(9)
        arithmetic(x[:, n].copy(), y[:, n].copy(), alone)
        np.testing.assert_allclose(out[:, n], alone, rtol=1e-15)
        a, b = x[0, n], y[0, n]
        chosen = a if a < b and not a <= 0.25 else 7.0
        np.testing.assert_allclose(
            alone[:4], [a + 2 * b - 1, -a / b, abs(a - b), max(a, b) + min(a, 0.5)]
        )
        np.testing.assert_allclose(
            alone[4:8],
            [chosen, 1.0 if a >= b else 2.0, math.sqrt(a) + math.log(a), math.exp(a) + a**b],
        )


@njit
def count_where_positive(x: Any, width: Any) -> int:
    own, found = in_lanes(x, width), 0
    if anywhere(own[0] > 0.0):
        for n in range(lanes_of(own)):
            if lane(own[0] > 0.0, n):
                found += 1
                row = lane(own, n)
                row[1] += lane(own[0], n)
    return found


@pytest.mark.canary
@pytest.mark.parametrize("width", WIDTHS)
def test_a_lane_is_a_view(width):
    """Numba would drop a write to an array that it does not know to share memory."""
    x = zeros(2, lanes=width)
    assert count_where_positive(x, (0,) * width) == 0
    x[0, -1] = 3.0
    assert count_where_positive(x, (0,) * width) == 1
    assert x[1].tolist() == [0.0] * (width - 1) + [3.0]


@njit
def add_rows(x: Any, width: Any) -> None:
    own = in_lanes(x, width)
    first, second = own[0], own[len(own) - 1]
    for i in range(len(first)):
        second[i] += first[i]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_row_is_a_view(width):
    x = zeros(3, 4, lanes=width)
    x[...] = np.arange(x.size).reshape(x.shape)
    expected = x.copy()
    expected[2] += expected[0]
    add_rows(x, (0,) * width)
    assert np.array_equal(x, expected)


UNTYPED = """
import numpy as np
from torch_occ.engine.lanes import in_lanes, lane, lanes_of, width_of, zeros
from torch_occ.engine.layout import kernel

@kernel
def add(x, out, width):
    x, out = in_lanes(x, width), in_lanes(out, width)
    for i in range(x.shape[0]):
        row = x[i]
        for j in range(len(row)):
            out[i] += row[j]
        for n in range(lanes_of(out)):
            lane(out, n)[i] += 0.5

x, out = zeros(3, 4), zeros(3)
x[...] = np.arange(x.size).reshape(x.shape)
add(x, out, width_of(8))
assert np.array_equal(out, x.sum(1) + 0.5)
"""


def test_pointers_need_no_types(tmp_path):
    """llvmlite has announced the end of typed pointers."""
    changed = {"LLVMLITE_ENABLE_IR_LAYER_TYPED_POINTERS": "0", "NUMBA_CACHE_DIR": str(tmp_path)}
    path = tmp_path / "untyped.py"
    path.write_text(UNTYPED)
    subprocess.run([sys.executable, path], env=os.environ | changed, check=True, timeout=300)


def test_memory_is_aligned_and_comes_back():
    elements = np.arange(12.0).reshape(3, 4)
    memory = pack(elements, 2)
    assert memory[:, 1].tolist() == [[1.0, 5.0], [9.0, 9.0]]
    assert zeros(3, 5).ctypes.data % 64 == pack(elements, 8).ctypes.data % 64 == 0
    memory[..., :] += 1
    unpack(memory, elements)
    assert elements.tolist() == (np.arange(1.0, 13.0).reshape(3, 4)).tolist()
    assert pack(elements, None) is elements


def test_one_or_two_problems_have_few_lanes():
    assert [lanes_for(n) for n in (1, 2, 3, 8, 9)] == [FEW_LANES, FEW_LANES, LANES, LANES, LANES]
    assert [lanes_for(n, 1) for n in (1, 2, 3)] == [1, 1, LANES]


def test_python_can_call_what_takes_plain_numbers():
    assert where(True, 1.0, 2.0) == 1.0
    assert where(False, 1.0, 2.0) == 2.0
    assert anywhere(True)
    assert sqrt(4.0) == power(2.0, 1.0) == 2.0
    for function in (lambda: in_lanes(zeros(1), None), lambda: lane(zeros(1), 0)):
        with pytest.raises(TypeError, match="called by kernels only"):
            function()
