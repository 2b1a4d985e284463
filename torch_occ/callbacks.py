"""Things that watch a simulation. A callback that does nothing is the base class; override what you need."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_occ.estimators import Estimator
from torch_occ.learners import Learner
from torch_occ.losses import LossProcess
from torch_occ.occupancy import occupancy, optimal_policy, policy_of
from torch_occ.parametrized import Parametrized
from torch_occ.regularizers import Regularizer, Scaled, Sum
from torch_occ.schedules import Schedule

if TYPE_CHECKING:
    from torch_occ.history import History
    from torch_occ.simulate import Simulation

_INSTALL = "pip install torch-occ[experiments]"


class Callback:
    """Hooks, in the order in which they are called."""

    def on_start(self, run: Simulation) -> None:
        """Before the first episode, or the first after a resume."""

    def on_checkpoint(self, run: Simulation) -> None:
        """After the curves have got a new point."""

    def on_chunk(self, run: Simulation) -> None:
        """At a chunk's edge, a few hundred episodes apart."""

    def on_end(self, run: Simulation, history: History) -> None:
        """After the last episode, or after Ctrl-C."""


class ProgressBar(Callback):
    """Episodes done, episodes per second and time left, on standard error."""

    def __init__(self, label: str = "") -> None:
        self.label = label
        self.bar: Any = None

    def on_start(self, run: Simulation) -> None:
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise ImportError(f"the progress bar needs tqdm: {_INSTALL}") from error
        self.bar = tqdm(total=run.episodes, initial=run.t, desc=self.label, unit="ep", dynamic_ncols=True, mininterval=0.5)

    def on_chunk(self, run: Simulation) -> None:
        self.bar.update(run.t - self.bar.n)

    def on_end(self, run: Simulation, history: History) -> None:
        self.bar.close()


#: Columns of the HParams dashboard: the last values of these curves, under these names, and what every run may be compared by.
_METRICS = {
    "regret/mean": "pseudo-regret",
    "regret/lower": "lower 95 %",
    "regret/upper": "upper 95 %",
    "regret/realised_mean": "realised regret",
    "policy/distance_to_optimal": "distance to optimal",
    "solver/uncertified": "uncertified",
    "speed/episodes_per_second": "episodes / s",
}
_COMPARED = ("learner", "losses", "episodes", "seeds", "horizon", "states", "actions", "alpha", "beta", "gamma")

#: Charts of the Custom Scalars dashboard.
_LAYOUT = {
    "regret": {
        "pseudo-regret: mean and 95 % band": ["Margin", ["regret/mean", "regret/lower", "regret/upper"]],
        "realised regret: mean and 95 % band": ["Margin", ["regret/realised_mean", "regret/realised_lower", "regret/realised_upper"]],
        "growth: flat over log t, or flat over sqrt t?": ["Multiline", ["regret/over_log_t", "regret/over_sqrt_t"]],
    },
    "solver": {"residuals": ["Multiline", ["solver/dual_residual", "solver/flow_residual"]]},
}


