"""The step against other solvers, for experiments/benchmark.py: cvxpy and cvxpylayers.

All contestants do the same in turns. Work that is needed once is not timed: the problem is stated,
compiled and, where it is quick, solved a first time. Rivals differ in accuracy, so each row has the
residuals of q and of the gradient, computed by torch_occ.reference.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import util
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from matplotlib.figure import Figure
from torch import Tensor

import torch_occ as occ
from experiments import common
from torch_occ.reference import (
    ACCURATE_CLARABEL,
    ACCURATE_SCS,
    CvxpyLayer,
    Equations,
    Settings,
    atoms,
    gather,
    largest,
    spread,
    state_in_cvxpy,
)

T = TypeVar("T")
Shape = tuple[int, int, int]  # horizon, width, actions


#: With these tolerances and scaled inputs Moreau finds q to 1e-12; with its defaults, to 1e-5.
TIGHT_MOREAU = Settings(
    "tight Moreau",
    {"ipm_settings": dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-14)},
    solver="MOREAU",
    normalize=True,
)


@dataclass(frozen=True)
class Case:
    """A batch of steps with the paper's regularizer, at episode t of random losses."""

    shape: Shape
    batch: int
    seed: int
    t: float
    clock: Callable[[], float] = time.perf_counter

    @cached_property
    def mdp(self) -> occ.LayeredMDP:
        return occ.LayeredMDP.random(*self.shape, seed=self.seed)

    @cached_property
    def regularizer(self) -> occ.Regularizer:
        return occ.jin_luo(self.mdp)

    @cached_property
    def losses(self) -> tuple[Tensor, Tensor, Tensor]:
        """The direction of the gradient, and the cumulative losses at episodes t and t + 1."""
        shape = (1 + 2 * self.batch, self.mdp.num_states, self.mdp.num_actions)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.rand(shape, dtype=torch.float64, generator=generator)
        direction, mean, new = drawn.split([1, self.batch, self.batch])
        return 2 * direction[0] - 1, self.t * mean, self.t * mean + new

    def timed(self, function: Callable[[], T]) -> tuple[T, float]:
        """The result of a call, and its seconds."""
        start = self.clock()
        result = function()
        return result, self.clock() - start


@dataclass(frozen=True)
class Trial:
    """One timed run over the first `count` elements of a batch.

    A field is None if the contestant does not offer it.
    """

    count: int
    q: Tensor  # (count, S, A)
    gradient: Tensor | None  # of <direction, q> in the loss, (count, S, A)
    forward: float  # seconds for all of them
    backward: float | None
    warm: float | None  # the step of the next episode, started from q

    @property
    def total(self) -> float:
        return self.forward + (self.backward or 0.0)


class Contestant:
    """A solver. Subclasses write `prepare`, which returns the function that is timed."""

    label: ClassVar[str]
    package: ClassVar[str] = "torch_occ"
    #: A guess before the first measurement: seconds for one element at 84 pairs. Times grow like
    #: pairs ** growth.
    seconds: ClassVar[float] = 0.02
    growth: ClassVar[float] = 1.0
    accurate: ClassVar[bool] = False  # whether its gradients have many right digits
    whole: ClassVar[bool] = False  # whether batches are always run whole, whatever the budget

    def __init__(self) -> None:
        self.measured: tuple[int, float] = (84, self.seconds)

    @property
    def missing(self) -> str:
        """Why it cannot take part, or an empty string."""
        return "" if util.find_spec(self.package) else f"{self.package} is not installed"

    def predict(self, pairs: int) -> float:
        """Seconds for one element, from the largest problem measured so far."""
        base, seconds = self.measured
        return seconds * max(pairs / base, 1.0) ** self.growth

    def learn(self, pairs: int, trial: Trial) -> None:
        """Remember a measurement."""
        self.measured = (pairs, trial.total / trial.count)

    def prepare(self, case: Case) -> Callable[[int], Trial]:
        """Get ready for a case; the function returned runs its first `count` elements."""
        raise NotImplementedError


