"""Follow the regularized leader over occupancy measures (`alg:main_alg`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_occ.game.contracts import DIAGNOSTICS, check_estimate
from torch_occ.game.estimators import Estimator, Feedback, ImportanceWeighted
from torch_occ.game.learners.base import Learner
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import interior_point
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import LogBarrier, Shannon, Tsallis
from torch_occ.regularizers.parametrized import Parametrized
from torch_occ.regularizers.schedules import Constant, InverseSqrt
from torch_occ.step.budgets.limits import Budgets
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.solution import Solution


class FTRL(Learner):
    """Follow the regularized leader over occupancy measures.

    With `jin_luo(mdp)` and importance weights this is `alg:main_alg`.

    Args:
        mdp: the MDP of the game.
        regularizer: psi_t.
        estimator: of the losses; by default importance weights.
        constraints: budgets on expected costs, without a batch. Every q_t then meets them. The
            entry `budget_excess` of the state is the largest ⟨G_i, q_t⟩ - h_i so far, `(N,)`.
    """

    def __init__(
        self,
        mdp: LayeredMDP,
        regularizer: Regularizer,
        estimator: Estimator | None = None,
        *,
        constraints: Budgets | None = None,
    ) -> None:
        super().__init__(mdp)
        if not isinstance(regularizer, Regularizer):
            raise TypeError(
                "regularizer: expected an occ.Regularizer, for example occ.jin_luo(mdp), got "
                f"{type(regularizer).__name__}"
            )
        if not isinstance(estimator, Estimator | None):
            raise TypeError(
                "estimator: expected an occ.Estimator, for example occ.ImportanceWeighted(), got "
                f"{estimator!r}"
            )
        self.step = FTRLStep(mdp, regularizer, constraints=constraints)
        if constraints is not None and constraints.costs.dim() + constraints.limits.dim() > 4:
            raise ValueError(
                "constraints: expected budgets without a batch, costs (m, S, A) and limits (m,), "
                f"got {tuple(constraints.costs.shape)} and {tuple(constraints.limits.shape)}"
            )
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
        if self.step.constraints is not None:
            limits = self.step.constraints.limits.detach()
            self.state["multipliers"] = torch.zeros_like(limits).expand(num_seeds, -1).clone()
            self.state["budget_excess"] = torch.full_like(count, -torch.inf)

    @torch.no_grad()
    def propose(self, t: int) -> Tensor:
        state = self.state
        solution = self.step.solve(
            state["cumulative_loss"],
            float(t),
            warm_start=state["q"],
            check=False,
            multipliers=state.get("multipliers"),
        )
        if solution.multipliers is not None and solution.slack is not None:
            state["multipliers"] = solution.multipliers
            excess = -solution.slack.amin(-1)
            state["budget_excess"] = torch.maximum(state["budget_excess"], excess)
        state["q"] = solution.q
        note(state, solution)
        return solution.q

    @torch.no_grad()
    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        estimate = check_estimate(
            self.mdp, self.estimator, self.estimator(feedback, q, t), t, len(q)
        )
        self.state["cumulative_loss"] = self.state["cumulative_loss"] + estimate

    def diagnostics(self) -> dict[str, Tensor]:
        return {name: self.state[name] for name in DIAGNOSTICS}


def note(state: dict[str, Tensor], solution: Solution) -> None:
    """Write the diagnostics of a solution into the state of a learner."""
    dtype = solution.q.dtype
    state["newton_steps"] = solution.steps.to(dtype)
    state["dual_residual"] = solution.dual_residual
    state["flow_residual"] = solution.flow_residual
    state["uncertified"] = (~solution.converged).to(dtype)
    state["status"] = solution.status.to(dtype)


def _same(one: LayeredMDP, other: LayeredMDP) -> bool:
    """Whether two MDPs have the same layout and the same probabilities."""
    if one.layer_sizes != other.layer_sizes or not torch.equal(one.actions, other.actions):
        return False
    return all(
        torch.equal(p, q) for p, q in zip(one.probabilities, other.probabilities, strict=True)
    )
