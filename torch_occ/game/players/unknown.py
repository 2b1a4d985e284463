"""The compiled player of FTRL for unknown transitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_occ.game.beliefs.widths import Bonus, Widths
from torch_occ.game.estimators import (
    Estimator,
    FullInformation,
    ImplicitExploration,
    ImportanceWeighted,
)
from torch_occ.game.learners.base import Learner
from torch_occ.game.learners.unknown import FLOOR, UnknownFTRL
from torch_occ.game.losses import LossProcess
from torch_occ.game.players.engine import EnginePlayer
from torch_occ.kernels.layout import Floats, Model, Terms, Work, make_work
from torch_occ.kernels.play.beliefs import Belief, Confidence
from torch_occ.kernels.play.episodes import (
    FULL_INFORMATION,
    IMPLICIT_EXPLORATION,
    IMPORTANCE_WEIGHTED,
    NOISE,
    Rules,
    Tally,
)
from torch_occ.kernels.play.planning import entries
from torch_occ.kernels.play.unknown import Course, Memory, play_unknown
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import uniform_policy
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.compiled.inputs import (
    exponents_of,
    kinds_of,
    model_of,
    terms_of,
    weights_of,
    why_not,
)

if TYPE_CHECKING:
    from torch_occ.game.simulation import Simulation

ESTIMATORS: dict[type[Estimator], int] = {
    ImportanceWeighted: IMPORTANCE_WEIGHTED,
    ImplicitExploration: IMPLICIT_EXPLORATION,
    FullInformation: FULL_INFORMATION,
}


def powers_of(regularizer: Regularizer, pairs: torch.Size) -> Floats | None:
    """The weights of psi as powers of time: weight k is `[0, k]` * t ** `[1, k]`.

    `(2, K)`, or `(2, K * S * A)` if they differ between pairs; `pairs` is `(S, A)`.
    None if a weight is not of this form, within rounding.
    """
    times = torch.tensor([1.0, 4.0, 1e6, 3e8], dtype=torch.float64)
    with torch.no_grad():
        found = weights_of(terms_of(regularizer, times), pairs).expand(len(times), -1)  # (4, K)
    one, four = found[0], found[1]
    exponents = torch.where(one == 0, 0.0, (four / one).abs().log2() / 2)
    # 0.5 is the usual one, and exact then.
    near = (exponents * 2).round() / 2
    exponents = torch.where((exponents - near).abs() < 1e-14, near, exponents)
    expected = one * times[:, None] ** exponents
    if not torch.allclose(found, expected, rtol=1e-11, atol=0.0):
        return None
    return torch.stack([one, exponents]).numpy()


class Seed(NamedTuple):
    """Scratch memory of one seed, for a whole run."""

    believed: Model
    weights: Floats
    work: Work
    scratch: Work


class UnknownPlayer(EnginePlayer):
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
        if reason is None and powers_of(regularizer, mdp.actions.shape) is None:
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
        with torch.no_grad():
            found = terms_of(regularizer, torch.ones(1, dtype=torch.float64))
            self.terms = Terms(*kinds_of(found), exponents_of(found, mdp.actions.shape).numpy())
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
        powers = powers_of(learner.step.regularizer, learner.mdp.actions.shape)
        assert powers is not None
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
