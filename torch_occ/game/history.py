"""What runs leave: histories, means with intervals over seeds, and comparisons of learners."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.choices import extra, later
from torch_occ._support.files import latex, markdown, read_checked, write_checked
from torch_occ.mdp.checks import check_that
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.layers import running_total
from torch_occ.mdp.occupancy import optimal_policy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# -- Means over seeds, and Student's 95 % confidence intervals of them -----------------------------


class Band(NamedTuple):
    """A mean over seeds and its 95 % confidence interval."""

    mean: Tensor  # (C,)
    lower: Tensor  # (C,)
    upper: Tensor  # (C,)


def band(curves: Tensor) -> Band:
    """Mean over seeds and Student's 95 % interval, `(N, C)` -> `(C,)`; of width 0 for one seed."""
    mean, n = curves.mean(0), len(curves)
    half = student(n - 1) * curves.std(0) / math.sqrt(n) if n > 1 else 0.0
    return Band(mean, mean - half, mean + half)


class Mean(NamedTuple):
    """A mean over seeds with its standard error, which is NaN for one seed."""

    mean: float
    standard_error: float
    seeds: int

    @classmethod
    def of(cls, values: Tensor) -> Mean:
        """The mean of one value per seed, `(N,)`."""
        n = len(values)
        error = float(values.std()) / math.sqrt(n) if n > 1 else math.nan
        return cls(float(values.mean()), error, n)

    @property
    def interval(self) -> tuple[float, float]:
        """Student's 95 % confidence interval; NaN for one seed."""
        half = student(self.seeds - 1) * self.standard_error if self.seeds > 1 else math.nan
        return self.mean - half, self.mean + half

    def __str__(self) -> str:
        error = "" if self.seeds < 2 else f" ± {short_number(self.standard_error, 2)}"
        return short_number(self.mean) + error


def short_number(x: float, digits: int = 4) -> str:
    """A number with about `digits` significant digits, and separated thousands from 1,000 on."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.{digits}g}"


def student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution, correct to 0.2 %."""
    if degrees < 5:
        return {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445}[degrees]
    z, n = 1.959964, degrees
    correction = (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return z + correction + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)


# -- The comparator --------------------------------------------------------------------------------


def comparator(mdp: LayeredMDP, total_mean: Tensor) -> Tensor:
    """The smallest total expected loss of any policy.

    The result has the same bits for a seed alone and in any batch.

    Args:
        total_mean: the sum of the mean losses of all episodes, `(*batch, S, A)`.

    Returns:
        A tensor `(*batch,)`.
    """
    first = optimal_policy(mdp, total_mean, in_order=True).value[..., : mdp.layer_sizes[0]]
    return running_total(mdp.initial * first, -1)


# -- The result of a simulation: curves over checkpoints and seeds ---------------------------------


@dataclass(repr=False, kw_only=True)
class Curves:
    """What histories share: curves over C checkpoints for N seeds, their means, and files."""

    shown: ClassVar[tuple[str, ...]]  # the curves that are printed

    episodes: Tensor  # (C,)
    newton_steps: Tensor  # (N, C), mean per episode since the last checkpoint
    dual_residual: Tensor  # (N, C), largest since the last checkpoint
    flow_residual: Tensor  # (N, C), likewise
    uncertified: Tensor  # (N, C), episodes so far whose q could not be certified
    wall_time: Tensor  # (C,), seconds
    seeds: tuple[int, ...]
    backend: str
    finished: bool
    config: dict[str, Any]

    def final(self, curve: str | None = None) -> Mean:
        """The mean over seeds of a curve at its last checkpoint, with its standard error.

        Args:
            curve: the name of a curve; by default the first that is shown, the regret.

        Returns:
            `Mean(mean, standard_error, seeds)`; its `interval` is Student's 95 % confidence
            interval.

        Raises:
            ValueError: if there is no such curve, or no checkpoint was reached.
        """
        curve = self.shown[0] if curve is None else curve
        curves = self.curves
        check_that(curve in curves, "curve", f"one of {list(curves)}", repr(curve))
        if not len(self.episodes):
            raise ValueError("history: no checkpoint was reached, so no curve has a last point")
        return Mean.of(curves[curve][:, -1].cpu())

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
        columns |= {name: x.cpu().numpy().reshape(-1) for name, x in self.curves.items()}
        return pandas.DataFrame(columns)

    @property
    def curves(self) -> dict[str, Tensor]:
        """All curves `(N, C)` by name, as `torch.testing.assert_close` takes them."""
        shape, every = (len(self.seeds), len(self.episodes)), self._fields().items()
        return {name: x for name, x in every if isinstance(x, Tensor) and tuple(x.shape) == shape}

    def _fields(self) -> dict[str, Any]:
        every, shared = fields(self), len(fields(Curves))
        return {x.name: getattr(self, x.name) for x in (*every[shared:], *every[:shared])}

    def __repr__(self) -> str:
        """One line, and curves (mean and standard error) at powers of ten and at the end."""
        episodes = self.episodes.tolist()
        last = episodes[-1] if episodes else 0
        uncertified = int(self.uncertified[:, -1].sum()) if episodes else 0
        seeds = f"{len(self.seeds)} seed{'s' * (len(self.seeds) != 1)}"
        line = f"{type(self).__name__}: {seeds}, {last:,} episodes, played by {self.backend}"
        line += "" if self.finished else ", not finished"
        line += f", {uncertified:,} uncertified steps" if uncertified else ""
        curves = [getattr(self, name) for name in self.shown]
        rows = [
            [f"{t:,}", *(str(Mean.of(x[:, i].cpu())) for x in curves)]
            for i, t in enumerate(episodes)
            if i == len(episodes) - 1 or str(t).rstrip("0") == "1"
        ]
        if not rows:
            return line
        names = [name.replace("_", " ") for name in ("episode", *self.shown)]
        return f"{line}\n{markdown(names, rows, left=())}"

    def save(self, path: str | Path) -> None:
        """Write the history to one `.npz` file with a checksum, atomically; NumPy can read it.

        Raises:
            OSError: if the file cannot be written.
        """
        every = self._fields()
        plain = {name: x for name, x in every.items() if not isinstance(x, Tensor)}
        arrays: dict[str, Any] = {
            name: x.cpu().numpy() for name, x in every.items() if isinstance(x, Tensor)
        }
        buffer = io.BytesIO()
        np.savez_compressed(buffer, plain=np.array(json.dumps(plain)), **arrays)
        write_checked(path, "a history", buffer.getvalue())

    @classmethod
    def load(cls, path: str | Path) -> Self:
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


