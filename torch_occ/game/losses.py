"""Loss processes: what the environment charges in each episode.

A process is a stream of means with a kind of noise around them. For episodes t0 <= t < t0 + n it
returns the means `(n or 1, N or 1, S, A)`, where N is the number of seeds and a 1 stands for "the
same for all"; the losses themselves are drawn only at the pairs that are visited, from a uniform
number each. So a million episodes never sit in memory, and a wide MDP costs no more for its width.

Processes are stateless where they can be. What a process must remember between chunks (a random
walk's position, a corruption budget) is a dictionary of tensors that `simulate` carries and saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.spacing import CHUNK
from torch_occ._support.streams import Purpose, stream
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import likeliest

Noise = Literal["none", "bernoulli", "uniform"]
State = dict[str, Tensor]


class LossProcess:
    """Base class. Subclasses write `means`, and `start` if they remember something."""

    #: How a loss is drawn around its mean: exactly it, 0 or 1, or uniform on the widest interval
    #: around it inside [0, 1].
    noise: Noise = "none"
    #: The most episodes that one call of `means` may cover; 1 for an adversary that reacts to every
    #: q.
    stride: int = CHUNK
    #: The number of episodes that the process has losses for, if it is limited.
    length: int | None = None

    def start(self, mdp: LayeredMDP, seeds: Sequence[int]) -> State:
        """The state before the first episode, after checking that the process fits the MDP."""
        return {}

    def means(
        self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor
    ) -> tuple[Tensor, State]:
        """Means of episodes t0..t0+n-1 (t counts from 1) and the next state; q `(N, S, A)` is the
        learner's occupancy before t0.
        """
        raise NotImplementedError

    def draw(self, mean: Tensor, uniform: Tensor) -> Tensor:
        """Losses with these means from uniform numbers of the same shape."""
        if self.noise == "bernoulli":
            return (uniform < mean).to(mean.dtype)
        if self.noise == "uniform":
            return mean + torch.minimum(mean, 1 - mean) * (2 * uniform - 1)
        return mean


class Stationary(LossProcess):
    """The same means for ever; without noise a constant loss."""

    stride = 1 << 62

    def __init__(self, mean: Tensor, noise: Noise = "none") -> None:
        self.mean, self.noise = check_unit_interval("mean", mean), check_noise(noise)

    def start(self, mdp: LayeredMDP, seeds: Sequence[int]) -> State:
        check_table("mean", self.mean, mdp)
        return {}

    def means(
        self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor
    ) -> tuple[Tensor, State]:
        return self.mean[None, None], state


class BernoulliLosses(Stationary):
    """i.i.d. losses in {0, 1} with the given means `(S, A)`: the paper's stochastic setting."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__(mean, "bernoulli")


