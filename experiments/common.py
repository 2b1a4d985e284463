"""What the experiments share: files, tables, figures, games, fits of how regret grows, clocks."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

import torch_occ as occ
from torch_occ.game.figures import COLOURS as COLOURS
from torch_occ.game.figures import plot_references
from torch_occ.game.figures import plot_regret as plot_regret

# -- arguments ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """Which games are played, and how long."""

    episodes: int = 100_000
    """T"""
    seeds: int = 8
    """independent runs of each game"""
    seed: int = 1
    """of the MDP, the losses and the first run"""
    processes: int = 2
    """games played at the same time"""
    tensorboard: bool = True
    """write TensorBoard logs"""
    root: Path = Path("runs")
    """where the run's directory goes"""


@dataclass(frozen=True)
class RunsOnMDP(Runs):
    """The same, on a random MDP."""

    horizon: int = 3
    """L"""
    width: int = 3
    """states in each layer but the first"""
    actions: int = 3
    """A"""
    gap: float = 0.4
    """of every suboptimal action"""

    def problem(self) -> tuple[occ.LayeredMDP, Tensor]:
        """The MDP and mean losses with this gap."""
        mdp = occ.LayeredMDP.random(self.horizon, self.width, self.actions, seed=self.seed)
        return mdp, loss_with_gap(mdp, self.gap, self.seed)


# -- files ----------------------------------------------------------------------------------------


def begin(experiment: str, args: Any, seed: int = 0) -> Path:
    """A new directory `<root>/<experiment>__<seed>__<time>` with the arguments in `config.json`.

    From here on, torch uses one thread.
    """
    torch.set_num_threads(1)
    stamp = int(time.time())
    while True:
        directory: Path = args.root / f"{experiment}__{seed}__{stamp}"
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            stamp += 1
        else:
            write_text(directory / "config.json", json.dumps(asdict(args), indent=2, default=str))
            return directory


def write(path: Path, content: bytes) -> None:
    """A file that is complete or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """A text, and the end of its last line."""
    write(path, f"{text}\n".encode())


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One line per row, with a column for every key of the first row; nothing without rows."""
    if rows:
        text = StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write(path, text.getvalue().encode())


def write_figure(path: Path, figure: Figure) -> None:
    """A matplotlib figure as PNG."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=150, bbox_inches="tight", facecolor="white")
    write(path, content.getvalue())


def write_findings(directory: Path, shows: Iterable[str], not_shown: Iterable[str]) -> None:
    """Print what a run shows and what it does not show, and write it to `report.txt`."""
    lines = ["What this run shows", *(f"  + {line}" for line in shows)]
    lines += ["What it does not show", *(f"  - {line}" for line in not_shown)]
    write_text(directory / "report.txt", "\n".join(lines))
    print("\n".join(lines))


# -- words ----------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A Markdown table that reads well as plain text; columns in `left` are aligned there."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * (w + 2) if i in left else f"{'-' * (w + 1)}:" for i, w in enumerate(widths)]

    def line(cells: Sequence[str]) -> str:
        aligned = (
            x.ljust(w) if i in left else x.rjust(w)
            for i, (x, w) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join(aligned)} |"

    return "\n".join([line(header), f"|{'|'.join(rule)}|", *map(line, rows)])


def seconds(x: float) -> str:
    """A duration with a unit that suits it."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 300.0), ("s", 1.0), ("ms", 1e-3)):
        if x >= size:
            return f"{x / (60.0 if unit == 'min' else size):.3g} {unit}"  # minutes from five on
    return f"{x / 1e-6:.3g} µs"


def machine() -> str:
    """The machine and the versions, in one line."""
    model, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists():
        named = re.search(r"^model name\s*:\s*(.*)$", cpuinfo.read_text(), re.MULTILINE)
        model = named[1] if named else model
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{os.cpu_count()} cores of {model}, {device}, {versions}"


# -- playing --------------------------------------------------------------------------------------


def loss_with_gap(mdp: occ.LayeredMDP, gap: float, seed: int, shaping: float = 0.1) -> Tensor:
    """Mean losses `(S, A)` in which every suboptimal action has exactly this gap.

    In each state one action is cheaper by the gap. A random potential v(s) - E v(s') is added. It
    moves losses between layers and changes no gap, so it misleads a learner that does not plan
    ahead. With equal gaps, bounds can be worked out by hand.
    """
    generator = torch.Generator().manual_seed(seed)
    best = torch.randint(mdp.num_actions, (mdp.num_states, 1), generator=generator)
    potential = shaping * (2 * torch.rand(mdp.num_states, dtype=mdp.dtype, generator=generator) - 1)
    suboptimal = (torch.arange(mdp.num_actions) != best).to(mdp.dtype)
    return 0.5 - gap / 2 + gap * suboptimal + occ.mdp.flow_adjoint(mdp, potential)


