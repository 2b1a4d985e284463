"""The regret bound of `lem:key_lemma_ftrl`, evaluated during a run: a callback for `simulate`.

The certificate does its work at checkpoints. Between them the run adds up the means of the losses
and their second moments E[loss_i loss_j]. Several checkpoints are evaluated together, at the latest
a few seconds later. torch_occ.theory.certificates.curves has the formulas and says which numbers
are exact. Nothing is evaluated twice, and a saved run continues with its sums.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_occ._support.private import event_writer
from torch_occ.game.callbacks import Callback, TensorBoard
from torch_occ.game.learners.ftrl import FTRL
from torch_occ.theory.certificates.curves import Records, evaluate
from torch_occ.theory.parameters import Parameters

if TYPE_CHECKING:
    from torch_occ.game.history import History
    from torch_occ.game.simulation import Simulation

#: Checkpoints are evaluated together: at most this many, and at least every so many seconds.
TOGETHER, EVALUATE_EVERY = 16, 2.0

#: Prefix of the certificate's entries in `Simulation.sums`, with which a saved run continues.
_KEPT = "theory/"


class Certificate(Callback):
    """Penalty, stability, their bounds and the smoothness of the update of `alg:main_alg`.

    `curves` has one number per seed and checkpoint under each name; docs/theory.md lists the names.

    Args:
        board: the TensorBoard callback of the same run, to log to it under `theory/*`. It must
            stand before the certificate in `callbacks`.

    Raises:
        ValueError: before the first episode, if the learner does not play `alg:main_alg`, if the
            board comes later in `callbacks`, or if a saved run was begun without a certificate.
    """

    def __init__(self, board: TensorBoard | None = None) -> None:
        self.board = board
        self._begin()

    def _begin(self) -> None:
        self.records: list[Records] = []  # one checkpoint each
        # The sum of second moments (N, SA, SA) at the last evaluated checkpoint and those since.
        self.totals: list[Tensor] = []
        self.known: list[dict[str, Tensor]] = []  # the curves, a batch of checkpoints each
        self.evaluated, self.since, self.unsaved = 0, 0.0, False

    @property
    def curves(self) -> dict[str, Tensor]:
        """Every curve by its name, `(N, C)`, and `episodes` `(C,)`.

        It is empty until the first checkpoints are evaluated.
        """
        if not self.known:
            return {}
        episodes = torch.cat([record.episode for record in self.records[: self.evaluated]])
        joined = {name: curve.movedim(0, -1) for name, curve in self._joined().items()}
        return {"episodes": episodes} | joined

    def _joined(self) -> dict[str, Tensor]:
        """Every curve, `(C, N)`."""
        return {name: torch.cat([part[name] for part in self.known]) for name in self.known[0]}

    def on_start(self, run: Simulation) -> None:
        self._begin()
        self.parameters = Parameters.of(run.learner)
        if self.board is not None and self.board.writer is None:
            raise ValueError(
                "board: the TensorBoard callback must stand before the certificate in `callbacks`"
            )
        if run.t:
            self._restore(run)
        run.ask_for_second_moments()
        if not self.totals:
            self.totals = [run.sums["second_moment"].clone()]

    def on_checkpoint(self, run: Simulation) -> None:
        if len(self.records) == self.evaluated:
            self.since = time.monotonic()
        estimated, regret = run.learner.state["cumulative_loss"], run.curves["regret"][-1]
        parts = (run.q, estimated, run.sums["total_mean"], regret)
        kept = (part.detach().clone().unsqueeze(0) for part in parts)
        self.records.append(Records(torch.tensor([run.t]), *kept))
        self.totals.append(run.sums["second_moment"].clone())
        self.unsaved = True
        if len(self.records) - self.evaluated >= TOGETHER or run.t == run.episodes:
            self._evaluate(run)

    def on_chunk(self, run: Simulation) -> None:
        if len(self.records) > self.evaluated and time.monotonic() - self.since > EVALUATE_EVERY:
            self._evaluate(run)
            self._to_board(TensorBoard.on_chunk, run)  # what is saved as evaluated must be on disk
        if self.unsaved:
            kept = _join(self.records)._asdict() | {"totals": torch.stack(self.totals)}
            if self.known:
                kept |= {f"curves/{name}": curve for name, curve in self._joined().items()}
            run.sums |= {f"{_KEPT}{name}": part for name, part in kept.items()}
            self.unsaved = False

    def on_end(self, run: Simulation, history: History) -> None:
        if len(self.records) > self.evaluated:  # after Ctrl-C
            self._evaluate(run)

    @torch.no_grad()
    def _evaluate(self, run: Simulation) -> None:
        """Evaluate and log the checkpoints that have waited."""
        assert isinstance(run.learner, FTRL)
        records, first = _join(self.records), self.evaluated
        start = records.episode[first - 1 : first] if first else torch.tensor([0])
        elapsed = torch.diff(records.episode[first:], prepend=start)
        moments = torch.diff(torch.stack(self.totals), dim=0) / elapsed[:, None, None, None]
        names = ("stability", "stability_first_step")
        before = torch.stack([self.known[-1][name][-1] for name in names]) if first else None
        found = evaluate(run.learner.step, self.parameters, records, moments, before)
        self.known.append(found)
        self.totals, self.evaluated = self.totals[-1:], len(self.records)
        self._to_board(_log, found, records.episode[first:].tolist())

    def _to_board(self, write: Callable[..., None], *arguments: Any) -> None:
        """Log, if there is a board. If its files fail, warn and go on without it."""
        if self.board is None:
            return
        try:
            write(self.board, *arguments)
        except OSError as error:
            self.board = None
            message = f"Certificate: {error}; its curves are not logged any more"
            warnings.warn(message, stacklevel=4)

    def _restore(self, run: Simulation) -> None:
        kept = {
            name.removeprefix(_KEPT): part
            for name, part in run.sums.items()
            if name.startswith(_KEPT)
        }
        if not {*Records._fields, "totals"} <= {*kept}:
            raise ValueError(
                f"save_to: the run that continues at episode {run.t + 1} was begun without the "
                "certificate, which needs every checkpoint; leave it out, or begin anew with "
                "another file"
            )
        records = Records(*(kept[name] for name in Records._fields))
        count = len(records.episode)
        self.records = [Records(*(part[i : i + 1] for part in records)) for i in range(count)]
        self.totals, self.since = list(kept["totals"]), time.monotonic()
        self.evaluated = count + 1 - len(self.totals)
        if self.evaluated:
            prefix = "curves/"
            curves = {n.removeprefix(prefix): x for n, x in kept.items() if n.startswith(prefix)}
            self.known = [curves]
            # A directory that has this run's log has these points; a fresh one has nothing.
            if self.board is not None and not self.board.known:
                self._to_board(_log, curves, records.episode[: self.evaluated].tolist())


def _join(records: list[Records]) -> Records:
    return Records(*(torch.cat(parts) for parts in zip(*records, strict=True)))


def _log(board: TensorBoard, found: dict[str, Tensor], episodes: list[int]) -> None:
    """Log means over seeds, and extremes of the smoothness; one event per checkpoint."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    over_seeds = {"smoothness_max": torch.amax, "smoothness_min": torch.amin}
    shown = {
        name: over_seeds.get(name, torch.mean)(values, -1).tolist()
        for name, values in found.items()
    }
    closed = board.writer.file_writer is None  # after Ctrl-C the board has ended already
    for i, t in enumerate(episodes):
        values = [
            Summary.Value(tag=f"theory/{name}", simple_value=curve[i])
            for name, curve in shown.items()
        ]
        event_writer(board.writer).add_summary(Summary(value=values), t)
    if closed:
        board.writer.close()
