"""The engine as a player of `simulate`: the same game as in torch, from the same random numbers.

A learner's class names its compiled form, a named tuple (`Learner.compiled`). The player fills its
fields by their names, plays, and copies the state back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.constants import CHUNK
from torch_occ._support.processes import for_each
from torch_occ.engine import learners as learners
from torch_occ.engine.lanes import Shared, allocator, lanes_for, pack, unpack, width_of
from torch_occ.engine.layout import (
    NARROW,
    USED,
    Floats,
    Solver,
    Work,
    few_lanes,
    make_work,
    suits_lanes,
)
from torch_occ.engine.newton import make_budgets
from torch_occ.engine.play import NOISE, Game, Tally, play
from torch_occ.game.learners import Learner
from torch_occ.game.losses import GreedyAdversary, LossProcess
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.step.arrays import WeightsOverTime, model_of
from torch_occ.step.ftrl import FTRLStep
from torch_occ.step.ways import why_not_game as why_not_game
from torch_occ.step.ways import why_not_model as why_not_model

if TYPE_CHECKING:
    from torch_occ.game.simulate import Simulation


#: Episodes in a block of `over_time`; torch does not split so few numbers between threads.
_BLOCK = 2048

#: The longest time in seconds that one call of a kernel should take.
LONGEST_CALL = 0.2


def over_time(function: Callable[[Tensor], Tensor]) -> Callable[[int, int], Floats]:
    """A function of the episode, computed by torch for a whole block of episodes.

    The last bit of a power depends on the position of a number in a tensor and on the tensor's
    size. So a block always has the same episodes, wherever a run stops, continues or records.

    Returns:
        A function from `first` and `stop` to the values at episodes first, ..., stop - 1,
        `(n, ...)`; episode 0 counts as 1.
    """

    @lru_cache(maxsize=8)  # a call has fewer blocks
    @torch.no_grad()
    def block(number: int) -> Floats:
        t = torch.arange(number * _BLOCK, (number + 1) * _BLOCK, dtype=torch.float64).clamp(min=1)
        found = function(t)
        return found.expand(_BLOCK, *found.shape[1:]).contiguous().numpy()

    def values(first: int, stop: int) -> Floats:
        numbers = range(first // _BLOCK, (stop - 1) // _BLOCK + 1)
        begin = numbers.start * _BLOCK
        return np.concatenate([*map(block, numbers)])[first - begin : stop - begin]

    return values


def form_of(learner: Learner) -> Any:
    """The compiled form of a learner's own class; None if only torch plays it."""
    found = vars(type(learner)).get("compiled")
    return found if found is None or isinstance(found, type) else found()


