"""The result of a simulation: curves over checkpoints and seeds."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.extras import extra
from torch_occ._support.files import read_checked, write_checked
from torch_occ._support.tables import markdown
from torch_occ.game.intervals import Mean

#: Episodes that are shown when a history is printed.
_POWERS_OF_TEN = {10**k for k in range(13)}


@dataclass(repr=False)
class History:
    """Curves over C checkpoints for N seeds.

    The pseudo-regret compares expected losses, sum_{tau<=t} ⟨q_tau - q_opt, mean_tau⟩, where q_opt
    is the best fixed policy for the first t episodes. The realised regret has the losses that were
    suffered in place of ⟨q_tau, mean_tau⟩.

    q_opt is the best policy for each seed. Against an adaptive adversary the mean over seeds is
    therefore E max, while the paper has max E; `theory.Certificate` has both.
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

    def final(self, curve: str = "regret") -> Mean:
        """The mean over seeds of a curve at its last checkpoint, with its standard error.

        Args:
            curve: the name of a curve, for example "regret" or "realised_regret".

        Returns:
            `Mean(mean, standard_error, seeds)`; its `interval` is Student's 95 % confidence
            interval.

        Raises:
            ValueError: if there is no such curve, or no checkpoint was reached.
        """
        values = self._curves().get(curve)
        if values is None:
            raise ValueError(f"curve: expected one of {list(self._curves())}, got {curve!r}")
        if not values.shape[-1]:
            raise ValueError("history: no checkpoint was reached, so no curve has a last point")
        return Mean.of(values[:, -1].cpu())

    def to_dataframe(self) -> Any:
        """Every curve as a pandas DataFrame.

        Returns:
            One row per seed and checkpoint, with columns `seed`, `episode` and the curves.

        Raises:
            ImportError: if pandas is not installed.
        """
        with extra("dataframe", "to_dataframe needs pandas"):
            import pandas
        points = len(self.episodes)
        columns: dict[str, Any] = {
            "seed": np.repeat(np.array(self.seeds), points),
            "episode": np.tile(self.episodes.numpy(), len(self.seeds)),
        }
        columns |= {
            name: values.cpu().numpy().reshape(-1) for name, values in self._curves().items()
        }
        return pandas.DataFrame(columns)

    def _curves(self) -> dict[str, Tensor]:
        """All tensors with a value for each seed and checkpoint, by name."""
        shape = (len(self.seeds), len(self.episodes))
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: x
            for name, x in tensors.items()
            if isinstance(x, Tensor) and tuple(x.shape) == shape
        }

    def __repr__(self) -> str:
        """One line, and the regret (mean and standard error) at powers of ten and at the end."""
        episodes = self.episodes.tolist()
        last = episodes[-1] if episodes else 0
        uncertified = int(self.uncertified[:, -1].sum()) if episodes else 0
        line = f"History: {len(self.seeds)} seeds, {last:,} episodes, played by {self.backend}"
        line += "" if self.finished else ", not finished"
        line += f", {uncertified:,} uncertified steps" if uncertified else ""
        shown = [i for i, t in enumerate(episodes) if i == len(episodes) - 1 or t in _POWERS_OF_TEN]
        rows = [
            [
                f"{episodes[i]:,}",
                *(str(Mean.of(x[:, i].cpu())) for x in (self.regret, self.realised_regret)),
            ]
            for i in shown
        ]
        return (
            "\n".join([line, markdown(["episode", "regret", "realised regret"], rows, left=())])
            if rows
            else line
        )

    def save(self, path: str | Path) -> None:
        """Write the history to one `.npz` file with a checksum, atomically; NumPy can read it.

        Raises:
            OSError: if the file cannot be written.
        """
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
        """Read a history that `save` wrote, also with another version of the package.

        Raises:
            ValueError: if the file is damaged, empty, or not a history.
        """
        payload = read_checked(path, "a history", any_version=True)
        with np.load(io.BytesIO(payload), allow_pickle=False) as file:
            plain = json.loads(str(file["plain"]))
            arrays: dict[str, Any] = {
                name: torch.from_numpy(file[name]) for name in file.files if name != "plain"
            }
        return cls(**arrays, **(plain | {"seeds": tuple(plain["seeds"])}))
