"""Things that watch a simulation. A callback that does nothing is the base class; override what you need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_occ.history import History
    from torch_occ.simulate import Simulation


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
        from tqdm import tqdm

        self.bar = tqdm(total=run.episodes, initial=run.t, desc=self.label, unit="ep", dynamic_ncols=True, mininterval=0.5)

    def on_chunk(self, run: Simulation) -> None:
        self.bar.update(run.t - self.bar.n)

    def on_end(self, run: Simulation, history: History) -> None:
        self.bar.close()


class TensorBoard(Callback):
    """Curves, images and the configuration of a run, for TensorBoard."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
