"""Several learners in the same game, on the same seeds, with paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_occ._support.choices import extra
from torch_occ._support.files import latex, markdown
from torch_occ.game.figures import regret_figure
from torch_occ.game.history import History, Mean, short_number
from torch_occ.game.learners import Learner
from torch_occ.game.losses import LossProcess
from torch_occ.game.simulate import simulate
from torch_occ.mdp.checks import check_that
from torch_occ.mdp.layered import LayeredMDP

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
        return regret_figure(self.histories, title=title)

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

    def __str__(self) -> str:
        return self.markdown()


def compare_learners(
    mdp: LayeredMDP,
    learners: Mapping[str, Learner],
    losses: LossProcess,
    episodes: int,
    seeds: Sequence[int] = tuple(range(8)),
    *,
    baseline: str | None = None,
    **options: Any,
) -> LearnerComparison:
    """Play every learner on the same seeds.

    Args:
        learners: by the name that tables and figures show.
        losses: the loss process that all of them play against.
        seeds: at least two, because intervals need two.
        baseline: the learner that the others are compared with; the first by default.
        options: further options of `simulate`: `checkpoints`, `callbacks`, `backend`, `progress`.

    Returns:
        The histories, with paired differences, a figure and tables.

    Raises:
        ValueError: if there are fewer than two learners or seeds, or if no learner has the name of
            the baseline.
    """
    fine, expected = isinstance(learners, Mapping), 'a dictionary, {"name": learner, ...}'
    check_that(fine, "learners", expected, type(learners).__name__, TypeError)
    if "save_to" in options:
        raise ValueError("save_to: a file holds one run; simulate each learner with its own file")
    names, seeds = list(learners), list(seeds)
    check_that(len(names) >= 2, "learners", "at least two to compare", names)
    check_that(len(seeds) >= 2, "seeds", "at least two, which intervals need", seeds)
    baseline = names[0] if baseline is None else baseline
    check_that(baseline in learners, "baseline", f"one of {names}", repr(baseline))
    histories = {
        name: simulate(mdp, learner, losses, episodes, seeds, **options)
        for name, learner in learners.items()
    }
    return LearnerComparison(histories, baseline)
