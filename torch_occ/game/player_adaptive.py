"""The compiled player of FTRL with hints and adaptive rates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torch_occ.engine.lanes import allocator, width_of
from torch_occ.engine.layout import Floats, Terms, Work, suits_lanes
from torch_occ.engine.play import IMPORTANCE_WEIGHTED, NOISE, Rules, Tally
from torch_occ.engine.play_adaptive import (
    ADAPTIVE_RATES,
    GRADIENT_HINTS,
    MATCHING_RATES,
    MEAN_HINTS,
    NO_HINTS,
    NO_RATES,
    Manner,
    Memory,
    Record,
    Trust,
    play_adaptive,
    play_corrected,
)
from torch_occ.game.adaptive import (
    AdaptiveFTRL,
    AdaptiveRates,
    CorrectedFTRL,
    GradientHints,
    MeanHints,
    StabilityPenaltyMatching,
)
from torch_occ.game.learners import Learner
from torch_occ.game.losses import LossProcess
from torch_occ.game.players import EnginePlayer, FTRLPlayer, OverTime, terms_in
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import interior_point
from torch_occ.step.arrays import exponents_of, kinds_of, terms_of, weights_of
from torch_occ.step.arrays import why_not_game as why_not

if TYPE_CHECKING:
    from torch_occ.game.simulate import Simulation


HINTS = {type(None): NO_HINTS, MeanHints: MEAN_HINTS, GradientHints: GRADIENT_HINTS}
RATES = {
    type(None): NO_RATES,
    AdaptiveRates: ADAPTIVE_RATES,
    StabilityPenaltyMatching: MATCHING_RATES,
}


class AdaptivePlayer(EnginePlayer):
    """Plays `AdaptiveFTRL` with a built-in regularizer, and built-in hints and rates.

    Seeds are in lanes if `suits_lanes`.
    """

    @staticmethod
    def why_not(mdp: LayeredMDP, learner: Learner) -> str | None:
        assert isinstance(learner, AdaptiveFTRL)
        for found, known in ((learner.hints, HINTS), (learner.rates, RATES)):
            if type(found) not in known:
                return f"the engine does not know {type(found).__name__}"
        if learner.unscaled.batched():
            return "the regularizer has batched parameters"
        return why_not(mdp, learner.unscaled)

    def __init__(self, mdp: LayeredMDP, learner: Learner, losses: LossProcess) -> None:
        assert isinstance(learner, AdaptiveFTRL)
        super().__init__(mdp, learner, losses)
        self.adaptive = learner
        self.in_lanes = suits_lanes(self.model)
        self.middle = interior_point(mdp).detach().numpy().flatten()
        self.valid: list[Any] = []  # the last values of the parameters that were valid
        regularizer, pairs = learner.unscaled, mdp.actions.shape
        with torch.no_grad():
            found = terms_of(regularizer, torch.ones(1, dtype=torch.float64))
            self.terms = Terms(*kinds_of(found), exponents_of(found, pairs).numpy())
        self.weights = OverTime(
            lambda t: weights_of(terms_of(regularizer, t), pairs).expand(len(t), -1)
        )
        hints, rates = learner.hints, learner.rates
        self.manner = Manner(
            HINTS[type(hints)],
            hints.prior if isinstance(hints, MeanHints) else 0.0,
            hints.count if isinstance(hints, MeanHints) else 1.0,
            hints.step if isinstance(hints, GradientHints) else 0.0,
            RATES[type(rates)],
            math.log(rates.episodes or 1) if isinstance(rates, AdaptiveRates) else 0.0,
        )

    def memory(self, count: int) -> tuple[Tensor, Tensor]:
        return self.adaptive.state["q"], self.adaptive.state["cumulative_loss"]

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        learner, state, count = self.adaptive, self.adaptive.state, len(run.seeds)
        values = [parameter.tolist() for parameter in learner.unscaled.parameters()]
        if values != self.valid:  # a callback may have changed them
            learner.step.check_parameters()
            self.valid = values
        weights = self.weights(t.start, t.stop)
        none = np.zeros((count, 0))
        if learner.rates is not None:
            learner.set_rate(state["inverse_rate"])  # shown by TensorBoard
        inverse = none if learner.rates is None else state["inverse_rate"].numpy()
        visits = state["hint_visits"].numpy() if "hint_visits" in state else none
        kept = state.get("hint_losses", state.get("hint_hint"))
        losses = none if kept is None else kept.numpy()
        rows = [x.reshape(count, -1) for x in (visits, losses, inverse)]
        rules, before, lanes = self.rules(run.losses.noise, t), run.t, self.lanes(run)
        terms = terms_in(self.terms, lanes)

        def play_group(group: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            work, blank = self.scratch(group, lambda: self.make(lanes, weights.shape[1], numbers))
            with self.rows_of(run, group, rows) as own:
                play_adaptive(
                    self.model,
                    terms,
                    weights,
                    before,
                    means,
                    numbers,
                    rules,
                    self.manner,
                    tally,
                    blank._replace(visits=own[0], losses=own[1], inverse_rate=own[2]),
                    self.middle,
                    allocator(lanes)(0),
                    work,
                    width_of(lanes),
                )

        return play_group

    def make(self, lanes: int | None, weights: int, numbers: Floats) -> tuple[Work, Memory]:
        """Scratch memory of a group of seeds; `Memory` without the state of hints and rates."""
        new, num_pairs, (num_seeds, _, horizon, _) = (
            allocator(lanes),
            len(self.middle),
            numbers.shape,
        )
        rates = self.adaptive.rates
        if rates is not None and rates.per_pair:
            weights = len(self.terms.argument) * num_pairs
        memory = Memory(
            new(0),
            new(0),
            new(0),
            new(weights),
            new(num_pairs),
            new(num_pairs),
            new(num_pairs),
            new(1, num_pairs // self.model.num_actions),
            np.zeros((num_seeds, horizon), np.int64),
            np.zeros((num_seeds, horizon)),
        )
        memory.weights[:] = 1.0
        return self.new_work(lanes, numbers), memory

    def rules(self, noise: str, t: range) -> Rules:
        options = self.adaptive.step.options
        limits = (options.tolerance_in(torch.float64), options.max_steps)
        # The setting of an estimator is not used.
        return Rules(self.reacts, NOISE[noise], IMPORTANCE_WEIGHTED, np.zeros(len(t)), *limits)


# -- The compiled player of FTRL on corrected empirical means --------------------------------------


class CorrectedPlayer(FTRLPlayer):
    """Plays `CorrectedFTRL` with a built-in regularizer, in lanes if `suits_lanes`."""

    def prepare(
        self, run: Simulation, t: range, tables: Tensor | None
    ) -> Callable[[int, Floats, Floats, Tally], None]:
        learner, count = self.ftrl, len(run.seeds)
        assert isinstance(learner, CorrectedFTRL)
        self.check()
        weights = self.weights(t.start - 1, t.stop)  # begins one episode earlier
        rules, before = self.rules(run.losses.noise, t), run.t
        trust = Trust(learner.width, learner.prior, learner.count)
        visits, losses, squares = (
            learner.state[name].numpy().reshape(count, -1)
            for name in ("visits", "losses", "squares")
        )
        layers, lanes = learner.mdp.horizon, self.lanes(run)
        terms, new = terms_in(self.terms, lanes), allocator(lanes)

        def play_group(group: int, means: Floats, numbers: Floats, tally: Tally) -> None:
            visited, lost = np.zeros(layers, np.int64), np.zeros(layers)
            with self.rows_of(run, group, (visits, losses, squares)) as own:
                play_corrected(
                    self.model,
                    terms,
                    weights,
                    before,
                    means,
                    numbers,
                    rules,
                    trust,
                    tally,
                    Record(own[0], own[1], own[2], new(len(self.middle)), visited, lost),
                    self.middle,
                    new(weights.shape[1]),
                    new(0),
                    self.work(group, lanes, numbers),
                    width_of(lanes),
                )

        return play_group