class TensorBoard(Callback):
    """Curves, images and the configuration of a run, for TensorBoard; the step axis is the episode. docs/tensorboard.md is a tour.

    Nothing happens between checkpoints. When a run is resumed, points beyond the episode at which it continues are purged, and
    a fresh directory gets the earlier part of the regret and solver curves too.

    Args:
        directory: where the event file goes, one directory a run; made if it is missing.
        images_per_decade: heat maps of q for every tenfold of episodes, besides the last; 0 for none. TensorBoard shows ten images.
    """

    def __init__(self, directory: str | Path, *, images_per_decade: int = 2) -> None:
        self.directory, self.images_per_decade = Path(directory), images_per_decade
        self.writer: Any = None
        self.begun, self.known = 0, False
        self.next_image = 1.0

    def on_start(self, run: Simulation) -> None:
        _check_directory(self.directory)
        try:
            import matplotlib  # noqa: F401  (now, not at the first image)
            from tensorboard.plugins.hparams import summary_v2 as hparams
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(f"the TensorBoard callback needs tensorboard and matplotlib: {_INSTALL}") from error
        self.begun, self.known = run.t, run.t > 0 and any(self.directory.glob("events.out.tfevents.*"))
        self.next_image = run.t + 1.0
        # A run from its beginning replaces whatever the directory holds; a resumed one, what lies beyond its first episode.
        self.writer = SummaryWriter(str(self.directory), purge_step=run.t + 1 if self.known else 0, max_queue=1000, flush_secs=10)
        if not self.known:
            self.writer.add_text("configuration", configuration(run), 0)
            self.writer.add_custom_scalars(_LAYOUT)
            names = [*_COMPARED, *(name for name in self._hparams(run) if name not in _COMPARED)]
            metrics = [hparams.Metric(tag, display_name=name) for tag, name in _METRICS.items()]
            self._summary(hparams.hparams_config_pb([hparams.HParam(name) for name in names], metrics))
            self._summary(self._session(run)[0])
            for i in range(len(run.recorded)):
                self._scalars(self._curves(run, i), run.recorded[i])
        self.writer.flush()

    @torch.no_grad()
    def on_checkpoint(self, run: Simulation) -> None:
        learner = {f"learner/{name}": value for name, value in parameters(run.learner, run.t).items()}
        self._scalars(self._curves(run, len(run.recorded) - 1) | self._policy(run) | learner, run.t)
        if self.images_per_decade and (run.t >= self.next_image or run.t == run.episodes):
            self._heat_map(run)
            self.next_image = run.t * 10 ** (1 / self.images_per_decade)

    def on_chunk(self, run: Simulation) -> None:
        # Whatever `simulate` saves after this is on disk here as well, so that a killed run leaves no hole.
        try:
            self.writer.flush()
        except OSError as error:
            raise OSError(
                f"{self.directory}: TensorBoard's events could not be written ({error}); what was saved so far is kept"
            ) from error

    def on_end(self, run: Simulation, history: History) -> None:
        from torch_occ.figures import pixels, regret_figure

        if len(history.episodes) and not (self.known and run.t == self.begun):
            image = pixels(regret_figure(history, title=f"{type(run.learner).__name__}, {len(run.seeds)} seeds: mean and 95 % band"))
            self.writer.add_image("regret/figure", image, run.t, dataformats="HWC")
            if history.finished:
                self._summary(self._session(run)[1])
        self.writer.close()

    # -- what is logged -------------------------------------------------------------------------------------------------------

    def _curves(self, run: Simulation, i: int) -> dict[str, float]:
        """The numbers of the i-th checkpoint, over all seeds."""
        from torch_occ.figures import band

        t, now = run.recorded[i], {name: rows[i] for name, rows in run.curves.items()}
        values = {f"regret/{name}": float(x) for name, x in band(now["regret"])._asdict().items()}
        values |= {f"regret/realised_{name}": float(x) for name, x in band(now["realised_regret"])._asdict().items()}
        values["regret/over_sqrt_t"] = values["regret/mean"] / math.sqrt(t)
        if t > 1:
            values["regret/over_log_t"] = values["regret/mean"] / math.log(t)
        if "corruption" in run.process_state:
            values["regret/corruption_spent"] = float(now["corruption"].mean())
        if run.learner.diagnostics():
            values["solver/newton_steps"] = float(now["newton_steps"].mean())
            values |= {f"solver/{name}": float(now[name].amax()) for name in ("dual_residual", "flow_residual")}
            values["solver/uncertified"] = float(now["uncertified"].sum())
        seconds = run.times[i] - (run.times[i - 1] if i else 0.0)
        if seconds > 0:
            values["speed/episodes_per_second"] = (t - (run.recorded[i - 1] if i else 0)) / seconds
        return values

    def _policy(self, run: Simulation) -> dict[str, float]:
        """How far q_t is from certain, and from the best policy for the first t episodes; means over seeds and layers."""
        mdp, q, mean = run.mdp, run.q, run.sums["total_mean"] / run.t
        best = occupancy(mdp, optimal_policy(mdp, mean).policy)
        policy = policy_of(mdp, q)
        return {
            "policy/entropy": float(-torch.xlogy(q, policy).sum((-2, -1)).mean()) / mdp.horizon,
            "policy/distance_to_optimal": float((q - best).abs().sum((-2, -1)).mean()) / (2 * mdp.horizon),
            "policy/loss_above_optimal": float(((q - best) * mean).sum((-2, -1)).mean()),
            "policy/smallest_q": float(torch.where(mdp.actions, q, torch.inf).amin()),
        }

    def _heat_map(self, run: Simulation) -> None:
        from torch_occ.figures import occupancy_figure, pixels

        best = optimal_policy(run.mdp, run.sums["total_mean"].mean(0)).policy
        title = f"q, mean over {len(run.seeds)} seeds, episode {run.t}; rings: the best policy so far"
        image = pixels(occupancy_figure(run.mdp, run.q.mean(0), optimal=best, title=title))
        self.writer.add_image("policy/q", image, run.t, dataformats="HWC")

    def _hparams(self, run: Simulation) -> dict[str, Any]:
        mdp, found = run.mdp, parameters(run.learner, 1)
        values = {"learner": type(run.learner).__name__, "losses": type(run.losses).__name__, "episodes": run.episodes}
        values |= {"seeds": len(run.seeds), "horizon": mdp.horizon, "states": mdp.num_states, "actions": mdp.num_actions}
        values |= {name: value for name, value in found.items() if name != "learning_rate"}
        return values | {name: value for name, value in run.config.items() if isinstance(value, bool | int | float | str)}

    def _session(self, run: Simulation) -> tuple[Any, Any]:
        """The first and the last word of a run on the HParams dashboard."""
        from torch.utils.tensorboard.summary import hparams

        _, first, last = hparams(self._hparams(run), {})
        return first, last

    def _scalars(self, values: dict[str, float], t: int) -> None:
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, t)

    def _summary(self, summary: Any) -> None:
        self.writer.file_writer.add_summary(summary, 0)


