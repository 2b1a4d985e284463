"""A sequential test of a published table: the environment is played and compared with the table.

An outcome that the table excludes refutes it at once. The frequencies of the other outcomes are
tested by betting against the table. A predictor that learns from past outcomes (Krichevsky and
Trofimov's) multiplies its wealth by the predicted over the tabulated probability of each outcome.
If the table is correct, this wealth is a nonnegative martingale that starts at 1. By Ville's
inequality it then reaches 1e9 with probability at most 1e-9, for any choice of states and actions.
If the table is wrong, the wealth grows exponentially.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from torch_occ.mdp.unrolling import ABSORBING, Outcomes

#: The wealth at which a table is refused.
WEALTH = 1e9


@dataclass
class Bets:
    """A predictor for each kind of outcomes: its counts, and the logarithm of its wealth."""

    counts: dict[Hashable, list[float]] = field(default_factory=dict)
    log_wealth: float = 0.0

    def place(self, key: Hashable, probabilities: tuple[float, ...], outcome: int) -> None:
        """Bet on the next outcome of a kind, and update the counts."""
        counts = self.counts.setdefault(key, [0.5] * len(probabilities))
        self.log_wealth += math.log(counts[outcome] / sum(counts)) - math.log(
            probabilities[outcome]
        )
        counts[outcome] += 1

    def frequencies(self, key: Hashable) -> tuple[str, int]:
        """The observed frequencies, as text, and the number of steps."""
        seen = [count - 0.5 for count in self.counts[key]]
        return ", ".join(f"{count / sum(seen):.3g}" for count in seen), int(sum(seen))


class Auditor:
    """Compares observations with the table; raises a ValueError once the table is refuted."""

    def __init__(
        self, name: str, outcomes: Outcomes, rewards: Tensor, initial: Tensor | None
    ) -> None:
        self.name = name
        self.rows: dict[tuple[int, int], dict[tuple[int, float], float]] = {}
        self.actions = [row.nonzero().flatten().tolist() for row in outcomes.actions]
        columns = (outcomes.state, outcomes.action, outcomes.next, outcomes.probability, rewards)
        for state, action, after, probability, reward in zip(
            *(x.tolist() for x in columns), strict=True
        ):
            row = self.rows.setdefault((state, action), {})
            if probability > 0:
                row[after, reward] = row.get((after, reward), 0.0) + probability
        first = [] if initial is None else initial.nonzero().flatten().tolist()
        self.initial = None if initial is None else tuple(initial[first].tolist())
        self.place = {state: i for i, state in enumerate(first)}
        # One predictor learns each pair by itself. The other learns all pairs with the same
        # probabilities together, and finds a small error everywhere, like a wrong slip rate, much
        # earlier.
        self.alone, self.together, self.starts = Bets(), Bets(), Bets()

    def saw_start(self, state: int) -> None:
        """Record that the environment was reset to a state."""
        if self.initial is None:
            return
        if state not in self.place:
            raise self.refusal(
                f"reset() gave state {state}, whose tabulated initial probability is 0"
            )
        self.starts.place(None, self.initial, self.place[state])
        if self.starts.log_wealth > math.log(WEALTH):
            raise self.refusal(
                "the frequencies of initial states are not those of its initial distribution"
            )

    def saw(self, state: int, action: int, after: int, reward: float, terminated: bool) -> None:
        """Record one step of the environment."""
        row = self.rows[state, action]
        target = ABSORBING if terminated else after
        keys = list(row)
        match = [
            i
            for i, (said, paid) in enumerate(keys)
            if said == target and math.isclose(paid, reward, rel_tol=1e-9, abs_tol=1e-12)
        ]
        if not match:
            what = f"the end of the episode at state {after}" if terminated else f"state {after}"
            raise self.refusal(
                f"in state {state}, action {action} led to {what} with reward {reward:g}, which "
                f"P[{state}][{action}] excludes"
            )
        if len(row) == 1:
            return
        probabilities = tuple(row.values())
        profile = tuple(round(p, 12) for p in probabilities)
        self.alone.place((state, action), probabilities, match[0])
        self.together.place(profile, probabilities, match[0])
        # The mean of two such martingales is also one.
        if max(self.alone.log_wealth, self.together.log_wealth) > math.log(2 * WEALTH):
            raise self.refusal(self._frequencies(state, action, profile))

    def _frequencies(self, state: int, action: int, profile: tuple[float, ...]) -> str:
        said = ", ".join(f"{p:.3g}" for p in profile)
        if self.together.log_wealth > self.alone.log_wealth:
            where, (seen, steps) = "outcomes", self.together.frequencies(profile)
        else:
            where = f"outcomes of P[{state}][{action}]"
            (seen, steps) = self.alone.frequencies((state, action))
        return (
            f"{where} of probabilities ({said}) were seen with frequencies ({seen}) in {steps} "
            "steps"
        )

    def refusal(self, reason: str) -> ValueError:
        """The error that refuses the table."""
        return ValueError(
            f"env: the table of {self.name} contradicts the environment: {reason}. The dynamics "
            "depend on more than env.unwrapped.P, or a wrapper changes them; verify=0 skips this "
            "check"
        )


def check_by_playing(
    env: Any, auditor: Auditor, visited: Sequence[int], horizon: int, *, steps: int, seed: int
) -> None:
    """Play `steps` steps, and raise a ValueError if they refute the table.

    Passing only means that these steps agree with it. Half of the steps are episodes of a uniform
    policy. The others start from each of the `visited` states, with each action in turn, if the
    environment lets its state be set (`env.unwrapped.s`).
    """
    if getattr(env.unwrapped, "fickle_passenger", False):
        raise ValueError(
            f"env: {auditor.name} with fickle_passenger=True does not do what its table says: the "
            "passenger's change of mind depends on a hidden variable that is not part of the "
            "state; make it with fickle_passenger=False"
        )
    if env.unwrapped.render_mode == "human":
        raise ValueError(
            f"env: {auditor.name} would draw its check on the screen; make it without render_mode, "
            "or pass verify=0"
        )
    choose = np.random.default_rng(seed)
    state = _reset(env, auditor, seed)
    settable = bool(np.all(getattr(env.unwrapped, "s", None) == state))
    played = 0
    while played < (steps // 2 if settable else steps):
        state, played = _reset(env, auditor), played + 1
        for k in range(horizon):
            if not auditor.actions[state]:
                break
            action = auditor.actions[state][choose.integers(len(auditor.actions[state]))]
            after, reward, terminated, truncated, _ = env.step(action)
            auditor.saw(state, action, int(after), float(reward), bool(terminated))
            state, played = int(after), played + 1
            if truncated and not terminated and k + 1 < horizon:
                raise auditor.refusal(
                    f"step {k + 1} of {horizon} was cut off (truncated), and the table knows of no "
                    "time limit"
                )
            if terminated:
                break
    if settable:
        for state, action in _sweep(auditor.actions, visited, steps - played):
            _reset(env, auditor)
            env.unwrapped.s = state
            after, reward, terminated, _, _ = env.step(action)
            auditor.saw(state, action, int(after), float(reward), bool(terminated))
    env.reset()


def _reset(env: Any, auditor: Auditor, seed: int | None = None) -> int:
    state, _ = env.reset(seed=seed)
    auditor.saw_start(int(state))
    return int(state)


def _sweep(
    actions: list[list[int]], visited: Sequence[int], steps: int
) -> Iterator[tuple[int, int]]:
    """Take all pairs at least once, and again until the steps are used up."""
    pairs = [(state, action) for state in visited for action in actions[state]]
    for _ in range(max(1, -(-steps // max(len(pairs), 1)))):
        yield from pairs