class TorchOcc(Contestant):
    """This package."""

    label = "torch_occ"
    whole = True

    def prepare(self, case: Case) -> Callable[[int], Trial]:
        step = occ.FTRLStep(case.mdp, case.regularizer)
        parameters = list(step.parameters())
        direction, losses, next_losses = case.losses

        def run(count: int) -> Trial:
            chosen = 0 if count == 1 else slice(count)
            loss = losses[chosen].clone().requires_grad_()
            q, forward = case.timed(lambda: step(loss, case.t))
            value = (direction * q).sum()
            found, backward = case.timed(lambda: torch.autograd.grad(value, [loss, *parameters]))
            start, later = q.detach(), next_losses[chosen]
            _, warm = case.timed(lambda: step(later, case.t + 1, warm_start=start))
            whole, gradient = (x.reshape(count, *direction.shape) for x in (start, found[0]))
            return Trial(count, whole, gradient, forward, backward, warm)

        return run


class Cvxpy(Contestant):
    """cvxpy with Clarabel at tight tolerances, one element at a time.

    It has no derivative and no warm start.
    """

    label = "cvxpy + Clarabel"
    package = "cvxpy"
    growth = 2.2

    def prepare(self, case: Case) -> Callable[[int], Trial]:
        weights = atoms(case.regularizer, case.t)
        problem, variable, parameters = state_in_cvxpy(case.mdp, list(weights), exact_powers=True)
        scale, losses = largest(weights), case.losses[1]
        tolerances = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-14)
        for parameter, weight in zip(parameters[1:], weights.values(), strict=True):
            parameter.value = (weight.detach() / scale).numpy()
        parameters[0].value = (gather(case.mdp, losses[0]) / scale).numpy()
        problem.get_problem_data("CLARABEL")  # compiles it; from now on only numbers change

        def solve(loss: Tensor) -> Tensor:
            parameters[0].value = (gather(case.mdp, loss) / scale).numpy()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Solution may be inaccurate", UserWarning)
                problem.solve(solver="CLARABEL", **tolerances)
            return spread(case.mdp, torch.as_tensor(variable.value))

        def run(count: int) -> Trial:
            q, forward = case.timed(lambda: torch.stack([solve(x) for x in losses[:count]]))
            return Trial(count, q, None, forward, None, None)

        return run


class Layers(Contestant):
    """cvxpylayers under some settings; no warm start."""

    settings: ClassVar[Settings]

    def prepare(self, case: Case) -> Callable[[int], Trial]:
        layer = CvxpyLayer(case.mdp, case.regularizer, self.settings)
        parameters, (direction, losses, _) = list(case.regularizer.parameters()), case.losses

        def run(count: int) -> Trial:
            loss = losses[:count].clone().requires_grad_()
            with warnings.catch_warnings():
                # NumPy warns about cvxpylayers, and diffcp about what the residuals show anyway.
                warnings.simplefilter("ignore")
                q, forward = case.timed(lambda: layer(loss, case.t))
                value, inputs = (direction * q).sum(), [loss, *parameters]
                found, backward = case.timed(lambda: torch.autograd.grad(value, inputs))
            return Trial(count, q.detach(), found[0], forward, backward, None)

        return run


class LayersScs(Layers):
    """The accurate settings with SCS."""

    label = "cvxpylayers + diffcp (SCS)"
    package, settings, accurate = "diffcp", ACCURATE_SCS, True
    seconds, growth = 0.8, 3.0  # a dense matrix over all variables of the cone program is factored


class LayersClarabel(Layers):
    """The accurate settings with Clarabel."""

    label = "cvxpylayers + diffcp (Clarabel)"
    package, settings, accurate = "diffcp", ACCURATE_CLARABEL, True
    seconds, growth = 0.8, 3.0


class LayersMoreau(Layers):
    """Moreau. Its gradients have few right digits even with tight tolerances; see the residual."""

    label = "cvxpylayers + Moreau"
    package, settings = "moreau", TIGHT_MOREAU
    growth = 2.0


CONTESTANTS: dict[str, type[Contestant]] = {
    "torch_occ": TorchOcc,
    "cvxpy": Cvxpy,
    "scs": LayersScs,
    "clarabel": LayersClarabel,
    "moreau": LayersMoreau,
}


# -- measuring ------------------------------------------------------------------------------------


