"""What learners share that do not know the transitions: counts, epochs, confidence sets.

    m(s, a, s')    how often s' followed the pair (s, a);    m(s, a) = sum over s'

A table over transitions is a tuple with one tensor `(*batch, S_k, A, S_{k+1})` per layer, as
`mdp.transitions`; the last S_{k+1} is 1, the terminal state. Learners keep such a table in one flat
tensor `(N, M)` with M = sum_k S_k A S_{k+1}, layer after layer; `split_transitions` returns layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ.engine.lanes import anywhere, lane, sqrt, where
from torch_occ.engine.layout import PAIR, Floats, Ints, Model, Work, routine
from torch_occ.engine.learners import count_visit
from torch_occ.engine.play import Game, PerPair, PerState, Tally
from torch_occ.game.estimators import Feedback
from torch_occ.game.learners import Learner
from torch_occ.mdp.checks import check_that
from torch_occ.mdp.layered import LayeredMDP

Table = tuple[Tensor, ...]  # one tensor (*batch, S_k, A, S_{k+1}) per layer


def transition_shapes(mdp: LayeredMDP) -> list[torch.Size]:
    """(S_k, A, S_{k+1}) of every layer; the last S_{k+1} is 1."""
    return [torch.Size((n, mdp.num_actions, m)) for n, m in pairwise((*mdp.layer_sizes, 1))]


def num_transitions(mdp: LayeredMDP) -> int:
    """M, the number of entries of a table over transitions."""
    return int(entries(mdp)[-1])


def split_transitions(mdp: LayeredMDP, flat: Tensor) -> Table:
    """The layers `(*batch, S_k, A, S_{k+1})` of a flat table `(*batch, M)`, as views."""
    shapes = transition_shapes(mdp)
    parts = flat.split([shape.numel() for shape in shapes], -1)
    return tuple(part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True))


def join_transitions(layers: Sequence[Tensor]) -> Tensor:
    """The inverse of `split_transitions`: a flat table `(*batch, M)`."""
    return torch.cat([layer.flatten(-3) for layer in layers], -1)


def entries(mdp: LayeredMDP) -> Ints:
    """The first entry of each pair in a flat table over transitions, `(S * A,)`, and M."""
    shapes = transition_shapes(mdp)
    sizes = np.repeat([m for _, _, m in shapes], [n * a for n, a, _ in shapes])
    return np.append(0, np.cumsum(sizes)).astype(np.int64)


def empirical_transitions(
    mdp: LayeredMDP, counts: Sequence[Tensor], pseudo_count: float = 1.0
) -> Table:
    """The empirical transitions of visit counts m, one tensor per layer of `mdp`'s layout.

        P(s' | s, a) = (m(s, a, s') + kappa / n) / (m(s, a) + kappa)

    where kappa is the pseudo-count, and n the number of states of the next layer. With kappa > 0,
    the occupancy measures have an interior. With kappa = 0, rows that were never seen are uniform.
    Rows of pairs that do not exist are zero.

    Raises:
        ValueError: if a shape does not fit the layout, or if `pseudo_count` is negative.
    """
    check_that(pseudo_count >= 0, "pseudo_count", "a number of at least 0", pseudo_count)
    shapes, found = transition_shapes(mdp), []
    per_layer = f"one tensor per layer, {len(shapes)}"
    check_that(len(counts) == len(shapes), "counts", per_layer, len(counts))
    for k, (m, mask) in enumerate(zip(counts, mdp.split(mdp.actions, 0), strict=True)):
        shape = f"shape (*batch, {', '.join(map(str, shapes[k]))})"
        check_that(m.shape[-3:] == shapes[k], f"counts[{k}]", shape, tuple(m.shape))
        n, total = m.shape[-1], m.sum(-1, keepdim=True) + pseudo_count
        rows = torch.where(total > 0, (m + pseudo_count / n) / total.clamp(min=1e-300), 1.0 / n)
        found.append(torch.where(mask.unsqueeze(-1), rows, 0.0))
    return tuple(found)


# -- Confidence widths of the empirical transitions, and the bonuses that follow from them ---------

#: The first five fields of `Widths`.
SOURCES = {
    "jin_huang_luo": (2.0, 14 / 3, 0, 1.0, False),  # Jin, Huang and Luo (2021), eq. (8)
    "uob_reps": (2.0, 14 / 3, 1, 1.0, False),  # Jin, Jin, Luo, Sra and Yu (2020), eq. (5)
    "practical": (1.0, 1.0, 0, 0.5, True),  # constants that work; without any guarantee
}


class Widths(NamedTuple):
    """Confidence widths B of the empirical P with the constants of a source (`Widths.of`).

        B(s, a, s')  = min{ 1, c1 sqrt(P(s' | s, a) iota / n) + c2 iota / n },
        bonus(s, a)  = share * range * min{ 1, share * sum_s' B(s, a, s') },

    where n = max(1, m(s, a) - fewer), and range is L, or with `remaining` L - 1 - k: the largest
    loss after layer k. B is 1 for pairs that were never seen, and 0 where the next layer has one
    state. The bonus makes the values of the belief optimistic: |(P - P') V| is at most
    (1/2) |P - P'|_1 times the range of V. The practical one is half of what this needs.
    """

    c1: float
    c2: float
    fewer: int
    share: float
    remaining: bool
    iota: float
    episodes: int = 0  # for which the widths hold; 0 if they promise nothing

    @classmethod
    def of(
        cls, name: str, mdp: LayeredMDP, episodes: int | None = None, delta: float | None = None
    ) -> Widths:
        """The widths of a source, a key of `SOURCES`, for T episodes.

        iota is ln(T S A / delta), with the number of existing pairs for S A; 1 for "practical".
        Some width fails with probability at most 4 delta.

        Raises:
            ValueError: if the name is unknown, or T or delta is missing or out of range.
        """
        check_that(name in SOURCES, "widths", f"one of {', '.join(SOURCES)}", repr(name))
        if name == "practical":
            return cls(*SOURCES[name], 1.0)
        if episodes is None or episodes < 1:
            raise ValueError(
                f"episodes: the widths of {name} need the number of episodes, at least 1, got "
                f"{episodes}"
            )
        if delta is None or not 0 < delta < 1:
            raise ValueError(f"delta: the widths of {name} need a number in (0, 1), got {delta}")
        iota = math.log(episodes) + math.log(mdp.num_pairs) - math.log(delta)
        return cls(*SOURCES[name], iota, episodes)


# -- Upper occupancy bounds (Comp-UOB): the largest probability of a state in a confidence set -----
#
# For a target state x, from the last layer to the first,
#
#     f(s) = 1{s = x} + sum_a pi(a | s) max{ sum_s' p(s') f(s') : lo <= p <= hi, sum p = 1 },
#
# with lo = max(0, P - B), hi = min(1, P + B), and u(x) = sum_s initial(s) f(s). The maximum is
# greedy: p = lo, and the mass 1 - sum lo goes to the successors in the order of decreasing f, to
# each up to hi - lo (Jin, Jin, Luo, Sra and Yu, 2020).


@routine
def upper_bound(model: Model, learner: Any, target: int, layer: int) -> float:
    """u(target), the upper occupancy bound of a state of this layer for the policy of one seed.

    `ahead` gets the values of states, and `order` the states of each layer by decreasing value.
    """
    start, num_actions, f, order = model.start, model.num_actions, learner.ahead, learner.order
    lower, upper, policy, entry = learner.lower, learner.upper, learner.policy, learner.entry
    if layer == 0:
        return model.initial[target]
    for k in range(layer - 1, -1, -1):
        first = start[k + 1]
        for s in range(first, start[k + 2] if k + 1 < layer else first):
            n = s  # sort the states of the next layer by decreasing value
            while n > first and f[int(order[n - 1])] < f[s]:
                order[n] = order[n - 1]
                n -= 1
            order[n] = float(s)
        for s in range(start[k], first):
            total = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if policy[i] > 0.0:
                    value, left = 0.0, learner.room[i]
                    if k + 1 == layer:  # all that is left goes to the target
                        e = entry[i] + target - first
                        value = lower[e] + min(upper[e] - lower[e], left)
                    else:
                        for n in range(first, start[k + 2]):
                            there = int(order[n])
                            e = entry[i] + there - first
                            more = min(upper[e] - lower[e], left)
                            left -= more
                            value += (lower[e] + more) * f[there]
                    total += policy[i] * value
            f[s] = total
    u = 0.0
    for s in range(start[1]):
        u += model.initial[s] * f[s]
    return u


# -- Learners that count ---------------------------------------------------------------------------


class CountingLearner(Learner):
    """Base class of learners that do not know the transitions, and count them.

    It keeps only the layout (`mdp.blind()`). A learner writes `propose_policy`, and calls `record`
    in its own `observe`. With episode t ends epoch i if m(s_k, a_k) >= max(1, 2 m_i(s_k, a_k)) in
    some layer k, where m_i are the counts at the beginning of the epoch (Jin, Jin, Luo, Sra and Yu,
    2020). There are at most S A (1 + log2 T) epochs. Its state, for N seeds:

    | name | shape | what it is |
    |---|---|---|
    | `counts` | `(N, M)` | m(s, a, s') so far, flat |
    | `visits` | `(N, S, A)` | m(s, a) so far |
    | `epoch_visits` | `(N, S, A)` | m(s, a) at the beginning of the epoch |
    | `belief` | `(N, M)` | the empirical transitions at the beginning of the epoch, flat |
    | `epochs` | `(N,)` | the number of the epoch, from 1 |
    | `epoch_start` | `(N,)` | the first episode of the epoch |
    | `widths` | `(N, M)` | B of the epoch, flat, if the learner has widths |

    Raises:
        ValueError: if `pseudo_count` is negative.
    """

    widths: Widths | None = None
    bonus = False

    def __init__(self, mdp: LayeredMDP, pseudo_count: float = 1.0) -> None:
        super().__init__(mdp.blind())
        check_that(pseudo_count >= 0, "pseudo_count", "a number of at least 0", pseudo_count)
        self.pseudo_count = pseudo_count

    def start(self, num_seeds: int) -> None:
        pairs = self._zeros(num_seeds)
        counts = pairs.new_zeros(num_seeds, num_transitions(self.mdp))
        self.state = {
            "counts": counts,
            "visits": pairs,
            "epoch_visits": pairs.clone(),
            "belief": self._empirical(counts),
            "epochs": pairs.new_ones(num_seeds),
            "epoch_start": pairs.new_ones(num_seeds),
        }
        if self.widths is not None:  # everything is possible, if there is more than one state
            sizes = (counts.new_full((*s,), s[-1]) for s in transition_shapes(self.mdp))
            self.state["widths"] = (join_transitions([*sizes]) > 1).to(counts).expand_as(counts)

    def transitions(self) -> Table:
        """The empirical transitions of the epoch, one tensor `(N, S_k, A, S_{k+1})` per layer."""
        return split_transitions(self.mdp, self.state["belief"])

    def settings(self) -> dict[str, Any]:
        bounded, widths = self.widths is not None, self.widths or Widths.of("practical", self.mdp)
        return {
            "confidence": Confidence(self.pseudo_count, bounded, self.bonus, widths),
            "entry": entries(self.mdp),
        } | {name: np.zeros(num_transitions(self.mdp)) for name in ("widths", "lower", "upper")}

    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        self.record(t, feedback)

    @torch.no_grad()
    def record(self, t: int, feedback: Feedback) -> Tensor:
        """Count the transitions of episode t, and begin new epochs.

        Returns:
            The seeds for which a new epoch begins with episode t + 1, a mask `(N,)`.
        """
        state, ones = self.state, torch.ones_like(feedback.losses)
        first = [here.start for here in self.mdp.layer_slices]
        local = feedback.states - torch.tensor(first, device=self.mdp.device)  # within the layer
        after = torch.nn.functional.pad(local[:, 1:], (0, 1))  # the terminal state has number 0
        pairs = feedback.states * self.mdp.num_actions + feedback.actions
        places = torch.from_numpy(entries(self.mdp)).to(self.mdp.device)[pairs] + after
        state["counts"] = state["counts"].scatter_add(-1, places, ones)
        state["visits"] = state["visits"] + feedback.scatter(ones, state["visits"])
        now, before = (feedback.gather(state[name]) for name in ("visits", "epoch_visits"))
        new = (now >= (2 * before).clamp(min=1)).any(-1)  # some visited pair has doubled its count
        if bool(new.any()):
            begun = {"belief": self._empirical(state["counts"]), "epoch_visits": state["visits"]}
            begun |= {"epochs": state["epochs"] + 1, "epoch_start": 0 * state["epochs"] + t + 1}
            for name, x in begun.items():
                where_new = new.view(-1, *(1,) * (x.dim() - 1))
                state[name] = torch.where(where_new, x, state[name])
        return new

    def _empirical(self, counts: Tensor) -> Tensor:
        layers = split_transitions(self.mdp, counts)
        return join_transitions(empirical_transitions(self.mdp, layers, self.pseudo_count))


class PlanningLearner(Learner):
    """Base class of learners that plan with averages; it knows only the layout of the MDP.

    Its state, for N seeds: `visits` and `losses` `(N, S, A)`, sums over the visits of each pair;
    `counts` `(N, M)`, the visits by next state, flat.
    """

    def __init__(self, mdp: LayeredMDP) -> None:
        super().__init__(mdp.blind())

    def start(self, num_seeds: int) -> None:
        pairs = self._zeros(num_seeds)
        counts = pairs.new_zeros(num_seeds, num_transitions(self.mdp))
        self.state = {"visits": pairs, "losses": pairs.clone(), "counts": counts}

    def settings(self) -> dict[str, Any]:
        return {"entry": entries(self.mdp)}


# -- compiled: tables are flat, and fields of a learner have the names of its state ----------------


class Confidence(NamedTuple):
    """The settings of a `CountingLearner`."""

    pseudo_count: float
    bounded: bool  # whether there are widths; if not, those below are not used
    bonus: bool  # whether there is one
    widths: Widths


#: The fields that the compiled forms of these learners share.
COUNTING: dict[str, Any] = {
    **dict.fromkeys(("counts", "belief", "widths", "lower", "upper"), Floats),  # (M,)
    **dict.fromkeys(("visits", "epoch_visits", "q", "estimate", "policy", "room"), PerPair),
    **dict.fromkeys(("ahead", "order"), PerState),
    "epochs": Floats,  # (1,)
    "epoch_start": Floats,  # (1,)
    "begun": Annotated[Floats, 1],  # whether an epoch begins
    "confidence": Confidence,
    "entry": Ints,
    "bias": float,
}


@routine(inline=True)
def count_transitions(game: Game, n: int, counts: Any, entry: Ints) -> None:
    """Count the transitions that seed n has seen."""
    layers = game.pairs.shape[1]
    for k in range(layers):
        i, after = game.pairs[n, k], 0  # of the terminal state
        if k + 1 < layers:
            after = game.states[n, k + 1] - game.model.start[k + 1]
        counts[entry[i] + after] += 1.0


@routine(inline=True)
def count_steps(game: Game, n: int, data: Any, entry: Ints) -> None:
    """Count the pairs, losses and transitions that seed n has seen."""
    for k in range(game.pairs.shape[1]):
        count_visit(data, game.pairs[n, k], game.losses[n, k])
    count_transitions(game, n, data.counts, entry)


def observe_transitions(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    """Count what every seed has seen."""
    for n in range(len(game.pairs)):
        count_steps(game, n, lane(learner, n), learner.entry)


@routine(inline=True)
def count_episode(game: Game, t: int, learner: Any) -> bool:
    """Count pairs and transitions, and begin epochs; return whether any seed began one."""
    for n in range(len(game.pairs)):
        own = lane(learner, n)
        own.begun[0] = 0.0
        for k in range(game.pairs.shape[1]):
            i = game.pairs[n, k]
            own.visits[i] += 1.0
            if own.visits[i] >= max(1.0, 2.0 * own.epoch_visits[i]):
                own.begun[0] = 1.0
        count_transitions(game, n, own.counts, own.entry)
    new = anywhere(learner.begun[0] > 0.0)
    if new:
        begin_epochs(game.model, game.before + t + 2, learner)
    return new


@routine(inline=True)
def begin_epochs(model: Model, episode: int, learner: Any) -> None:
    """Begin epochs where `begun` is 1: the empirical transitions, their widths and bounds."""
    settings, entry, new = learner.confidence, learner.entry, learner.begun[0] > 0.0
    kappa, (c1, c2, fewer, _, _, iota, _) = settings.pseudo_count, settings.widths
    learner.epochs[0] += learner.begun[0]
    learner.epoch_start[0] = where(new, float(episode), learner.epoch_start[0])
    for i in range(len(learner.visits)):
        m = where(new, learner.visits[i], learner.epoch_visits[i])
        n, width = max(m - fewer, 1.0), entry[i + 1] - entry[i]
        learner.epoch_visits[i] = m
        if not model.exists[PAIR, i]:
            continue
        for e in range(entry[i], entry[i + 1]):
            p = (learner.counts[e] + kappa / width) / (m + kappa)
            p = where(new, where(m + kappa > 0.0, p, 1.0 / width), learner.belief[e])
            learner.belief[e] = p
            if settings.bounded and width > 1:
                B = where(m > 0.0, min(1.0, c1 * sqrt(p * iota / n) + c2 * iota / n), 1.0)
                learner.widths[e] = where(new, B, learner.widths[e])
    if settings.bounded:
        bound_transitions(model, learner)


@routine(inline=True)
def bound_transitions(model: Model, learner: Any) -> None:
    """The bounds of the confidence sets, and the `room` that the lower ones leave."""
    entry = learner.entry
    for i in range(len(learner.visits)):
        if model.exists[PAIR, i]:
            left = 1.0
            for e in range(entry[i], entry[i + 1]):
                p, B = learner.belief[e], learner.widths[e]
                learner.lower[e], learner.upper[e] = max(0.0, p - B), min(1.0, p + B)
                left -= learner.lower[e]
            learner.room[i] = max(left, 0.0)


@routine(inline=True)
def write_policy(num_actions: int, unseen: Floats, learner: Any) -> None:
    """Write the policy q(s, a) / q(s), and `unseen` where q(s) is zero."""
    q, policy = learner.q, learner.policy
    for first in range(0, len(q), num_actions):
        total = 0.0
        for i in range(first, first + num_actions):
            total += q[i]
        for i in range(first, first + num_actions):
            policy[i] = where(total > 0.0, q[i] / total, unseen[i])


@routine(inline=True)
def estimate_losses(game: Game, by_bounds: bool, learner: Any) -> None:
    """Write loss / (u + bias) of visited pairs; u is q, or bounds it."""
    for i in range(len(learner.q)):
        learner.estimate[i] = 0.0
    for n in range(len(game.pairs)):
        own = lane(learner, n)
        for k in range(game.pairs.shape[1]):
            i = game.pairs[n, k]
            u = own.q[i]
            if by_bounds:
                u = own.policy[i] * upper_bound(game.model, own, game.states[n, k], k)
            own.estimate[i] = game.losses[n, k] / (u + own.bias)
