"""FTRL on the empirical means of the losses, corrected where importance weights contradict them.

    q_t = argmin over q in Omega of ⟨q, t m + c⟩ + psi_t(q),
    c = D max{0, 1 - width^2 V / D^2},    D = Lhat - (t - 1) m

m is the mean of the observed losses of a pair, Lhat the sum of its importance-weighted losses, and
V the sum of their squares, which estimates the variance of Lhat.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_occ.game.estimators import Feedback
from torch_occ.game.learners.ftrl import FTRL, note
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.base import Regularizer
from torch_occ.regularizers.catalog import Tsallis
from torch_occ.regularizers.schedules import InverseSqrt

#: gamma and width, chosen on MDPs 80 to 90 (docs/corrected.md).
GAMMA, WIDTH = 0.85, 3.0


class CorrectedFTRL(FTRL):
    """FTRL that trusts empirical means until importance weights contradict them.

    Importance weights are unbiased in every world. But an action that is played with probability
    q ~ 1/t has weights ~ t, so that a few recent observations decide, and the others are wasted.
    The empirical mean m uses all observations alike. It is right if the mean losses do not
    change, and may be wrong otherwise. So the step is taken with t m. The difference D between the
    importance-weighted sum and (t - 1) m is added as far as noise does not explain it: shrunk by
    the factor 1 - width^2 V / D^2 (the non-negative garrote of Breiman, 1995), and left out if that
    is negative. V is the sum of the squared importance-weighted losses. The step is then never
    farther than width sqrt(V) from that of `FTRL` with importance weights, in any coordinate of
    the cumulative loss.

    There is no theorem. It is good with random losses and against an adversary that reacts. Where
    means change from outside, it may follow too late. docs/corrected.md has what was measured.

    Args:
        mdp: the MDP.
        regularizer: psi_t; by default the 1/2-Tsallis entropy with eta_t = 0.85 / sqrt(t). It needs
            no log-barrier.
        width: how many standard deviations are put down to noise. 0 is `FTRL` with importance
            weights, up to the mean m, which is added once as a hint.
        prior, count: m = (count * prior + sum of losses) / (count + number of visits). A prior of
            zero is optimistic: pairs that were seen seldom are tried again.

    Raises:
        ValueError: if `width` is negative or infinite, `prior` is outside [0, 1], or `count` is not
            positive.
    """

    def __init__(
        self,
        mdp: LayeredMDP,
        regularizer: Regularizer | None = None,
        *,
        width: float = WIDTH,
        prior: float = 0.0,
        count: float = 1.0,
    ) -> None:
        if not 0 <= width < math.inf:
            raise ValueError(f"width: expected a finite number of at least 0, got {width}")
        if not (0 <= prior <= 1 and 0 < count < math.inf):
            raise ValueError(
                "prior, count: expected a number in [0, 1] and a positive number, got "
                f"{prior} and {count}"
            )
        if regularizer is None:
            regularizer = Tsallis() / InverseSqrt(GAMMA)
        super().__init__(mdp, regularizer)
        self.width, self.prior, self.count = width, prior, count

    def start(self, num_seeds: int) -> None:
        super().start(num_seeds)
        zero = self._zeros(num_seeds)
        self.state |= {name: zero.clone() for name in ("visits", "losses", "squares")}

    def loss(self, t: int) -> Tensor:
        """t m + c, the loss of the step of episode t, `(N, S, A)`; zero on masked pairs."""
        state = self.state
        mean = (self.count * self.prior + state["losses"]) / (self.count + state["visits"])
        apart = state["cumulative_loss"] - (t - 1) * mean
        noise = self.width**2 * state["squares"]
        clear = apart.square() > noise
        kept = torch.where(clear, 1 - noise / torch.where(clear, apart, 1.0).square(), 0.0)
        return torch.where(self.mdp.actions, t * mean + apart * kept, 0.0)

    @torch.no_grad()
    def propose(self, t: int) -> Tensor:
        solution = self.step.solve(self.loss(t), float(t), warm_start=self.state["q"], check=False)
        self.state["q"] = solution.q
        note(self.state, solution)
        return solution.q

    @torch.no_grad()
    def observe(self, t: int, q: Tensor, feedback: Feedback) -> None:
        super().observe(t, q, feedback)
        state, weighted = self.state, feedback.losses / feedback.gather(q)
        seen = {
            "visits": torch.ones_like(weighted),
            "losses": feedback.losses,
            "squares": weighted.square(),
        }
        for name, values in seen.items():
            state[name] = state[name] + feedback.scatter(values, q)
