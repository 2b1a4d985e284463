"""PSRL: posterior sampling for unknown transitions and losses."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.mdp.layers import total
from torch_occ.mdp.occupancy import cheapest, optimal_policy
from torch_occ.rivals.beliefs import join_transitions, split_transitions
from torch_occ.rivals.planning import PlanningLearner
from torch_occ.rivals.sampling import betas, gammas, keys_of


class PSRL(PlanningLearner):
    """Posterior sampling (Osband, Russo and Van Roy, 2013): plan in a model drawn at random.

    Before every episode, the mean loss of each pair is drawn from Beta(1 + sum of losses,
    1 + N - sum of losses), and its transitions from Dirichlet(1/n + counts), with n the number of
    states of the next layer. The policy is optimal for this model. The prior fits Bernoulli losses;
    other losses in [0, 1] are treated as if they were. The guarantee is on average over the prior,
    for losses that have the same mean in every episode; there is none against an adversary.

    The random numbers are a function of the run's seed and the episode
    (torch_occ.rivals.sampling).
    """

    @torch.no_grad()
    def propose_policy(self, t: int) -> Tensor:
        loss, transitions = self.sample(t)
        believed = self.mdp.with_transitions(transitions)
        return cheapest(self.mdp, optimal_policy(believed, loss, in_order=True).Q)

    def sample(self, t: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The model of episode t: losses `(N, S, A)`, and transitions per layer."""
        state, seeds = self.state, self.seeds or range(len(self.state["visits"]))
        successes, visits = state["losses"], state["visits"]
        loss = betas(seeds, t, 1 + successes, 1 + (visits - successes).clamp(min=0))
        counts = split_transitions(self.mdp, state["counts"])
        prior = join_transitions([m + 1 / m.shape[-1] for m in counts])
        # The first items belong to the losses, two for each pair.
        first = 2 * visits[0].numel()
        keys = keys_of(seeds, t, first + prior.shape[-1])[:, first:]
        drawn = torch.from_numpy(gammas(keys, prior.cpu().double().numpy())).to(prior)
        shares = split_transitions(self.mdp, drawn)
        return loss, tuple(x / total(x, -1).unsqueeze(-1) for x in shares)