def why_not_play(mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> str | None:
    """The reason why the engine cannot play this game, or None if it can."""
    if type(losses).draw is not LossProcess.draw:
        return f"{type(losses).__name__} draws its losses in its own way"
    if form_of(learner) is None:
        return f"the engine does not know the learner {type(learner).__name__}"
    return learner.why_not_compiled(mdp)


def solver_settings(step: FTRLStep) -> dict[str, Any]:
    """The fields `solver` and `weights` of a learner with this step."""
    weights, budgets = WeightsOverTime(step.regularizer, step.mdp.actions.shape), None
    if step.constraints is not None:
        budgets = make_budgets(len(step.constraints), model_of(step.mdp), allocator(None))
        costs = step.constraints.on_existing_pairs(step.mdp)
        budgets.costs[...] = costs.detach().flatten(-2).numpy()
        budgets.limits[...] = step.constraints.limits.detach().numpy()
    limits = step.options.tolerance_in(torch.float64), step.options.max_steps
    interior = step.interior.detach().numpy().flatten()
    solver = Solver(weights.terms, np.ones(weights.size), *limits, interior, budgets)
    return {"solver": solver, "weights": weights.at}


class EnginePlayer:
    """Plays segments in compiled code: seeds in lanes if the MDP suits them, and in threads."""

    name = "engine"
    chunks = 32  # per call, if memory allows, so that starting threads takes negligible time
    most: int  # episodes per call, of about `LONGEST_CALL` seconds, because Ctrl-C waits for it

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        self.learner, self.form = learner, form_of(learner)
        self.hints = _field_types(self.form)
        self.model = model_of(mdp)  # the true one; the learner's may be blind
        self.sizes = {"pairs": mdp.num_states * mdp.num_actions, "states": mdp.num_states}
        self.settings = learner.settings()
        self.over_time = {
            name: over_time(self.settings[name])
            for name in self.form._fields
            if callable(self.settings.get(name))
        }
        solves = "solver" in self.form._fields
        # Whether the tables of eight seeds fit into the cache.
        narrow = int(np.diff(self.model.start).max()) <= NARROW
        self.in_lanes = suits_lanes(self.model) if solves else narrow
        self.chunks = max(1, min(self.chunks, 4_000 // mdp.num_pairs))
        self.most = self.limit = self.chunks * CHUNK
        if mdp.num_pairs > 1000:  # may be slow; the first calls measure it
            self.most = 8
        self.reacts = type(losses) is GreedyAdversary
        self.kept: dict[int, Any] = {}  # scratch memory, by group

    def play(
        self, run: Simulation, means: Tensor, numbers: Tensor, tables: Tensor | None, rows: range
    ) -> None:
        """Play episodes run.t + 1, ...; the arguments are those of `TorchPlayer`."""
        self.learner.check_settings()
        count, n, q = len(run.seeds), len(rows), run.q.clone()
        lanes = lanes_for(count, few_lanes(self.model)) if self.in_lanes else None
        sums = {"second_moment": np.zeros((count, 0, 0))}
        for table in (run.sums, run.parts, {"q": q}):
            sums |= state_rows(Tally, table)
        state = state_rows(self.form, self.learner.state)
        changing = {name: f(run.t, run.t + 1 + n) for name, f in self.over_time.items()}
        # A copy `(N or 1, n or 1, S * A)`, because the kernel may write to it.
        charged = np.array(means.flatten(-2).transpose(0, 1).numpy(), order="C")
        alike = len(charged) == 1 and not self.reacts
        charged = pack(charged if alike else np.repeat(charged, count // len(charged), 0), lanes)
        drawn, shown = numbers.numpy(), np.zeros((count, 0, 0))
        if tables is not None:
            shown = tables.flatten(-2).numpy()
        keys = np.array([seed % 2**64 for seed in run.seeds], np.uint64)
        each = lanes or 1
        totals = {name: pack(x, lanes) for name, x in sums.items()}
        states = {name: pack(x, lanes) for name, x in state.items()}

        def play_group(group: int) -> None:
            chosen = slice(group * each, (group + 1) * each)
            size, _, layers, _ = drawn[chosen].shape
            given: Any = (
                *(self.model, charged[0 if alike else group], drawn[chosen], shown[chosen]),
                *(rows.start, n, run.t),
                *(NOISE[run.losses.noise], self.reacts),
                *np.zeros((2, size, layers), np.int64),  # the trajectory, and what it shows
                *(np.zeros((size, layers)), np.zeros((size, shown.shape[-1]))),
            )
            game = Game(*given)
            tally = Tally(**{name: x[group] for name, x in totals.items()})
            own = {name: x[group] for name, x in states.items()} | {"seeds": keys[chosen]}
            learner, work = self.filled(group, size, lanes, changing | own)
            play(game, tally, learner, work, width_of(lanes))

        begun, calls = time.monotonic(), -(-count // each)
        for_each(play_group, calls)
        for groups, flat in ((totals, sums), (states, state)):
            for name, x in flat.items():
                unpack(groups[name], x)
        run.t += n
        run.since += n
        run.q = q
        self.adapt(n, (time.monotonic() - begun) / -(-calls // torch.get_num_threads()))

    def filled(
        self, group: int, size: int, lanes: int | None, given: dict[str, Any]
    ) -> tuple[Any, Work]:
        """The compiled learner of a group of seeds, and scratch memory, made once in a run.

        `given` has the fields that change between calls.
        """
        if group not in self.kept:
            work = make_work(self.settings.get("believed", self.model), allocator(lanes))
            if lanes is not None:
                work.notes[USED, size:] = 0.0
            names = (name for name in self.form._fields if name not in self.over_time)
            self.kept[group] = work, {name: self.fill(name, lanes) for name in names}
        work, fields = self.kept[group][0], self.kept[group][1] | given
        return self.form(*(fields[name] for name in self.form._fields)), work

    def fill(self, name: str, lanes: int | None) -> Any:
        """The value of a field of the compiled form: a setting, or scratch memory."""
        hint, learner = self.hints[name], self.learner
        if name in self.settings:
            return _repeated(self.settings[name], hint, lanes)
        if name in learner.state or name == "seeds":
            return None  # filled in every call
        if hint in (float, int, bool) and hasattr(learner, name):
            return hint(getattr(learner, name))
        shape = [self.sizes.get(size, size) for size in getattr(hint, "__metadata__", ())]
        if not shape or hint is Shared:
            raise TypeError(
                f"{self.form.__name__}.{name}: neither the state of {type(learner).__name__}, nor "
                "its settings, nor its attributes have this name; return it from settings(), or "
                "declare it as scratch memory, for example as PerPair"
            )
        return allocator(lanes)(*shape)

    def adapt(self, episodes: int, seconds: float) -> None:
        """Play fewer episodes in the next call of a kernel if this took too long, else more."""
        if seconds > LONGEST_CALL:
            self.most = max(1, int(episodes * LONGEST_CALL / seconds))
        elif self.most < self.limit and 2 * self.most * seconds < episodes * LONGEST_CALL:
            self.most = min(2 * self.most, self.limit)


def state_rows(form: Any, table: dict[str, Tensor]) -> dict[str, Floats]:
    """The tensors `(N, ...)` that a named tuple has fields for, as arrays that kernels change."""
    found, hints = {}, _field_types(form)
    for name in table.keys() & form._fields:
        x = table[name] = table[name].contiguous()
        if "pairs" in getattr(hints[name], "__metadata__", ()) and x.dim() > 2:
            x = x.flatten(-2)
        found[name] = x.numpy().reshape(len(x), *(x.shape[1:] or (1,)))
    return found


@cache
def _field_types(form: Any) -> dict[str, Any]:
    """The types of the fields of a named tuple, with their shapes."""
    return get_type_hints(form, include_extras=True)


def _repeated(value: Any, hint: Any, lanes: int | None) -> Any:
    """A setting, with a copy of its floats in every lane unless they are `Shared`."""
    if hint in (float, int, bool):
        return hint(value)
    if hasattr(value, "_fields"):
        kind: Any = type(value)
        hints = _field_types(kind)
        return kind(*(_repeated(x, hints[name], lanes) for name, x in value._asdict().items()))
    if hint is Shared or not isinstance(value, np.ndarray) or value.dtype != np.float64:
        return value
    return value.copy() if lanes is None else pack(value[None], lanes)[0]
