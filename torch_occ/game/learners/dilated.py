"""Policy optimization with dilated bonuses: one small FTRL problem per state, no convex program.

For known transitions, after Luo, Wei and Lee (2021) and Dann, Wei and Zimmert (2023). In episode t,

    pi_t(.|s) = argmin of ⟨pi, sum_{tau < t} (Q_tau - B_tau)(s, .)⟩ - sum_a sqrt(pi(a)) / eta_t(s)
    Q_t(s,a)  = 1{(s,a) visited} (loss of the episode from s on) / q_t(s,a)
    B_t(s,a)  = b_t(s) + (1 + 1/L) E[sum_a' pi_t(a'|s') B_t(s',a') | s, a],

with q_t the occupancy measure of pi_t. Q_t is an unbiased estimate of the value of pi_t. What is
printed is this form; the rates and bonuses are derived here, as the prints were not at hand. With
R = L - k(s), the range of losses from s on, and N_t(s) = sum_{tau <= t} 1 / q_tau(s),

    1 / eta_t(s) = (R / gamma) sqrt(N_t(s)),
    b_t(s) = scale (2 gamma + 1 / gamma) R xi_t(s) / (q_t(s) sqrt(N_t(s))),
    xi_t(s) = sum_a sqrt(pi_t(a|s)) (1 - pi_t(a|s)).

**Derivation.** In a state, the regret of FTRL grows per episode by the stability, at most
2 eta R^2 xi / q in expectation, and by the penalty (1/eta_t - 1/eta_{t-1}) (sum sqrt(pi) - 1), at
most (R / gamma) xi / (q sqrt(N)). Their sum is b_t(s) with scale 1. The dilated bonus then moves
these terms from the occupancy of the best policy, which may be far from q_t, to that of pi_t: by
the performance-difference lemma and a telescoping sum over layers, the regret is at most
(1 + 1/L)^L < 3 times sum_t sum_s q_t(s) b_t(s), up to a constant, provided that
eta sqrt(pi) (B + R / q) is small, as it is after many visits. That is at most
3 (2 gamma + 1/gamma) sum_s R xi sum_t t^(-1/2): order L S sqrt(A T). It is small wherever the
policy is nearly deterministic, as logarithmic regret in a stochastic world needs. That part is not
proved here, nor is the proviso checked.

With one layer this is FTRL with the Tsallis entropy: bonuses shift all actions alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.game.estimators import Feedback
from torch_occ.game.learners.base import Learner
from torch_occ.mdp.in_order import InOrder, total
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import join
from torch_occ.step.checks import check_reachable

#: The largest number of Newton iterations for the policy of a state. They converge from one side.
ITERATIONS = 60


class PolicyOptimization(Learner):
    """Policy optimization with dilated bonuses, for known transitions.

    An episode takes one pass forward and one backward through the transitions. See
    torch_occ.game.learners.dilated for the formulas, their sources and what is derived.

    Args:
        mdp: every state must be reachable.
        gamma: the learning rate. 1 / sqrt(2) makes the derived bonus smallest.
        scale: of the bonus; 1 is the derived one. Smaller bonuses explore less and have no proof.

    Raises:
        ValueError: if a state cannot be reached, or an argument is out of range.
    """

    def __init__(self, mdp: LayeredMDP, gamma: float = 0.5**0.5, scale: float = 1.0) -> None:
        super().__init__(mdp)
        check_reachable(mdp)
        if not gamma > 0:
            raise ValueError(f"gamma: expected a positive number, got {gamma}")
        if not scale >= 0:
            raise ValueError(f"scale: expected a number of at least 0, got {scale}")
        self.gamma, self.scale = float(gamma), float(scale)

    def start(self, num_seeds: int) -> None:
        pairs = self._zeros(num_seeds)
        self.state = {
            "cumulative_loss": pairs,  # of Q - B
            "inverse": pairs[..., 0].clone(),  # N, the sums of 1 / q(s)
            "q": pairs.clone(),
        }

    @torch.no_grad()
    def propose(self, t: int) -> Tensor:
        mdp, state = self.mdp, self.state
        losses = mdp.split(state["cumulative_loss"], -2)
        inverses, masks = mdp.split(state["inverse"], -1), mdp.split(mdp.actions, -2)
        u = mdp.initial.expand(len(losses[0]), -1)
        occupancies, sums = [], []
        for k in range(mdp.horizon):
            # q(s) depends on the layers before only, so N includes this episode.
            sums.append(inverses[k] + 1 / u)
            rate = self.gamma / ((mdp.horizon - k) * sums[k].sqrt())
            occupancies.append(u.unsqueeze(-1) * tsallis_policy(losses[k], rate, masks[k]))
            if k + 1 < mdp.horizon:
                u = InOrder(mdp.layers[k]).arrive(occupancies[k])
        state["inverse"], state["q"] = join(sums, 1), join(occupancies, 2)
        return state["q"]

    @torch.no_grad()
    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        to_go = feedback.losses.flip(-1).cumsum(-1).flip(-1)
        estimate = feedback.scatter(to_go / feedback.gather(q), q)
        total = self.state["cumulative_loss"] + (estimate - self.bonus(q))
        self.state["cumulative_loss"] = torch.where(self.mdp.actions, total, 0.0)

    def bonus(self, q: Tensor) -> Tensor:
        """B_t(s, a), `(N, S, A)`, of the last proposal."""
        mdp = self.mdp
        u = total(q, -1)
        policy = q / u.unsqueeze(-1)
        spread = total(policy.sqrt() * (1 - policy), -1)  # xi
        reach = (mdp.horizon - mdp.layer).to(q)
        factor = self.scale * (2 * self.gamma + 1 / self.gamma)
        own = mdp.split(factor * reach * spread / (u * self.state["inverse"].sqrt()), -1)
        policies = mdp.split(policy, -2)
        found: list[Tensor] = []
        behind: Tensor | None = None
        for k in reversed(range(mdp.horizon)):
            B = own[k].unsqueeze(-1).expand(*own[k].shape, mdp.num_actions)
            if behind is not None:
                B = B + (1 + 1 / mdp.horizon) * InOrder(mdp.layers[k]).ahead(behind)
            behind = total(policies[k] * B, -1)
            found.insert(0, B)
        return join(found, 2)


def tsallis_policy(loss: Tensor, rate: Tensor, mask: Tensor) -> Tensor:
    """argmin of ⟨pi, loss⟩ - sum_a sqrt(pi(a)) / rate over distributions.

    sqrt(pi(a)) = 1 / (2 rate (loss(a) - v)), with the v below all losses for which the sum of pi is
    one. The sum is convex and increasing in v, so Newton's method descends to v from any larger
    start, for which the sum is at least one.

    Args:
        loss: `(*batch, A)`.
        rate: `(*batch,)`, positive.
        mask: the available actions, broadcastable to the loss.
    """
    gaps = torch.where(mask, loss, torch.inf)
    gaps = 2 * rate.unsqueeze(-1) * (gaps - gaps.amin(-1, keepdim=True))
    v = torch.full_like(gaps[..., :1], -1.0)  # in units of 1 / (2 rate), below the smallest loss
    running = torch.ones_like(v, dtype=torch.bool)
    for _ in range(ITERATIONS):
        root = 1 / (gaps - v)  # sqrt(pi), zero on masked actions
        excess = total(root * root, -1).unsqueeze(-1) - 1
        step = excess / (2 * total(root * root * root, -1).unsqueeze(-1))
        running = running & (excess > 0) & (v - step < v)
        v = torch.where(running, v - step, v)
        if not bool(running.any()):
            break
    root = 1 / (gaps - v)
    return root * root / total(root * root, -1).unsqueeze(-1)