@dataclass(repr=False, kw_only=True)
class History(Curves):
    """Curves over C checkpoints for N seeds.

    The pseudo-regret compares expected losses, sum_{tau<=t} ⟨q_tau - q_opt, mean_tau⟩, where q_opt
    is the best fixed policy for the first t episodes. The realised regret has the losses that were
    suffered in place of ⟨q_tau, mean_tau⟩.

    q_opt is the best policy for each seed. Against an adaptive adversary the mean over seeds is
    therefore E max, while the paper has max E; `theory.Certificate` has both.
    """

    shown = ("regret", "realised_regret")

    regret: Tensor  # (N, C), pseudo-regret
    realised_regret: Tensor  # (N, C)
    comparator: Tensor  # (N, C), the total expected loss of the best fixed policy so far
    corruption: Tensor  # (N, C), spent so far
    cumulative_occupancy: Tensor  # (N, S, A), sum_t q_t
    total_mean: Tensor  # (N, S, A), sum_t mean_t
    last_q: Tensor  # (N, S, A)

    def plot(self, title: str = "") -> Figure:
        """Regret over the number of episodes, with 95 % bands, as a matplotlib figure.

        Save it by `figure.savefig(path)`.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        return later("game.figures").regret_figure(self, title=title)


@dataclass(frozen=True)
class LearnerComparison:
    """The histories of several learners that played the same game on the same seeds, by name.

    Differences are paired seed by seed, so that effects of a seed on all learners cancel. `print`
    shows the Markdown table.
    """

    histories: dict[str, History]
    baseline: str

    def final(self) -> dict[str, Mean]:
        """Mean over seeds and standard error of the final pseudo-regret, by learner."""
        return {name: history.final() for name, history in self.histories.items()}

    def differences(self) -> dict[str, Mean]:
        """Final pseudo-regret minus the baseline's, paired by seed, by learner."""
        reference = self.histories[self.baseline].regret[:, -1]
        return {
            name: Mean.of(history.regret[:, -1] - reference)
            for name, history in self.histories.items()
            if name != self.baseline
        }

    def markdown(self) -> str:
        """One row per learner: the final regret, and its difference from the baseline.

        The difference is paired by seed and has a 95 % interval.
        """
        return markdown(*self._table())

    def latex(self) -> str:
        """The same table for LaTeX, with the rules of the package booktabs."""
        return latex(*self._table())

    def plot(self, title: str = "") -> Figure:
        """Regret over the number of episodes, with 95 % bands; requires matplotlib."""
        return later("game.figures").regret_figure(self.histories, title=title)

    def to_dataframe(self) -> Any:
        """Every curve of every learner as a pandas DataFrame; requires pandas.

        Returns:
            One row per learner, seed and checkpoint; see `History.to_dataframe`.
        """
        with extra("dataframe", "to_dataframe needs pandas"):
            import pandas
        frames = {name: history.to_dataframe() for name, history in self.histories.items()}
        return pandas.concat(frames, names=["learner"]).reset_index(0).reset_index(drop=True)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        differences = self.differences()
        rows = []
        for name, regret in self.final().items():
            paired = "baseline"
            if name in differences:
                low, high = map(short_number, differences[name].interval)
                paired = f"{short_number(differences[name].mean)} [{low}, {high}]"
            uncertified = int(self.histories[name].uncertified[:, -1].sum())
            rows.append([name, str(regret), paired, str(uncertified)])
        return ["learner", "regret", f"minus {self.baseline} (95 %)", "uncertified steps"], rows

    __str__ = markdown
