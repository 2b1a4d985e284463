"""What a learner is, and the learners of the paper.

A learner plays N independent runs at once, one per seed. To write one, derive from `Learner`:
`start` makes its state, `propose` returns q_t, and `observe` learns. Everything that must survive
an interruption is a tensor in `self.state`. `simulate` plays a copy.

A learner that does not know the transitions keeps `mdp.blind()`, which has the layout and no
probabilities, and writes `propose_policy`. The simulation computes q with the true MDP and does not
show it, so the policies are a function of trajectories and losses only.
"""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from torch_occ._support.choices import later
from torch_occ.game.checks import DIAGNOSTICS, check_estimate, check_tensor, refuse_policy
from torch_occ.game.estimators import (
    Estimator,
    Feedback,
    FullInformation,
    ImplicitExploration,
    ImportanceWeighted,
    ReducedVariance,
)
from torch_occ.mdp.checks import check_kind, check_that, unwritten
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import cheapest, interior_point, occupancy, optimal_policy
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import LogBarrier, Shannon, Tsallis
from torch_occ.regularizers.parameters import Parametrized
from torch_occ.regularizers.schedules import Constant, InverseSqrt
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.solution import Budgets, Status


class Learner:
    """Base class. `state` holds tensors whose first dimension is the seed."""

    full_information = False
    #: Attributes that do not change what is played; the fingerprint of a saved run ignores them.
    fingerprint_ignores: ClassVar[tuple[str, ...]] = ("state", "seeds")
    #: The seeds of the run, which `simulate` sets before `start`. A learner that samples draws from
    #: them (torch_occ.engine.draws), so that it is a function of its seed.
    seeds: tuple[int, ...] = ()

    #: The largest number of episodes for which the settings hold, for example a confidence level;
    #: None if there is no limit. `simulate` refuses longer runs.
    max_episodes: int | None = None

    #: The compiled form: a class of named tuples (torch_occ.engine.play), or a function without
    #: parameters that imports it. None if only torch plays the learner. It is not inherited: a
    #: class that derives from a learner may play another game.
    compiled: ClassVar[Any] = None
    #: Makes the player of this learner from a backend, if it is neither torch nor the engine.
    player: Any = None

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
        raise unwritten(self, "propose(t) -> q, (N, S, A), or propose_policy(t)")

    def propose_policy(self, t: int) -> Tensor:
        """The policy of episode t, `(N, S, A)`, or `(1, S, A)` if it is the same for all seeds.

        Write it instead of `propose`. `simulate` checks it, and computes q with the true MDP.
        """
        raise unwritten(self, "propose_policy(t) -> (N, S, A)")

    @property
    def proposes_policy(self) -> bool:
        """Whether the learner proposes policies (`propose_policy`) and not occupancy measures."""
        return type(self).propose_policy is not Learner.propose_policy

    @property
    def engine_only(self) -> bool:
        """Whether the learner has no torch side, neither `propose` nor `propose_policy`."""
        own, base = type(self), Learner
        return own.propose is base.propose and own.propose_policy is base.propose_policy

    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        """Learn from episode t, in which q was played.

        A learner with `propose_policy` is given its policy `(N, S, A)` in place of q.
        """

    def why_not_compiled(self, mdp: LayeredMDP) -> str | None:
        """The reason why the compiled form cannot play this MDP with these settings, or None."""
        reason: str | None = later("game.players").why_not_model(mdp)
        return reason

    def settings(self) -> dict[str, Any]:
        """Settings of the compiled form, by the names of its fields.

        A function of t, from `(n,)` to `(n, ...)`, is evaluated for the episodes that are played;
        its field is `Shared`. Numbers that are attributes of the learner need no entry.
        """
        return {}

    def check_settings(self) -> None:
        """Raise a ValueError if a setting is not valid; called before the engine plays.

        A callback may have changed it.
        """

    def monitor(self, mdp: LayeredMDP, q: Tensor) -> dict[str, float]:
        """Numbers for TensorBoard, under `learner/`; the learner's last q is `(N, S, A)`."""
        return {}

    def diagnostics(self) -> dict[str, Tensor]:
        """Numbers `(N,)` about the last proposal, by name; empty by default.

        The names are newton_steps, dual_residual, flow_residual, uncertified (0 or 1) and,
        optionally, status (an `occ.Status`).
        """
        return {}

    def _zeros(self, num_seeds: int) -> Tensor:
        shape = (num_seeds, self.mdp.num_states, self.mdp.num_actions)
        return torch.zeros(shape, dtype=self.mdp.dtype, device=self.mdp.device)


