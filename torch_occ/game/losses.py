"""Loss processes: the losses that the environment charges in each episode.

A process gives the mean losses, and the kind of noise around them. For episodes t0 <= t < t0 + n it
returns the means `(n or 1, N or 1, S, A)`, where N is the number of seeds and a 1 stands for "the
same for all". Losses are drawn only at visited pairs, each from one uniform number. What a process
must remember between chunks is a dictionary of tensors, which `simulate` passes on and saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.constants import CHUNK
from torch_occ._support.streams import Purpose, stream
from torch_occ.mdp.checks import as_tensor, check_kind, check_that, check_type, unwritten
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import likeliest, optimal_policy

Noise = Literal["none", "bernoulli", "uniform"]
State = dict[str, Tensor]
Means = tuple[Tensor, State]


class LossProcess:
    """Base class. Subclasses define `means`, and `start` if they have a state."""

    #: The attribute with a loss table `(S, A)`, or `(n, S, A)`, which must fit the MDP.
    given: str | None = None

    #: How a loss is drawn: equal to its mean, as 0 or 1, or uniformly on the widest interval around
    #: the mean inside [0, 1].
    noise: Noise = "none"
    #: The most episodes per call of `means`; 1 for an adversary that reacts to every q.
    stride: int = CHUNK
    #: The number of episodes for which the process has losses, if it is limited.
    length: int | None = None

    def start(self, mdp: LayeredMDP, seeds: Sequence[int]) -> State:
        """Check that the process fits the MDP, and return the state before the first episode."""
        if self.given is not None:
            table = getattr(self, self.given)
            check_fits(self.given, table[0] if self.given.startswith("table") else table, mdp)
        return {}

    def means(self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor) -> Means:
        """Mean losses of episodes t0, ..., t0 + n - 1, where t counts from 1.

        Args:
            state: the state before episode t0.
            q: the learner's occupancy measures before t0, `(N, S, A)`.

        Returns:
            The means `(n or 1, N or 1, S, A)`, and the state after these episodes.
        """
        raise unwritten(self, "means(mdp, state, t0, n, q) -> (means, state)")

    def draw(self, mean: Tensor, uniform: Tensor) -> Tensor:
        """Draw losses with these means from uniform numbers of the same shape."""
        if self.noise == "bernoulli":
            return (uniform < mean).to(mean.dtype)
        if self.noise == "uniform":
            return mean + torch.minimum(mean, 1 - mean) * (2 * uniform - 1)
        return mean


class Stationary(LossProcess):
    """The same means in every episode; without noise, a constant loss."""

    stride = 1 << 62
    given = "mean"

    def __init__(self, mean: Tensor, noise: Noise = "none") -> None:
        self.mean, self.noise = check_unit_interval("mean", mean), check_noise(noise)

    def means(self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor) -> Means:
        return self.mean[None, None], state


class BernoulliLosses(Stationary):
    """i.i.d. losses in {0, 1} with the given means `(S, A)`: the paper's stochastic setting."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__(mean, "bernoulli")


