"""The compiled players of learners at the limit of regret: KL-UCB, Thompson sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ.engine import play_planning as planning
from torch_occ.engine.lanes import allocator, width_of
from torch_occ.engine.layout import PAIR, Floats, Model, Work, make_work
from torch_occ.engine.play_indices import KL_UCB, SERIES_ROWS, THOMPSON, play_indices
from torch_occ.engine.play_old import (
    FULL_INFORMATION,
    IMPLICIT_EXPLORATION,
    IMPORTANCE_WEIGHTED,
    NOISE,
    Rules,
    Seen,
    make_seen,
)
from torch_occ.engine.play_old import (
    FlatTally as Tally,
)
from torch_occ.engine.play_planning import (
    Planner,
    Stack,
    entries,
    play_planner,
    play_posterior,
    play_stack,
)
from torch_occ.engine.play_unknown import Belief, Confidence, Course, Memory, play_unknown
from torch_occ.engine.play_uob_reps import Mirror, play_uob_reps
from torch_occ.engine.projection import Reference, layers_of, make_scratch
from torch_occ.game.checks import DIAGNOSTICS
from torch_occ.game.estimators import (
    Estimator,
    FullInformation,
    ImplicitExploration,
    ImportanceWeighted,
)
from torch_occ.game.learners import Learner
from torch_occ.game.losses import LossProcess
from torch_occ.game.players_old import EmpiricalPlayer, LoopPlayer, OverTime, few_states
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import uniform_policy
from torch_occ.rivals.beliefs import Bonus, Widths
from torch_occ.rivals.multilayer import MultiLayerUCBVI
from torch_occ.rivals.planning import OptimisticLearner
from torch_occ.rivals.thompson import Thompson
from torch_occ.rivals.ucbvi import EULER, UCBVI, StrongEuler
from torch_occ.rivals.unknown import FLOOR, UnknownFTRL
from torch_occ.rivals.uob_reps import UOBREPS
from torch_occ.step.arrays import WeightsOverTime, model_of
from torch_occ.step.arrays import why_not_game as why_not

if TYPE_CHECKING:
    from torch_occ.game.simulate import Simulation


class IndexPlayer(EmpiricalPlayer):
    """Plays `KLUCB` and `Thompson`."""

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        rules, logs = self.rules(run.losses.noise, t), self.logs(t.start, t.stop)
        kind = THOMPSON if isinstance(self.learner, Thompson) else KL_UCB
        visits = self.learner.state["visits"].numpy().reshape(len(run.seeds), -1)
        before, lanes = run.t, self.lanes(run)
        each = lanes or 1
        seeds = np.array([seed % 2**64 for seed in run.seeds], np.uint64)

        def play_group(group: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            work, blank = self.scratch(group, lambda: self.make(lanes))
            with self.rows_of(run, group, [visits]) as own:
                play_indices(
                    self.model,
                    kind,
                    seeds[group * each : (group + 1) * each],
                    before,
                    logs,
                    means,
                    numbers,
                    rules,
                    tally,
                    blank._replace(visits=own[0], losses=tally.cumulative_loss),
                    allocator(lanes)(SERIES_ROWS, visits.shape[1]),
                    work,
                    width_of(lanes),
                )

        return play_group


# -- The compiled players of learners that plan with estimated transitions -------------------------


_UCBVI = {
    "hoeffding": planning.UCBVI_HOEFFDING,
    "bernstein": planning.UCBVI_BERNSTEIN,
    "sharp": planning.SHARP_HOEFFDING,
}


class CountingPlayer(LoopPlayer):
    """What the players here share: visits, counts and sums of losses."""

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        super().__init__(mdp, learner, losses)
        self.entry = entries(self.model)

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        losses = self.learner.state["losses"]
        return torch.zeros_like(losses), losses

    def rows(self, name: str) -> Floats:
        """A tensor of the learner's state, one row per seed; kernels change it in place."""
        return self.learner.state[name].flatten(1).numpy()

    def make(self, lanes: int | None) -> tuple[Work, Seen]:
        """Scratch memory of a group of seeds."""
        seen = make_seen(self.model, allocator(lanes))
        return make_work(self.model, allocator(lanes)), seen._replace(entry=self.entry)