@dataclass
class Row:
    """One contestant in one cell.

    Times are seconds for the whole batch. Ratios are multiples of torch_occ's time.
    """

    horizon: int
    width: int
    actions: int
    pairs: int
    batch: int
    contestant: str
    accurate: bool
    forward: float | None = None
    backward: float | None = None
    warm: float | None = None
    residual_q: float | None = None
    residual_gradient: float | None = None
    ratio_forward: float | None = None
    ratio_backward: float | None = None
    ratio_total: float | None = None
    ratio_warm: float | None = None
    measured: int = 0  # elements of the batch that were run; the times are scaled up from them
    repeats: int = 0
    note: str = ""

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.horizon, self.width, self.actions

    def cells(self) -> list[str]:
        """As printed."""
        scaled = "" if self.measured == self.batch else "~"
        times = (self.forward, self.backward, self.warm)
        residuals = (self.residual_q, self.residual_gradient)
        ratios = (self.ratio_forward, self.ratio_backward, self.ratio_total, self.ratio_warm)
        cells = [scaled + common.seconds(x) if x else "-" for x in times]
        cells += [f"{x:.0e}" if x is not None else "-" for x in residuals]
        cells += [multiple(x) for x in ratios]
        return [f"{self.shape}", str(self.batch), self.contestant, *cells, self.note]


def multiple(x: float | None) -> str:
    """A ratio with two digits or as an integer."""
    return "-" if not x else f"{x:.1f}" if x < 10 else f"{x:,.0f}"


HEADER = ["size", "batch", "", "forward", "backward", "warm", "KKT q", "KKT grad"]
HEADER += ["×fwd", "×bwd", "×both", "×warm", "note"]


@dataclass(frozen=True)
class Limits:
    """How carefully contestants are measured."""

    repeats: int
    budget: float  # seconds for one contestant in one cell
    patience: float  # seconds beyond which a contestant is skipped
    t: float = 1000.0
    seed: int = 0
    clock: Callable[[], float] = time.perf_counter


def measure_cell(
    limits: Limits, case: Case, contestants: list[Contestant], single: dict[str, Trial]
) -> list[Row]:
    """All contestants on one size and batch, in turns.

    `single` holds the trials on one element of this size.
    """
    rows, running, trials = {}, {}, {contestant.label: list[Trial]() for contestant in contestants}
    for contestant in contestants:
        size = (*case.shape, case.mdp.num_pairs, case.batch)
        row = Row(*size, contestant.label, contestant.accurate, note=contestant.missing)
        rows[contestant.label] = row
        expected = contestant.predict(case.mdp.num_pairs)
        if not row.note and expected > limits.patience:
            growth = f"by pairs^{contestant.growth:g}"
            row.note = f"skipped: a step would take {common.seconds(expected)}, {growth}"
        if row.note:
            continue
        count = (
            case.batch
            if contestant.whole
            else min(case.batch, max(1, int(limits.budget / expected)))
        )
        if count < case.batch:
            row.note = f"{count} of {case.batch} measured"
        if count == 1 and contestant.label in single:  # slow, and known already
            trials[contestant.label] = [single[contestant.label]]
        else:
            run = contestant.prepare(case)
            if expected < limits.budget / 10:
                run(1)
            running[contestant.label] = (run, count)

    for _ in range(limits.repeats):
        for contestant in contestants:
            done = trials[contestant.label]
            if (
                contestant.label in running
                and sum(trial.total for trial in done) * (1 + 1 / max(len(done), 1))
                <= limits.budget
            ):
                run, count = running[contestant.label]
                done.append(run(count))

    for contestant in contestants:
        if done := trials[contestant.label]:
            if done[-1].count == 1:
                single[contestant.label] = done[-1]
            contestant.learn(case.mdp.num_pairs, done[-1])
            _summarize(rows[contestant.label], case, done)
    ours = rows[contestants[0].label]
    for row in rows.values():
        _compare(row, ours)
    return list(rows.values())


def _summarize(row: Row, case: Case, trials: list[Trial]) -> None:
    row.measured, row.repeats = trials[0].count, len(trials)

    def median(times: list[float | None]) -> float | None:
        known = [x for x in times if x is not None]
        return statistics.median(known) * row.batch / row.measured if known else None

    row.forward = median([trial.forward for trial in trials])
    row.backward = median([trial.backward for trial in trials])
    row.warm = median([trial.warm for trial in trials])
    t, loss = torch.tensor(case.t, dtype=torch.float64), case.losses[1][0]
    judge = Equations(case.mdp, case.regularizer, loss, t)
    row.residual_q = judge.residual_of_q(trials[0].q[0])
    if trials[0].gradient is not None:
        if case.mdp.num_pairs <= 2000:
            direction, gradient = case.losses[0], trials[0].gradient[0]
            found = judge.residual_of_gradient(trials[0].q[0], direction, gradient)
            row.residual_gradient = found
        else:
            row.note = "; ".join(filter(None, [row.note, "gradient not judged: too large"]))