def random_means(mdp: occ.LayeredMDP, seed: int) -> Tensor:
    """Mean losses `(S, A)`, uniform on [0, 1]."""
    shape, generator = (mdp.num_states, mdp.num_actions), torch.Generator().manual_seed(seed)
    return torch.rand(shape, dtype=mdp.dtype, generator=generator)


@dataclass(frozen=True)
class Game:
    """One learner in one environment."""

    environment: str
    name: str
    learner: occ.Learner
    losses: occ.LossProcess
    pictures: bool = False  # heat maps of q in TensorBoard; drawing them takes longer than playing
    logged: bool = True  # in TensorBoard, whose colours repeat after seven games
    mdp: occ.LayeredMDP | None = None  # the true one, if the learner's is blind


Histories = dict[tuple[str, str], occ.History]  # by environment and learner


def play_all(games: Sequence[Game], runs: Runs, directory: Path) -> Histories:
    """Play all games, several at a time.

    A game leaves its history, and its log if it has one, in `<directory>/<environment>/<learner>/`.
    """
    found: Histories = {}
    width = max(len(game.environment) + len(game.name) for game in games) + 2

    def done(game: Game, history: occ.History) -> None:
        found[game.environment, game.name] = history
        label = f"{game.environment}, {game.name}".ljust(width)
        took = seconds(float(history.wall_time[-1]))
        with tqdm.external_write_mode():
            print(f"  {label}  regret {history.regret[:, -1].mean():9.1f}   {took:>7}", flush=True)

    size = f"{len(games)} games of {runs.episodes:,} episodes, {runs.seeds} seeds each"
    print(f"{size}; {machine()}", flush=True)
    if runs.processes < 2:
        for game in games:
            done(game, play(game, runs, directory))
    else:
        # Fresh interpreters: a forked one would inherit torch's locked threads.
        spawn = multiprocessing.get_context("spawn")
        bar = tqdm(total=len(games), unit="game", mininterval=0.5, miniters=0, disable=None)
        with bar, ProcessPoolExecutor(runs.processes, mp_context=spawn) as pool:
            futures = {pool.submit(play, game, runs, directory): game for game in games}
            while futures:
                finished = wait(futures, timeout=1.0, return_when=FIRST_COMPLETED).done
                for future in finished:
                    done(futures.pop(future), future.result())
                bar.update(len(finished))
    return {(game.environment, game.name): found[game.environment, game.name] for game in games}


def play(game: Game, runs: Runs, directory: Path) -> occ.History:
    """Play one game on one thread."""
    torch.set_num_threads(1)
    place = directory / slug(game.environment) / slug(game.name)
    board = occ.TensorBoard(place, images_per_decade=int(game.pictures))
    history = occ.simulate(
        game.learner.mdp if game.mdp is None else game.mdp,
        game.learner,
        game.losses,
        runs.episodes,
        range(runs.seed, runs.seed + runs.seeds),
        callbacks=[board] if runs.tensorboard and game.logged else [],
        config={"environment": game.environment, "learner": game.name},
    )
    history.save(place / "history.npz")
    return history


def slug(name: str) -> str:
    """A name as part of a path."""
    return re.sub(r"[^A-Za-z0-9.=]+", "-", name.replace("β", "beta").replace(" = ", "=")).strip("-")


def final_regret(
    learner: occ.Learner, losses: occ.LossProcess, episodes: int, seeds: range
) -> Tensor:
    """The regret of every seed after the last episode, `(N,)`."""
    history = occ.simulate(learner.mdp, learner, losses, episodes, seeds, checkpoints=[episodes])
    return history.regret[:, -1]


# -- how fast does regret grow? -------------------------------------------------------------------
# A curve is averaged over seeds first and fitted afterwards. The intervals resample the seeds: they
# say how far another set of seeds could have moved the fit. They do not say whether the model is
# right, nor what happens after the last episode.


class Fit(NamedTuple):
    """A number fitted to the mean over seeds, with its 95 % percentile interval.

    All three are NaN where the fit does not exist.
    """

    value: float
    lower: float
    upper: float

    @property
    def exists(self) -> bool:
        return self.value == self.value

    def text(self, digits: int = 2) -> str:
        """`0.51 [0.48, 0.55]`, or a dash."""
        value, lower, upper = (f"{x:,.{digits}f}" for x in self)
        return f"{value} [{lower}, {upper}]" if self.exists else "-"

    def row(self, name: str) -> dict[str, float]:
        """Three columns of a CSV file."""
        return {name: self.value, f"{name}_lower": self.lower, f"{name}_upper": self.upper}


