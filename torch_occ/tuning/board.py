"""A tuning in TensorBoard."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_occ._support.extras import summary_writer

if TYPE_CHECKING:
    from torch_occ.tuning.tuner import Tuner


class TuningBoard:
    """Writes `meta/*` for TensorBoard; steps are those of the optimizer.

    If writing fails, there is a warning, and the tuning continues without TensorBoard.
    """

    def __init__(self, directory: str | Path, tuner: Tuner) -> None:
        self.writer: Any = summary_writer(directory, purge_step=len(tuner.values))

    def write(self, tuner: Tuner) -> None:
        """Log the last step."""
        if self.writer is None:
            return
        try:
            self._write(tuner)
        except OSError as error:
            self.writer = None
            message = f"directory: {error}; the tuning goes on without TensorBoard"
            warnings.warn(message, stacklevel=3)

    def _write(self, tuner: Tuner) -> None:
        step = len(tuner.values) - 1
        best = int(tuner.best_values.argmin())
        values = {
            "meta/objective": float(tuner.values[-1][best]),
            "meta/best": float(tuner.best_values[best]),
        }
        values |= {f"meta/objective_of_start/{i}": float(x) for i, x in enumerate(tuner.values[-1])}
        for name, x in tuner.space.tensors(tuner.path[-1][best]).items():
            if x.dim():  # a curve for every number would be too many
                self.writer.add_histogram(f"meta/{name}", x, step)
                ends = {"least": x.min(), "mean": x.mean(), "largest": x.max()}
                values |= {f"meta/{name}/{end}": float(y) for end, y in ends.items()}
            else:
                values[f"meta/{name}"] = float(x)
        values |= {f"meta/regret/{name}": float(x[best]) for name, x in tuner.best_regrets.items()}
        values["meta/gradient_norm"] = float(tuner.gradient_norm[best])
        values["meta/failures"] = float(tuner.failures[-1].sum())
        values["meta/at_bounds"] = float(len(tuner.space.at_bounds(tuner.best_u[best])))
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, step)

    def close(self, tuner: Tuner) -> None:
        """Log the result, and close the file."""
        if self.writer is None:
            return
        try:
            self._close(tuner)
        except OSError as error:
            warnings.warn(f"directory: {error}; the result is not in TensorBoard", stacklevel=3)

    def _close(self, tuner: Tuner) -> None:
        if bool(tuner.best_values.isfinite().any()):
            self.writer.add_text(
                "meta/result", "```\n" + str(tuner.result()) + "\n```", len(tuner.values) - 1
            )
        self.writer.close()