def _check_directory(directory: Path) -> None:
    """Make it and write a file there, or say what is wrong before any episode is played."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"events")
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(error.errno, f"TensorBoard cannot write here ({reason}); name another directory", str(directory)) from error


# -- words and numbers about a learner ------------------------------------------------------------------------------------


def parameters(learner: Learner, t: int) -> dict[str, float]:
    """Every number that a learner is set by, by its own name (a second one of the same name gets _2), and learning rates at t."""
    found: dict[str, float] = {}
    for name, value in _numbers(learner, t):
        count = 1 + sum(other.partition("~")[0] == name for other in found)
        found[name if count == 1 else f"{name}~{count}"] = value
    return {name.replace("~", "_"): value for name, value in found.items()}


def _numbers(learner: Learner, t: int) -> Iterator[tuple[str, float]]:
    for value in [part for owner in (learner, getattr(learner, "estimator", None)) for part in getattr(owner, "__dict__", {}).items()]:
        if isinstance(value[1], bool | int | float) and not isinstance(value[1], bool):
            yield value[0], float(value[1])
    for module in vars(learner).values():
        if isinstance(module, nn.Module):
            for part in module.modules():
                if isinstance(part, Scaled) and isinstance(part.factor, Schedule):
                    rate = part.factor(torch.tensor(float(t), dtype=torch.float64)).detach()
                    yield "learning_rate" if part.power == -1 else "weight", float(rate.mean())
            for path, parameter in module.named_parameters():
                yield path.rpartition(".")[2], float(parameter.detach().mean())


def describe(thing: Any) -> str:
    """A learner, a loss process or a regularizer in one line, with its numbers."""
    if isinstance(thing, Sum):
        return " + ".join(describe(term) for term in thing.terms)
    if isinstance(thing, Scaled):
        inner = f"({describe(thing.regularizer)})" if isinstance(thing.regularizer, Sum) else describe(thing.regularizer)
        return f"{inner} {'/' if thing.power == -1 else '*'} {describe(thing.factor)}"
    if isinstance(thing, Parametrized):
        fields = {name: x.tolist() for name, x in thing.named_parameters()}
    elif hasattr(thing, "__dict__"):
        fields = {name: getattr(x, "regularizer", x) for name, x in vars(thing).items()}
    else:
        return f"{thing:.6g}" if isinstance(thing, float) else str(thing)
    shown = str | int | float | LossProcess | Estimator | Regularizer | Schedule
    inside = [f"{name}={describe(x)}" for name, x in fields.items() if isinstance(x, shown) and name not in ("stride", "full_information")]
    return f"{type(thing).__name__}({', '.join(inside)})"


def configuration(run: Simulation) -> str:
    """The configuration of a run as a Markdown table."""
    seeds = ", ".join(map(str, run.seeds[:8])) + (f", ... ({len(run.seeds)})" if len(run.seeds) > 8 else "")
    rows = {"learner": describe(run.learner), "losses": describe(run.losses), "MDP": repr(run.mdp), "episodes": str(run.episodes)}
    rows |= {"seeds": seeds, "checkpoints": str(len(run.checkpoints)), "torch": torch.__version__}
    rows |= {f"config: {name}": x if isinstance(x, str) else json.dumps(x, default=str) for name, x in run.config.items()}
    cells = [(name.replace("|", "\\|"), x.replace("|", "\\|").replace("\n", " ")) for name, x in rows.items()]
    return "\n".join(["| setting | value |", "|---|---|", *(f"| {name} | `{x}` |" for name, x in cells)])
