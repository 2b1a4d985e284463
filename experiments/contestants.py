"""The step against other solvers, for experiments/benchmark.py: cvxpy and cvxpylayers.

All contestants do the same in turns. Work that is needed once is not timed: the problem is stated,
compiled and, where it is quick, solved a first time. Rivals differ in accuracy, so each row has the
residuals of q and of the gradient, computed by torch_occ.reference.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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
    largest,
    on_pairs,
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


class Trial(NamedTuple):
    """One timed run over the first elements of a batch.

    A field is None if the contestant does not offer it.
    """

    elements: int
    q: Tensor  # (elements, S, A)
    gradient: Tensor | None  # of <direction, q> in the loss, (elements, S, A)
    forward: float  # seconds for all of them
    backward: float | None
    warm: float | None  # the step of the next episode, started from q

    @property
    def total(self) -> float:
        return self.forward + (self.backward or 0.0)


Run = Callable[[int], Trial]  # the first elements of a case


def torch_occ(case: Case) -> Run:
    """This package."""
    step = occ.FTRLStep(case.mdp, case.regularizer)
    parameters, (direction, losses, next_losses) = list(step.parameters()), case.losses

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


def cvxpy(case: Case) -> Run:
    """cvxpy with Clarabel at tight tolerances, one element at a time.

    It has no derivative and no warm start.
    """
    weights = atoms(case.regularizer, case.t)
    problem, variable, parameters = state_in_cvxpy(case.mdp, list(weights), exact_powers=True)
    scale, losses = largest(weights), case.losses[1]
    tolerances = dict.fromkeys(("tol_gap_abs", "tol_gap_rel", "tol_feas"), 1e-14)
    for parameter, weight in zip(parameters[1:], weights.values(), strict=True):
        parameter.value = (weight.detach() / scale).numpy()
    parameters[0].value = (on_pairs(case.mdp, losses[0]) / scale).numpy()
    problem.get_problem_data("CLARABEL")  # compiles it; from now on only numbers change

    def solve(loss: Tensor) -> Tensor:
        parameters[0].value = (on_pairs(case.mdp, loss) / scale).numpy()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Solution may be inaccurate", UserWarning)
            problem.solve(solver="CLARABEL", **tolerances)
        return spread(case.mdp, torch.as_tensor(variable.value))

    def run(count: int) -> Trial:
        q, forward = case.timed(lambda: torch.stack([solve(x) for x in losses[:count]]))
        return Trial(count, q, None, forward, None, None)

    return run


def layers(settings: Settings, case: Case) -> Run:
    """cvxpylayers under some settings; no warm start."""
    layer = CvxpyLayer(case.mdp, case.regularizer, settings)
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


class Contestant(NamedTuple):
    """A solver."""

    label: str
    package: str
    prepare: Callable[[Case], Run]  # its result is timed
    seconds: float  # for one element at 84 pairs: a guess before the first measurement
    growth: float  # times grow like pairs ** growth


def _layers(name: str, package: str, settings: Settings, *guess: float) -> Contestant:
    return Contestant(f"cvxpylayers + {name}", package, partial(layers, settings), *guess)


#: diffcp factors a dense matrix over all variables of the cone program. The gradients of Moreau
#: have few right digits even with tight tolerances; see the residual.
CONTESTANTS = {
    "torch_occ": Contestant("torch_occ", "torch_occ", torch_occ, 1e-6, 1.0),
    "cvxpy": Contestant("cvxpy + Clarabel", "cvxpy", cvxpy, 0.02, 2.2),
    "scs": _layers("diffcp (SCS)", "diffcp", ACCURATE_SCS, 0.8, 3.0),
    "clarabel": _layers("diffcp (Clarabel)", "diffcp", ACCURATE_CLARABEL, 0.8, 3.0),
    "moreau": _layers("Moreau", "moreau", TIGHT_MOREAU, 0.02, 2.0),
}


# -- measuring ------------------------------------------------------------------------------------

Row = dict[str, Any]  # times are seconds for the whole batch, ratios multiples of torch_occ's time
TIMES, RESIDUALS = ("forward", "backward", "warm"), ("residual_q", "residual_gradient")
RATIOS = ("ratio_forward", "ratio_backward", "ratio_total", "ratio_warm")
HEADER = ["size", "batch", "", "forward", "backward", "warm", "KKT q", "KKT grad"]
HEADER += ["×fwd", "×bwd", "×both", "×warm", "note"]


class Limits(NamedTuple):
    """How carefully contestants are measured."""

    repeats: int
    budget: float  # seconds for one contestant in one cell; a longer batch is measured in part
    patience: float  # seconds of one step beyond which a contestant is skipped


def measure_cell(
    limits: Limits, case: Case, contestants: list[Contestant], known: dict[str, tuple[int, float]]
) -> list[Row]:
    """All contestants on one size and batch, in turns.

    `known` has the pairs and the seconds of each contestant's last measurement, for one element.
    """
    rows, running, trials = {}, {}, {x.label: list[Trial]() for x in contestants}
    pairs = case.mdp.num_pairs
    for contestant in contestants:
        base, took = known.get(contestant.label, (84, contestant.seconds))
        expected = took * max(pairs / base, 1.0) ** contestant.growth
        count, note = min(case.batch, max(1, int(limits.budget / expected))), ""
        if not util.find_spec(contestant.package):
            note = f"{contestant.package} is not installed"
        elif expected > limits.patience:
            note = f"skipped: a step would take {common.seconds(expected)}"
        else:
            note = "" if count == case.batch else f"{count} of {case.batch} measured"
            running[contestant.label] = (run := contestant.prepare(case)), count
            if expected < limits.budget / 10:
                run(1)
        row: Row = dict(zip(("horizon", "width", "actions"), case.shape, strict=True))
        row |= {"pairs": pairs, "batch": case.batch, "contestant": contestant.label, "note": note}
        rows[contestant.label] = row | dict.fromkeys((*TIMES, "total", *RESIDUALS, *RATIOS))
    for _ in range(limits.repeats):
        for label, (run, count) in running.items():
            spent = sum(trial.total for trial in trials[label])
            if spent * (1 + 1 / max(len(trials[label]), 1)) <= limits.budget:
                trials[label].append(run(count))
    for label, done in trials.items():
        if done:
            known[label] = pairs, done[-1].total / done[-1].elements
            rows[label] |= _summarize(case, done)
    ours = rows[contestants[0].label]
    for row in rows.values():
        # Without a warm start, the cold one counts.
        theirs = (row["forward"], row["backward"], row["total"], row["warm"] or row["forward"])
        own = (ours["forward"], ours["backward"], ours["total"], ours["warm"])
        for name, x, y in zip(RATIOS, theirs, own, strict=True):
            row[name] = x / y if x and y else None
    return list(rows.values())


def _summarize(case: Case, trials: list[Trial]) -> Row:
    """Medians, scaled up to the whole batch, and the residuals of the first element."""
    first = trials[0]
    row: Row = {"measured": first.elements, "repeats": len(trials)}
    for name in TIMES:
        found = [getattr(trial, name) for trial in trials]
        row[name] = statistics.median(found) * case.batch / first.elements if found[0] else None
    row["total"] = row["forward"] + row["backward"] if row["backward"] else None
    t, (direction, losses, _) = torch.tensor(case.t, dtype=torch.float64), case.losses
    judge = Equations(case.mdp, case.regularizer, losses[0], t)
    row["residual_q"] = judge.residual_of_q(first.q[0])
    if first.gradient is not None and case.mdp.num_pairs <= 2000:  # larger ones are not judged
        residual = judge.residual_of_gradient(first.q[0], direction, first.gradient[0])
        row["residual_gradient"] = residual
    return row


def measure_rivals(
    names: tuple[str, ...], cases: Iterable[Case], limits: Limits, path: Path
) -> list[Row]:
    """All cells; the CSV grows with each of them."""
    contestants = [CONTESTANTS[name] for name in ("torch_occ", *names)]
    rows, known = list[Row](), dict[str, tuple[int, float]]()
    for case in cases:
        cell = measure_cell(limits, case, contestants, known)
        rows += cell
        for row in cell:
            print("  ".join(x for x in cells(row) if x not in ("", "-")))
        common.write_csv(path, rows)
    return rows


def cells(row: Row) -> list[str]:
    """As printed; ~ marks times that are scaled up from part of the batch."""

    def multiple(x: float | None) -> str:
        return "-" if not x else f"{x:.1f}" if x < 10 else f"{x:,.0f}"

    scaled = "" if row.get("measured") == row["batch"] else "~"
    line = [f"({row['horizon']}, {row['width']}, {row['actions']})", str(row["batch"])]
    line += [row["contestant"]]
    line += [scaled + common.seconds(row[name]) if row[name] else "-" for name in TIMES]
    line += [f"{row[name]:.0e}" if row[name] is not None else "-" for name in RESIDUALS]
    return [*line, *(multiple(row[name]) for name in RATIOS), row["note"]]


def draw_rivals(rows: list[Row]) -> Figure:
    """Seconds per step, forward and backward together, over the batch; one panel per size."""
    shapes = list(dict.fromkeys((x["horizon"], x["width"], x["actions"]) for x in rows))
    names = list(dict.fromkeys(row["contestant"] for row in rows if row["forward"]))
    figure = common.new_figure(3.4 * len(shapes) + 1.2, 4.4)
    panels = figure.subplots(1, len(shapes), sharey=True, squeeze=False)[0]
    batches = sorted({row["batch"] for row in rows})
    for panel, shape in zip(panels, shapes, strict=True):
        here = [x for x in rows if (x["horizon"], x["width"], x["actions"]) == shape]
        for i, name in enumerate(names):
            mine = [row for row in here if row["contestant"] == name and row["forward"]]
            x = [row["batch"] for row in mine]
            y = [(row["total"] or row["forward"]) / row["batch"] for row in mine]
            label = name + ", no gradient" * (not any(row["backward"] for row in mine))
            panel.plot(x, y, color=f"C{i}", linewidth=1.4 + (i == 0), label=label)
            faces = [f"C{i}" if row["measured"] == row["batch"] else "white" for row in mine]
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