class Growth(NamedTuple):
    """How a regret curve grows late in the run."""

    final: Fit  # regret after the last episode
    exponent: Fit  # slope of log regret over log T: 0 is bounded, 1/2 is sqrt T, 1 is linear
    per_log: Fit  # slope of regret over log T
    log_share: float  # share of resamples that a + b log T fits better than a + b sqrt T

    def cells(self) -> list[str]:
        """A line of a table."""
        fits = [self.final.text(1), self.exponent.text(), self.per_log.text(1)]
        return [*fits, f"{self.log_share:.0%}"]

    def row(self) -> dict[str, float]:
        """A line of a CSV file."""
        fits = self.final.row("final") | self.exponent.row("exponent") | self.per_log.row("per_log")
        return fits | {"log_share": self.log_share}


Fits = dict[tuple[str, str], Growth]  # by environment and learner


def fit_all(histories: Histories, path: Path, fraction: float = 0.1) -> Fits:
    """The growth of all games, which is written as CSV."""
    fits = {key: growth(x.episodes, x.regret, fraction) for key, x in histories.items()}
    rows = [{"environment": x, "learner": y} | fit.row() for (x, y), fit in fits.items()]
    write_csv(path, rows)
    return fits


def growth_table(fits: Fits) -> str:
    """One line per game."""
    header = ["environment", "learner", "regret at T", "d log R / d log T", "d R / d log T"]
    cells = [[*key, *fit.cells()] for key, fit in fits.items()]
    return table([*header, "log T fits better"], cells, left=(0, 1))


def growth(
    episodes: Tensor, regret: Tensor, fraction: float = 0.1, resamples: int = 1000
) -> Growth:
    """All fits of one run, on the checkpoints from `fraction` of the last episode on."""
    t, curves = late(episodes, regret, fraction)
    share = float(fits_log_better(t, resampled_means(curves, resamples)).mean())
    final, exponent, per_log = (
        bootstrap(statistic, t, curves, resamples) for statistic in (last, power_slope, log_slope)
    )
    return Growth(final, exponent, per_log, share)


def slope(x: Tensor, y: Tensor) -> Tensor:
    """The least-squares slope of y `(*batch, C)` over x `(C,)`, with an intercept."""
    centred = x - x.mean()
    return (y * centred).sum(-1) / (centred**2).sum()


def power_slope(x: Tensor, y: Tensor) -> Tensor:
    """The slope of log y over log x; NaN for curves that are not positive."""
    return slope(x.log(), y.where((y > 0).all(-1, keepdim=True), torch.nan).log())


def log_slope(x: Tensor, y: Tensor) -> Tensor:
    """The slope of y over log x: what one more e-fold of episodes costs."""
    return slope(x.log(), y)


def last(x: Tensor, y: Tensor) -> Tensor:
    """The last point."""
    return y[..., -1]


def fits_log_better(x: Tensor, y: Tensor) -> Tensor:
    """1 where a + b log x leaves a smaller sum of squares than a + b sqrt x, else 0."""

    def residual(x: Tensor) -> Tensor:
        line = y.mean(-1, keepdim=True) + slope(x, y).unsqueeze(-1) * (x - x.mean())
        return ((y - line) ** 2).sum(-1)

    return (residual(x.log()) < residual(x.sqrt())).to(y.dtype)


def late(episodes: Tensor, regret: Tensor, fraction: float = 0.1) -> tuple[Tensor, Tensor]:
    """The checkpoints from `fraction` times the last episode on, in float64.

    `(C,)`, `(N, C)` -> `(c,)`, `(N, c)`.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"fraction: expected a number in [0, 1), got {fraction}")
    chosen = episodes >= fraction * episodes[-1]
    if int(chosen.sum()) < 3:
        raise ValueError(
            f"a fit needs three checkpoints, but only {int(chosen.sum())} "
            f"are later than {fraction:g} of the run"
        )
    return episodes[chosen].double(), regret[:, chosen].double()


def resampled_means(regret: Tensor, resamples: int = 1000, seed: int = 0) -> Tensor:
    """Mean curves of bootstrap samples of the seeds: `(N, C)` -> `(resamples, C)`.

    The same seed gives the same samples.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(regret), (resamples, len(regret)), generator=generator)
    weights = torch.zeros(resamples, len(regret), dtype=regret.dtype).scatter_add_(
        1, chosen, torch.ones_like(chosen, dtype=regret.dtype)
    )
    return weights @ regret / len(regret)


