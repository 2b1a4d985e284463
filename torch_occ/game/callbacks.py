"""Callbacks: they watch a simulation. Derive from `Callback` and override the hooks you need."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_occ._support.choices import extra, progress_bar, summary_writer
from torch_occ._support.files import markdown, write_atomically
from torch_occ.game.estimators import Estimator
from torch_occ.game.figures import occupancy_figure, pixels, regret_figure
from torch_occ.game.history import band
from torch_occ.game.learners import Learner
from torch_occ.game.losses import LossProcess
from torch_occ.mdp.occupancy import occupancy, optimal_policy, policy_of
from torch_occ.regularizers.base import Regularizer, Scaled, Sum
from torch_occ.regularizers.parameters import Parametrized
from torch_occ.regularizers.schedules import Schedule
from torch_occ.regularizers.terms import Factor

if TYPE_CHECKING:
    from torch_occ.game.history import History
    from torch_occ.game.simulate import Simulation


class Callback:
    """The base class, whose hooks do nothing; they are listed in the order of the calls.

    An OSError in `on_start` is raised. An OSError in a later hook does not end the run: the
    callback is dropped with a warning. Every other exception ends the run.
    """

    def on_start(self, run: Simulation) -> None:
        """Called before the first episode, or before the first one after a resume."""

    def on_checkpoint(self, run: Simulation) -> None:
        """Called after the curves have got a new point."""

    def on_chunk(self, run: Simulation) -> None:
        """Called at the end of each chunk, every few hundred episodes."""

    def on_end(self, run: Simulation, history: History) -> None:
        """Called after the last episode, or when the run is interrupted."""


def tell(callbacks: list[Callback], hook: str, *arguments: Any) -> None:
    """Call a hook of every callback; drop a callback with an OSError, and warn."""
    for callback in tuple(callbacks):
        try:
            getattr(callback, hook)(*arguments)
        except OSError as error:
            callbacks[:] = [other for other in callbacks if other is not callback]
            warnings.warn(
                f"{type(callback).__name__}: {error}; the run goes on without this callback",
                stacklevel=3,
            )


class ProgressBar(Callback):
    """Episodes done, episodes per second and time left, on standard error, after some seconds."""

    def __init__(self, label: str = "", *, after: float = 0.0) -> None:
        self.label, self.after = label, after

    def on_start(self, run: Simulation) -> None:
        self.bar = progress_bar(run.episodes, run.t, "ep", self.label, self.after)

    def on_chunk(self, run: Simulation) -> None:
        self.bar.update(run.t - self.bar.n)

    def on_end(self, run: Simulation, history: History) -> None:
        self.bar.close()


#: The tags of a band: its mean, and its ends.
_REGRET = ["Regret/mean", "Regret/mean_lower", "Regret/mean_upper"]
_REALISED = ["Regret/realised_mean", "Regret/realised_mean_lower", "Regret/realised_mean_upper"]

#: The curves whose last value the HParams dashboard shows.
_METRICS = [*_REGRET, _REALISED[0], "policy/distance_to_optimal", "solver/uncertified"]

#: Charts of the Custom Scalars dashboard.
_LAYOUT = {
    "regret": {
        "pseudo-regret: mean and 95 % band": ["Margin", _REGRET],
        "realised regret: mean and 95 % band": ["Margin", _REALISED],
        "pseudo-regret over log t": ["Multiline", ["Regret/over_log_T"]],
        "pseudo-regret over sqrt t": ["Multiline", ["Regret/over_sqrt_T"]],
    },
    "policy": {"distance to optimal": ["Multiline", ["policy/distance_to_optimal"]]},
    "solver": {"residuals": ["Multiline", ["solver/dual_residual", "solver/flow_residual"]]},
}


class TensorBoard(Callback):
    """Writes curves, images and the configuration of a run for TensorBoard; steps are episodes.

    docs/results.md lists the tags. If writing fails during a run, the callback is dropped with a
    warning, and the run continues.

    Nothing is written between checkpoints. When a run is resumed, points after the episode at which
    it continues are purged. A new directory also gets the earlier part of the regret and solver
    curves.

    Args:
        directory: where the event file goes, one directory per run; it is created if missing.
        images_per_decade: heat maps of q for every tenfold of episodes, besides the last; 0 for
            none.
    """

    def __init__(self, directory: str | Path, *, images_per_decade: int = 1) -> None:
        self.directory, self.images_per_decade = Path(directory), images_per_decade

    def on_start(self, run: Simulation) -> None:
        try:
            write_atomically(self.directory / "events", lambda _: None, rehearse=True)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            message = f"TensorBoard cannot write here ({reason}); name another directory"
            raise OSError(error.errno, message, str(self.directory)) from error
        with extra("experiments", "the TensorBoard callback needs tensorboard and matplotlib"):
            import matplotlib  # noqa: F401  (fail here if it is missing, not at the first image)

        self.begun = run.t
        self.known = run.t > 0 and any(self.directory.glob("events.out.tfevents.*"))
        self.next_image, self.monitored = run.t + 1.0, run.t if self.known else 0
        # A new run replaces what the directory holds; a resumed run replaces the points after
        # the episode at which it continues.
        fresh = {"purge_step": run.t + 1 if self.known else 0}
        self.writer = summary_writer(self.directory, **fresh, max_queue=1000, flush_secs=10)
        *start, self.end = self._hparams(run)
        if not self.known:
            self.writer.add_text("configuration", configuration(run), 0)
            self.writer.add_custom_scalars(_LAYOUT)
            for summary in start:
                self.writer.file_writer.add_summary(summary, 0)
            for i in range(len(run.recorded)):
                self._scalars(self._curves(run, i), run.recorded[i])
        self.writer.flush()

    @torch.no_grad()
    def on_checkpoint(self, run: Simulation) -> None:
        if not self.directory.is_dir():  # writing to the open file would fail silently
            raise FileNotFoundError(2, "TensorBoard's directory has gone", str(self.directory))
        # TensorBoard sorts charts by name, capitals first: "Regret" is the first group, and
        # "theta", whose charts are mostly constant, comes late.
        theta = {f"theta/{name}": value for name, value in parameters(run.learner, run.t).items()}
        curves = self._curves(run, len(run.recorded) - 1)
        own = {f"learner/{name}": x for name, x in run.learner.monitor(run.mdp, run.q).items()}
        self._scalars(curves | self._policy(run) | own | theta, run.t)
        if self.images_per_decade and (run.t >= self.next_image or run.t == run.episodes):
            best = optimal_policy(run.mdp, run.sums["total_mean"].mean(0)).policy
            title = f"episode {run.t:,}, mean of {len(run.seeds)} seeds; rings: best policy so far"
            image = pixels(occupancy_figure(run.mdp, run.q.mean(0), optimal=best, title=title))
            self.writer.add_image("policy/q", image, run.t, dataformats="HWC")
            self.next_image = run.t * 10 ** (1 / self.images_per_decade)

    def on_chunk(self, run: Simulation) -> None:
        # `simulate` saves the run after this. Flush first, so that a killed run leaves no gap.
        self._monitors(run)
        try:
            self.writer.flush()
        except OSError as error:
            message = f"{self.directory}: TensorBoard's events cannot be written ({error})"
            raise OSError(message) from error

    def on_end(self, run: Simulation, history: History) -> None:
        self._monitors(run)
        if len(history.episodes) and not (self.known and run.t == self.begun):
            who = f"{type(run.learner).__name__}, {len(run.seeds)} seeds"
            image = pixels(regret_figure(history, title=f"{who}: mean and 95 % band"))
            self.writer.add_image("Regret/on_log_axes", image, run.t, dataformats="HWC")
            if history.finished:
                self.writer.file_writer.add_summary(self.end, 0)
        self.writer.close()

    # -- what is logged ------------------------------------------------------------------------

    def _curves(self, run: Simulation, i: int) -> dict[str, float]:
        """The values of the i-th checkpoint, over all seeds."""
        t, now = run.recorded[i], {name: rows[i] for name, rows in run.curves.items()}
        values = dict(zip(_REGRET, map(float, band(now["regret"])), strict=True))
        values |= zip(_REALISED, map(float, band(now["realised_regret"])), strict=True)
        values["Regret/over_sqrt_T"] = values["Regret/mean"] / math.sqrt(t)
        if t > 1:
            values["Regret/over_log_T"] = values["Regret/mean"] / math.log(t)
        if "corruption" in run.process_state:
            values["Regret/spent_corruption"] = float(now["corruption"].mean())
        if run.learner.diagnostics() or bool(now["newton_steps"].any()):
            values["solver/newton_steps"] = float(now["newton_steps"].mean())
            for name in ("dual_residual", "flow_residual"):
                values[f"solver/{name}"] = float(now[name].amax())
            values["solver/uncertified"] = float(now["uncertified"].sum())
        seconds = run.times[i] - (run.times[i - 1] if i else 0.0)
        if seconds > 0:
            values["speed/episodes_per_second"] = (t - (run.recorded[i - 1] if i else 0)) / seconds
        return values

    def _policy(self, run: Simulation) -> dict[str, float]:
        """Means over seeds and layers; the best policy is that of the first t episodes."""
        mdp, q, mean = run.mdp, run.q, run.sums["total_mean"] / run.t
        best = occupancy(mdp, optimal_policy(mdp, mean).policy)
        policy = policy_of(mdp, q)
        return {
            "policy/entropy": float(-torch.xlogy(q, policy).sum((-2, -1)).mean()) / mdp.horizon,
            "policy/distance_to_optimal": float((q - best).abs().sum((-2, -1)).mean())
            / (2 * mdp.horizon),
            "policy/loss_above_optimal": float(((q - best) * mean).sum((-2, -1)).mean()),
            "policy/smallest_q": float(torch.where(mdp.actions, q, torch.inf).amin()),
        }

    def _hparams(self, run: Simulation) -> Any:
        """What the HParams dashboard is told at the start of a run, and last at its end."""
        from torch.utils.tensorboard.summary import hparams

        mdp, own, values = run.mdp, parameters(run.learner, 1).items(), dict[str, Any]()
        values |= {"learner": type(run.learner).__name__, "losses": type(run.losses).__name__}
        values |= {"episodes": run.episodes, "seeds": len(run.seeds)}
        values |= {"horizon": mdp.horizon, "states": mdp.num_states, "actions": mdp.num_actions}
        values |= {name: x for name, x in own if name != "learning_rate"}
        simple = bool | int | float | str
        values |= {name: x for name, x in run.config.items() if isinstance(x, simple)}
        return hparams(values, dict.fromkeys(_METRICS, 0.0))

    def _monitors(self, run: Simulation) -> None:
        """Log the numbers of other callbacks: each monitor has them by episode, after one."""
        for monitor in run.monitors:
            for t, values in monitor(self.monitored).items():
                self._scalars(values, t)
        self.monitored = run.t

    def _scalars(self, values: dict[str, float], t: int) -> None:
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, t)


# -- the numbers of a learner ------------------------------------------------------------------


def parameters(learner: Learner, t: int) -> dict[str, float]:
    """Every number that a learner has, by its name (with _2, ...), and rates at episode t."""
    found: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for name, value in _numbers(learner, t):
        counts[name] += 1
        found[name if counts[name] == 1 else f"{name}_{counts[name]}"] = value
    return found


def _numbers(learner: Learner, t: int) -> Iterator[tuple[str, float]]:
    for owner in (learner, getattr(learner, "estimator", None)):
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield name, float(value)
    for module in vars(learner).values():
        if isinstance(module, nn.Module):
            for part in module.modules():
                if isinstance(part, Scaled) and isinstance(part.factor, Schedule):
                    now = torch.tensor(float(t), dtype=torch.float64)
                    rate = Factor(part.factor).read(now).detach()
                    yield "learning_rate" if part.power == -1 else "weight", float(rate.mean())
            for path, parameter in module.named_parameters():
                name, x = path.rpartition(".")[2], parameter.detach()
                yield name, float(x.mean())
                if x.numel() > 1:  # one value per layer, state or pair
                    yield f"{name}_least", float(x.min())
                    yield f"{name}_largest", float(x.max())


# -- a run in words ----------------------------------------------------------------------------


def describe(thing: Any) -> str:
    """A learner, a loss process or a regularizer with its numbers, in one line."""
    if isinstance(thing, Sum):
        return " + ".join(describe(term) for term in thing.terms)
    if isinstance(thing, Scaled):
        inner = describe(thing.regularizer)
        inner = f"({inner})" if isinstance(thing.regularizer, Sum) else inner
        return f"{inner} {'/' if thing.power == -1 else '*'} {describe(thing.factor)}"
    if isinstance(thing, Parametrized):
        fields = {name: x.tolist() for name, x in thing.named_parameters()}
    elif hasattr(thing, "__dict__"):
        fields = {name: getattr(x, "regularizer", x) for name, x in vars(thing).items()}
    else:
        return f"{thing:.6g}" if isinstance(thing, float) else str(thing)
    shown = str | int | float | LossProcess | Estimator | Regularizer | Schedule
    inside = [
        f"{name}={describe(x)}"
        for name, x in fields.items()
        if isinstance(x, shown) and name not in ("stride", "full_information")
    ]
    return f"{type(thing).__name__}({', '.join(inside)})"


def configuration(run: Simulation) -> str:
    """The configuration of a run as a Markdown table."""
    more = f", ... ({len(run.seeds)})" if len(run.seeds) > 8 else ""
    rows = {
        "learner": describe(run.learner),
        "losses": describe(run.losses),
        "MDP": repr(run.mdp),
        "episodes": str(run.episodes),
        "seeds": ", ".join(map(str, run.seeds[:8])) + more,
        "checkpoints": str(len(run.checkpoints)),
        "backend": run.player.name,
        "torch": torch.__version__,
    }
    rows |= {
        f"config: {name}": x if isinstance(x, str) else json.dumps(x, default=str)
        for name, x in run.config.items()
    }
    cells = [[name, f"`{x}`".replace("\n", " ")] for name, x in rows.items()]
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    return markdown(["setting", "value"], escaped, left=(0, 1))
