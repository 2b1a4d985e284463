"""The torch player: one episode of every seed at a time.

The learner proposes q or a policy, which is played along a trajectory, and it observes the losses
there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_occ._support.constants import CHUNK
from torch_occ._support.streams import invert
from torch_occ.game.estimators import Feedback
from torch_occ.game.losses import LossProcess
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import occupancy, policy_of

if TYPE_CHECKING:
    from torch_occ.game.simulate import Simulation


class TorchPlayer:
    """Plays any learner; all seeds are played as one batch."""

    name = "torch"
    chunks = 1
    most = CHUNK
    reacts = False

    def __init__(self, mdp: LayeredMDP) -> None:
        self.mdp = mdp
        self.first = mdp.initial.cumsum(-1)

    def play(self, run: Simulation, means: Tensor, numbers: Tensor, tables: Tensor | None) -> None:
        """Play episodes run.t + 1, ....

        Args:
            means: mean losses `(n or 1, N or 1, S, A)`.
            numbers: uniform numbers `(N, n, L, 3)`.
            tables: uniform numbers `(N, n, S, A)` for whole loss tables, or None.
        """
        for i in range(numbers.shape[1]):
            run.t += 1
            run.since += 1
            proposed, policy = self.ask(run)
            mean = means[min(i, len(means) - 1)].expand_as(policy)
            table = None if tables is None else run.losses.draw(mean, tables[:, i])
            # A copy: the learner may change it, and the process keeps the original.
            table = mean.clone() if table is mean else table
            feedback = self.walk(run.losses, policy, mean, table, numbers[:, i])
            run.contract.drawn(run.t, feedback)
            run.tally(mean, feedback)
            run.learner.observe(run.t, proposed, feedback)

    def ask(self, run: Simulation) -> tuple[Tensor, Tensor]:
        """Set `run.q` to the learner's next q.

        Returns what the learner proposed (q or a policy), and the policy that is played, both
        `(N, S, A)`.
        """
        learner, n = run.learner, len(run.seeds)
        if not learner.proposes_policy:
            q = learner.propose(run.t)
            run.contract.proposal(run.t, q)
            q = q.detach().expand(n, *q.shape[1:])
            run.q = q.clone()  # the learner may change its own tensor later
            return q, policy_of(self.mdp, run.q)
        policy = learner.propose_policy(run.t)
        run.contract.policy(run.t, policy)
        policy = policy.detach().expand(n, *policy.shape[1:])
        run.q = occupancy(self.mdp, policy, in_order=True)
        return policy, policy.clone()

    def walk(
        self,
        losses: LossProcess,
        policy: Tensor,
        mean: Tensor,
        table: Tensor | None,
        numbers: Tensor,
    ) -> Feedback:
        """Sample one trajectory per seed.

        In each layer, the three numbers of `(N, L, 3)` decide the action, the loss and the next
        state. The last layer has no next state, so its third number decides the first state.
        """
        every = torch.arange(len(policy), device=policy.device)
        local = invert(self.first.expand(len(policy), -1), numbers[:, -1, 2])
        states, actions, suffered = [], [], []
        for k, (here, layer) in enumerate(zip(self.mdp.layer_slices, self.mdp.layers, strict=True)):
            state = here.start + local
            action = invert(policy[every, state].cumsum(-1), numbers[:, k, 0])
            loss = (
                losses.draw(mean[every, state, action], numbers[:, k, 1])
                if table is None
                else table[every, state, action]
            )
            if k + 1 < self.mdp.horizon:
                local = layer.draw(local, action, numbers[:, k, 2])
            states.append(state)
            actions.append(action)
            suffered.append(loss)
        return Feedback(
            torch.stack(states, -1), torch.stack(actions, -1), torch.stack(suffered, -1), table
        )
