"""Vectors, masks and arrays in lanes: every operation does in each lane what NumPy does."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from numba import njit

from torch_occ.engine.lanes import FEW_LANES, LANES, anywhere, in_lanes, lane, lanes_of, zeros

WIDTHS = (1, FEW_LANES, LANES)


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
