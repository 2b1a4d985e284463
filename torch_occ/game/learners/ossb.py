"""OSSB for known transitions: the exploration that the limit of regret asks for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_occ.game.estimators import Feedback
from torch_occ.game.learners.base import Learner
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.limits.completion import missing_visits
from torch_occ.mdp.occupancy import cheapest, occupancy, optimal_policy

#: The reward for the pair that is played for; it outweighs the losses of an episode.
AIM = 1000.0


class OSSB(Learner):
    """Plays the greedy policy, and explores what the limit of regret asks for at the least cost.

    At episode t a plan is made for the average losses. With (1 + margin) log t in place of log T,
    the program of `lower_bound` says which visits, beside those that were made, rule out every
    table of means for which another policy is optimal. The learner makes these visits and plays
    the greedy policy otherwise, until the next plan. A plan is due if t or the visits of a pair
    have grown by the share `growth`.

    - In a state that the greedy policy visits, the action with the fewest visits is played among
      the greedy one and those to explore. So greedy pairs are known best.
    - In other states it is the one with the fewest visits among those to explore.
    - If there is something to explore, a pair with at most `share` times as many visits as there
      were episodes of exploration, and at most log t visits, is played for first: by the policy
      that most likely visits it. Attempts count as visits.

    This is OSSB (Combes, Magureanu and Proutiere, 2017) with changes. The printed algorithm
    explores until the visits of every pair reach the program's solution for no visits at all. Here,
    visits of the past count with the information that they have. A plan is kept for a while, and
    greedy pairs come first. The theorem is about the printed algorithm with a margin and a share
    that are positive, and as small as one likes.

    The losses must be in [0, 1]. Needs SciPy if there are states that a greedy policy leaves out.

    Its state, for N seeds:

    | name | shape | what it is |
    |---|---|---|
    | `visits`, `losses` | `(N, S, A)` | the visits of each pair, and the sum of its losses |
    | `tries` | `(N, S, A)` | the episodes played for a pair |
    | `goals` | `(N, S, A)` | the visits up to which a pair is explored |
    | `greedy` | `(N, S)` | the action of the greedy policy |
    | `visited` | `(N, S)` | whether the greedy policy visits a state |
    | `floor` | `(N,)` | the visits that every pair should have |
    | `due`, `next` | `(N, S, A)`, `(N,)` | the visits, and the episode, that make a new plan due |
    | `explored` | `(N,)` | the episodes of exploration |

    Args:
        margin: how much more information than log t is gathered.
        share: of the episodes of exploration, for every pair.
        growth: how much t or visits grow before the next plan.

    Raises:
        ValueError: if `margin` is negative, `share` is not in [0, 1), or `growth` is not positive.
    """

    def __init__(
        self,
        mdp: LayeredMDP,
        *,
        margin: float = 0.0,
        share: float = 0.003,
        growth: float = 0.3,
    ) -> None:
        super().__init__(mdp)
        if not 0 <= margin < math.inf:
            raise ValueError(f"margin: expected a number of at least 0, got {margin}")
        if not 0 <= share < 1:
            raise ValueError(f"share: expected a number in [0, 1), got {share}")
        if not 0 < growth < math.inf:
            raise ValueError(f"growth: expected a positive number, got {growth}")
        self.margin, self.share, self.growth = margin, share, growth
        #: Pairs that some policy visits, `(S, A)`.
        self.pairs = mdp.actions & mdp.reachable.unsqueeze(-1)

    def start(self, num_seeds: int) -> None:
        pairs = self._zeros(num_seeds)
        states, runs = pairs[..., 0], pairs[:, 0, 0]
        self.state = {
            "visits": pairs,
            "losses": pairs.clone(),
            "goals": pairs.clone(),
            "tries": pairs.clone(),
            "due": pairs.clone(),
            "greedy": torch.zeros_like(states, dtype=torch.int64),
            "visited": torch.zeros_like(states, dtype=torch.bool),
            "next": runs.clone(),
            "explored": runs.clone(),
            "floor": runs.clone(),
        }

    # -- plans ---------------------------------------------------------------------------------

    def averages(self, seed: int | slice) -> Tensor:
        """The average losses, zero for pairs without visits, `(..., S, A)`."""
        losses, visits = self.state["losses"][seed], self.state["visits"][seed]
        return (losses / visits.clamp(min=1)).clamp(0.0, 1.0)

    def tried(self, seed: int | slice) -> Tensor:
        """Visits and attempts of every pair, `(..., S, A)`."""
        return self.state["visits"][seed] + self.state["tries"][seed]

    def renew(self, t: int, seed: int) -> None:
        """Make the plan of one seed for episode t and those after it.

        Plans are made one by one, so that a seed plays the same game alone and among others.
        """
        state, visits, mean = self.state, self.state["visits"][seed], self.averages(seed)
        policy = cheapest(self.mdp, optimal_policy(self.mdp, mean).Q)
        state["greedy"][seed] = policy.argmax(-1)
        state["visited"][seed] = occupancy(self.mdp, policy, in_order=True).sum(-1) > 0
        state["goals"][seed] = visits
        if bool((self.tried(seed)[self.pairs] > 0).all()):
            level = (1 + self.margin) * math.log(max(t, 2))
            missing = missing_visits(self.mdp, mean, visits / level)
            state["goals"][seed] += (level * missing.to(visits)).ceil()
        # Tied actions are explored for ever, at no cost; log t bounds what that asks of others.
        state["floor"][seed] = min(self.share * float(state["explored"][seed]), math.log(max(t, 2)))
        state["due"][seed] = ((1 + self.growth) * visits).floor() + 1
        state["next"][seed] = math.floor((1 + self.growth) * t) + 1

    # -- play ----------------------------------------------------------------------------------

    def propose(self, t: int) -> Tensor:
        state = self.state
        due = (t >= state["next"]) | (state["visits"] >= state["due"]).flatten(1).any(-1)
        for seed in due.nonzero().flatten().tolist():
            self.renew(t, seed)
        greedy, visited, visits = state["greedy"], state["visited"], state["visits"]
        open_ = torch.where(state["goals"] > visits, visits, torch.inf)
        limit = visits.gather(-1, greedy.unsqueeze(-1)).squeeze(-1)
        explore = open_.amin(-1) < torch.where(visited, limit, torch.inf)
        choice = torch.where(explore, first_least(open_), greedy)
        tried = torch.where(self.pairs, self.tried(slice(None)), torch.inf).flatten(1)
        fewest, rare = tried.amin(-1), first_least(tried)
        exploring = (explore & visited).any(-1)
        aims = (fewest == 0) | (exploring & (fewest <= state["floor"]))
        policy = torch.nn.functional.one_hot(choice, self.mdp.num_actions).to(visits)
        if bool(aims.any()):
            target = torch.nn.functional.one_hot(rare, tried.shape[-1]).to(visits).view_as(visits)
            plan = optimal_policy(self.mdp, self.averages(slice(None)) - AIM * target)
            aim = aims[:, None, None]
            policy = torch.where(aim, cheapest(self.mdp, plan.Q), policy)
            state["tries"] = state["tries"] + torch.where(aim, target, 0.0)
        return occupancy(self.mdp, policy)

    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        state, visits = self.state, self.state["visits"]
        state["visits"] = visits + feedback.scatter(torch.ones_like(feedback.losses), visits)
        state["losses"] = state["losses"] + feedback.scatter(feedback.losses, visits)
        other = feedback.actions != state["greedy"].gather(-1, feedback.states)
        state["explored"] = state["explored"] + other.any(-1).to(visits)


def first_least(x: Tensor) -> Tensor:
    """The index of the smallest number along the last dimension, the first of equal ones."""
    least = x == x.amin(-1, keepdim=True)
    return (least & (least.cumsum(-1) == 1)).to(torch.int64).argmax(-1)
