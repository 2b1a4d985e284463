"""The regret with unknown transitions in parts, as Jin, Huang and Luo (2021) take it apart.

In episode t the learner plays pi_t. It believes transitions P_i, and its estimate of the loss has
the conditional expectation l^_t. Values V are those of the true transitions and the loss l_t, and
values V^ those of P_i and l^_t. Against a policy pi,

    Reg    = ERR1 + ESTREG + ERR2,
    ERR1   = V(pi_t) - V^(pi_t)        ESTREG = V^(pi_t) - V^(pi)        ERR2 = V^(pi) - V(pi).

If pi is deterministic, let E(s, a) = l_t(s, a) + sum_s' P(s' | s, a) V^(s') - Q^(s, a) with the
values of pi, and q*(s, a) the probability that pi_t reaches (s, a) by actions of pi only. Then

    ERR1 + ERR2 = ERRSUB + ERROPT + OCCDIFF + BIAS,
    ERRSUB  = sum over a != pi(s) of q_t(s, a) E(s, a),
    ERROPT  = sum over a = pi(s) of (q_t - q*)(s, a) E(s, a),
    OCCDIFF = sum of (q_t - q^_t)(s, a) (Q^(s, a) - V^(s)),
    BIAS    = sum over a != pi(s) of q*(s, a) (V^(s) - V(s)),

where q_t and q^_t are the occupancy measures of pi_t under P and P_i. Both are identities: they
hold in every episode, for every belief and every l^. The rows of P_i may sum to less than one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import LayeredFlow, flow_source, occupancy


class UnknownParts(NamedTuple):
    """The parts of the regret of one episode, each `(*batch,)`."""

    regret: Tensor
    err1: Tensor
    estreg: Tensor
    err2: Tensor
    errsub: Tensor
    erropt: Tensor
    occdiff: Tensor
    bias: Tensor


def unknown_parts(
    mdp: LayeredMDP,
    believed: LayeredMDP,
    policy: Tensor,
    comparator: Tensor,
    loss: Tensor,
    estimate: Tensor,
) -> UnknownParts:
    """Take the regret of one episode apart.

    Args:
        mdp: the true MDP.
        believed: the MDP that the learner believes; a batch for a batch of learners.
        policy: pi_t, `(*batch, S, A)`.
        comparator: pi, deterministic, `(*batch, S, A)`.
        loss: l_t, `(*batch, S, A)`.
        estimate: l^_t, `(*batch, S, A)`.

    Raises:
        ValueError: if the comparator is not deterministic.
    """
    check_deterministic(mdp, comparator)
    true, belief = LayeredFlow(mdp), LayeredFlow(believed)
    source = flow_source(mdp)

    def value(flow: LayeredFlow, pi: Tensor, charged: Tensor) -> Tensor:
        return flow.backward(pi, (pi * charged).sum(-1))

    def start(values: Tensor) -> Tensor:
        return (source * values).sum(-1)

    V, V_hat = value(true, comparator, loss), value(belief, comparator, estimate)
    played = start(value(true, policy, loss))
    believed_played = start(value(belief, policy, estimate))
    best, believed_best = start(V), start(V_hat)

    keep = mdp.actions
    Q_hat = torch.where(keep, estimate + belief.lookahead(V_hat), 0.0)
    error = torch.where(keep, loss + true.lookahead(V_hat) - Q_hat, 0.0)
    q, q_hat = occupancy(mdp, policy), occupancy(believed, policy)
    same, other = comparator, keep.to(policy.dtype) - comparator
    # A pass that loses what leaves the actions of the comparator.
    within = true.forward(policy * same, source).unsqueeze(-1) * policy
    advantage = torch.where(keep, Q_hat - V_hat.unsqueeze(-1), 0.0)
    gap = (V_hat - V).unsqueeze(-1)
    return UnknownParts(
        regret=played - best,
        err1=played - believed_played,
        estreg=believed_played - believed_best,
        err2=believed_best - best,
        errsub=(other * q * error).sum((-2, -1)),
        erropt=(same * (q - within) * error).sum((-2, -1)),
        occdiff=((q - q_hat) * advantage).sum((-2, -1)),
        bias=(other * within * gap).sum((-2, -1)),
    )


def check_deterministic(mdp: LayeredMDP, comparator: Tensor) -> None:
    """Raise a ValueError unless the policy takes one existing action in every state."""
    shape = (mdp.num_states, mdp.num_actions)
    if tuple(comparator.shape[-2:]) != shape:
        raise ValueError(
            f"comparator: expected a policy (*batch, {shape[0]}, {shape[1]}), got "
            f"{tuple(comparator.shape)}"
        )
    good = ((comparator == 0) | ((comparator == 1) & mdp.actions)).all(-1)
    good = good & (comparator.sum(-1) == 1)
    if not bool(good.all()):
        state = int((~good).nonzero()[0, -1])
        raise ValueError(
            f"comparator: {mdp.locate(state)} does not take one action with probability 1; "
            "expected a deterministic policy, for example occ.optimal_policy(mdp, mean).policy"
        )
