"""Learners: an occupancy measure for every episode, from what the earlier ones showed.

A learner plays N independent runs at once, one for every seed. To write one, derive from `Learner`: `start` makes its state, `propose`
returns q_t, `observe` learns. Everything that must survive an interruption is a tensor in `self.state`. `simulate` plays a copy, so one
learner serves any number of runs, also at the same time; callbacks see the copy as `run.learner`, in `on_end` with its last state.
"""

from __future__ import annotations

import copy
import math
from typing import ClassVar, Self

import torch
from torch import Tensor

from torch_occ.game.contracts import DIAGNOSTICS, check_estimate, check_policy
from torch_occ.game.estimators import Estimator, Feedback, ImportanceWeighted
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import cheapest, interior_point, occupancy, optimal_policy
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import LogBarrier, Shannon, Tsallis
from torch_occ.regularizers.parametrized import Parametrized
from torch_occ.regularizers.schedules import Constant, InverseSqrt
from torch_occ.step.ftrl import FTRLStep


class Learner:
    """The protocol. `state` holds tensors whose first dimension is the seed."""

    full_information = False
    #: Attributes that do not decide what is played; a saved run does not depend on them.
    fingerprint_ignores: ClassVar[tuple[str, ...]] = ("state",)

    def __init__(self, mdp: LayeredMDP) -> None:
        self.mdp = mdp
        self.state: dict[str, Tensor] = {}

    def copy(self) -> Self:
        """A learner with the same settings and with memory of its own, for one run; the MDP, which never changes, is shared.

        Override it for a learner that holds what cannot be copied.
        """
        return copy.deepcopy(self, {id(self.mdp): self.mdp})

    def start(self, num_seeds: int) -> None:
        """Forget everything and get ready for N runs; raise a ValueError if the settings are not valid."""
        self.state = {}

    def propose(self, t: int) -> Tensor:
        """q_t, an occupancy measure `(N, S, A)`, or `(1, S, A)` when all are the same. `simulate` checks it."""
        raise NotImplementedError

    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        """Learn from episode t, in which q was played."""

    def diagnostics(self) -> dict[str, Tensor]:
        """Numbers `(N,)` about the last proposal: newton_steps, dual_residual, flow_residual, uncertified (1 if it is so, else 0), and
        if you like status, an `occ.Status`; or nothing.
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


class FTRL(Learner):
    """Follow the regularized leader over occupancy measures; `alg:main_alg` with `jin_luo(mdp)` and importance weights."""

    def __init__(
        self, mdp: LayeredMDP, regularizer: Regularizer, estimator: Estimator | None = None
    ) -> None:
        super().__init__(mdp)
        self.step = FTRLStep(mdp, regularizer)
        self.estimator = ImportanceWeighted() if estimator is None else estimator

    @property
    def full_information(self) -> bool:  # type: ignore[override]
        """Whether the estimator is shown the whole loss function."""
        return self.estimator.full_information

    @classmethod
    def o_reps(cls, mdp: LayeredMDP, episodes: int) -> FTRL:
        """O-REPS (Zimin and Neu, 2013): Shannon entropy, with the constant learning rate for a known number of episodes."""
        choices = max(
            math.log(mdp.num_pairs / mdp.horizon), math.log(2)
        )  # with nothing to choose any rate will do
        eta = math.sqrt(mdp.horizon * choices / (episodes * mdp.num_pairs))
        return cls(mdp, Shannon() / Constant(eta))

    @classmethod
    def tsallis(cls, mdp: LayeredMDP, gamma: float = 1.0) -> FTRL:
        """The 1/2-Tsallis entropy on pairs with eta_t = gamma / sqrt(t); for L = 1 and gamma = 1/2, Tsallis-INF."""
        return cls(mdp, Tsallis() / InverseSqrt(gamma))

    @classmethod
    def log_barrier(cls, mdp: LayeredMDP, gamma: float = 1.0) -> FTRL:
        """The log-barrier with eta_t = gamma / sqrt(t)."""
        return cls(mdp, LogBarrier() / InverseSqrt(gamma))

    def start(self, num_seeds: int) -> None:
        if self.step.mdp is not self.mdp and not _same(self.step.mdp, self.mdp):
            raise ValueError(
                f"learner: its step is for another MDP, {self.step.mdp}; give it one for {self.mdp}"
            )
        self.step.check_parameters()
        for part in vars(self.estimator).values():
            if isinstance(part, Parametrized):
                part.validate()
        zero = self._zeros(num_seeds)
        count = torch.zeros(num_seeds, dtype=self.mdp.dtype, device=self.mdp.device)
        self.state = {
            "cumulative_loss": zero,
            "q": interior_point(self.mdp).expand_as(zero).clone(),
        }
        self.state |= dict.fromkeys(DIAGNOSTICS, count)

    @torch.no_grad()
    def propose(self, t: int) -> Tensor:
        state = self.state
        solution = self.step.solve(
            state["cumulative_loss"], float(t), warm_start=state["q"], check=False
        )
        if not bool(solution.converged.all()):
            # A warm start can lie too close to the boundary; from the middle, Newton's method is certain.
            again = self.step.solve(state["cumulative_loss"], float(t), check=False)
            solution = solution.merge(again, again.converged & ~solution.converged)
        state["q"] = solution.q
        state["newton_steps"] = solution.steps.to(self.mdp.dtype)
        state["dual_residual"], state["flow_residual"] = (
            solution.dual_residual,
            solution.flow_residual,
        )
        state["uncertified"] = (~solution.converged).to(self.mdp.dtype)
        state["status"] = solution.status.to(self.mdp.dtype)
        return solution.q

    @torch.no_grad()
    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        estimate = check_estimate(
            self.mdp, self.estimator, self.estimator(feedback, q, t), t, len(q)
        )
        self.state["cumulative_loss"] = self.state["cumulative_loss"] + estimate

    def diagnostics(self) -> dict[str, Tensor]:
        return {name: self.state[name] for name in DIAGNOSTICS}


def _same(one: LayeredMDP, other: LayeredMDP) -> bool:
    """Whether two MDPs have the same layout and the same probabilities."""
    if one.layer_sizes != other.layer_sizes or not torch.equal(one.actions, other.actions):
        return False
    return all(
        torch.equal(p, q) for p, q in zip(one.probabilities, other.probabilities, strict=True)
    )


class FixedPolicy(Learner):
    """The same policy in every episode: the uniform one by default."""

    def __init__(self, mdp: LayeredMDP, policy: Tensor | None = None) -> None:
        super().__init__(mdp)
        self.q = (
            interior_point(mdp)
            if policy is None
            else occupancy(mdp, check_policy(mdp, policy), in_order=True)
        ).detach()

    @classmethod
    def best_in_hindsight(cls, mdp: LayeredMDP, mean: Tensor) -> FixedPolicy:
        """The optimal policy of the (average) mean loss `(S, A)`, which no learner knows."""
        return cls(mdp, optimal_policy(mdp, mean, in_order=True).policy)

    def propose(self, t: int) -> Tensor:
        return self.q[None]


class EmpiricalLearner(Learner):
    """Plays the optimal policy of an estimate built from counts and observed losses.

    Actions whose Q is within 1e-9 of the smallest are tied, and the one with the lowest index is played.
    """

    def start(self, num_seeds: int) -> None:
        self.state = {"visits": self._zeros(num_seeds), "losses": self._zeros(num_seeds)}

    def index(self, t: int) -> Tensor:
        """The loss `(N, S, A)` that is planned with."""
        raise NotImplementedError

    def propose(self, t: int) -> Tensor:
        return occupancy(self.mdp, cheapest(self.mdp, optimal_policy(self.mdp, self.index(t)).Q))

    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        visits = self.state["visits"]
        self.state["visits"] = visits + feedback.scatter(torch.ones_like(feedback.losses), visits)
        self.state["losses"] = self.state["losses"] + feedback.scatter(feedback.losses, visits)


class FollowTheLeader(EmpiricalLearner):
    """The optimal policy of the average observed losses, unseen pairs counting as free."""

    def index(self, t: int) -> Tensor:
        return self.state["losses"] / self.state["visits"].clamp(min=1)


class OptimisticValueIteration(EmpiricalLearner):
    """UCB-style value iteration for known transitions: the average observed loss minus scale * sqrt(log t / visits), at least `floor`.

    Pairs that were never seen are believed to cost `floor`, which is 0 by default, since no loss is less. For L = 1, scale = sqrt(2) and
    floor = -inf it is UCB1 (Auer, Cesa-Bianchi and Fischer, 2002).
    """

    def __init__(self, mdp: LayeredMDP, scale: float = 0.5**0.5, floor: float = 0.0) -> None:
        super().__init__(mdp)
        if not scale > 0:
            raise ValueError(f"scale: expected a positive number, got {scale}")
        if not floor <= 0 or (math.isinf(floor) and mdp.horizon > 1):
            raise ValueError(
                f"floor: expected a number of at most 0, finite if there is more than one layer, got {floor}"
            )
        self.scale, self.floor = scale, floor

    def index(self, t: int) -> Tensor:
        visits = self.state["visits"].clamp(min=1)
        bonus = self.scale * (math.log(max(t, 2)) / visits).sqrt()
        seen = (self.state["losses"] / visits - bonus).clamp(min=self.floor)
        return torch.where(self.state["visits"] > 0, seen, self.floor)
