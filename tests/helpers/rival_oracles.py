"""The rivals once more, in torch and plain Python, as they are written in the papers.

Each is a learner of its own that `simulate` plays in torch, from the same random numbers.
"""

import math

import numpy as np
import torch

import torch_occ as occ
from torch_occ.game.learners import EmpiricalLearner
from torch_occ.rivals.beliefs import split_transitions


def kl_lower(mean, width):
    """The smallest x with kl(mean, x) <= width, by bisection."""
    low, high = torch.zeros_like(mean), mean
    for _ in range(80):
        x = (low + high) / 2
        information = torch.xlogy(mean, mean / x) + torch.xlogy(1 - mean, (1 - mean) / (1 - x))
        low, high = (
            torch.where(information > width, x, low),
            torch.where(information > width, high, x),
        )
    return torch.where(mean > 0, high, 0.0)


class KLUCB(EmpiricalLearner):
    def index(self, t):
        visits = self.state["visits"]
        seen = visits.clamp(min=1)
        return kl_lower(self.state["losses"] / seen, math.log(max(t, 2)) / seen) * (visits > 0)


def bonus_of(name, mdp, log, left, n, loss, p, low, up, arrivals, changed=0.0):
    """The bonus of one pair, from the formulas of the papers, with plain numbers."""
    L, S, A = mdp.horizon, mdp.num_states, mdp.num_actions
    if name in ("hoeffding", "sharp"):
        b = 7 * L * log / math.sqrt(n) if name == "hoeffding" else left * math.sqrt(log / (2 * n))
        return b + min(1, changed / (2 * n))
    if n < 2:
        return math.inf
    mean = np.dot(p, low)
    variance, gap = np.dot(p, (low - mean) ** 2), math.sqrt(np.dot(p, (up - low) ** 2))
    b = math.sqrt(2 * max(loss * (1 - loss), 0) * log / (n - 1)) + 7 * log / (3 * (n - 1))
    if name == "bernstein":
        b += math.sqrt(8 * log * variance / n) + 14 * L * log / (3 * n)
        if left > 1:
            spread = [
                min(1e4 * L**3 * S**2 * A * log**2 / m, L**2) if m else L**2 for m in arrivals
            ]
            b += math.sqrt(8 / n * np.dot(p, spread))
    elif len(p) > 1:
        b += math.sqrt(2 * log / (n - 1)) * (math.sqrt(variance) + gap)
        b += 7 * (left - 1) * log / (3 * (n - 1))
        if name == "strong":
            b += math.sqrt(2 * len(p) * log / (n - 1)) * gap
            b += 7 * len(p) * (left - 1) * log / (3 * (n - 1))
    return b


class Optimist(occ.rivals.CountingLearner):
    """`UCBVI`, `EULER` and `StrongEuler`, pair by pair, with the settings of the learner."""

    def __init__(self, name, learner):
        super().__init__(learner.mdp)
        self.name, self.learner = name, learner

    def start(self, num_seeds):
        super().start(num_seeds)
        self.state |= {"losses": self._zeros(num_seeds), "lower": self._zeros(num_seeds)}

    def observe(self, t, policy, feedback):
        self.state["losses"] = self.state["losses"] + feedback.scatter(feedback.losses, policy)
        self.record(t, feedback)

    def propose_policy(self, t):
        own, policy = self.learner, self._zeros(len(self.seeds))
        log = float(own.log(torch.tensor(float(t), dtype=torch.float64)))
        for n in range(len(policy)):
            lower, chosen = self.plan(n, log)
            self.state["lower"][n] = torch.from_numpy(np.where(self.mdp.actions, lower, 0.0))
            policy[n, range(self.mdp.num_states), chosen] = 1.0
        return policy

    def plan(self, n, log):
        """Q_lower and the actions."""
        mdp, visits, losses = self.mdp, self.state["visits"][n], self.state["losses"][n]
        counts, least = split_transitions(mdp, self.state["counts"][n]), self.state["lower"][n]
        lower, upper = np.full((2, *visits.shape), np.inf)
        chosen, low, up = [0] * mdp.num_states, np.zeros(1), np.zeros(1)
        for k in reversed(range(mdp.horizon)):
            here, left = mdp.layer_slices[k], mdp.horizon - k
            after = visits[mdp.layer_slices[k + 1]].sum(-1) if left > 1 else [0]
            for s, a in ((s, a) for s, a in mdp.actions.nonzero().tolist() if mdp.layer[s] == k):
                lower[s, a], upper[s, a], m = 0.0, left, float(visits[s, a])
                if m:
                    p, loss = counts[k][s - here.start, a].numpy() / m, float(losses[s, a]) / m
                    given = (log, left, m, loss, p, low, up, after, self.learner.corruption)
                    b = bonus_of(self.name, mdp, *given)
                    lower[s, a] = max(0.0, loss + np.dot(p, low) - b)
                    upper[s, a] = min(left, loss + np.dot(p, up) + b)
                if self.learner.monotone:
                    lower[s, a] = max(lower[s, a], float(least[s, a]))
            low = lower[here].min(-1)
            best = lower[here] <= (low + 1e-9 * np.maximum(1, abs(low)))[:, None]
            chosen[here] = best.argmax(-1).tolist()
            up = upper[range(here.start, here.stop), chosen[here]]
        return lower, chosen