class UniformLosses(Stationary):
    """i.i.d. losses, uniform on the widest interval around the mean inside [0, 1]."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__(mean, "uniform")


class TableLosses(LossProcess):
    """A fixed sequence of losses `(T, S, A)`, from an oblivious adversary.

    Raises:
        ValueError: if the table does not have three dimensions, or a loss is not in [0, 1].
    """

    given = "table"

    def __init__(self, table: Tensor) -> None:
        self.table = check_unit_interval("table", table)
        check_that(self.table.dim() == 3, "table", "shape (T, S, A)", tuple(table.shape))
        self.length = len(self.table)

    def means(self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor) -> Means:
        return self.table[t0 - 1 : t0 - 1 + n, None], state


class SwitchingLosses(LossProcess):
    """An adversary that cycles through tables `(K, S, A)`, with `period` episodes for each.

    The best policy changes with every switch.

    Raises:
        ValueError: if the tables do not have three dimensions, a loss is not in [0, 1], or
            `period` is less than 1.
    """

    given = "tables"

    def __init__(self, tables: Tensor, period: int, noise: Noise = "none") -> None:
        self.tables, self.period = check_unit_interval("tables", tables), period
        self.noise = check_noise(noise)
        check_that(self.tables.dim() == 3, "tables", "shape (K, S, A)", tuple(tables.shape))
        whole = isinstance(period, int) and period >= 1
        check_that(whole, "period", "a whole number of at least 1", period)

    def means(self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor) -> Means:
        t = torch.arange(t0 - 1, t0 - 1 + n, device=self.tables.device)
        return self.tables[(t // self.period) % len(self.tables), None], state


class RandomWalkLosses(LossProcess):
    """Every loss is a random walk, reflected in [0, 1], from 1/2; each seed has its own.

    Raises:
        ValueError: if `step` is not in (0, 1).
    """

    def __init__(self, step: float = 0.01, noise: Noise = "none") -> None:
        check_that(0 < step < 1, "step", "a number in (0, 1)", step)
        self.step, self.noise = step, check_noise(noise)

    def start(self, mdp: LayeredMDP, seeds: Sequence[int]) -> State:
        position = torch.full((len(seeds), mdp.num_states, mdp.num_actions), 0.5, dtype=mdp.dtype)
        return {"position": position.to(mdp.device), "seeds": torch.tensor(list(seeds))}

    def means(self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor) -> Means:
        shape = (CHUNK, mdp.num_states, mdp.num_actions)
        chunk, row = divmod(t0 - 1, CHUNK)
        if row + n > CHUNK:
            raise ValueError(
                f"a random walk is asked for chunk by chunk, of {CHUNK} episodes; got {t0} to "
                f"{t0 + n - 1}"
            )
        streams = [stream(seed, Purpose.WALKS, chunk) for seed in state["seeds"].tolist()]
        moves = np.stack([each.standard_normal(shape) for each in streams], 1)[row : row + n]
        before = state["position"]
        free = before + self.step * torch.from_numpy(moves).to(before).cumsum(0)
        path = 1 - (free.remainder(2) - 1).abs()  # reflection at 0 and 1 folds the free walk
        return path, state | {"position": free[-1].remainder(2)}


class GreedyAdversary(LossProcess):
    """An adaptive adversary: each state charges 1 for the most likely action of the last q.

    All other actions cost 0. The best policy in hindsight depends on the learner's random choices,
    so the mean over seeds of `History.regret` estimates E max, not the paper's max E.
    `theory.Certificate` has both.

    Actions whose q is within a relative 1e-9 of the largest are tied, and the one with the lowest
    index is charged (`torch_occ.mdp.occupancy.likeliest`). A learner that treats two actions alike
    has q that are equal up to rounding, and rounding errors must not decide.
    """

    stride = 1

    def means(self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor) -> Means:
        return likeliest(mdp, q)[None], state


class StochasticallyConstrained(LossProcess):
    """Means that change with fixed gaps: all losses of a layer rise and fall together.

    Phase j has ceil(growth^j) episodes. In it, layer k charges base(s, a) * (1 - swing) plus a
    level, 0 or `swing`, which alternates with the phase and the layer. Every policy pays the level
    of a layer, so the gaps Q(s,a) - min Q are constant. This is the setting of
    `eq:self_bounding_constraint` with C = 0, although losses are neither independent nor
    identically distributed.

    Raises:
        ValueError: if a loss is not in [0, 1], or `swing` or `growth` is out of range.
    """

    given = "base"

    def __init__(
        self, base: Tensor, swing: float = 0.5, growth: float = 1.6, noise: Noise = "bernoulli"
    ) -> None:
        check_that(0 <= swing < 1, "swing", "a number in [0, 1)", swing)
        check_that(growth > 1, "growth", "more than 1", growth)
        self.base, self.swing, self.growth = check_unit_interval("base", base), swing, growth
        self.noise = check_noise(noise)

    @property
    def gap_table(self) -> Tensor:
        """A loss `(S, A)` whose gaps hold in every episode."""
        return self.base * (1 - self.swing)

    def means(self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor) -> Means:
        ends = self._phase_ends(t0 + n)
        phase = torch.bucketize(torch.arange(t0, t0 + n), ends).to(mdp.device)
        level = ((phase[:, None] + mdp.layer) % 2).to(mdp.dtype) * self.swing  # (n, S)
        return self.gap_table + level[:, None, :, None], state

    def _phase_ends(self, until: int) -> Tensor:
        ends, length = [0], 1.0
        while ends[-1] < until:
            ends.append(ends[-1] + int(-(-length // 1)))
            length *= self.growth
        return torch.tensor(ends[1:])


def check_unit_interval(name: str, table: Tensor) -> Tensor:
    """Return a copy of the table; raise a ValueError if an entry is not in [0, 1]."""
    table = as_tensor(table)
    advice = "; make one by torch.as_tensor(..., dtype=torch.float64)"
    check_type(name, table, Tensor, "a torch tensor", advice)
    for index in map(tuple, (~((table >= 0) & (table <= 1))).nonzero()[:1].tolist()):
        raise ValueError(
            f"{name}: entry {index} is {float(table[index])}; losses must be in [0, 1]"
        )
    empty = f"an empty tensor of shape {tuple(table.shape)}"
    check_that(table.numel() > 0, name, "at least one loss", empty)
    return table.detach().clone()


def mean_square(mean: Tensor, noise: Noise) -> Tensor:
    """E[loss^2] of losses that `LossProcess.draw` draws with this mean."""
    if noise == "bernoulli":
        return mean
    spread = torch.minimum(mean, 1 - mean).square() / 3 if noise == "uniform" else 0.0
    return mean.square() + spread


def second_moments(mean: Tensor, square: Tensor) -> Tensor:
    """E[loss_i loss_j] for i <= j, from E[loss] and E[loss^2], `(*batch, S * A, S * A)`.

    Losses of different pairs are independent given their means.
    """
    flat = mean.flatten(-2)
    products = torch.triu(flat.unsqueeze(-1) * flat.unsqueeze(-2), 1)
    return products + torch.diag_embed(square.flatten(-2))


def check_noise(noise: Noise) -> Noise:
    """Return the noise; raise a ValueError if it is unknown."""
    known = noise in ("none", "bernoulli", "uniform")
    check_that(known, "noise", "none, bernoulli or uniform", repr(noise))
    return noise


def check_fits(name: str, table: Tensor, mdp: LayeredMDP) -> None:
    """Raise a ValueError if a table does not have the shape, type and device of the MDP."""
    found = f"{table.dtype} of shape {tuple(table.shape)} on {table.device}"
    expected = f"{mdp.dtype} of shape {tuple(mdp.actions.shape)} on {mdp.device}"
    check_that(found == expected, name, expected, found)


def size_of_change(mdp: LayeredMDP, change: Tensor) -> Tensor:
    """2 sum_k max_{s in S_k, a} |change|, `(*batch, S, A)` -> `(*batch,)`."""
    sizes = torch.where(mdp.actions, change.abs(), 0.0)
    first, *others = (layer.amax((-2, -1)) for layer in mdp.split(sizes, -2))
    return 2 * sum(others, first)


# -- Corrupted losses: the means of another process are changed, within a budget -------------------


class Corrupted(LossProcess):
    """Another process whose means are corrupted until a budget is spent.

    The corruption of an episode is 2 sum_k max_{s in S_k, a} |mean - mean'|, where mean' is the
    uncorrupted mean, as in `sec:preliminaries_self_bounding`. `state["corruption"]` is the
    corruption spent so far by each seed, `(N,)`. `state["corruption_so_far"]` is its course over
    the last episodes, `(N, n)`.

    Strategies:
        "front" replaces every loss l by 1 - l from the first episode on.
        "uniform" spreads the same change evenly over `episodes` episodes.
        "targeted" charges 1 for the optimal actions of the mean loss `target`, from the first
        episode on.

    Raises:
        ValueError: if the budget is negative, the strategy is unknown, or it lacks `episodes` or
            `target`.
    """

    def __init__(
        self,
        base: LossProcess,
        budget: float,
        strategy: Literal["front", "uniform", "targeted"] = "front",
        *,
        episodes: int | None = None,
        target: Tensor | None = None,
    ) -> None:
        check_kind("base", base, LossProcess, ", for example occ.BernoulliLosses(mean)")
        check_that(budget >= 0, "budget", "a non-negative number", budget)
        known = strategy in ("front", "uniform", "targeted")
        check_that(known, "strategy", "front, uniform or targeted", repr(strategy))
        spread = strategy != "uniform" or (episodes is not None and episodes >= 1)
        number = "the number of episodes over which to spread the budget"
        check_that(spread, "episodes", number, episodes)
        if strategy == "targeted" and target is None:
            raise ValueError(
                "target: the targeted strategy needs the mean loss (S, A) whose optimal actions "
                "it attacks"
            )
        self.base, self.budget, self.strategy, self.episodes = base, budget, strategy, episodes
        self.target = target
        self.noise, self.stride, self.length = base.noise, min(base.stride, CHUNK), base.length

    def start(self, mdp: LayeredMDP, seeds: Sequence[int]) -> State:
        if self.target is not None:
            check_fits("target", self.target, mdp)
        inner = {f"base.{name}": value for name, value in self.base.start(mdp, seeds).items()}
        return inner | {"corruption": torch.zeros(len(seeds), dtype=mdp.dtype, device=mdp.device)}

    def means(self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor) -> Means:
        inner = {name[5:]: value for name, value in state.items() if name.startswith("base.")}
        clean, inner = self.base.means(mdp, inner, t0, n, q)
        clean = clean.expand(n, *clean.shape[1:])
        wanted = 1 - clean  # (n, N or 1, S, A)
        if self.strategy == "targeted" and self.target is not None:
            best = optimal_policy(mdp, self.target, in_order=True).policy > 0
            wanted = torch.where(best, 1.0, clean)
        attack = torch.where(mdp.actions, wanted - clean, 0.0)
        cost = size_of_change(mdp, attack)  # (n, N or 1)
        share = torch.ones_like(cost)
        if self.strategy == "uniform" and self.episodes is not None:
            share = self.budget / self.episodes / cost.clamp(min=1e-300)
            share = torch.where(cost > 0, share, 0.0).clamp(max=1)
        left = self.budget - state["corruption"]  # (N,)
        # A remainder of the size of rounding errors counts as nothing.
        left = torch.where(left > 1e-12 * self.budget, left, 0.0)
        asked = share * cost
        before = asked.cumsum(0) - asked
        granted = torch.minimum(asked, (left - before).clamp(min=0))  # (n, N)
        share = torch.where(cost > 0, granted / cost.clamp(min=1e-300), 0.0)
        spent = state["corruption"] + granted.cumsum(0)
        corrupted = clean + share[..., None, None] * attack
        kept = {"corruption": spent[-1].clone(), "corruption_so_far": spent.T}
        return corrupted, {f"base.{name}": value for name, value in inner.items()} | kept
