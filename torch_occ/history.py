"""What a simulation leaves behind."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_occ.files import read_checked, write_checked


@dataclass
class History:
    """Curves over C checkpoints for N seeds.

    The pseudo-regret compares expected losses, sum_{tau<=t} <q_tau - q_opt, mean_tau>, with q_opt the best fixed policy for the first t
    episodes; the realised regret puts the losses that were really suffered in place of <q_tau, mean_tau>. Neither is ever mixed
    with the other.
    """

    episodes: Tensor  # (C,)
    regret: Tensor  # (N, C), pseudo-regret
    realised_regret: Tensor  # (N, C)
    comparator: Tensor  # (N, C), the total expected loss of the best fixed policy so far
    corruption: Tensor  # (N, C), spent so far
    newton_steps: Tensor  # (N, C), mean per episode since the last checkpoint
    dual_residual: Tensor  # (N, C), largest since the last checkpoint
    flow_residual: Tensor  # (N, C), likewise
    uncertified: Tensor  # (N, C), episodes so far whose q could not be certified
    wall_time: Tensor  # (C,), seconds
    cumulative_occupancy: Tensor  # (N, S, A), sum_t q_t
    total_mean: Tensor  # (N, S, A), sum_t mean_t
    last_q: Tensor  # (N, S, A)
    seeds: tuple[int, ...]
    backend: str
    finished: bool
    config: dict[str, Any]

    def save(self, path: str | Path) -> None:
        """Write everything to one `.npz` file with a checksum, atomically; NumPy can read it."""
        arrays: dict[str, Any] = {}
        plain: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                arrays[field.name] = value.cpu().numpy()
            else:
                plain[field.name] = value
        buffer = io.BytesIO()
        np.savez_compressed(buffer, plain=np.array(json.dumps(plain)), **arrays)
        write_checked(path, "a history", buffer.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> History:
        """Read what `save` wrote, in this version of the package or another.

        Raises:
            ValueError: if the file is damaged, empty, or not a history.
        """
        payload = read_checked(path, "a history", any_version=True)
        with np.load(io.BytesIO(payload), allow_pickle=False) as file:
            plain = json.loads(str(file["plain"]))
            arrays: dict[str, Any] = {name: torch.from_numpy(file[name]) for name in file.files if name != "plain"}
        return cls(**arrays, **(plain | {"seeds": tuple(plain["seeds"])}))
