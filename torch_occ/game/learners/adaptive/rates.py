"""Learning rates that follow from what was observed, one per pair or one for all.

The regularizer of episode t is that of the learner times b_t = 1 / eta_t: every term is multiplied
by b_t(s, a). To write new rates, derive from `Rates`; b_t is part of the learner's state.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import LayeredFlow, policy_of
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import TabularRegularizer
from torch_occ.regularizers.terms import Power, Term, XLogX


class Rates:
    """Base class."""

    #: Whether there is one rate per pair, b `(N, S, A)`, or one for all pairs, b `(N,)`.
    per_pair = False
    #: The number of episodes that the rates were made for, if they depend on it.
    episodes: int | None = None

    def start(self, mdp: LayeredMDP, regularizer: Regularizer) -> float:
        """b_1; raise a ValueError if the regularizer does not fit."""
        raise NotImplementedError(f"{type(self).__name__}: write start(mdp, regularizer) -> b_1")

    def update(self, mdp: LayeredMDP, b: Tensor, q: Tensor, excess: Tensor) -> Tensor:
        """b_{t+1} from b_t, from q_t and from the estimate of loss - m_t, `(N, S, A)` both."""
        raise NotImplementedError(f"{type(self).__name__}: write update(mdp, b, q, excess) -> b")


class AdaptiveRates(Rates):
    """One rate per pair, for a log-barrier (Li, Tsuchiya and Yamanishi, 2026).

        b_{t+1} = b_t + zeta_t / (b_t log T),
        zeta_t = q_t^2 min{ x^2, (Q - V)^2 },        x = the estimate of loss - m_t,

    with Q and V of x and the policy of q_t. zeta_t is zero on pairs that were not visited.

    Args:
        episodes: T.
        first: b_1; by default 2 L, as in the paper. Smaller values explore less at first.

    Raises:
        ValueError: if a number is not positive.
    """

    per_pair = True

    def __init__(self, episodes: int, first: float | None = None) -> None:
        if not (episodes > 1 and (first is None or 0 < first < math.inf)):
            raise ValueError(
                "episodes, first: expected more than one episode and a positive number, got "
                f"{episodes} and {first}"
            )
        self.episodes, self.first = episodes, first

    def start(self, mdp: LayeredMDP, regularizer: Regularizer) -> float:
        return 2.0 * mdp.horizon if self.first is None else self.first

    def update(self, mdp: LayeredMDP, b: Tensor, q: Tensor, excess: Tensor) -> Tensor:
        assert self.episodes is not None
        policy, flow = policy_of(mdp, q), LayeredFlow(mdp)
        V = flow.backward(policy, (policy * excess).sum(-1))
        advantage = excess + flow.lookahead(V) - V.unsqueeze(-1)
        zeta = q.square() * torch.minimum(excess.square(), advantage.square())
        return b + zeta / (b * math.log(self.episodes))


class StabilityPenaltyMatching(Rates):
    """One rate for all pairs that balances stability and penalty (Ito, Tsuchiya and Honda, 2024).

        b_{t+1} = b_t + z_t / (b_t h_t)

    z_t / b_t bounds the stability and (b_{t+1} - b_t) h_t the penalty of episode t. For phi =
    - sum q^p, with the variance (1 - pi) / q of the advantages, and for phi = sum q log q,

        z_t = sum q^(1-p) (1 - pi) / (2 p (1 - p)),    h_t = sum q(s,a)^p - sum q(s)^p,
        z_t = sum (1 - pi) / 2,                        h_t = - sum q log pi.

    With p = 1/2, z_t / h_t varies little, so b_t is close to a multiple of sqrt(t).

    Args:
        first: b_1.

    Raises:
        ValueError: if `first` is not positive; in `start`, if the regularizer is neither `Tsallis`
            nor `Shannon` without a schedule.
    """

    def __init__(self, first: float = 1.0) -> None:
        if not 0 < first < math.inf:
            raise ValueError(f"first: expected a positive number, got {first}")
        self.first = first
        self.term: Term | None = None

    def start(self, mdp: LayeredMDP, regularizer: Regularizer) -> float:
        self.term = term_of(regularizer)
        return self.first

    def update(self, mdp: LayeredMDP, b: Tensor, q: Tensor, excess: Tensor) -> Tensor:
        assert self.term is not None
        policy, state = policy_of(mdp, q), q.sum(-1)
        others = torch.where(mdp.actions, 1 - policy, 0.0)
        if isinstance(self.term.function, Power):
            p = float(torch.as_tensor(self.term.function.p).detach())
            z = (q ** (1 - p) * others).sum((-2, -1)) / (2 * p * (1 - p))
            h = (q**p).sum((-2, -1)) - (state**p).sum(-1)
        else:
            z = others.sum((-2, -1)) / 2
            h = -torch.xlogy(q, policy).sum((-2, -1))
        return b + z / (b * h.clamp(min=torch.finfo(q.dtype).tiny))


def term_of(regularizer: Regularizer) -> Term:
    """The term of `Tsallis` or `Shannon`.

    Raises:
        ValueError: for any other regularizer, and for an exponent per layer, state or pair.
    """
    if isinstance(regularizer, TabularRegularizer):
        terms, scalar = regularizer.table(), not (regularizer.places() or regularizer.batched())
        function, weight = terms[0].function, terms[0].weight
        expected = {Power: -1.0, XLogX: 1.0}.get(type(function))
        if scalar and len(terms) == 1 and terms[0].argument == "pair" and weight == expected:
            return terms[0]
    raise ValueError(
        "rates: StabilityPenaltyMatching knows occ.Tsallis and occ.Shannon, without a schedule and "
        f"with one exponent, got {regularizer}"
    )
