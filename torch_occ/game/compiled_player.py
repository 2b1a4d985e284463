"""The engine as a player of `simulate`: the same game as in torch, from the same random numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.compiling import compile_message
from torch_occ._support.spacing import CHUNK
from torch_occ._support.threads import for_each
from torch_occ.game.estimators import (
    Estimator,
    FullInformation,
    ImplicitExploration,
    ImportanceWeighted,
    ReducedVariance,
)
from torch_occ.game.learners import (
    FTRL,
    EmpiricalLearner,
    FixedPolicy,
    FollowTheLeader,
    Learner,
    OptimisticValueIteration,
)
from torch_occ.game.losses import GreedyAdversary, LossProcess
from torch_occ.kernels.baselines import play_empirical, play_fixed
from torch_occ.kernels.episodes import (
    FULL_INFORMATION,
    IMPLICIT_EXPLORATION,
    IMPORTANCE_WEIGHTED,
    NOISE,
    REDUCED_VARIANCE,
    Rules,
    Tally,
    play,
)
from torch_occ.kernels.layout import Floats, Terms, Work, make_work
from torch_occ.mdp.occupancy import interior_point
from torch_occ.step.kernel_inputs import (
    exponents_of,
    kinds_of,
    model_of,
    terms_of,
    weights_of,
    why_not,
    why_not_model,
)

if TYPE_CHECKING:
    from torch_occ.game.simulation import Simulation

_ESTIMATORS: dict[type[Estimator], int] = {
    ImportanceWeighted: IMPORTANCE_WEIGHTED,
    ImplicitExploration: IMPLICIT_EXPLORATION,
    ReducedVariance: REDUCED_VARIANCE,
    FullInformation: FULL_INFORMATION,
}

#: Episodes in a block of `_OverTime`; torch does not split so few numbers between threads.
_BLOCK = 2048

#: The longest time in seconds that one call of a kernel should take.
LONGEST_CALL = 0.2

#: The entries of `Tally.scalars`, by their names in `Simulation.sums`.
_SCALARS = (
    *("expected", "realised", "newton_steps", "uncertified", "dual_residual", "flow_residual"),
    *("first_uncertified", "first_status"),
)


def why_not_play(learner: Learner, losses: LossProcess) -> str | None:
    """The reason why the engine cannot play this game, or None if it can."""
    if type(losses).draw is not LossProcess.draw:
        return f"{type(losses).__name__} draws its losses in its own way"
    if type(learner) in (FixedPolicy, FollowTheLeader, OptimisticValueIteration):
        return why_not_model(learner.mdp)
    if type(learner) is not FTRL:
        return f"the engine does not know the learner {type(learner).__name__}"
    if type(learner.estimator) not in _ESTIMATORS:
        return f"the engine does not know the estimator {type(learner.estimator).__name__}"
    if any(parameter.dim() for parameter in learner.step.regularizer.parameters()):
        return "the regularizer has batched parameters"
    return why_not(learner.mdp, learner.step.regularizer)


class _OverTime:
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


def engine_player(learner: Learner, losses: LossProcess) -> EnginePlayer:
    """The player for a learner; `why_not_play` must have returned None for it."""
    if isinstance(learner, FTRL):
        return FTRLPlayer(learner, losses)
    return (
        EmpiricalPlayer(learner, losses)
        if isinstance(learner, EmpiricalLearner)
        else EnginePlayer(learner, losses)
    )


class EnginePlayer:
    """Plays segments in compiled code, with seeds in threads; here, a fixed policy."""

    name = "engine"
    chunks = 16  # per call, if memory allows, so that the overhead of Python is negligible
    most: int  # episodes per call, of about `LONGEST_CALL` seconds, because Ctrl-C waits for it

    def __init__(self, learner: Learner, losses: LossProcess) -> None:
        self.learner = learner
        self.model = model_of(learner.mdp)
        self.chunks = max(1, min(self.chunks, 10_000 // learner.mdp.num_pairs))
        self.most = self.limit = self.chunks * CHUNK
        if learner.mdp.num_pairs > 1000:  # may be slow; the first calls measure it
            self.most = 8
        self.reacts = type(losses) is GreedyAdversary

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
        # Copies `(n or 1, S * A)`, because the kernel may write to them.
        charged = [np.array(mean.flatten(-2).numpy()) for mean in means.unbind(1)]
        drawn = numbers.contiguous().numpy()
        play = self.prepare(run, t, tables)

        def play_seed(seed: int) -> None:
            tally = Tally(*(x[seed] for x in (*per_pair, moments, scalars)))
            play(seed, charged[min(seed, len(charged) - 1)], drawn[seed], tally)

        begun = time.monotonic()
        with compile_message:
            for_each(play_seed, count)
        for name, column in zip(_SCALARS, scalars.T, strict=True):
            sums[name] = torch.from_numpy(column.copy())
        run.t += n
        run.since += n
        run.q = q
        self.adapt(n, (time.monotonic() - begun) / -(-count // torch.get_num_threads()))

    def adapt(self, episodes: int, seconds: float) -> None:
        """Play fewer episodes in the next call if these took too long for a seed, else more."""
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
        """A function of the seed's index, means, random numbers and tally that plays episodes t."""
        rules = self.rules(run.losses.noise, t)
        return lambda seed, means, numbers, tally: play_fixed(
            self.model, means, numbers, rules, tally
        )

    def rules(self, noise: str, t: range) -> Rules:
        """The rules for a learner that solves nothing."""
        return Rules(self.reacts, NOISE[noise], IMPORTANCE_WEIGHTED, np.zeros(len(t)), 0.0, 0)