class OptimisticPlayer(CountingPlayer):
    """Plays `UCBVI`, `EULER` and `StrongEuler`."""

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        assert isinstance(learner, OptimisticLearner)
        super().__init__(mdp, learner, losses)
        self.optimist = learner
        self.in_lanes = few_states(self.model)
        self.logs = OverTime(learner.log)
        self.corruption = 0.0
        if isinstance(learner, UCBVI):
            self.bonus, self.corruption = _UCBVI[learner.kind], learner.corruption
        else:
            codes = {EULER: planning.EULER, StrongEuler: planning.STRONG_EULER}
            self.bonus = codes[type(learner)]

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        learner, mdp = self.optimist, self.optimist.mdp
        rules, logs = self.rules(run.losses.noise, t), self.logs(t.start, t.stop)
        visits, counts = self.rows("visits"), self.rows("counts")
        lower = self.rows("lower") if learner.monotone else None
        settings = (learner.monotone, float(learner.floor), float(self.corruption))
        size = (float(mdp.num_states), float(mdp.num_actions))

        lanes = self.lanes(run)
        rows = [visits, counts] if lower is None else [visits, counts, lower]

        def play_group(group: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            (work, blank), bounds, values = self.scratch(group, lambda: self.make_all(lanes))
            with self.rows_of(run, group, rows) as own:
                if lower is not None:
                    bounds[planning.LOWER] = own[2]
                losses = tally.cumulative_loss
                seen = blank._replace(visits=own[0], losses=losses, counts=own[1])
                planner = Planner(
                    self.bonus,
                    *settings,
                    *size,
                    seen,
                    bounds,
                    values,
                    self.model.exists[PAIR],
                )
                play_planner(
                    self.model,
                    planner,
                    logs,
                    means,
                    numbers,
                    rules,
                    tally,
                    work,
                    width_of(lanes),
                )
                if lower is not None:
                    own[2][:] = bounds[planning.LOWER]

        return play_group

    def make_all(self, lanes: int | None) -> tuple[tuple[Work, Seen], Floats, Floats]:
        """Scratch memory of a group of seeds; the last two are `bounds` and `values`."""
        made, new, num_pairs = self.make(lanes), allocator(lanes), self.model.exists.shape[1]
        return made, new(2, num_pairs), new(3, num_pairs // self.model.num_actions)


class PosteriorPlayer(CountingPlayer):
    """Plays `PSRL`."""

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        rules, visits, counts = self.rules(run.losses.noise, t), *map(self.rows, _SEEN)

        def play_seed(seed: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            work, blank = self.scratch(seed, lambda: self.make(None))
            losses = tally.cumulative_loss
            play_posterior(
                self.model,
                run.seeds[seed],
                run.t,
                means,
                numbers,
                rules,
                tally,
                blank._replace(visits=visits[seed], losses=losses, counts=counts[seed]),
                work,
            )

        return play_seed


class MultiLayerPlayer(CountingPlayer):
    """Plays `MultiLayerUCBVI`."""

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        mdp = self.learner.mdp
        q = torch.zeros(count, mdp.num_states, mdp.num_actions, dtype=mdp.dtype)
        return q, torch.zeros_like(q)

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        learner, rules = self.learner, self.rules(run.losses.noise, t)
        assert isinstance(learner, MultiLayerUCBVI)
        names = ("visits", "losses", "counts")
        sums = [learner.state[name].flatten(2).numpy() for name in names]  # (N, R, ...)
        possible = learner.state["possible"].flatten(2).numpy()
        num_pairs, num_states = possible.shape[-1], learner.mdp.num_states

        def play_seed(seed: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            rows = [np.concatenate([x[seed], x[seed].sum(0, keepdims=True)]) for x in sums]
            stack = Stack(
                run.seeds[seed],
                learner.log,
                learner.corruption,
                rows[0],
                rows[1],
                rows[2],
                np.zeros_like(rows[0]),
                np.zeros_like(rows[0]),
                possible[seed],
                self.entry,
                np.zeros((2, num_pairs)),
                np.zeros((3, num_states)),
                np.zeros(num_pairs, np.bool_),
                np.zeros(8),
            )
            play_stack(
                self.model, stack, run.t, means, numbers, rules, tally, make_work(self.model)
            )
            for x, found in zip(sums, rows, strict=True):
                x[seed] = found[:-1]

        return play_seed


#: The state of the learner that its kernel changes, besides the losses.
_SEEN = ("visits", "counts")


# -- The compiled player of FTRL for unknown transitions -------------------------------------------


ESTIMATORS: dict[type[Estimator], int] = {
    ImportanceWeighted: IMPORTANCE_WEIGHTED,
    ImplicitExploration: IMPLICIT_EXPLORATION,
    FullInformation: FULL_INFORMATION,
}


class Seed(NamedTuple):
    """Scratch memory of one seed, for a whole run."""

    believed: Model
    weights: Floats
    work: Work
    scratch: Work


class UnknownPlayer(LoopPlayer):
    """Plays `UnknownFTRL` with a built-in regularizer."""

    @staticmethod
    def why_not(mdp: LayeredMDP, learner: Learner) -> str | None:
        assert isinstance(learner, UnknownFTRL)
        regularizer = learner.step.regularizer
        if type(learner.estimator) not in ESTIMATORS:
            name = type(learner.estimator).__name__
            return f"the engine does not know the estimator {name} for unknown transitions"
        if regularizer.batched():
            return "the regularizer has batched parameters"
        reason = why_not(mdp, regularizer)
        if reason is None and not WeightsOverTime(regularizer, mdp.actions.shape).are_powers:
            reason = "the weights of the regularizer are not powers of t"
        return reason

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        assert isinstance(learner, UnknownFTRL)
        super().__init__(mdp, learner, losses)
        self.unknown = learner
        self.valid: list[Any] = []  # the last values of the parameters that were valid
        self.seeds: dict[int, Seed] = {}
        self.dense = model_of(learner.mdp, dense=True)
        self.uniform = uniform_policy(learner.mdp).numpy().flatten()
        self.entry = entries(self.model)
        regularizer = learner.step.regularizer
        self.weights = WeightsOverTime(regularizer, mdp.actions.shape)
        self.terms = self.weights.terms
        widths = learner.widths or Widths.of("practical", mdp)  # not used if there are none
        bonus = learner.bonus or Bonus(scale=0.0)
        self.confidence = Confidence(
            float(learner.pseudo_count),
            learner.widths is not None,
            widths.source.c1,
            widths.source.c2,
            np.array(widths.source.fewer, dtype=np.float64),
            widths.source.variance,
            np.array(widths.iota),
            float(bonus.scale),
            float(bonus.share),
            bonus.remaining,
            FLOOR if learner.optimistic else 1.0,
        )

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        total = self.unknown.state["cumulative_loss"]
        return torch.zeros_like(total), total

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        learner, state, count = self.unknown, self.unknown.state, len(run.seeds)
        values = [parameter.tolist() for parameter in learner.step.parameters()]
        if values != self.valid:  # a callback may have changed them
            learner.step.check_parameters()
            self.valid = values
        powers = self.weights.powers()
        course = Course(
            powers,
            learner.restart,
            0.0 if learner.adaptive is None else float(learner.adaptive),
            learner.choices,
            learner.divides_by_bounds,
        )
        names = ("counts", "visits", "epoch_visits", "belief", "bonus", "q")
        rows = {name: state[name].flatten(1).numpy() for name in names}
        none = np.zeros((count, 0))
        rows["widths"] = state["widths"].numpy() if "widths" in state else none
        epoch = np.stack([state["epochs"].numpy(), state["epoch_start"].numpy()], -1)
        spread = np.zeros((count, 1)) if "spread" not in state else state["spread"].numpy()[:, None]
        for name, column in (("epochs", 0), ("epoch_start", 1)):
            state[name] = torch.from_numpy(epoch[:, column])  # a view, which the kernel changes
        rules, unseen = self.rules(run.losses.noise, t), np.zeros((0, 0))
        seen = None if tables is None else tables.flatten(-2).contiguous().numpy()
        before = run.t

        def play_seed(seed: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            own = self.seeds.get(seed) or self._allot(seed, powers.shape[1])
            num_pairs, widest = own.believed.next_state.shape
            belief = Belief(
                rows["counts"][seed],
                rows["visits"][seed],
                rows["epoch_visits"][seed],
                rows["belief"][seed],
                rows["widths"][seed],
                epoch[seed],
                rows["bonus"][seed],
                self.entry,
                np.zeros((2, num_pairs, widest)),
                np.zeros(num_pairs),
                np.zeros(len(self.uniform) // self.model.num_actions),
                np.zeros(widest, np.int64),
            )
            policy, middle, loss, estimate = np.zeros((4, num_pairs))
            memory = Memory(
                rows["q"][seed],
                spread[seed],
                policy,
                self.uniform,
                middle,
                loss,
                estimate,
                own.weights,
                np.zeros(len(self.model.start) - 1, np.int64),
                np.zeros(0),
            )
            play_unknown(
                self.model,
                own.believed,
                self.terms,
                course,
                self.confidence,
                belief,
                memory,
                before,
                means,
                numbers[0],
                unseen if seen is None else seen[seed],
                rules,
                tally,
                own.work,
                own.scratch,
            )

        return play_seed

    def _allot(self, seed: int, num_terms: int) -> Seed:
        """The arrays of a seed: a dense model that the kernel fills, and scratch memory."""
        like = self.dense
        believed = like._replace(
            next_state=like.next_state.copy(),
            arrivals=like.arrivals.copy(),
            conserved=not self.unknown.optimistic,
        )
        made = Seed(believed, np.ones((2, num_terms)), make_work(believed), make_work(self.model))
        self.seeds[seed] = made
        return made

    def rules(self, noise: str, t: range) -> Rules:
        options, own = self.unknown.step.options, self.unknown.estimator
        bias = own.bias if isinstance(own, ImplicitExploration) else 0.0
        return Rules(
            self.reacts,
            NOISE[noise],
            ESTIMATORS[type(own)],
            np.full(len(t), bias),
            options.tolerance_in(torch.float64),
            options.max_steps,
        )


# -- The compiled player of UOB-REPS ---------------------------------------------------------------


class UOBREPSPlayer(LoopPlayer):
    """Plays `UOBREPS`."""

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        assert isinstance(learner, UOBREPS)
        super().__init__(mdp, learner, losses)
        self.uob_reps = learner
        self.dense = model_of(learner.mdp, dense=True)
        self.layers = layers_of(self.dense)
        source = learner.widths.source
        self.confidence = Confidence(
            float(learner.pseudo_count),
            True,
            source.c1,
            source.c2,
            np.array(source.fewer, dtype=np.float64),
            source.variance,
            np.array(learner.widths.iota),
            0.0,
            0.0,
            False,
            1.0,
        )
        self.course = Course(np.zeros((2, 0)), False, 0.0, 0.0, True)  # estimates divide by u

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        q = torch.zeros_like(self.uob_reps.state["q"])
        return q, torch.zeros_like(q)

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        state = self.uob_reps.state
        names = ("counts", "visits", "epoch_visits", "belief", "widths")
        believed = {name: state[name].flatten(1).numpy() for name in names}
        # q, its transitions and their bounds, which the kernel changes in place
        own = [state[name].flatten(1).numpy() for name in ("q", "rows", "lower", "upper")]
        epoch = self._columns("epochs", "epoch_start")
        last = self._columns(*DIAGNOSTICS)
        rules, before = self.rules(run.losses.noise, t), run.t
        num_pairs, widest = self.dense.next_state.shape
        num_states = num_pairs // self.dense.num_actions

        def play_seed(seed: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            model = self.dense._replace(
                next_state=self.dense.next_state.copy(), arrivals=self.dense.arrivals.copy()
            )
            belief = Belief(
                believed["counts"][seed],
                believed["visits"][seed],
                believed["epoch_visits"][seed],
                believed["belief"][seed],
                believed["widths"][seed],
                epoch[seed],
                np.zeros(num_pairs),
                self.layers.entry,
                np.zeros((2, num_pairs, widest)),
                np.zeros(num_pairs),
                np.zeros(num_states),
                np.zeros(widest, np.int64),
            )
            q, policy, uniform, middle, loss, estimate = np.zeros((6, num_pairs))
            none, path = np.zeros(0), np.zeros(len(self.dense.start) - 1, np.int64)
            memory = Memory(
                q, none, policy, uniform, middle, loss, estimate, np.zeros((2, 0)), path, none
            )
            play_uob_reps(
                self.model,
                model,
                self.course,
                self.confidence,
                belief,
                memory,
                Mirror(
                    self.uob_reps.learning_rate,
                    self.layers,
                    Reference(*(x[seed] for x in own)),
                    last[seed],
                    make_scratch(self.layers),
                ),
                before,
                means,
                numbers[0],
                np.zeros((0, 0)),
                rules,
                tally,
                make_work(self.model),
            )

        return play_seed

    def _columns(self, *names: str) -> Floats:
        """Numbers of the state, one row per seed; the state becomes views of them."""
        state = self.uob_reps.state
        table = torch.stack([state[name] for name in names], -1)
        state.update(zip(names, table.unbind(-1), strict=True))
        return table.numpy()

    def rules(self, noise: str, t: range) -> Rules:
        options = self.uob_reps.project.options
        return Rules(
            self.reacts,
            NOISE[noise],
            IMPLICIT_EXPLORATION,
            np.full(len(t), self.uob_reps.bias),
            options.tolerance_in(torch.float64),
            options.max_steps,
        )