# -- Learners to compare FTRL with: a fixed policy, and those that plan with averages --------------


class FixedPolicy(Learner):
    """The same policy in every episode; uniform by default."""

    compiled = lambda: later("game.players").learners.CompiledFixed  # noqa: E731

    def __init__(self, mdp: LayeredMDP, policy: Tensor | None = None) -> None:
        super().__init__(mdp)
        if policy is None:
            self.q = interior_point(mdp).detach()
        else:
            check_tensor("policy", policy, mdp, (), "")
            refuse_policy(policy[None], mdp, lambda _: "policy: ")
            self.q = occupancy(mdp, policy, in_order=True).detach()

    def propose(self, t: int) -> Tensor:
        return self.q[None]

    def settings(self) -> dict[str, Any]:
        return {"q": self.q.flatten().numpy()}


class EmpiricalLearner(Learner):
    """Plays the optimal policy of an estimate built from counts and observed losses.

    Actions whose Q is within 1e-9 of the smallest are tied; the one with the lowest index is
    played.
    """

    def start(self, num_seeds: int) -> None:
        self.state = {"visits": self._zeros(num_seeds), "losses": self._zeros(num_seeds)}

    def settings(self) -> dict[str, Any]:
        return {"logs": lambda t: t.clamp(min=2).log()}

    def index(self, t: int) -> Tensor:
        """The loss `(N, S, A)` for which the policy is optimal."""
        raise unwritten(self, "index(t) -> loss, (N, S, A)")

    def propose(self, t: int) -> Tensor:
        return occupancy(self.mdp, cheapest(self.mdp, optimal_policy(self.mdp, self.index(t)).Q))

    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        visits = self.state["visits"]
        self.state["visits"] = visits + feedback.scatter(torch.ones_like(feedback.losses), visits)
        self.state["losses"] = self.state["losses"] + feedback.scatter(feedback.losses, visits)


class FollowTheLeader(EmpiricalLearner):
    """The optimal policy for the average observed losses; unseen pairs cost nothing."""

    compiled = lambda: later("game.players").learners.CompiledEmpirical  # noqa: E731
    scale, floor = 0.0, 0.0

    def index(self, t: int) -> Tensor:
        return self.state["losses"] / self.state["visits"].clamp(min=1)


class OptimisticValueIteration(EmpiricalLearner):
    """UCB-style value iteration for known transitions.

    The policy is optimal for the average observed loss minus scale * sqrt(log t / visits), but at
    least `floor`. Pairs that were never seen cost `floor`, which is 0 by default, the smallest
    possible loss. For L = 1, scale = sqrt(2) and floor = -inf this is UCB1 (Auer, Cesa-Bianchi and
    Fischer, 2002).

    Raises:
        ValueError: if `scale` is not positive; or if `floor` is positive, or infinite with more
            than one layer.
    """

    compiled = lambda: later("game.players").learners.CompiledEmpirical  # noqa: E731

    def __init__(self, mdp: LayeredMDP, scale: float = 0.5**0.5, floor: float = 0.0) -> None:
        super().__init__(mdp)
        check_that(scale > 0, "scale", "a positive number", scale)
        fine = floor <= 0 and (math.isfinite(floor) or mdp.horizon == 1)
        expected = "a number of at most 0, finite if there is more than one layer"
        check_that(fine, "floor", expected, floor)
        self.scale, self.floor = scale, floor

    def index(self, t: int) -> Tensor:
        visits = self.state["visits"].clamp(min=1)
        bonus = self.scale * (math.log(max(t, 2)) / visits).sqrt()
        seen = (self.state["losses"] / visits - bonus).clamp(min=self.floor)
        return torch.where(self.state["visits"] > 0, seen, self.floor)


