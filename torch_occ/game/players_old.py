"""The players of the rivals that have a loop of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.choices import compile_message
from torch_occ._support.constants import CHUNK
from torch_occ._support.processes import for_each
from torch_occ.engine.lanes import allocator, gather, lanes_for, scatter
from torch_occ.engine.layout import USED, Floats, Work, few_lanes, make_work
from torch_occ.engine.play_old import (
    IMPORTANCE_WEIGHTED,
    NOISE,
    Rules,
    Seen,
    make_seen,
)
from torch_occ.engine.play_old import (
    FlatTally as Tally,
)
from torch_occ.game.learners import Learner
from torch_occ.game.losses import GreedyAdversary, LossProcess
from torch_occ.game.players import OverTime, few_states
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.step.arrays import (
    model_of,
    why_not_model,
)

if TYPE_CHECKING:
    from torch_occ.game.simulate import Simulation


Memory = TypeVar("Memory")

#: The longest time in seconds that one call of a kernel should take.
LONGEST_CALL = 0.2

#: The entries of `Tally.scalars`, by their names in `Simulation.sums`.
_SCALARS = (
    *("expected", "realised", "newton_steps", "uncertified", "dual_residual", "flow_residual"),
    *("first_uncertified", "first_status"),
)


class LoopPlayer:
    """Plays segments in compiled code, with seeds in threads; here, a fixed policy."""

    name = "engine"
    in_lanes = False  # whether `prepare` returns a function that plays one seed per lane
    chunks = 32  # per call, if memory allows, so that starting threads takes negligible time
    most: int  # episodes per call, of about `LONGEST_CALL` seconds, because Ctrl-C waits for it

    @staticmethod
    def why_not(mdp: LayeredMDP, learner: Learner) -> str | None:
        """The reason why this player cannot play the learner, or None if it can."""
        return why_not_model(mdp)

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        self.learner = learner
        self.model = model_of(mdp)  # the true one; the learner's may be blind
        self.chunks = max(1, min(self.chunks, 4_000 // mdp.num_pairs))
        self.most = self.limit = self.chunks * CHUNK
        if mdp.num_pairs > 1000:  # may be slow; the first calls measure it
            self.most = 8
        self.reacts = type(losses) is GreedyAdversary
        self.kept: dict[int, Any] = {}

    def play(self, run: Simulation, means: Tensor, numbers: Tensor, tables: Tensor | None) -> None:
        """Play episodes run.t + 1, ....

        Args:
            means: mean losses `(n or 1, N or 1, S, A)`.
            numbers: uniform numbers `(N, n, L, 3)`.
            tables: uniform numbers `(N, n, S, A)` for whole loss tables, or None.
        """
        count, n, sums = len(run.seeds), numbers.shape[1], run.sums
        t = range(run.t + 1, run.t + 1 + n)
        q, cumulative_loss = self.memory(count)
        per_pair = [
            x.numpy().reshape(count, -1)
            for x in (q, cumulative_loss, sums["cumulative_occupancy"], sums["total_mean"])
        ]
        asked = sums.get("second_moment")
        moments = np.zeros((count, 0, 0)) if asked is None else asked.numpy()
        scalars = torch.stack([sums[name] for name in _SCALARS], -1).numpy()
        sums_of_seeds = (*per_pair, moments, scalars)
        # Copies `(n or 1, S * A)`, because the kernel may write to them.
        charged = [np.array(mean.flatten(-2).numpy()) for mean in means.unbind(1)]
        drawn = numbers.contiguous().numpy()
        play = self.prepare(run, t, tables)

        def play_seed(seed: int) -> None:
            tally = Tally(*(x[seed] for x in sums_of_seeds))
            play(seed, charged[min(seed, len(charged) - 1)], drawn[seed : seed + 1], tally)

        width = self.lanes(run) or 1
        calls = -(-count // width)

        def play_lanes(group: int) -> None:
            seeds = range(group * width, min((group + 1) * width, count))
            lanes = [min(seed, count - 1) for seed in range(group * width, (group + 1) * width)]
            tally = Tally(*(gather(x, lanes) for x in sums_of_seeds))
            shown = charged[0]
            if self.reacts or len(charged) > 1:
                shown = gather(charged, [min(seed, len(charged) - 1) for seed in lanes])
            play(group, shown, drawn[seeds.start : seeds.stop], tally)
            for x, found in zip(sums_of_seeds, tally, strict=True):
                scatter(found, x, seeds)

        begun = time.monotonic()
        with compile_message:
            for_each(play_lanes if self.in_lanes else play_seed, calls)
        for name, column in zip(_SCALARS, scalars.T, strict=True):
            sums[name] = torch.from_numpy(column.copy())
        run.t += n
        run.since += n
        run.q = q
        self.adapt(n, (time.monotonic() - begun) / -(-calls // torch.get_num_threads()))

    def lanes(self, run: Simulation) -> int | None:
        """The number of seeds that are played together in lanes; None in plain arrays."""
        return lanes_for(len(run.seeds), few_lanes(self.model)) if self.in_lanes else None

    def scratch(self, group: int, make: Callable[[], Memory]) -> Memory:
        """Scratch memory of a group of seeds, which is made once in a run."""
        if group not in self.kept:
            self.kept[group] = make()
        return cast("Memory", self.kept[group])

    def new_work(self, lanes: int | None, numbers: Floats) -> Work:
        """Scratch memory for a group of seeds; lanes without random numbers are not in use."""
        work = make_work(self.model, allocator(lanes))
        if lanes is not None:
            work.notes[USED, len(numbers) :] = 0.0
        return work

    @contextmanager
    def rows_of(
        self, run: Simulation, group: int, rows: Sequence[Floats]
    ) -> Iterator[list[Floats]]:
        """Arrays of one group of seeds for a kernel that changes them; rows have one per seed."""
        count, lanes = len(run.seeds), self.lanes(run)
        if lanes is None:
            yield [x[group] for x in rows]
            return
        seeds = range(group * lanes, min((group + 1) * lanes, count))
        own = [gather(x, [*seeds, *[seeds[-1]] * (lanes - len(seeds))]) for x in rows]
        yield own
        for x, found in zip(rows, own, strict=True):
            scatter(found, x, seeds)

    def adapt(self, episodes: int, seconds: float) -> None:
        """Play fewer episodes in the next call of a kernel if this took too long, else more."""
        if seconds > LONGEST_CALL:
            self.most = max(1, int(episodes * LONGEST_CALL / seconds))
        elif self.most < self.limit and 2 * self.most * seconds < episodes * LONGEST_CALL:
            self.most = min(2 * self.most, self.limit)

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        """The learner's q and its cumulative statistics, both `(N, S, A)`, updated in place."""
        raise NotImplementedError

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        """A function that plays episodes t of one group of seeds; without lanes, of one seed.

        Its arguments are the group's number, means, random numbers `(seeds, n, L, 3)` and tally.
        """
        raise NotImplementedError

    def rules(self, noise: str, t: range) -> Rules:
        """The rules for a learner that solves nothing."""
        return Rules(self.reacts, NOISE[noise], IMPORTANCE_WEIGHTED, np.zeros(len(t)), 0.0, 0)


class EmpiricalPlayer(LoopPlayer):
    """Plays the learners that plan with averages."""

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        super().__init__(mdp, learner, losses)
        self.in_lanes = few_states(self.model)
        self.logs = OverTime(lambda t: t.clamp(min=2).log())

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        losses = self.learner.state["losses"]
        return torch.zeros_like(losses), losses

    def make(self, lanes: int | None) -> tuple[Work, Seen]:
        """Scratch memory of a group of seeds."""
        return make_work(self.model, allocator(lanes)), make_seen(self.model, allocator(lanes))
