"""The regret of a run of `UnknownFTRL` in parts, at checkpoints: a callback for `simulate`.

torch_occ.theory.certificates.unknown_parts has the formulas.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_occ.game.callbacks import Callback, TensorBoard
from torch_occ.game.estimators import FullInformation, ImplicitExploration, ImportanceWeighted
from torch_occ.game.learners.unknown import UnknownFTRL
from torch_occ.game.losses import Stationary
from torch_occ.mdp.occupancy import occupancy, optimal_policy, policy_of
from torch_occ.theory.certificates.unknown_parts import (
    UnknownParts,
    check_deterministic,
    unknown_parts,
)

if TYPE_CHECKING:
    from torch_occ.game.simulation import Simulation

#: Prefix of the certificate's entries in `Simulation.sums`, with which a saved run continues.
_KEPT = "unknown_parts/"

#: The parts of the state that make the belief.
_BELIEF = ("belief", "widths", "bonus")


class UnknownCertificate(Callback):
    """Reg = ERR1 + ESTREG + ERR2 and its finer parts along a run of `UnknownFTRL`.

    `curves` has the sum of each part of `UnknownParts` up to every checkpoint, `(N, C)`, and
    `episodes` `(C,)`. Estimates of losses enter with their conditional expectations. The parts are
    evaluated at checkpoints. If every episode is one (`checkpoints=range(1, T + 1)`), the sums are
    exact. Otherwise the episodes between two checkpoints are interpolated linearly, with the
    average loss between them, and the belief is the one after the checkpoint.

    Args:
        comparator: a deterministic policy `(S, A)`. If the losses are stochastic, it is by default
            the best policy for their means.
        board: the TensorBoard callback of the same run, to log means over seeds to it under
            `theory/*`. It must stand before the certificate in `callbacks`.

    Raises:
        ValueError: before the first episode, if the learner is another one or has an estimator
            whose expectation is not known, if there is no comparator, if the board comes later in
            `callbacks`, or if a saved run was begun without the certificate.
    """

    def __init__(self, comparator: Tensor | None = None, board: TensorBoard | None = None) -> None:
        self.comparator, self.board = comparator, board
        self.episodes: list[int] = []
        self.sums: list[Tensor] = []  # (8, N) each
        self.last: Tensor | None = None  # the parts of the last checkpoint

    @property
    def curves(self) -> dict[str, Tensor]:
        """The sum of each part by its name, `(N, C)`, and `episodes` `(C,)`; empty at first."""
        if not self.sums:
            return {}
        table = torch.stack(self.sums, -1)  # (8, N, C)
        found = dict(zip(UnknownParts._fields, table, strict=True))
        return {"episodes": torch.tensor(self.episodes)} | found

    def on_start(self, run: Simulation) -> None:
        learner, losses = run.learner, run.losses
        if not isinstance(learner, UnknownFTRL):
            raise ValueError(
                f"learner: these parts are those of UnknownFTRL, not {type(learner).__name__}"
            )
        known = (ImportanceWeighted, ImplicitExploration, FullInformation)
        if type(learner.estimator) not in known:
            raise ValueError(
                "learner: the expectation of its estimator must be known, as for importance "
                f"weights; got {type(learner.estimator).__name__}"
            )
        if self.comparator is None:
            if not isinstance(losses, Stationary):
                raise ValueError(
                    f"comparator: {type(losses).__name__} has no best policy before the run; give "
                    "one, for example that of an earlier history, "
                    "occ.optimal_policy(mdp, history.total_mean[0]).policy"
                )
            self.chosen = optimal_policy(run.mdp, losses.mean).policy
        else:
            self.chosen = self.comparator
        check_deterministic(run.mdp, self.chosen)
        if self.board is not None and self.board.writer is None:
            raise ValueError(
                "board: the TensorBoard callback must stand before the certificate in `callbacks`"
            )
        self.episodes, self.sums, self.last, self.seen = [], [], None, 0
        self.total_mean, self.before = run.sums["total_mean"].clone(), self._belief(learner)
        if run.t:
            self._restore(run)

    @staticmethod
    def _belief(learner: UnknownFTRL) -> dict[str, Tensor]:
        """A copy of the belief; a new epoch replaces it."""
        return {name: learner.state[name].clone() for name in _BELIEF if name in learner.state}

    @torch.no_grad()
    def on_checkpoint(self, run: Simulation) -> None:
        learner = run.learner
        assert isinstance(learner, UnknownFTRL)
        elapsed, now = run.t - self.seen, self._belief(learner)
        mean = (run.sums["total_mean"] - self.total_mean) / elapsed
        # The learner has learned from this episode already, and may believe something new.
        parts = torch.stack(self._parts(run, learner, self.before if elapsed == 1 else now, mean))
        last = parts if self.last is None else self.last
        # The sum of the line through both points over the episodes after the first.
        added = 0.5 * (elapsed * (last + parts) + (parts - last))
        self.sums.append(added if not self.sums else self.sums[-1] + added)
        self.episodes.append(run.t)
        self.last, self.seen, self.before = parts, run.t, now
        self.total_mean = run.sums["total_mean"].clone()
        if self.board is not None:
            for name, total in zip(UnknownParts._fields, self.sums[-1], strict=True):
                self.board.writer.add_scalar(f"theory/{name}", float(total.mean()), run.t)

    def _parts(
        self, run: Simulation, learner: UnknownFTRL, belief: dict[str, Tensor], mean: Tensor
    ) -> UnknownParts:
        mdp, q, own = run.mdp, run.q, learner.estimator
        policy, then = policy_of(mdp, q), copy.copy(learner)
        then.state = belief  # the learner with an earlier belief
        if learner.full_information:
            expected = mean
        else:
            q_hat = occupancy(then.believed(), policy)
            shown = then.bounds(policy) if learner.divides_by_bounds else q_hat
            bias = own.bias if isinstance(own, ImplicitExploration) else 0.0
            # Pairs that are never played have no estimate.
            expected = torch.where(q > 0, mean * q / torch.where(q > 0, shown + bias, 1.0), 0.0)
        estimate = expected - belief["bonus"]
        pi = self.chosen.expand_as(policy)
        return unknown_parts(mdp, then.believed(), policy, pi, mean, estimate)

    # -- saving ----------------------------------------------------------------------------------

    def on_chunk(self, run: Simulation) -> None:
        """Keep everything in the sums of the run, which are saved after this."""
        none = run.q.new_zeros(len(UnknownParts._fields), len(run.seeds))
        kept = {
            "episodes": torch.tensor(self.episodes, dtype=torch.int64),
            "sums": torch.stack([none, *self.sums]),
            "last": none if self.last is None else self.last,
            "total_mean": self.total_mean,
        }
        run.sums |= {f"{_KEPT}{name}": part for name, part in kept.items()}

    def _restore(self, run: Simulation) -> None:
        if f"{_KEPT}sums" not in run.sums:
            raise ValueError(
                f"save_to: the run that continues at episode {run.t + 1} was begun without the "
                "certificate, which needs every checkpoint; leave it out, or begin anew with "
                "another file"
            )
        self.sums = list(run.sums[f"{_KEPT}sums"])[1:]
        self.episodes = run.sums[f"{_KEPT}episodes"].tolist()
        self.last = run.sums[f"{_KEPT}last"] if self.episodes else None
        self.total_mean = run.sums[f"{_KEPT}total_mean"]
        self.seen = self.episodes[-1] if self.episodes else 0
