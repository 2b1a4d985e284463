"""The engine as a player of `simulate`: the same game as in torch, from the same random numbers.

`EnginePlayer` plays a fixed policy. The players of other learners derive from it.
"""

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
from torch_occ.engine.lanes import allocator, gather, lanes_for, scatter, width_of
from torch_occ.engine.layout import (
    NARROW,
    Floats,
    Model,
    Terms,
    Work,
    few_lanes,
    make_work,
    suits_lanes,
)
from torch_occ.engine.play import (
    FULL_INFORMATION,
    IMPLICIT_EXPLORATION,
    IMPORTANCE_WEIGHTED,
    NOISE,
    REDUCED_VARIANCE,
    Rules,
    Seen,
    Tally,
    make_seen,
    play,
    play_empirical,
    play_fixed,
)
from torch_occ.game.estimators import (
    Estimator,
    FullInformation,
    ImplicitExploration,
    ImportanceWeighted,
    ReducedVariance,
)
from torch_occ.game.learners import FTRL, FixedPolicy, Learner, OptimisticValueIteration
from torch_occ.game.losses import GreedyAdversary, LossProcess
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import interior_point
from torch_occ.step.arrays import (
    exponents_of,
    kinds_of,
    model_of,
    terms_of,
    weights_of,
    why_not_model,
)
from torch_occ.step.arrays import why_not_game as why_not

if TYPE_CHECKING:
    from torch_occ.game.simulate import Simulation


Memory = TypeVar("Memory")

#: Episodes in a block of `OverTime`; torch does not split so few numbers between threads.
_BLOCK = 2048

#: The longest time in seconds that one call of a kernel should take.
LONGEST_CALL = 0.2

#: The entries of `Tally.scalars`, by their names in `Simulation.sums`.
_SCALARS = (
    *("expected", "realised", "newton_steps", "uncertified", "dual_residual", "flow_residual"),
    *("first_uncertified", "first_status"),
)