class UniformLosses(Stationary):
    """i.i.d. losses, uniform on the widest interval around the mean that stays in [0, 1]."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__(mean, "uniform")


class TableLosses(LossProcess):
    """A fixed sequence `(T, S, A)`, chosen by an oblivious adversary."""

    def __init__(self, table: Tensor) -> None:
        self.table = check_unit_interval("table", table)
        if table.dim() != 3:
            raise ValueError(f"table: expected shape (T, S, A), got {tuple(table.shape)}")
        self.length = len(table)

    def start(self, mdp: LayeredMDP, seeds: Sequence[int]) -> State:
        check_table("table", self.table[0], mdp)
        return {}

    def means(
        self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor
    ) -> tuple[Tensor, State]:
        return self.table[t0 - 1 : t0 - 1 + n, None], state


class SwitchingLosses(LossProcess):
    """An adversary that goes round several tables `(K, S, A)`, each for `period` episodes, so that
    the best policy keeps changing.
    """

    def __init__(self, tables: Tensor, period: int, noise: Noise = "none") -> None:
        self.tables, self.period = check_unit_interval("tables", tables), period
        self.noise = check_noise(noise)
        if tables.dim() != 3:
            raise ValueError(f"tables: expected shape (K, S, A), got {tuple(tables.shape)}")
        if period < 1:
            raise ValueError(f"period: expected at least one episode, got {period}")

    def start(self, mdp: LayeredMDP, seeds: Sequence[int]) -> State:
        check_table("tables", self.tables[0], mdp)
        return {}

    def means(
        self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor
    ) -> tuple[Tensor, State]:
        t = torch.arange(t0 - 1, t0 - 1 + n, device=self.tables.device)
        return self.tables[(t // self.period) % len(self.tables), None], state


class RandomWalkLosses(LossProcess):
    """Every loss is a random walk reflected in [0, 1], started at 1/2, another one for every seed."""

    def __init__(self, step: float = 0.01, noise: Noise = "none") -> None:
        if not 0 < step < 1:
            raise ValueError(f"step: expected a number in (0, 1), got {step}")
        self.step, self.noise = step, check_noise(noise)

    def start(self, mdp: LayeredMDP, seeds: Sequence[int]) -> State:
        position = torch.full((len(seeds), mdp.num_states, mdp.num_actions), 0.5, dtype=mdp.dtype)
        return {"position": position.to(mdp.device), "seeds": torch.tensor(list(seeds))}

    def means(
        self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor
    ) -> tuple[Tensor, State]:
        shape = (CHUNK, mdp.num_states, mdp.num_actions)
        chunk, row = divmod(t0 - 1, CHUNK)
        if row + n > CHUNK:
            raise ValueError(
                f"a random walk is asked for chunk by chunk, of {CHUNK} episodes; got {t0} to "
                f"{t0 + n - 1}"
            )
        moves = np.stack(
            [
                stream(seed, Purpose.WALKS, chunk).standard_normal(shape)
                for seed in state["seeds"].tolist()
            ],
            1,
        )[row : row + n]
        free = state["position"] + self.step * torch.from_numpy(moves).to(state["position"]).cumsum(
            0
        )
        path = 1 - (free.remainder(2) - 1).abs()  # reflection at 0 and 1 folds the free walk
        return path, state | {"position": free[-1].remainder(2)}


class GreedyAdversary(LossProcess):
    """An adaptive adversary: every state charges 1 for the most likely action of the last q, else
    0.

    The best policy in hindsight depends on the learner's random choices, so the mean over seeds of
    `History.regret` estimates E max, not the paper's max E. `theory.Certificate` has both.

    Actions whose q is within a relative 1e-9 of the largest are tied, and the one with the lowest
    index is charged (`torch_occ.mdp.occupancy.likeliest`): a learner that treats two actions alike
    has q equal up to rounding, and rounding must not decide.
    """

    stride = 1

    def means(
        self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor
    ) -> tuple[Tensor, State]:
        return likeliest(mdp, q)[None], state


class StochasticallyConstrained(LossProcess):
    """Gaps fixed, means moving: in phases of growing length all losses of a layer rise and fall
    together.

    In phase j, of length ceil(growth^j), layer k charges base(s, a) * (1 - swing) plus a level, 0
    or `swing`, that alternates with the phase and the layer. A level that is the same for a whole
    layer is paid by every policy, so Q(s,a) - min Q never moves: the setting of
    `eq:self_bounding_constraint` with C = 0, though losses are neither independent nor identically
    distributed.
    """

    def __init__(
        self, base: Tensor, swing: float = 0.5, growth: float = 1.6, noise: Noise = "bernoulli"
    ) -> None:
        if not 0 <= swing < 1:
            raise ValueError(f"swing: expected a number in [0, 1), got {swing}")
        if not growth > 1:
            raise ValueError(f"growth: expected more than 1, got {growth}")
        self.base, self.swing, self.growth = check_unit_interval("base", base), swing, growth
        self.noise = check_noise(noise)

    def start(self, mdp: LayeredMDP, seeds: Sequence[int]) -> State:
        check_table("base", self.base, mdp)
        return {}

    @property
    def gap_table(self) -> Tensor:
        """A loss `(S, A)` with the gaps that hold in every episode."""
        return self.base * (1 - self.swing)

    def means(
        self, mdp: LayeredMDP, state: State, t0: int, n: int, q: Tensor
    ) -> tuple[Tensor, State]:
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
    """A copy of the table, once every entry is known to be in [0, 1]."""
    wrong = (~((table >= 0) & (table <= 1))).nonzero()
    if len(wrong):
        index = tuple(wrong[0].tolist())
        raise ValueError(
            f"{name}: entry {index} is {float(table[index])}; losses must be in [0, 1]"
        )
    if table.numel() == 0:
        raise ValueError(
            f"{name}: expected at least one loss, got an empty tensor of shape {tuple(table.shape)}"
        )
    return table.detach().clone()


def mean_square(mean: Tensor, noise: Noise) -> Tensor:
    """E[loss^2] of losses drawn by `LossProcess.draw`: m for a coin, m^2 + min(m, 1-m)^2 / 3 for
    the uniform one, m^2 without noise.
    """
    if noise == "bernoulli":
        return mean
    return (
        mean.square() + torch.minimum(mean, 1 - mean).square() / 3
        if noise == "uniform"
        else mean.square()
    )


def second_moments(mean: Tensor, square: Tensor) -> Tensor:
    """E[loss_i loss_j] for every two pairs i <= j, from E[loss] and E[loss^2] of each pair.

    Losses of different pairs are independent given their means. Pairs are flat and i comes before
    j, so the matrix is upper triangular: `(*batch, S, A)` -> `(*batch, S * A, S * A)`.
    """
    flat = mean.flatten(-2)
    products = torch.triu(flat.unsqueeze(-1) * flat.unsqueeze(-2), 1)
    return products + torch.diag_embed(square.flatten(-2))


def check_noise(noise: Noise) -> Noise:
    """The noise, if it is a known kind."""
    if noise not in ("none", "bernoulli", "uniform"):
        raise ValueError(f"noise: expected none, bernoulli or uniform, got {noise!r}")
    return noise


def check_table(name: str, table: Tensor, mdp: LayeredMDP) -> None:
    """Raise a ValueError if a table of means does not have the shape of the MDP."""
    expected = (mdp.num_states, mdp.num_actions)
    if tuple(table.shape) != expected or table.dtype != mdp.dtype or table.device != mdp.device:
        found = f"{table.dtype} of shape {tuple(table.shape)} on {table.device}"
        raise ValueError(
            f"{name}: expected {mdp.dtype} of shape {expected} on {mdp.device}, got {found}"
        )