def _compare(row: Row, ours: Row) -> None:
    def ratio(theirs: float | None, own: float | None) -> float | None:
        return theirs / own if theirs and own else None

    row.ratio_forward, row.ratio_backward = (
        ratio(row.forward, ours.forward),
        ratio(row.backward, ours.backward),
    )
    if row.forward and row.backward and ours.forward and ours.backward:
        row.ratio_total = (row.forward + row.backward) / (ours.forward + ours.backward)
    row.ratio_warm = ratio(row.warm or row.forward, ours.warm)  # without a warm start: a cold one


def measure_rivals(
    names: tuple[str, ...],
    shapes: tuple[Shape, ...],
    batches: tuple[int, ...],
    limits: Limits,
    path: Path,
) -> list[Row]:
    """Every size and batch; the CSV grows with every cell."""
    contestants = [CONTESTANTS[name]() for name in ("torch_occ", *names)]
    rows: list[Row] = []
    for shape in shapes:
        single: dict[str, Trial] = {}
        for batch in batches:
            case = Case(shape, batch, limits.seed, limits.t, limits.clock)
            rows += measure_cell(limits, case, contestants, single)
            for row in rows[-len(contestants) :]:
                print("  ".join(cell for cell in row.cells() if cell not in ("", "-")))
            common.write_csv(path, [asdict(row) for row in rows])
    return rows


# -- reporting ------------------------------------------------------------------------------------


def summary(rows: list[Row]) -> str:
    """A step with its gradient, one line per size, for the README.

    The time of torch_occ, and how many times as long the others take.
    """
    names = list(dict.fromkeys(row.contestant for row in rows))
    batches = sorted({row.batch for row in rows})
    ends = dict.fromkeys((batches[0], batches[-1]))
    lines = []
    for shape in dict.fromkeys(row.shape for row in rows):
        line = [f"{shape}", ""]
        for batch in ends:
            cell = {
                row.contestant: row for row in rows if row.shape == shape and row.batch == batch
            }
            ours = cell[names[0]]
            line[1] = str(ours.pairs)
            line.append(common.seconds(((ours.forward or 0.0) + (ours.backward or 0.0)) / batch))
            line += [
                multiple(cell[name].ratio_total or cell[name].ratio_forward) for name in names[1:]
            ]
        lines.append(line)
    header = ["size", "pairs"]
    for batch in ends:
        header += [f"batch {batch}: {names[0]}, per step", *names[1:]]
    return common.table(header, lines)


def draw_rivals(rows: list[Row]) -> Figure:
    """Seconds per step, forward and backward together, over the batch; one panel per size."""
    shapes = list(dict.fromkeys(row.shape for row in rows))
    names = list(dict.fromkeys(row.contestant for row in rows if row.forward))
    figure = common.new_figure(3.4 * len(shapes) + 1.2, 4.4)
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    batches = sorted({row.batch for row in rows})
    for panel, shape in zip(panels, shapes, strict=True):
        for i, name in enumerate(names):
            here = [x for x in rows if (x.shape, x.contestant) == (shape, name) and x.forward]
            x = [row.batch for row in here]
            y = [((row.forward or 0) + (row.backward or 0)) / row.batch for row in here]
            label = name + ", no gradient" * (not any(row.backward for row in here))
            width = 2.4 if i == 0 else 1.4
            panel.plot(x, y, color=f"C{i}", linewidth=width, zorder=3 - (i > 0), label=label)
            faces = [f"C{i}" if row.measured == row.batch else "white" for row in here]
            panel.scatter(x, y, edgecolors=f"C{i}", c=faces, zorder=4)
        title = "horizon {}, width {}, {} actions".format(*shape)
        common.tidy(panel, xscale="log", yscale="log", xlabel="batch", title=title)
        panel.set_xticks(batches, [str(batch) for batch in batches], minor=False)
        panel.minorticks_off()
    panels[0].set_ylabel("seconds per step, forward + backward")
    common.legend_below(figure, panels[0])
    title = "One FTRL step and its gradient (hollow: scaled up from part of the batch)"
    figure.suptitle(title, fontsize=11)
    return figure