class OverTime:
    """A function of the episode, computed by torch for a whole block of episodes.

    The last bit of a power or a logarithm depends on the position of a number in a tensor and on
    the tensor's size: most entries go through vector instructions, the last few through another
    function. So a block always has the same episodes, wherever a run stops, continues or records.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function
        self.blocks: dict[int, Floats] = {}  # the blocks of the last call

    @torch.no_grad()
    def __call__(self, first: int, stop: int) -> Floats:
        """The values at episodes first, ..., stop - 1, `(n, ...)`; episode 0 counts as 1."""
        numbers = range(first // _BLOCK, (stop - 1) // _BLOCK + 1)
        self.blocks = {b: self.blocks[b] if b in self.blocks else self._block(b) for b in numbers}
        begin = numbers.start * _BLOCK
        return np.concatenate(list(self.blocks.values()))[first - begin : stop - begin]

    def _block(self, number: int) -> Floats:
        t = torch.arange(number * _BLOCK, (number + 1) * _BLOCK, dtype=torch.float64).clamp(min=1)
        found = self.function(t)
        return found.expand(_BLOCK, *found.shape[1:]).contiguous().numpy()


def few_states(model: Model) -> bool:
    """Whether the layers are narrow. Learners that solve nothing then play in lanes.

    In wide layers the tables of eight seeds do not fit into the cache. The rule depends on the MDP
    alone, so that a seed has the same bits in any batch.
    """
    return int(np.diff(model.start).max()) <= NARROW


def terms_in(terms: Terms, lanes: int | None) -> Terms:
    """The terms, with the same exponents in every lane."""
    if lanes is None:
        return terms
    return terms._replace(exponent=gather([terms.exponent], [0] * lanes))


class EnginePlayer:
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
            work.stale[3, len(numbers) :] = 0.0
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
        assert isinstance(self.learner, FixedPolicy)
        q = self.learner.q.expand(count, *self.learner.q.shape).clone()
        return q, torch.zeros_like(q)

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        """A function that plays episodes t of one group of seeds; without lanes, of one seed.

        Its arguments are the group's number, means, random numbers `(seeds, n, L, 3)` and tally.
        """
        rules = self.rules(run.losses.noise, t)
        return lambda seed, means, numbers, tally: play_fixed(
            self.model, means, numbers, rules, tally, np.zeros(1, np.int64)
        )

    def rules(self, noise: str, t: range) -> Rules:
        """The rules for a learner that solves nothing."""
        return Rules(self.reacts, NOISE[noise], IMPORTANCE_WEIGHTED, np.zeros(len(t)), 0.0, 0)


# -- The compiled player of FTRL with a built-in regularizer ---------------------------------------


ESTIMATORS: dict[type[Estimator], int] = {
    ImportanceWeighted: IMPORTANCE_WEIGHTED,
    ImplicitExploration: IMPLICIT_EXPLORATION,
    ReducedVariance: REDUCED_VARIANCE,
    FullInformation: FULL_INFORMATION,
}


class FTRLPlayer(EnginePlayer):
    """Plays FTRL with a built-in regularizer, in lanes if `suits_lanes`."""

    @staticmethod
    def why_not(mdp: LayeredMDP, learner: Learner) -> str | None:
        assert isinstance(learner, FTRL)
        if learner.step.constraints is not None:
            return "the compiled episode loop does not know budgets"
        if type(learner.estimator) not in ESTIMATORS:
            return f"the engine does not know the estimator {type(learner.estimator).__name__}"
        if learner.step.regularizer.batched():
            return "the regularizer has batched parameters"
        return why_not(mdp, learner.step.regularizer)

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        assert isinstance(learner, FTRL)
        super().__init__(mdp, learner, losses)
        self.ftrl = learner
        self.middle = interior_point(learner.mdp).detach().numpy().flatten()
        self.valid: list[Any] = []  # the last values of the parameters that were valid
        regularizer, own = learner.step.regularizer, learner.estimator
        with torch.no_grad():
            found = terms_of(regularizer, torch.ones(1, dtype=torch.float64))
            pairs = learner.mdp.actions.shape
            exponents = exponents_of(found, pairs).numpy()
        self.in_lanes = suits_lanes(self.model)
        self.terms = Terms(*kinds_of(found), exponents)
        self.weights = OverTime(
            lambda t: weights_of(terms_of(regularizer, t), pairs).expand(len(t), -1)
        )
        if isinstance(own, ReducedVariance):
            self.setting = OverTime(own.threshold)
        else:
            bias = own.bias if isinstance(own, ImplicitExploration) else 0.0
            self.setting = OverTime(lambda t: torch.full_like(t, bias))

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        return self.ftrl.state["q"], self.ftrl.state["cumulative_loss"]

    def check(self) -> None:
        """Check the parameters if they have changed; a callback may have done that."""
        values = [parameter.tolist() for parameter in self.ftrl.step.parameters()]
        if values != self.valid:
            self.ftrl.step.check_parameters()
            self.valid = values

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        self.check()
        weights = self.weights(t.start - 1, t.stop)  # begins one episode earlier
        rules, lanes = self.rules(run.losses.noise, t), self.lanes(run)
        width = lanes or 1
        seen = np.zeros((len(run.seeds), 0, 0))
        if tables is not None:
            seen = tables.flatten(-2).contiguous().numpy()
        terms, new = terms_in(self.terms, lanes), allocator(lanes)

        def play_group(group: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            play(
                self.model,
                terms,
                weights,
                run.t,
                means,
                numbers,
                seen[group * width : (group + 1) * width],
                rules,
                tally,
                self.middle,
                new(len(self.middle)),
                new(weights.shape[1]),
                new(0),
                self.work(group, lanes, numbers),
                width_of(lanes),
            )

        return play_group

    def work(self, group: int, lanes: int | None, numbers: Floats) -> Work:
        """The scratch memory of a group of seeds, with the factors of the last episode."""
        return self.scratch(group, lambda: self.new_work(lanes, numbers))

    def rules(self, noise: str, t: range) -> Rules:
        options = self.ftrl.step.options
        limits = (options.tolerance_in(torch.float64), options.max_steps)
        return Rules(
            self.reacts,
            NOISE[noise],
            ESTIMATORS[type(self.ftrl.estimator)],
            self.setting(t.start, t.stop),
            *limits,
        )


# -- The compiled player of learners that plan with averages ---------------------------------------


class EmpiricalPlayer(EnginePlayer):
    """Plays the learners that plan with averages."""

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        super().__init__(mdp, learner, losses)
        self.in_lanes = few_states(self.model)
        self.logs = OverTime(lambda t: t.clamp(min=2).log())

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        losses = self.learner.state["losses"]
        return torch.zeros_like(losses), losses

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        learner, rules = self.learner, self.rules(run.losses.noise, t)
        logs = self.logs(t.start, t.stop)
        scale, floor = (
            (learner.scale, learner.floor)
            if isinstance(learner, OptimisticValueIteration)
            else (0.0, 0.0)
        )
        visits = learner.state["visits"].numpy().reshape(len(run.seeds), -1)
        lanes = self.lanes(run)

        def play_group(group: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            work, seen = self.scratch(group, lambda: self.make(lanes))
            with self.rows_of(run, group, [visits]) as own:
                play_empirical(
                    self.model,
                    logs,
                    scale,
                    floor,
                    means,
                    numbers,
                    rules,
                    tally,
                    seen._replace(visits=own[0], losses=tally.cumulative_loss),
                    work,
                    width_of(lanes),
                )

        return play_group

    def make(self, lanes: int | None) -> tuple[Work, Seen]:
        """Scratch memory of a group of seeds."""
        return make_work(self.model, allocator(lanes)), make_seen(self.model, allocator(lanes))