# -- Follow the regularized leader over occupancy measures (`alg:main_alg`) ------------------------


#: The numbers of the estimators that the compiled form knows, as in torch_occ.engine.learners.
_ESTIMATORS: dict[type[Estimator], int] = {
    ImportanceWeighted: 0,
    ImplicitExploration: 1,
    ReducedVariance: 2,
    FullInformation: 3,
}


class FTRL(Learner):
    """Follow the regularized leader over occupancy measures.

    With `jin_luo(mdp)` and importance weights this is `alg:main_alg`.

    Args:
        mdp: the MDP of the game.
        regularizer: psi_t.
        estimator: of the losses; by default importance weights.
        constraints: budgets on expected costs, without a batch. Every q_t then meets them. The
            entry `budget_excess` of the state is the largest ⟨G_i, q_t⟩ - h_i so far, `(N,)`.
        optimistic: count the last estimated loss twice; in torch only. In games
            (torch_occ.games), last iterates may then converge.
    """

    compiled = lambda: later("game.players").learners.CompiledFTRL  # noqa: E731
    fingerprint_ignores = (*Learner.fingerprint_ignores, "valid")

    def __init__(
        self,
        mdp: LayeredMDP,
        regularizer: Regularizer,
        estimator: Estimator | None = None,
        *,
        constraints: Budgets | None = None,
        optimistic: bool = False,
    ) -> None:
        super().__init__(mdp)
        self.optimistic = optimistic
        check_kind("regularizer", regularizer, Regularizer, ", for example occ.jin_luo(mdp)")
        expected = "an occ.Estimator, for example occ.ImportanceWeighted()"
        fine = isinstance(estimator, Estimator | None)
        check_that(fine, "estimator", expected, repr(estimator), TypeError)
        self.step = FTRLStep(mdp, regularizer, constraints=constraints)
        self.valid: list[Any] = []  # the last parameters that `check_settings` found valid
        if constraints is not None:
            shapes = tuple(constraints.costs.shape), tuple(constraints.limits.shape)
            expected = "budgets without a batch, costs (m, S, A) and limits (m,)"
            fine = sum(map(len, shapes)) <= 4
            check_that(fine, "constraints", expected, f"{shapes[0]} and {shapes[1]}")
        self.estimator = ImportanceWeighted() if estimator is None else estimator

    @property
    def full_information(self) -> bool:  # type: ignore[override]
        """Whether the estimator needs the whole loss function."""
        return self.estimator.full_information

    @classmethod
    def o_reps(cls, mdp: LayeredMDP, episodes: int) -> FTRL:
        """O-REPS (Zimin and Neu, 2013): Shannon entropy with a constant learning rate.

        The rate depends on the number of episodes, which must be known.
        """
        # If there is nothing to choose, any rate will do.
        choices = max(math.log(mdp.num_pairs / mdp.horizon), math.log(2))
        eta = math.sqrt(mdp.horizon * choices / (episodes * mdp.num_pairs))
        return cls(mdp, Shannon() / Constant(eta))

    @classmethod
    def tsallis(cls, mdp: LayeredMDP, gamma: float = 1.0) -> FTRL:
        """The 1/2-Tsallis entropy on pairs with eta_t = gamma / sqrt(t).

        For L = 1 and gamma = 1/2 this is Tsallis-INF.
        """
        return cls(mdp, Tsallis() / InverseSqrt(gamma))

    @classmethod
    def log_barrier(cls, mdp: LayeredMDP, gamma: float = 1.0) -> FTRL:
        """The log-barrier with eta_t = gamma / sqrt(t)."""
        return cls(mdp, LogBarrier() / InverseSqrt(gamma))

    def start(self, num_seeds: int) -> None:
        own, mdp = self.step.mdp, self.mdp
        if own is not mdp and (
            own.layout_difference(mdp)
            or not all(map(torch.equal, own.probabilities, mdp.probabilities))
        ):
            raise ValueError(f"learner: its step is for another MDP, {own}; give it one for {mdp}")
        self.step.check_parameters()
        for part in vars(self.estimator).values():
            if isinstance(part, Parametrized):
                part.validate()
        zero = self._zeros(num_seeds)
        count, q = zero[:, 0, 0].clone(), interior_point(self.mdp).expand_as(zero).clone()
        self.state = {"cumulative_loss": zero, "q": q} | dict.fromkeys(DIAGNOSTICS, count)
        if self.optimistic:
            self.state["last"] = zero.clone()
        if self.step.constraints is not None:
            constraints = self.step.constraints
            plain = FTRLStep(mdp, self.step.regularizer, backend="torch", constraints=constraints)
            if int(plain.solve(zero[0], 1.0, check=False).status) == Status.INFEASIBLE:
                plain.solve(zero[0], 1.0)  # raises an error with the proof
            limits = constraints.limits.detach()
            self.state["multipliers"] = torch.zeros_like(limits).expand(num_seeds, -1).clone()
            self.state["budget_excess"] = torch.full_like(count, -torch.inf)

    def loss(self, t: int) -> Tensor:
        """The loss of the step of episode t, `(N, S, A)`."""
        total = self.state["cumulative_loss"]
        return total + self.state["last"] if self.optimistic else total

    @torch.no_grad()
    def propose(self, t: int) -> Tensor:
        state = self.state
        start: dict[str, Any] = {"warm_start": state["q"], "multipliers": state.get("multipliers")}
        solution = self.step.solve(self.loss(t), float(t), check=False, **start)
        if solution.multipliers is not None and solution.slack is not None:
            state["multipliers"] = solution.multipliers
            state["budget_excess"] = torch.maximum(state["budget_excess"], -solution.slack.amin(-1))
        dtype = solution.q.dtype
        state["q"] = solution.q
        state["newton_steps"] = solution.steps.to(dtype)
        state["dual_residual"] = solution.dual_residual
        state["flow_residual"] = solution.flow_residual
        state["uncertified"] = (~solution.converged).to(dtype)
        state["status"] = solution.status.to(dtype)
        return solution.q

    @torch.no_grad()
    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        estimate = self.estimator(feedback, q, t)
        check_estimate(self.mdp, self.estimator, estimate, t, len(q))
        self.state["cumulative_loss"] = self.state["cumulative_loss"] + estimate
        if self.optimistic:
            self.state["last"] = estimate

    def why_not_compiled(self, mdp: LayeredMDP) -> str | None:
        if self.step.constraints is not None and self.step.evaluator.in_logs:
            return "with budgets, the compiled episode loop lets the q of an entropy underflow"
        if self.optimistic:
            return "the compiled episode loop does not know optimism"
        if type(self.estimator) not in _ESTIMATORS:
            return f"the engine does not know the estimator {type(self.estimator).__name__}"
        if self.step.regularizer.batched():
            return "the regularizer has batched parameters"
        reason: str | None = later("game.players").why_not_game(mdp, self.step.regularizer)
        return reason

    def settings(self) -> dict[str, Any]:
        found: dict[str, Any] = later("game.players").solver_settings(self.step)
        own = self.estimator  # which has a threshold, or perhaps a bias
        return found | {
            "estimator": _ESTIMATORS[type(own)],
            "bias": getattr(own, "threshold", lambda t: 0 * t + getattr(own, "bias", 0.0)),
        }

    def check_settings(self) -> None:
        values = [parameter.tolist() for parameter in self.step.regularizer.parameters()]
        if values != self.valid:
            self.step.check_parameters()
            self.valid = values

    def diagnostics(self) -> dict[str, Tensor]:
        return {name: self.state[name] for name in DIAGNOSTICS}
