"""Confidence widths of the empirical transitions, and the bonuses that follow from them.

    B(s, a, s') = min{ 1, c1 sqrt(P(s' | s, a) iota / m1) + c2 iota / m2 }

with the empirical P, the visits m = m(s, a), and denominators m1, m2 of either m or m - 1. The
constants of each source are a row of `SOURCES`. B is 1 for pairs that were never seen. It is 0
where the next layer has one state, since that successor is certain: so in the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.game.beliefs.counts import Table, check_table
from torch_occ.mdp.layered import LayeredMDP


class Source(NamedTuple):
    """A row of the table of widths."""

    c1: float
    c2: float
    #: What is subtracted from m in the first and in the second denominator, which is at least 1.
    fewer: tuple[int, int]
    #: Whether the root has the variance P (1 - P) in place of P.
    variance: bool
    #: Whether the union in iota is over 2 S A S' T, and not over S A T.
    two_sided: bool
    #: The probability that some width does not hold, as a multiple of delta; None without proof.
    failures: float | None


#: The constants of each source.
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
    """Confidence widths with the constants of a source; `Widths.of` computes iota.

    Args:
        source: a row of `SOURCES`, or your own constants.
        iota: one number per layer.
        episodes: T.
    """

    source: Source
    iota: tuple[float, ...]
    #: The number of episodes for which the widths hold; None if they promise nothing.
    episodes: int | None = None

    @classmethod
    def of(
        cls, name: str, mdp: LayeredMDP, episodes: int | None = None, delta: float | None = None
    ) -> Widths:
        """The widths of a source.

        iota is ln(T S A / delta), with the number of existing pairs for S A; for "bernstein"
        ln(2 S A S' T / delta), with S' the states of the next layer; and 1 for "practical".

        Args:
            name: a key of `SOURCES`.
            mdp: the layout.
            episodes: T.
            delta: in (0, 1); the widths of all pairs and episodes hold with probability
                1 - failures * delta.

        Raises:
            ValueError: if the name is unknown, or if T or delta is missing or out of range; it says
                which source needs them.
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
        """B(s, a, s'), one tensor `(*batch, S_k, A, S_{k+1})` per layer.

        Args:
            mdp: the layout; its probabilities are not used.
            transitions: the empirical P, one tensor `(*batch, S_k, A, S_{k+1})` per layer.
            visits: m(s, a), `(*batch, S, A)`.

        Raises:
            ValueError: if a shape does not fit the layout.
        """
        check_table("transitions", mdp, transitions)
        expected = (mdp.num_states, mdp.num_actions)
        if tuple(visits.shape[-2:]) != expected:
            raise ValueError(
                f"visits: expected shape (*batch, {expected[0]}, {expected[1]}), got "
                f"{tuple(visits.shape)}"
            )
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

    where range is L, or, with `remaining`, L - 1 - k: the largest loss after layer k. It is zero
    where B is.

    The defaults are those of Jin, Huang and Luo (2021): L min{1, sum B}. `Bonus.practical()` is
    smaller. |(P - P') V| is at most (1/2) |P - P'|_1 times the range of V, so share = 1/2 and
    `remaining` keep the optimism; scale = 1/2 does not.
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
        check_table("widths", mdp, widths)
        rows = []
        for k, B in enumerate(widths):
            reach = mdp.horizon - 1 - k if self.remaining else mdp.horizon
            rows.append(self.scale * reach * (self.share * B.sum(-1)).clamp(max=1.0))
        return torch.where(mdp.actions, torch.cat(rows, -2), 0.0)
