"""FTRL over the occupancy measures of transitions that are learned.

    q_t = argmin over q in Omega(P_i) of ⟨q, L_t⟩ + psi_t(q),     the policy is q_t(s, a) / q_t(s),

where P_i are the empirical transitions of epoch i. The estimate of a loss divides by q_t, or by an
upper occupancy bound u_t; a bonus makes it optimistic. Jin, Huang and Luo (2021) prove their bound
for widths, bonus, upper occupancy bounds and a new start in every epoch (`jin_huang_luo`). The
plug-in, which is the default, has none of these and no proof.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_occ.game.checks import DIAGNOSTICS, check_estimate
from torch_occ.game.estimators import Estimator, Feedback, FullInformation, ImportanceWeighted
from torch_occ.game.learners import note
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import LayeredFlow, occupancy, policy_of, uniform_policy
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import LogBarrier, Shannon, Tsallis
from torch_occ.regularizers.parameters import Parametrized
from torch_occ.regularizers.schedules import InverseSqrt
from torch_occ.rivals.beliefs import (
    Bonus,
    CountingLearner,
    Table,
    Widths,
    join_transitions,
    split_transitions,
    upper_occupancy,
)
from torch_occ.step.ftrl import FTRLStep

#: Optimistic transitions are at least this share of the empirical ones, so that every state can be
#: reached while the widths are large.
FLOOR = 0.05


class UnknownFTRL(CountingLearner):
    """FTRL for unknown transitions, over the occupancy measures of the empirical ones.

    The loss of the step is L_t = sum of estimates - (number of estimates) * bonus, with the bonus
    of the current epoch. The sum is over all episodes before t, or with `restart` over those of
    the epoch, and psi is taken at t, or with `restart` at the number of the episode in the epoch.

    Args:
        mdp: only its layout is kept (`mdp.blind()`).
        regularizer: psi_t, any of the package.
        widths: confidence widths. Estimates then divide by the upper occupancy bound u_t (Comp-UOB)
            instead of q_t.
        bonus: what is subtracted from every estimate; it needs `widths`.
        restart: whether a new FTRL instance begins in every epoch.
        estimator: importance weights by default; it is given q_t, or u_t, in place of the
            occupancy measure.
        optimistic: FTRL over optimistic transitions max(P - B, 0.05 P), whose rows sum to less than
            one: the rest ends the episode without further loss (Jin, Liu, Rouyer, Chang, Wei and
            Luo, 2023; the floor is ours, and the formula is quoted from memory). It needs `widths`
            and replaces the bonus.
        adaptive: for regularizers psi / InverseSqrt(1): replace t by `adaptive` + M_t / (L ln(S A))
            with M_t = sum of min{ sum q l^2, sum q (Q - V)^2 } over the estimates l in the sum, and
            Q, V of l and the policy in the believed transitions.
        pseudo_count: of the empirical transitions.

    Raises:
        TypeError, ValueError: if an argument is wrong, or `widths` are missing.
    """

    def __init__(
        self,
        mdp: LayeredMDP,
        regularizer: Regularizer,
        *,
        widths: Widths | None = None,
        bonus: Bonus | None = None,
        restart: bool = False,
        estimator: Estimator | None = None,
        optimistic: bool = False,
        adaptive: float | None = None,
        pseudo_count: float = 1.0,
    ) -> None:
        super().__init__(mdp, pseudo_count)
        for name, value, kind in (
            ("regularizer", regularizer, Regularizer),
            ("estimator", estimator, Estimator | None),
            ("widths", widths, Widths | None),
            ("bonus", bonus, Bonus | None),
        ):
            if not isinstance(value, kind):
                example = {"regularizer": "jin_luo(mdp)", "estimator": "ImportanceWeighted()"}
                example |= {"widths": 'Widths.of("practical", mdp)', "bonus": "Bonus.practical()"}
                raise TypeError(f"{name}: expected for example occ.{example[name]}, got {value!r}")
        if widths is None and (bonus is not None or optimistic):
            which = "a bonus" if bonus is not None else "optimistic transitions"
            raise ValueError(
                f"widths: {which} needs confidence widths, for example "
                'occ.rivals.Widths.of("practical", mdp)'
            )
        if bonus is not None and optimistic:
            raise ValueError("bonus: optimistic transitions replace it; give one of them")
        if pseudo_count == 0:
            raise ValueError(
                "pseudo_count: FTRL needs a positive one; without it some states have probability "
                "zero from every pair, and the occupancy measures have no interior"
            )
        if adaptive is not None and not 1 <= adaptive < math.inf:
            raise ValueError(f"adaptive: expected a number of at least 1, got {adaptive}")
        self.step = FTRLStep(self.mdp, regularizer, backend="torch")
        self.estimator = ImportanceWeighted() if estimator is None else estimator
        self.widths, self.bonus, self.restart = widths, bonus, restart
        self.optimistic, self.adaptive = optimistic, adaptive
        self.max_episodes = None if widths is None else widths.episodes

    @property
    def full_information(self) -> bool:  # type: ignore[override]
        """Whether the estimator needs the whole loss function."""
        return self.estimator.full_information

    @property
    def divides_by_bounds(self) -> bool:
        """Whether estimates divide by upper occupancy bounds."""
        return self.widths is not None and not self.full_information

    @classmethod
    def practical(cls, mdp: LayeredMDP, regularizer: Regularizer | None = None) -> UnknownFTRL:
        """Small widths and bonuses, upper occupancy bounds, no restarts; without any guarantee.

        The regularizer is by default Tsallis() / InverseSqrt(1) + LogBarrier(1).
        """
        if regularizer is None:
            regularizer = Tsallis() / InverseSqrt(1.0) + LogBarrier(1.0)
        widths = Widths.of("practical", mdp)
        return cls(mdp, regularizer, widths=widths, bonus=Bonus.practical())

    @classmethod
    def jin_huang_luo(
        cls, mdp: LayeredMDP, episodes: int | None = None, *, full_information: bool = False
    ) -> UnknownFTRL:
        """The algorithm of Jin, Huang and Luo (2021) with the constants that they print.

        Bandit feedback: psi_t = -sqrt(tau) sum sqrt(q) - 128 L^4 sum log q with tau the number of
        the episode in its epoch, and delta = T^-3. Full information: the entropy sum q log q over
        eta_t = sqrt(L ln(S A) / (64 L^5 ln(S A) + M_t)), and delta = T^-2. Both: widths of their
        eq. (8), the bonus L min{1, sum B}, and a new start in every epoch. Two things differ, and
        both help: one pseudo-count, and no bonus where the next state is certain.

        Raises:
            ValueError: if the number of episodes is missing.
        """
        if episodes is None or episodes < 2:
            raise ValueError(
                "episodes: the algorithm of Jin, Huang and Luo needs the number of episodes T, at "
                f"least 2, for its confidence level T^-{2 if full_information else 3}; got "
                f"{episodes}"
            )
        L = mdp.horizon
        delta = float(episodes) ** (-2 if full_information else -3)
        widths = Widths.of("jin_huang_luo", mdp, episodes, delta)
        if full_information:
            return cls(
                mdp,
                Shannon() / InverseSqrt(1.0),
                widths=widths,
                bonus=Bonus(),
                restart=True,
                estimator=FullInformation(),
                adaptive=64.0 * L**4,
            )
        psi = Tsallis() / InverseSqrt(1.0) + LogBarrier(128.0 * L**4)
        return cls(mdp, psi, widths=widths, bonus=Bonus(), restart=True)

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        self.step.check_parameters()
        for part in vars(self.estimator).values():
            if isinstance(part, Parametrized):
                part.validate()
        zero, state = self._zeros(num_seeds), self.state
        state["cumulative_loss"], state["bonus"] = zero, zero.clone()
        if self.widths is not None:
            state["widths"] = torch.zeros_like(state["counts"])
        state["q"] = zero.clone()
        self._believe(torch.ones(num_seeds, dtype=torch.bool, device=zero.device), None)
        count = zero.new_zeros(num_seeds)
        if self.adaptive is not None:
            state["spread"] = count.clone()
        state |= dict.fromkeys(DIAGNOSTICS, count)

    # -- the belief ------------------------------------------------------------------------------

    def confidence(self) -> Table:
        """The widths B of the epoch, one tensor `(N, S_k, A, S_{k+1})` per layer.

        Raises:
            ValueError: if the learner has no widths.
        """
        if self.widths is None:
            raise ValueError("widths: this learner was made without confidence widths")
        return split_transitions(self.mdp, self.state["widths"])

    def believed(self) -> LayeredMDP:
        """The MDP over whose occupancy measures the step is taken, a batch of N.

        Its transitions are the empirical ones, or the optimistic ones, whose rows sum to less than
        one.
        """
        P = self.transitions()
        if self.optimistic:
            pairs = zip(P, self.confidence(), strict=True)
            P = tuple(torch.maximum(p - width, FLOOR * p) for p, width in pairs)
        return self.mdp.with_transitions(P)

    def bounds(self, policy: Tensor) -> Tensor:
        """u(s, a) = pi(a | s) u(s), the upper occupancy bound of a policy, `(N, S, A)`.

        Raises:
            ValueError: if the learner has no widths.
        """
        u = upper_occupancy(self.mdp, policy, self.transitions(), self.confidence())
        return policy * u.unsqueeze(-1)

    def _believe(self, new: Tensor, policy: Tensor | None) -> None:
        """Begin epochs for the seeds in the mask: widths, bonus, and the start of Newton's method.

        The last q does not belong to the new occupancy measures; that of its policy does.
        """
        state = self.state
        if self.widths is not None:
            found = self.widths(self.mdp, self.transitions(), state["epoch_visits"])
            state["widths"] = torch.where(new[:, None], join_transitions(found), state["widths"])
            if self.bonus is not None:
                bonus = self.bonus(self.mdp, self.confidence())
                state["bonus"] = torch.where(new[:, None, None], bonus, state["bonus"])
        if policy is None or self.restart:
            policy = uniform_policy(self.mdp).expand_as(state["q"])
        q = occupancy(self.believed(), policy, in_order=True)
        state["q"] = torch.where(new[:, None, None], q, state["q"])

    # -- the game --------------------------------------------------------------------------------

    def loss_and_time(self, t: int) -> tuple[Tensor, Tensor]:
        """The cumulative loss `(N, S, A)` and the time `(N,)` at which the step is taken."""
        state = self.state
        first = state["epoch_start"] if self.restart else torch.ones_like(state["epoch_start"])
        counted = t - first  # the number of estimates in the sum
        loss = state["cumulative_loss"] - counted[:, None, None] * state["bonus"]
        if self.adaptive is None:
            return loss, counted + 1
        return loss, self.adaptive + state["spread"] / self.choices

    @property
    def choices(self) -> float:
        """L ln(S A); at least L ln 2, for there may be nothing to choose."""
        return self.mdp.horizon * math.log(max(self.mdp.num_pairs, 2))

    @torch.no_grad()
    def propose_policy(self, t: int) -> Tensor:
        loss, time = self.loss_and_time(t)
        solution = self.step.solve(
            loss, time, warm_start=self.state["q"], mdp=self.believed(), check=False
        )
        self.state["q"] = solution.q
        note(self.state, solution)
        return policy_of(self.mdp, solution.q)

    @torch.no_grad()
    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        """Learn from episode t; `q` is the policy that was played."""
        policy, state = q, self.state
        shown = self.bounds(policy) if self.divides_by_bounds else state["q"]
        estimate = check_estimate(
            self.mdp, self.estimator, self.estimator(feedback, shown, t), t, len(policy)
        )
        if self.adaptive is not None:
            state["spread"] = state["spread"] + self._spread(policy, estimate - state["bonus"])
        state["cumulative_loss"] = state["cumulative_loss"] + estimate
        new = self.record(t, feedback)
        if bool(new.any()):
            self._believe(new, policy)
            if self.restart:
                kept = (~new).to(policy.dtype)
                state["cumulative_loss"] = state["cumulative_loss"] * kept[:, None, None]
                if self.adaptive is not None:
                    state["spread"] = state["spread"] * kept

    def _spread(self, policy: Tensor, estimate: Tensor) -> Tensor:
        """min{ sum q l^2, sum q (Q - V)^2 } of an episode, `(N,)`."""
        q, flow = self.state["q"], LayeredFlow(self.believed())
        V = flow.backward(policy, (policy * estimate).sum(-1))
        advantage = estimate + flow.lookahead(V) - V.unsqueeze(-1)
        sums = [(q * x**2).sum((-2, -1)) for x in (estimate, advantage)]
        return torch.minimum(*sums)

    def diagnostics(self) -> dict[str, Tensor]:
        return {name: self.state[name] for name in DIAGNOSTICS}

    @torch.no_grad()
    def monitor(self, mdp: LayeredMDP, q: Tensor) -> dict[str, float]:
        """As for every `CountingLearner`; with widths, also how good the confidence set is.

        Returns:
            Also `coverage`, the share of seeds for which the confidence set holds the true
            transitions; `bonus`, its mean over pairs; `upper_bound`, the mean over states of the
            upper occupancy bound u(s), and `occupancy`, that of q(s).
        """
        found = super().monitor(mdp, q)
        if self.widths is not None:
            pairs = zip(self._errors(mdp), self.confidence(), strict=True)
            held = torch.stack([(e.abs() <= B + 1e-12).flatten(1).all(1) for e, B in pairs])
            found["coverage"] = float(held.all(0).double().mean())
            found["bonus"] = float(self.state["bonus"][:, mdp.actions].mean())
            found["upper_bound"] = float(self.bounds(policy_of(mdp, q)).sum(-1).mean())
            found["occupancy"] = float(q.sum(-1).mean())
        return found
