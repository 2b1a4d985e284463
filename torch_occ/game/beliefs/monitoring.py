"""Numbers about a learner's belief, compared with the true MDP, for TensorBoard."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.game.learners.base import Learner
from torch_occ.game.learners.counting import CountingLearner
from torch_occ.game.learners.unknown import UnknownFTRL
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import policy_of


@torch.no_grad()
def belief_numbers(mdp: LayeredMDP, learner: Learner, q: Tensor) -> dict[str, float]:
    """How far the belief of a learner is from the truth; means over seeds.

    The last layer counts in none of them, since its successor is certain.

    Args:
        mdp: the true MDP.
        learner: during a run.
        q: what was played, `(N, S, A)`.

    Returns:
        By name: `epochs`; `l1_error`, the mean over pairs of |P - P_i|_1; `l1_error_played`, the
        same mean weighted by q. With widths also `coverage`, the share of seeds for which the
        confidence set holds the true transitions; `bonus`, its mean over pairs; `upper_bound`, the
        mean over states of the upper occupancy bound u(s), and `occupancy`, that of q(s). Empty if
        the learner does not believe anything.
    """
    if not isinstance(learner, CountingLearner):
        return {}
    found = {"epochs": float(learner.state["epochs"].mean())}
    true = mdp.to_dense().transitions
    errors = [(p - P).abs() for p, P in zip(learner.transitions(), true, strict=True)]
    l1 = torch.cat([error.sum(-1) for error in errors], -2)  # (N, S, A)
    inner = mdp.actions & (mdp.layer < mdp.horizon - 1).unsqueeze(-1)
    if bool(inner.any()):
        found["l1_error"] = float(l1[:, inner].mean())
        found["l1_error_played"] = float((q * l1).sum((-2, -1)).mean()) / (mdp.horizon - 1)
    if isinstance(learner, UnknownFTRL) and learner.widths is not None:
        held = torch.stack(
            [
                (error <= B + 1e-12).flatten(1).all(1)
                for error, B in zip(errors, learner.confidence(), strict=True)
            ]
        )
        found["coverage"] = float(held.all(0).double().mean())
        found["bonus"] = float(learner.state["bonus"][:, mdp.actions].mean())
        found["upper_bound"] = float(learner.bounds(policy_of(mdp, q)).sum(-1).mean())
        found["occupancy"] = float(q.sum(-1).mean())
    return found
