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

import torch
from torch import Tensor

from torch_occ.game.checks import DIAGNOSTICS
from torch_occ.game.estimators import Feedback
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import policy_of
from torch_occ.rivals.beliefs import (
    CountingLearner,
    Widths,
    join_transitions,
    split_transitions,
    upper_occupancy,
)
from torch_occ.step.projection import KLProjection


class UOBREPS(CountingLearner):
    """UOB-REPS, for adversarial losses and unknown transitions.

    The learning rate and the bias are eta = gamma = sqrt(L ln(L S A / delta) / (T S A)), where S A
    is the number of existing pairs; the constant is quoted from memory. The widths are those of
    eq. (5) of the paper. Its regret is O(L S sqrt(A T ln(T S A / delta))) with probability
    1 - O(delta).

    The empirical transitions have no pseudo-counts, as printed. The state has, beyond that of
    `CountingLearner`, `q` `(N, S, A)`, and `rows`, `widths`, `lower` and `upper` `(N, M)`: the
    transitions inside q_t, and the confidence set.

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
        self.episodes, self.max_episodes, self.delta = episodes, episodes, delta
        self.learning_rate = _positive("learning_rate", learning_rate, printed)
        self.bias = _positive("bias", bias, printed)
        self.widths = Widths.of("uob_reps", self.mdp, episodes, delta) if widths is None else widths
        self.max_episodes = self.widths.episodes
        self.project = KLProjection(self.mdp)

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        in_layer = self.mdp.actions.sum(-1)  # the number of actions of a state, then of pairs
        pairs = torch.cat([n.sum().expand_as(n) for n in self.mdp.split(in_layer, -1)])
        q = self.mdp.actions / pairs.unsqueeze(-1).to(self.mdp.dtype)
        self.state["q"] = q.expand(num_seeds, -1, -1).clone()
        self.state["rows"] = join_transitions(self.mdp.transitions).expand(num_seeds, -1).clone()
        self.state |= dict.fromkeys(DIAGNOSTICS, q.new_zeros(num_seeds))
        self._bound(torch.ones(num_seeds, dtype=torch.bool, device=q.device))

    def propose_policy(self, t: int) -> Tensor:
        return policy_of(self.mdp, self.state["q"])

    @torch.no_grad()
    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        policy, state = q, self.state  # a learner with `propose_policy` is given its policy
        reach = upper_occupancy(self.mdp, policy, self.transitions(), self.confidence())
        seen = feedback.gather(policy) * reach.gather(-1, feedback.states)
        estimate = feedback.scatter(feedback.losses / (seen + self.bias), policy)
        self._bound(self.record(t, feedback))
        rows, lower, upper = (
            split_transitions(self.mdp, state[name]) for name in ("rows", "lower", "upper")
        )
        found = self.project.solve(
            state["q"], rows, lower, upper, estimate, self.learning_rate, check=False
        )
        good = found.converged  # a projection that failed is left out
        state["q"] = torch.where(good[:, None, None], found.q, state["q"])
        state["rows"] = torch.where(
            good[:, None], join_transitions(found.transitions), state["rows"]
        )
        state["newton_steps"] = found.steps.to(policy)
        state["dual_residual"] = found.dual_residual
        state["flow_residual"] = found.flow_residual
        state["uncertified"] = (~good).to(policy)
        state["status"] = found.status.to(policy)

    def confidence(self) -> tuple[Tensor, ...]:
        """The confidence widths of the epoch, one tensor `(N, S_k, A, S_{k+1})` per layer."""
        return split_transitions(self.mdp, self.state["widths"])

    def _bound(self, new: Tensor) -> None:
        """Set widths and bounds, if a new epoch begins for some of the seeds `(N,)`."""
        if not bool(new.any()):
            return
        belief, visits = self.state["belief"], self.state["epoch_visits"]
        widths = join_transitions(self.widths(self.mdp, self.transitions(), visits))
        self.state["widths"] = widths
        self.state["lower"] = (belief - widths).clamp(min=0)
        self.state["upper"] = (belief + widths).clamp(max=1)

    def diagnostics(self) -> dict[str, Tensor]:
        return {name: self.state[name] for name in DIAGNOSTICS}


def _positive(name: str, given: float | None, default: float) -> float:
    if given is None:
        return default
    if not 0 < given < math.inf:
        raise ValueError(f"{name}: expected a positive number, got {given}")
    return given
