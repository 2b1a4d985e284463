"""EXP3++, a rival of Tsallis-INF in the multi-armed bandit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import torch_occ as occ


class Exp3PlusPlus(occ.Learner):
    """EXP3++ (Seldin and Slivkins, 2014) with the parameters of Seldin and Lugosi (2017).

    With eta_t = sqrt(ln K / (t K)) / 2, weights w proportional to exp(-eta_t L) for the importance
    weighted losses L, and eps_t = min{1 / (2 K), eta_t, beta ln t / (t gap_t^2)} for every arm,

        q_t = (1 - sum of eps_t) w + eps_t.

    The gap of an arm is estimated from below: its lower confidence bound minus the smallest upper
    one, or 0. The bounds are average -+ sqrt(alpha ln(t K^(1/alpha)) / (2 N)), clipped to [0, 1],
    and 0 and 1 for N = 0; alpha = 3 and beta = 256. We could not read the papers: the formulas are
    those that the library SMPyBandits quotes from them, and agree with our memory.
    """

    def __init__(self, mdp: occ.LayeredMDP, alpha: float = 3.0, beta: float = 256.0) -> None:
        super().__init__(mdp)
        if mdp.num_states != 1:
            raise ValueError(f"mdp: EXP3++ is for bandits, with one state, got {mdp.num_states}")
        self.alpha, self.beta = alpha, beta

    def start(self, num_seeds: int) -> None:
        names = ("estimates", "visits", "losses")
        self.state = {name: self._zeros(num_seeds) for name in names}

    def propose(self, t: int) -> Tensor:
        K, visits = self.mdp.num_actions, self.state["visits"]
        eta = 0.5 * math.sqrt(math.log(K) / (t * K))
        average = self.state["losses"] / visits.clamp(min=1)
        width = (self.alpha * math.log(t * K ** (1 / self.alpha)) / (2 * visits)).sqrt()
        upper, lower = (average + width).clamp(max=1), (average - width).clamp(min=0)
        gap = (lower - upper.amin(-1, keepdim=True)).clamp(min=0)
        explore = (self.beta * math.log(t) / (t * gap**2)).nan_to_num(math.inf, math.inf)
        explore = explore.clamp(max=min(1 / (2 * K), eta))
        weights = torch.softmax(-eta * self.state["estimates"], -1)
        return (1 - explore.sum(-1, keepdim=True)) * weights + explore

    def observe(self, t: int, q: Tensor, feedback: occ.Feedback) -> None:
        seen, state = feedback.losses, self.state
        state["estimates"] = state["estimates"] + feedback.scatter(seen / feedback.gather(q), q)
        state["losses"] = state["losses"] + feedback.scatter(seen, q)
        state["visits"] = state["visits"] + feedback.scatter(torch.ones_like(seen), q)