def bootstrap(
    statistic: Callable[[Tensor, Tensor], Tensor], x: Tensor, curves: Tensor, resamples: int = 1000
) -> Fit:
    """A statistic of the mean curve, `(C,)` and `(N, C)`, with its 95 % interval.

    NaN if any resample has none.
    """
    found = statistic(x, resampled_means(curves, resamples))
    if bool(found.isnan().any()):
        return Fit(torch.nan, torch.nan, torch.nan)
    lower, upper = found.quantile(torch.tensor([0.025, 0.975], dtype=found.dtype)).tolist()
    return Fit(float(statistic(x, curves.mean(0, keepdim=True))), lower, upper)


class Band(NamedTuple):
    """A curve with its 95 % band, `(C,)` each."""

    value: Tensor
    lower: Tensor
    upper: Tensor


def band(curves: Tensor) -> Band:
    """The mean over seeds with Student's interval, `(N, C)`; without width for one seed."""
    from scipy.stats import t

    mean, n = curves.mean(0), len(curves)
    half = t.ppf(0.975, n - 1) * curves.std(0) / n**0.5 if n > 1 else torch.zeros_like(mean)
    return Band(mean, mean - half, mean + half)


def ratio_band(regret: Tensor, reference: Tensor, resamples: int = 1000) -> Band:
    """The ratio of two mean regret curves, `(N, C)` each, with its bootstrap band.

    Both are resampled together, seed by seed: runs with the same seed share their random numbers.
    NaN where the reference is not positive in every resample.
    """
    above, below = (resampled_means(x, resamples) for x in (regret, reference))
    value = regret.mean(0) / reference.mean(0)
    levels = torch.tensor([0.025, 0.975], dtype=value.dtype)
    lower, upper = (above / below).quantile(levels, dim=0)
    exists = (below > 0).all(0) & (reference.mean(0) > 0)
    return Band(*(x.where(exists, torch.nan) for x in (value, lower, upper)))


# -- drawing --------------------------------------------------------------------------------------


def new_figure(width: float, height: float) -> Any:
    """A figure whose parts do not overlap."""
    return Figure(figsize=(width, height), layout="constrained")


def tidy(axes: Any, **settings: Any) -> None:
    """Labels, scales and limits; a faint grid, and only the spines that carry numbers."""
    axes.set(**settings)
    axes.grid(visible=True, which="major", color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Any, axes: Any, columns: int = 5) -> None:
    """One legend for all panels, below the figure."""
    handles, labels = axes.get_legend_handles_labels()
    columns = min(columns, len(labels))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def colours(histories: Histories) -> dict[str, str]:
    """The colour of every learner. A colour never means anything else."""
    names = dict.fromkeys(name for _, name in histories)
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}


def fill_panels(
    figure: Any, panels: Any, histories: Histories, environments: Sequence[str], anchor: str
) -> None:
    """Regret over episodes on doubly logarithmic axes, one panel per environment.

    The references log T and sqrt T start on the curve of the learner `anchor`, at a tenth of T.
    """
    for axes, environment in zip(panels, environments, strict=True):
        axes.set(xscale="log", yscale="log")
        top = 0.0
        for name, colour in colours(histories).items():
            history = histories[environment, name]
            plot_regret(axes, history, label=name, colour=colour)
            axes.lines[-1].set_linewidth(2.4 if name == anchor else 1.3)
            top = max(top, float(history.regret.mean(0).max()))
        history = histories[environment, anchor]
        t, mean = history.episodes, history.regret.mean(0)
        start, end = int((t < t[-1] / 10).sum()), float(t[-1])
        bottom = float(mean.where((t >= 3) & (mean > 0), torch.inf).min())
        if float(mean[start]) > 0:
            plot_references(axes, float(t[start]), float(mean[start]), end)
        limits = {"xlim": (3, end), "ylim": (min(bottom, top / 30) / 2, 2 * top)}
        tidy(axes, title=environment, xlabel="episodes T", ylabel="pseudo-regret", **limits)
    legend_below(figure, panels[0])


# -- clocks ---------------------------------------------------------------------------------------


def in_turns(
    contestants: Mapping[str, Callable[[], Any]],
    repeats: int,
    budget: float = float("inf"),
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Seconds of each contestant's quickest call.

    All contestants are called once before, and that does not count. Then they take turns, so that
    a busy machine disturbs all of them alike. After two turns the budget, in seconds, may end it.
    """
    for function in contestants.values():
        function()
    quickest = dict.fromkeys(contestants, float("inf"))
    begun = time.perf_counter()
    for turn in range(repeats):
        if turn >= 2 and time.perf_counter() - begun > budget:
            break
        for name, function in contestants.items():
            start = clock()
            function()
            quickest[name] = min(quickest[name], clock() - start)
    return quickest
