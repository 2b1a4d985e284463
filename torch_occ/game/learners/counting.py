"""What learners share that do not know the transitions: a blind MDP, counts and epochs.

Such a learner derives from `CountingLearner`, which keeps only the layout (`mdp.blind()`), counts
the transitions of every episode and keeps the empirical transitions of the current epoch. It writes
`propose_policy`, and calls `record` in its own `observe`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.game.beliefs.counts import (
    Table,
    begins_epoch,
    empirical_transitions,
    join_transitions,
    num_transitions,
    split_transitions,
    visited_transitions,
)
from torch_occ.game.estimators import Feedback
from torch_occ.game.learners.base import Learner
from torch_occ.mdp.layered import LayeredMDP


class CountingLearner(Learner):
    """Base class of learners that do not know the transitions, and count them.

    Its state, for N seeds (`split_transitions` returns the layers of a flat table):

    | name | shape | what it is |
    |---|---|---|
    | `counts` | `(N, M)` | m(s, a, s') so far, flat |
    | `visits` | `(N, S, A)` | m(s, a) so far |
    | `epoch_visits` | `(N, S, A)` | m(s, a) at the beginning of the epoch |
    | `belief` | `(N, M)` | the empirical transitions at the beginning of the epoch, flat |
    | `epochs` | `(N,)` | the number of the epoch, from 1 |
    | `epoch_start` | `(N,)` | the first episode of the epoch |

    Raises:
        ValueError: if `pseudo_count` is negative.
    """

    def __init__(self, mdp: LayeredMDP, pseudo_count: float = 1.0) -> None:
        super().__init__(mdp.blind())
        if not pseudo_count >= 0:
            raise ValueError(f"pseudo_count: expected a number of at least 0, got {pseudo_count}")
        self.pseudo_count = pseudo_count

    def start(self, num_seeds: int) -> None:
        pairs = self._zeros(num_seeds)
        counts = pairs.new_zeros(num_seeds, num_transitions(self.mdp))
        self.state = {
            "counts": counts,
            "visits": pairs,
            "epoch_visits": pairs.clone(),
            "belief": self._empirical(counts),
            "epochs": pairs.new_ones(num_seeds),
            "epoch_start": pairs.new_ones(num_seeds),
        }

    def transitions(self) -> Table:
        """The empirical transitions of the epoch, one tensor `(N, S_k, A, S_{k+1})` per layer."""
        return split_transitions(self.mdp, self.state["belief"])

    def counted(self) -> Table:
        """m(s, a, s') of all episodes so far, one tensor `(N, S_k, A, S_{k+1})` per layer."""
        return split_transitions(self.mdp, self.state["counts"])

    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        self.record(t, feedback)

    @torch.no_grad()
    def record(self, t: int, feedback: Feedback) -> Tensor:
        """Count the transitions of episode t, and begin new epochs.

        Returns:
            The seeds for which a new epoch begins with episode t + 1, a mask `(N,)`.
        """
        state, ones = self.state, torch.ones_like(feedback.losses)
        places = visited_transitions(self.mdp, feedback)
        state["counts"] = state["counts"].scatter_add(-1, places, ones)
        state["visits"] = state["visits"] + feedback.scatter(ones, state["visits"])
        new = begins_epoch(state["visits"], state["epoch_visits"], feedback)
        if bool(new.any()):
            state["belief"] = torch.where(
                new[:, None], self._empirical(state["counts"]), state["belief"]
            )
            state["epoch_visits"] = torch.where(
                new[:, None, None], state["visits"], state["epoch_visits"]
            )
            state["epochs"] = state["epochs"] + new
            state["epoch_start"] = torch.where(new, float(t + 1), state["epoch_start"])
        return new

    def _empirical(self, counts: Tensor) -> Tensor:
        layers = split_transitions(self.mdp, counts)
        return join_transitions(empirical_transitions(self.mdp, layers, self.pseudo_count))