class EmpiricalPlayer(EnginePlayer):
    """Plays the learners that plan with averages."""

    def __init__(self, learner: Learner, losses: LossProcess) -> None:
        super().__init__(learner, losses)
        self.logs = _OverTime(lambda t: t.clamp(min=2).log())

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

        def play_seed(seed: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            play_empirical(
                self.model,
                logs,
                scale,
                floor,
                means,
                numbers,
                rules,
                tally,
                visits[seed],
                make_work(self.model),
            )

        return play_seed


class FTRLPlayer(EnginePlayer):
    """Plays FTRL with a built-in regularizer."""

    def __init__(self, learner: FTRL, losses: LossProcess) -> None:
        super().__init__(learner, losses)
        self.ftrl = learner
        self.middle = interior_point(learner.mdp).detach().numpy().flatten()
        self.valid: list[Any] = []  # the last values of the parameters that were valid
        self.works: dict[int, Work] = {}  # by seed, with the factors of its last episode
        regularizer, own = learner.step.regularizer, learner.estimator
        with torch.no_grad():
            found = terms_of(regularizer, torch.ones(1, dtype=torch.float64))
            self.terms = Terms(*kinds_of(found), exponents_of(found).numpy())
        self.weights = _OverTime(lambda t: weights_of(terms_of(regularizer, t)).expand(len(t), -1))
        if isinstance(own, ReducedVariance):
            self.setting = _OverTime(own.threshold)
        else:
            bias = own.bias if isinstance(own, ImplicitExploration) else 0.0
            self.setting = _OverTime(lambda t: torch.full_like(t, bias))

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        return self.ftrl.state["q"], self.ftrl.state["cumulative_loss"]

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        values = [parameter.tolist() for parameter in self.ftrl.step.parameters()]
        if values != self.valid:  # a callback may have changed them
            self.ftrl.step.check_parameters()
            self.valid = values
        terms, weights = self.terms, self.weights(t.start - 1, t.stop)  # begins one episode earlier
        rules, unseen = self.rules(run.losses.noise, t), np.zeros((0, 0))
        seen = None if tables is None else tables.flatten(-2).contiguous().numpy()

        def play_seed(seed: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            scratch, shown = np.zeros(len(self.middle)), unseen if seen is None else seen[seed]
            work = self.works[seed] = self.works.get(seed) or make_work(self.model)
            play(
                self.model,
                terms,
                weights,
                run.t,
                means,
                numbers,
                shown,
                rules,
                tally,
                self.middle,
                scratch,
                np.zeros(0),
                work,
            )

        return play_seed

    def rules(self, noise: str, t: range) -> Rules:
        options = self.ftrl.step.options
        limits = (options.tolerance_in(torch.float64), options.max_steps)
        return Rules(
            self.reacts,
            NOISE[noise],
            _ESTIMATORS[type(self.ftrl.estimator)],
            self.setting(t.start, t.stop),
            *limits,
        )
