"""What learners share that do not know the transitions: counts, epochs, confidence sets.

    m(s, a, s')    how often s' followed the pair (s, a);    m(s, a) = sum over s'

A table over transitions is a tuple with one tensor `(*batch, S_k, A, S_{k+1})` per layer, as
`mdp.transitions`; the last S_{k+1} is 1, the terminal state. Learners keep such a table in one flat
tensor `(N, M)` with M = sum_k S_k A S_{k+1}, layer after layer; `split_transitions` returns layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ.engine.lanes import Shared, anywhere, lane, sqrt, where
from torch_occ.engine.layout import PAIR, Floats, Ints, Model, inlined, kernel, routine
from torch_occ.engine.play import Game
from torch_occ.game.estimators import Feedback
from torch_occ.game.learners import Learner
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import policy_of

Table = tuple[Tensor, ...]  # one tensor (*batch, S_k, A, S_{k+1}) per layer


def transition_shapes(mdp: LayeredMDP) -> list[torch.Size]:
    """(S_k, A, S_{k+1}) of every layer; the last S_{k+1} is 1."""
    return [torch.Size((n, mdp.num_actions, m)) for n, m in pairwise((*mdp.layer_sizes, 1))]


def num_transitions(mdp: LayeredMDP) -> int:
    """M, the number of entries of a table over transitions."""
    return sum(shape.numel() for shape in transition_shapes(mdp))


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
    """The empirical transitions of visit counts, with pseudo-counts.

        P(s' | s, a) = (m(s, a, s') + kappa / n) / (m(s, a) + kappa)

    where n is the number of states of the next layer. With kappa > 0, the occupancy measures have
    an interior. With kappa = 0, rows that were never seen are uniform.

    Args:
        mdp: the layout; its probabilities are not used.
        counts: m, one tensor `(*batch, S_k, A, S_{k+1})` per layer.
        pseudo_count: kappa, at least 0.

    Returns:
        One tensor `(*batch, S_k, A, S_{k+1})` per layer. Rows of pairs that do not exist are zero.

    Raises:
        ValueError: if a shape does not fit the layout, or if `pseudo_count` is negative.
    """
    check_layers("counts", mdp, counts)
    check_pseudo_count(pseudo_count)
    found = []
    for m, mask in zip(counts, mdp.split(mdp.actions, 0), strict=True):
        n, total = m.shape[-1], m.sum(-1, keepdim=True) + pseudo_count
        rows = torch.where(total > 0, (m + pseudo_count / n) / total.clamp(min=1e-300), 1.0 / n)
        found.append(torch.where(mask.unsqueeze(-1), rows, 0.0))
    return tuple(found)


def check_pseudo_count(value: float) -> None:
    """Raise a ValueError if a pseudo-count is negative."""
    if not value >= 0:
        raise ValueError(f"pseudo_count: expected a number of at least 0, got {value}")


def check_layers(name: str, mdp: LayeredMDP, table: Sequence[Tensor]) -> None:
    """Raise a ValueError unless a table over transitions fits the layout."""
    shapes = transition_shapes(mdp)
    if len(table) != len(shapes):
        raise ValueError(f"{name}: expected one tensor per layer, {len(shapes)}, got {len(table)}")
    for k, (layer, shape) in enumerate(zip(table, shapes, strict=True)):
        if layer.shape[-3:] != shape:
            raise ValueError(
                f"{name}[{k}]: expected shape (*batch, {', '.join(map(str, shape))}), got "
                f"{tuple(layer.shape)}"
            )


def check_pairs(name: str, mdp: LayeredMDP, table: Tensor) -> None:
    """Raise a ValueError unless a table has one number per pair, `(*batch, S, A)`."""
    if table.shape[-2:] != mdp.actions.shape:
        shape = ", ".join(map(str, mdp.actions.shape))
        raise ValueError(f"{name}: expected shape (*batch, {shape}), got {tuple(table.shape)}")


# -- Confidence widths of the empirical transitions, and the bonuses that follow from them ---------


class Source(NamedTuple):
    """The constants of widths."""

    c1: float
    c2: float
    fewer: tuple[int, int]  # m1 = m - fewer[0] and m2 = m - fewer[1], at least 1
    variance: bool  # whether the root has P (1 - P) in place of P
    two_sided: bool  # whether the union in iota is over 2 S A S' T, and not over S A T
    failures: float | None  # some width fails with probability failures * delta; None: no proof


SOURCES = {
    # Jin, Huang and Luo (2021), eq. (8).
    "jin_huang_luo": Source(2.0, 14 / 3, (0, 0), False, False, 4.0),
    # Jin, Jin, Luo, Sra and Yu (2020), eq. (5).
    "uob_reps": Source(2.0, 14 / 3, (1, 1), False, False, 4.0),
    # Maurer and Pontil (2009), theorem 4, with a union bound over all s, a, s' and m <= T. Quoted
    # from memory.
    "bernstein": Source(math.sqrt(2.0), 7 / 3, (0, 1), True, True, 1.0),
    # Constants that work; without any guarantee.
    "practical": Source(1.0, 1.0, (0, 0), False, False, None),
}


@dataclass(frozen=True)
class Widths:
    """Confidence widths of the empirical P with the constants of a source (`Widths.of`).

        B(s, a, s') = min{ 1, c1 sqrt(P(s' | s, a) iota / m1) + c2 iota / m2 }

    with denominators m1, m2 of m(s, a) or m(s, a) - 1. B is 1 for pairs that were never seen, and 0
    where the next layer has one state, which is certain.

    Args:
        source: a row of `SOURCES`, or your own constants.
        iota: one number per layer.
        episodes: the number for which the widths hold; None if they promise nothing.
    """

    source: Source
    iota: tuple[float, ...]
    episodes: int | None = None

    @classmethod
    def of(
        cls, name: str, mdp: LayeredMDP, episodes: int | None = None, delta: float | None = None
    ) -> Widths:
        """The widths of a source, a key of `SOURCES`, for T episodes.

        iota is ln(T S A / delta), with the number of existing pairs for S A; for "bernstein"
        ln(2 S A S' T / delta), with S' the states of the next layer; and 1 for "practical".

        Raises:
            ValueError: if the name is unknown, or T or delta is missing or out of range.
        """
        if name not in SOURCES:
            raise ValueError(f"widths: expected one of {', '.join(SOURCES)}, got {name!r}")
        source = SOURCES[name]
        if source.failures is None:
            return cls(source, (1.0,) * mdp.horizon)
        if episodes is None or episodes < 1:
            raise ValueError(
                f"episodes: the widths of {name} need the number of episodes, at least 1, got "
                f"{episodes}"
            )
        if delta is None or not 0 < delta < 1:
            raise ValueError(f"delta: the widths of {name} need a number in (0, 1), got {delta}")
        base = math.log(episodes) + math.log(mdp.num_pairs) - math.log(delta)
        sizes = (*mdp.layer_sizes[1:], 1)
        iota = tuple(base + (math.log(2 * n) if source.two_sided else 0.0) for n in sizes)
        return cls(source, iota, episodes)

    def __call__(self, mdp: LayeredMDP, transitions: Sequence[Tensor], visits: Tensor) -> Table:
        """B of the empirical `transitions`, shaped as they, and of `visits` `(*batch, S, A)`.

        Raises:
            ValueError: if a shape does not fit the layout.
        """
        check_layers("transitions", mdp, transitions)
        check_pairs("visits", mdp, visits)
        if len(self.iota) != mdp.horizon:
            raise ValueError(
                f"widths: were made for {len(self.iota)} layers, the MDP has {mdp.horizon}"
            )
        found, source = [], self.source
        for P, m, iota in zip(transitions, mdp.split(visits, -2), self.iota, strict=True):
            if P.shape[-1] == 1:
                found.append(torch.zeros_like(P))
                continue
            m = m.unsqueeze(-1)
            first, second = ((m - fewer).clamp(min=1) for fewer in source.fewer)
            spread = P * (1 - P) if source.variance else P
            B = source.c1 * (spread * iota / first).sqrt() + source.c2 * iota / second
            # A source that subtracts from m says nothing about pairs with so few visits, unless
            # its own denominator is max(1, m - 1).
            least = 1 if source.variance else 0
            found.append(torch.where(m > least, B.clamp(max=1.0), 1.0))
        return tuple(found)


@dataclass(frozen=True)
class Bonus:
    """What is subtracted from the loss, so that the values of the belief are optimistic.

        bonus(s, a) = scale * range * min{ 1, share * sum_s' B(s, a, s') }

    where range is L, or, with `remaining`, L - 1 - k: the largest loss after layer k. The defaults
    are those of Jin, Huang and Luo (2021). |(P - P') V| is at most (1/2) |P - P'|_1 times the range
    of V, so share = 1/2 and `remaining` keep the optimism; scale = 1/2 does not.
    """

    scale: float = 1.0
    share: float = 1.0
    remaining: bool = False

    @classmethod
    def practical(cls) -> Bonus:
        """(1/2) (L - 1 - k) min{1, (1/2) sum B}."""
        return cls(0.5, 0.5, True)

    def __post_init__(self) -> None:
        for name in ("scale", "share"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"{name}: expected a number of at least 0, got {getattr(self, name)}"
                )

    def __call__(self, mdp: LayeredMDP, widths: Sequence[Tensor]) -> Tensor:
        """The bonus `(*batch, S, A)` for widths B, one tensor per layer; 0 on masked pairs.

        Raises:
            ValueError: if a shape does not fit the layout.
        """
        check_layers("widths", mdp, widths)
        rows = []
        for k, B in enumerate(widths):
            reach = mdp.horizon - 1 - k if self.remaining else mdp.horizon
            rows.append(self.scale * reach * (self.share * B.sum(-1)).clamp(max=1.0))
        return torch.where(mdp.actions, torch.cat(rows, -2), 0.0)


# -- Upper occupancy bounds (Comp-UOB): the largest probability of a state in a confidence set -----
#
# For a target state x, from the last layer to the first,
#
#     f(s) = 1{s = x} + sum_a pi(a | s) max{ sum_s' p(s') f(s') : lo <= p <= hi, sum p = 1 },
#
# with lo = max(0, P - B), hi = min(1, P + B), and u(x) = sum_s initial(s) f(s). The maximum is
# greedy: p = lo, and the mass 1 - sum lo goes to the successors in the order of decreasing f, to
# each up to hi - lo (Jin, Jin, Luo, Sra and Yu, 2020).


class Reach(NamedTuple):
    """A policy, the bounds of the transitions, and scratch memory, for one seed."""

    policy: Floats  # (S * A,)
    lower: Floats  # (M,)
    upper: Floats  # (M,)
    room: Floats  # (S * A,), what the lower bounds leave
    ahead: Floats  # (S,), values of states
    order: Floats  # (S,), the states of each layer by decreasing value


@routine
def upper_bound(model: Model, entry: Ints, reach: Reach, target: int, layer: int) -> float:
    """u(target), the upper occupancy bound of a state of this layer for one seed's policy."""
    start, num_actions, f = model.start, model.num_actions, reach.ahead
    lower, upper, policy = reach.lower, reach.upper, reach.policy
    if layer == 0:
        return model.initial[target]
    for k in range(layer - 1, -1, -1):
        first = start[k + 1]
        if k + 1 < layer:
            sort_states(f, reach.order, first, start[k + 2])
        for s in range(start[k], first):
            total = 0.0
            for i in range(s * num_actions, (s + 1) * num_actions):
                if policy[i] > 0.0:
                    value, left = 0.0, reach.room[i]
                    if k + 1 == layer:  # all that is left goes to the target
                        e = entry[i] + target - first
                        value = lower[e] + min(upper[e] - lower[e], left)
                    else:
                        for n in range(first, start[k + 2]):
                            there = int(reach.order[n])
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


@routine(inline=True)
def sort_states(f: Floats, order: Floats, first: int, stop: int) -> None:
    """Sort the states of a layer by decreasing value."""
    for s in range(first, stop):
        n = s
        while n > first and f[int(order[n - 1])] < f[s]:
            order[n] = order[n - 1]
            n -= 1
        order[n] = float(s)


@kernel
def upper_bounds(model: Model, entry: Ints, reach: Reach, found: Floats) -> None:
    """Write u of all states."""
    for k in range(len(model.start) - 1):
        for s in range(model.start[k], model.start[k + 1]):
            found[s] = upper_bound(model, entry, reach, s, k)


def upper_occupancy(
    mdp: LayeredMDP, policy: Tensor, transitions: Sequence[Tensor], widths: Sequence[Tensor]
) -> Tensor:
    """u(s), the largest q(s) of a policy over all transitions in the confidence set.

    For pairs, u(s, a) = pi(a | s) u(s).

    Args:
        mdp: the layout and the initial distribution; its transitions are not used.
        policy: `(*batch, S, A)`.
        transitions: the centre P of the set, one tensor `(*batch, S_k, A, S_{k+1})` per layer.
        widths: B, one tensor of the same shape per layer.

    Raises:
        ValueError: if a shape does not fit the layout.
    """
    check_layers("transitions", mdp, transitions)
    check_layers("widths", mdp, widths)
    check_pairs("policy", mdp, policy)
    least = [(P - B).clamp(min=0.0) for P, B in zip(transitions, widths, strict=True)]
    most = [(P + B).clamp(max=1.0) for P, B in zip(transitions, widths, strict=True)]
    room = torch.cat([(1 - low.sum(-1)).clamp(min=0.0).flatten(-2) for low in least], -1)
    tables = (policy.flatten(-2), join_transitions(least), join_transitions(most), room)
    batch = torch.broadcast_shapes(*(x.shape[:-1] for x in tables), mdp.initial.shape[:-1])
    initial, *rows = (
        x.detach().double().expand(*batch, -1).reshape(-1, x.shape[-1]).numpy()
        for x in (mdp.initial, *tables)
    )
    start = np.array([0, *(here.stop for here in mdp.layer_slices)], np.int64)
    exists, none = mdp.actions.flatten()[None].numpy(), np.zeros((0, 0))
    found = np.zeros((len(initial), mdp.num_states))
    for i, u in enumerate(found):
        model = Model(mdp.num_actions, start, none, none, exists, initial[i].copy(), True)
        own = Reach._make([*(x[i].copy() for x in rows), *np.zeros((2, len(u)))])
        upper_bounds(model, entries(mdp), own, u)
    return torch.from_numpy(found).to(mdp.dtype).reshape(*batch, -1)


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
    bonus: Bonus | None = None

    def __init__(self, mdp: LayeredMDP, pseudo_count: float = 1.0) -> None:
        super().__init__(mdp.blind())
        check_pseudo_count(pseudo_count)
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
        if self.widths is not None:
            found = self.widths(self.mdp, self.transitions(), self.state["epoch_visits"])
            self.state["widths"] = join_transitions(found)

    def transitions(self) -> Table:
        """The empirical transitions of the epoch, one tensor `(N, S_k, A, S_{k+1})` per layer."""
        return split_transitions(self.mdp, self.state["belief"])

    def counted(self) -> Table:
        """m(s, a, s') of all episodes so far, one tensor `(N, S_k, A, S_{k+1})` per layer."""
        return split_transitions(self.mdp, self.state["counts"])

    def confidence(self) -> Table:
        """The widths B of the epoch, one tensor `(N, S_k, A, S_{k+1})` per layer.

        Raises:
            ValueError: if the learner has no widths.
        """
        if self.widths is None:
            raise ValueError("widths: this learner was made without confidence widths")
        return split_transitions(self.mdp, self.state["widths"])

    def settings(self) -> dict[str, Any]:
        found = {"confidence": Confidence.of(self), "entry": entries(self.mdp)}
        return found | {"begun": np.zeros(1)}

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
            state["belief"] = torch.where(
                new[:, None], self._empirical(state["counts"]), state["belief"]
            )
            state["epoch_visits"] = torch.where(
                new[:, None, None], state["visits"], state["epoch_visits"]
            )
            state["epochs"] = state["epochs"] + new
            state["epoch_start"] = torch.where(new, float(t + 1), state["epoch_start"])
        return new

    @torch.no_grad()
    def monitor(self, mdp: LayeredMDP, q: Tensor) -> dict[str, float]:
        """How far the belief is from the truth; means over seeds, without the last layer.

        Returns:
            By name: `epochs`; `l1_error`, the mean over pairs of |P - P_i|_1; `l1_error_played`,
            the same mean weighted by q. With widths also `coverage`, the share of seeds for which
            the confidence set holds the true transitions; `bonus`, its mean over pairs, if there is
            one; `upper_bound`, the mean over states of the upper occupancy bound u(s), and
            `occupancy`, that of q(s).
        """
        state, pairs = self.state, zip(self.transitions(), mdp.to_dense().transitions, strict=True)
        errors = [(p - P).abs() for p, P in pairs]
        found = {"epochs": float(state["epochs"].mean())}
        l1 = torch.cat([error.sum(-1) for error in errors], -2)  # (N, S, A)
        inner = mdp.actions & (mdp.layer < mdp.horizon - 1).unsqueeze(-1)
        if bool(inner.any()):
            found["l1_error"] = float(l1[:, inner].mean())
            found["l1_error_played"] = float((q * l1).sum((-2, -1)).mean()) / (mdp.horizon - 1)
        if self.widths is not None:
            outside = join_transitions(errors) > state["widths"] + 1e-12
            found["coverage"] = float((~outside.any(1)).double().mean())
            if "bonus" in state:
                found["bonus"] = float(state["bonus"][:, mdp.actions].mean())
            policy = policy_of(mdp, q)
            u = upper_occupancy(self.mdp, policy, self.transitions(), self.confidence())
            found["upper_bound"], found["occupancy"] = float(u.mean()), float(q.sum(-1).mean())
        return found

    def _empirical(self, counts: Tensor) -> Tensor:
        layers = split_transitions(self.mdp, counts)
        return join_transitions(empirical_transitions(self.mdp, layers, self.pseudo_count))


class PlanningLearner(Learner):
    """Base class of learners that plan with averages; it knows only the layout of the MDP.

    Its state, for N seeds: `visits` and `losses` `(N, S, A)`, the number of visits of each pair and
    the sum of its losses; `counts` `(N, M)`, the visits by next state, flat.
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
    """The settings of `Widths` and `Bonus`."""

    pseudo_count: float
    bounded: bool  # whether there are widths; if not, the settings below are not used
    c1: float
    c2: float
    fewer: Shared  # (2,), subtracted from the visits in the denominators
    variance: bool
    iota: Shared  # (L,)
    scale: float  # of the bonus; 0 if there is none
    share: float
    remaining: bool

    @classmethod
    def of(cls, learner: CountingLearner) -> Confidence:
        found = learner.widths or Widths.of("practical", learner.mdp)
        own, charged = found.source, learner.bonus or Bonus(scale=0.0)
        return cls(
            float(learner.pseudo_count),
            learner.widths is not None,
            *(own.c1, own.c2, np.array(own.fewer, dtype=np.float64), own.variance),
            np.array(found.iota),
            *(float(charged.scale), float(charged.share), charged.remaining),
        )


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
def count_episode(game: Game, t: int, learner: Any) -> bool:
    """Count pairs and transitions, and begin epochs; return whether any seed began one."""
    for n in range(len(game.pairs)):
        visits, before = lane(learner.visits, n), lane(learner.epoch_visits, n)
        begun = lane(learner.begun, n)
        begun[0] = 0.0
        for k in range(game.pairs.shape[1]):
            i = game.pairs[n, k]
            visits[i] += 1.0
            if visits[i] >= max(1.0, 2.0 * before[i]):
                begun[0] = 1.0
        count_transitions(game, n, lane(learner.counts, n), learner.entry)
    new = anywhere(learner.begun[0] > 0.0)
    if new:
        begin_epochs(game.model, game.before + t + 2, learner)
    return new


@routine(inline=True)
def begin_epochs(model: Model, episode: int, learner: Any) -> None:
    """Begin epochs where `begun` is 1: the empirical transitions, their widths and bounds."""
    start, num_actions, entry = model.start, model.num_actions, learner.entry
    settings, new = learner.confidence, learner.begun[0] > 0.0
    kappa, fewer = settings.pseudo_count, settings.fewer
    learner.epochs[0] += learner.begun[0]
    learner.epoch_start[0] = where(new, float(episode), learner.epoch_start[0])
    for k in range(len(start) - 1):
        iota = settings.iota[k]
        for i in range(start[k] * num_actions, start[k + 1] * num_actions):
            m = where(new, learner.visits[i], learner.epoch_visits[i])
            first, least, width = m - fewer[0], m - fewer[1], entry[i + 1] - entry[i]
            learner.epoch_visits[i] = m
            if not model.exists[PAIR, i]:
                continue
            for e in range(entry[i], entry[i + 1]):
                p = (learner.counts[e] + kappa / width) / (m + kappa)
                p = where(new, where(m + kappa > 0.0, p, 1.0 / width), learner.belief[e])
                learner.belief[e] = p
                if settings.bounded and width > 1:
                    spread = p * (1.0 - p) if settings.variance else p
                    B = settings.c1 * sqrt(spread * iota / max(first, 1.0))
                    B = min(1.0, B + settings.c2 * iota / max(least, 1.0))
                    B = where(m > (1.0 if settings.variance else 0.0), B, 1.0)
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
    """Write the table of losses, or loss / (u + bias) of visited pairs; u is q, or bounds it."""
    for i in range(len(learner.q)):
        learner.estimate[i] = 0.0
    for n in range(len(game.pairs)):
        own, estimate, q = lane(reach_of(learner), n), lane(learner.estimate, n), lane(learner.q, n)
        for i in range(game.table.shape[1]):
            estimate[i] = game.table[n, i]
        for k in range(0 if game.table.shape[1] > 0 else game.pairs.shape[1]):
            i = game.pairs[n, k]
            u = q[i]
            if by_bounds:
                reached = upper_bound(game.model, learner.entry, own, game.states[n, k], k)
                u = own.policy[i] * reached
            estimate[i] = game.losses[n, k] / (u + learner.bias)


@inlined
def reach_of(learner: Any) -> Reach:
    """These fields of a learner."""
    return Reach(
        learner.policy, learner.lower, learner.upper, learner.room, learner.ahead, learner.order
    )
