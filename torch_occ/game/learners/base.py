"""What a learner is.

A learner plays N independent runs at once, one per seed. To write one, derive from `Learner`:
`start` makes its state, `propose` returns q_t, and `observe` learns. Everything that must survive
an interruption is a tensor in `self.state`. `simulate` plays a copy, so one learner can be used in
any number of runs, also at the same time. Callbacks see the copy as `run.learner`, with its last
state in `on_end`.

A learner that does not know the transitions keeps `mdp.blind()`, which has the layout and no
probabilities. It writes `propose_policy` instead of `propose`, since q depends on the transitions:
the simulation computes q with the true MDP and does not show it. `observe` is given what was
proposed: q, or the policy. So the policies are a function of trajectories and losses only.
"""

from __future__ import annotations

import copy
from typing import ClassVar, Self

import torch
from torch import Tensor

from torch_occ.game.estimators import Feedback
from torch_occ.mdp.layered import LayeredMDP


class Learner:
    """Base class. `state` holds tensors whose first dimension is the seed."""

    full_information = False
    #: Attributes that do not change what is played; the fingerprint of a saved run ignores them.
    fingerprint_ignores: ClassVar[tuple[str, ...]] = ("state", "seeds")
    #: The seeds of the run, which `simulate` sets before `start`. A learner that samples draws from
    #: them (torch_occ.game.learners.sampling), so that it is a function of its seed.
    seeds: tuple[int, ...] = ()

    #: The largest number of episodes for which the settings hold, for example a confidence level;
    #: None if there is no limit. `simulate` refuses longer runs.
    max_episodes: int | None = None

    def __init__(self, mdp: LayeredMDP) -> None:
        self.mdp = mdp
        self.state: dict[str, Tensor] = {}

    def copy(self) -> Self:
        """A learner with the same settings and its own state, for one run; the MDP is shared.

        Override it for a learner with attributes that cannot be copied.
        """
        return copy.deepcopy(self, {id(self.mdp): self.mdp})

    def start(self, num_seeds: int) -> None:
        """Reset the state for N runs; raise a ValueError if the settings are not valid."""
        self.state = {}

    def propose(self, t: int) -> Tensor:
        """q_t, an occupancy measure `(N, S, A)`, or `(1, S, A)` if it is the same for all seeds.

        `simulate` checks it.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: write propose(t) -> q, (N, S, A), or propose_policy(t)"
        )

    def propose_policy(self, t: int) -> Tensor:
        """The policy of episode t, `(N, S, A)`, or `(1, S, A)` if it is the same for all seeds.

        Write it instead of `propose`. `simulate` checks it, and computes q with the true MDP.
        """
        raise NotImplementedError(f"{type(self).__name__}: write propose_policy(t) -> (N, S, A)")

    @property
    def proposes_policy(self) -> bool:
        """Whether the learner proposes policies (`propose_policy`) and not occupancy measures."""
        return type(self).propose_policy is not Learner.propose_policy

    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        """Learn from episode t, in which q was played.

        A learner with `propose_policy` is given its policy `(N, S, A)` in place of q.
        """

    def diagnostics(self) -> dict[str, Tensor]:
        """Numbers `(N,)` about the last proposal, by name; empty by default.

        The names are newton_steps, dual_residual, flow_residual, uncertified (0 or 1) and,
        optionally, status (an `occ.Status`).
        """
        return {}

    def _zeros(self, num_seeds: int) -> Tensor:
        return torch.zeros(
            num_seeds,
            self.mdp.num_states,
            self.mdp.num_actions,
            dtype=self.mdp.dtype,
            device=self.mdp.device,
        )
