"""UOB-REPS (Jin, Jin, Luo, Sra and Yu, 2020): mirror descent over a confidence set of transitions.

For adversarial losses, bandit feedback and unknown transitions. With q_t over triples (s, a, s'),

    play         pi_t(a|s) proportional to q_t(s,a)
    estimate     loss_t(s,a) 1{(s,a) visited} / (u_t(s,a) + gamma),   u_t by Comp-UOB
    update       counts; if a count has doubled, a new epoch and a new confidence set
    q_{t+1}      = argmin over q in Delta(set) of eta ⟨q, estimate⟩ + KL(q || q_t)

The set is that of the current epoch, after the update. q_1 is uniform over the triples of a layer,
and the first set contains all transitions.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch

from torch_occ._support.constants import CONVERGED
from torch_occ.engine.lanes import where
from torch_occ.engine.layout import PAIR, Floats, Ints, Work
from torch_occ.engine.learners import note_solve
from torch_occ.engine.play import Game, PerPair, PerState, Tally, observe, propose
from torch_occ.mdp.checks import check_that
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.rivals import beliefs
from torch_occ.rivals.beliefs import Confidence, CountingLearner, Widths
from torch_occ.rivals.projection import FOUND, P, Scratch, make_scratch, project
from torch_occ.step.solution import Options


class CompiledUOBREPS(NamedTuple):
    """`UOBREPS`."""

    counts: Floats  # (M,)
    visits: PerPair
    epoch_visits: PerPair
    belief: Floats  # (M,)
    epochs: Floats  # (1,)
    epoch_start: Floats  # (1,)
    widths: Floats  # (M,)
    q: PerPair
    rows: Floats  # (M,)
    estimate: PerPair  # of the last episode
    confidence: Confidence
    entry: Ints
    learning_rate: float
    bias: float
    tolerance: float
    max_steps: int
    scratch: Scratch
    lower: Floats  # (M,)
    upper: Floats  # (M,)
    policy: PerPair
    room: PerPair
    ahead: PerState
    order: PerState
    begun: Annotated[Floats, 1]  # whether an epoch begins


class UOBREPS(CountingLearner):
    """UOB-REPS, for adversarial losses and unknown transitions.

    The learning rate and the bias are eta = gamma = sqrt(L ln(L S A / delta) / (T S A)), where S A
    is the number of existing pairs; the constant is quoted from memory. The widths are those of
    eq. (5) of the paper, and the empirical transitions have no pseudo-counts. Its regret is
    O(L S sqrt(A T ln(T S A / delta))) with probability 1 - O(delta).

    The state has, beyond that of `CountingLearner`, `q` `(N, S, A)` and `rows` `(N, M)`, the
    transitions inside q_t, and `estimate` `(N, S, A)`, that of the last episode.

    Args:
        mdp: only its layout and its initial distribution are used.
        episodes: T, which the algorithm must know.
        delta: the probability of failure, in (0, 1).
        learning_rate: eta, if not the above.
        bias: gamma, if not the above.
        widths: the confidence widths, if not those of the paper, for example
            `Widths.of("practical", mdp)`.

    Raises:
        ValueError: if an argument is out of range.
    """

    compiled = CompiledUOBREPS

    def __init__(
        self,
        mdp: LayeredMDP,
        episodes: int,
        delta: float = 0.1,
        *,
        learning_rate: float | None = None,
        bias: float | None = None,
        widths: Widths | None = None,
    ) -> None:
        super().__init__(mdp, pseudo_count=0.0)
        if isinstance(episodes, bool) or not isinstance(episodes, int) or episodes < 1:
            raise ValueError(
                "episodes: UOB-REPS needs the number of episodes, an integer of at least 1, got "
                f"{episodes!r}"
            )
        if not 0 < delta < 1:
            raise ValueError(f"delta: UOB-REPS needs a number in (0, 1), got {delta}")
        pairs = self.mdp.num_pairs
        printed = math.sqrt(
            mdp.horizon * math.log(mdp.horizon * pairs / delta) / (episodes * pairs)
        )
        self.episodes, self.delta = episodes, delta
        self.learning_rate = printed if learning_rate is None else learning_rate
        self.bias = printed if bias is None else bias
        for name, rate in (("learning_rate", self.learning_rate), ("bias", self.bias)):
            check_that(0 < rate < math.inf, name, "a positive number", rate)
        self.widths = Widths.of("uob_reps", self.mdp, episodes, delta) if widths is None else widths
        self.max_episodes = self.widths.episodes or None
        self.options = Options()

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        in_layer = self.mdp.actions.sum(-1)  # the number of actions of a state, then of pairs
        pairs = torch.cat([n.sum().expand_as(n) for n in self.mdp.split(in_layer, -1)])
        q = self.mdp.actions / pairs.unsqueeze(-1).to(self.mdp.dtype)
        self.state["q"] = q.expand(num_seeds, -1, -1).clone()
        rows = beliefs.join_transitions(self.mdp.transitions)
        self.state |= {"rows": rows.expand(num_seeds, -1).clone(), "estimate": 0 * self.state["q"]}

    def settings(self) -> dict[str, Any]:
        found = super().settings()
        start = np.array([0, *(here.stop for here in self.mdp.layer_slices)])
        return found | {
            "tolerance": self.options.tolerance_in(torch.float64),
            "max_steps": self.options.max_steps,
            "scratch": make_scratch(start, found["entry"]),
        }


@propose.register(CompiledUOBREPS)
def _propose_projected(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    if t == 0:
        beliefs.bound_transitions(game.model, learner)
    if game.before + t > 0:
        status, steps, flow, dual = project(game.model, learner)
        good = status == float(CONVERGED)  # a projection that failed is left out
        for i in range(len(learner.q)):
            learner.q[i] = where(good, learner.scratch.pairs[FOUND, i], learner.q[i])
            if game.model.exists[PAIR, i]:
                for e in range(learner.entry[i], learner.entry[i + 1]):
                    learner.rows[e] = where(good, learner.scratch.rows[P, e], learner.rows[e])
        note_solve(game.before + t + 1, status, steps, flow, dual, tally)
    beliefs.write_policy(game.model.num_actions, learner.policy, learner)


@observe.register(CompiledUOBREPS)
def _observe_estimates(game: Game, t: int, tally: Tally, learner: Any, work: Work) -> None:
    beliefs.estimate_losses(game, True, learner)
    beliefs.count_episode(game, t, learner)
