"""Checks of what learners, loss processes and estimators return; warnings of uncertified steps.

Parts that a user wrote are checked in every episode. Parts of this package are not checked, because
they are certified or tested. An error names the class, the episode, the seed, the layer, the state
and the value, and says what was expected.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_occ.game.estimators import Estimator, Feedback
from torch_occ.game.losses import LossProcess, State
from torch_occ.mdp.checks import check_dtype, check_that
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_of, flow_source
from torch_occ.step.solution import Status

if TYPE_CHECKING:
    from torch_occ.game.learners import Learner
    from torch_occ.game.simulate import Simulation


#: The first words of a message about a batch element.
Where = Callable[[int], str]

#: The entries that `Learner.diagnostics` returns; `status` is optional.
DIAGNOSTICS = ("newton_steps", "dual_residual", "flow_residual", "uncertified", "status")


class Contract:
    """The checks of one run."""

    def __init__(
        self, mdp: LayeredMDP, learner: Learner, losses: LossProcess, seeds: Sequence[int]
    ) -> None:
        self.mdp, self.seeds = mdp, seeds
        self.learner, self.losses = type(learner).__name__, type(losses).__name__
        self.trusts_learner = built_in(learner)
        self.trusts_draws = type(losses).draw is LossProcess.draw
        self.flow, self.source = flow_of(mdp), flow_source(mdp).detach()
        self.tolerance = occupancy_tolerance(mdp.dtype)

    def proposal(self, t: int, q: Tensor) -> None:
        """Check that q_t `(N or 1, S, A)` is an occupancy measure: q >= 0 and E q = b."""
        if self.trusts_learner:
            return
        what = f"learner: q from {self.learner}.propose"
        check_tensor(what, q, self.mdp, (len(self.seeds),), f"episode {t}")
        where = self._where(what, t, len(q))
        refuse_first(q, q.isfinite(), self.mdp, where, "expected finite numbers")
        expected = "expected q >= 0; clip what rounding left over"
        refuse_first(q, q >= -self.tolerance, self.mdp, where, expected)
        absent = self.mdp.actions | (q <= self.tolerance)
        refuse_first(q, absent, self.mdp, where, "the state has no such action; expected 0")
        residual = q.sum(-1) - self.flow.inflow(q) - self.source
        if float(residual.abs().amax()) > self.tolerance:
            element, state = divmod(int(residual.abs().argmax()), self.mdp.num_states)
            out = float(q[element, state].sum())
            source = "initial" if state < self.mdp.layer_sizes[0] else "incoming"
            raise ValueError(
                f"{where(element)}{self.mdp.locate(state)} is no occupancy measure: its "
                f"actions sum to {out:.6g}, but the {source} probability is "
                f"{out - float(residual[element, state]):.6g}. If it is a policy, return "
                "occ.occupancy(mdp, policy)"
            )

    def policy(self, t: int, policy: Tensor) -> None:
        """Check that a policy `(N or 1, S, A)` has a distribution over actions in every state."""
        if self.trusts_learner:
            return
        what = f"learner: policy from {self.learner}.propose_policy"
        check_tensor(what, policy, self.mdp, (len(self.seeds),), f"episode {t}")
        refuse_policy(policy, self.mdp, self._where(what, t, len(policy)))

    def means(self, found: tuple[Tensor, State], first: int, n: int) -> tuple[Tensor, State]:
        """Check means `(n or 1, N or 1, S, A)` in [0, 1], and the next state of the process."""
        what = f"losses: {self.losses}.means"
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
            raise TypeError(
                f"{what} returned {_kind(found)}; expected a pair: a tensor of means, and the next "
                "state, a dict"
            )
        means, state = found
        when = f"episodes {first} to {first + n - 1}"
        check_tensor(what, means, self.mdp, (n, len(self.seeds)), when)
        good = (means >= 0) & (means <= 1)
        if not bool(good.all()):
            row = int((~good).flatten(1).any(1).nonzero()[0])
            where = self._where(what, first + row, means.shape[1])
            refuse_first(means[row], good[row], self.mdp, where, "expected means in [0, 1]")
        return means, state

    def drawn(self, t: int, feedback: Feedback) -> None:
        """Check that losses from a user's `draw` are finite, one for each mean."""
        if self.trusts_draws:
            return
        what, losses, where = f"losses: {self.losses}.draw", feedback.losses, f"at episode {t}"
        found, shape = _kind(losses), f"{self.mdp.dtype} of shape {tuple(feedback.states.shape)}"
        check_that(found == shape, f"{what} {where}", f"{shape}, like its means", found)
        for i, k in (~losses.isfinite()).nonzero()[:1].tolist():
            state, action = int(feedback.states[i, k]), int(feedback.actions[i, k])
            raise ValueError(
                f"{self._where(what, t, len(losses))(i)}{self.mdp.locate(state)}, action {action} "
                f"is {float(losses[i, k])}; expected finite numbers"
            )

    def diagnostics(self, t: int, found: dict[str, Tensor]) -> dict[str, Tensor]:
        """Check that diagnostics are empty, or tensors `(N,)` with the names in `DIAGNOSTICS`."""
        if self.trusts_learner or not found:
            return found
        what = f"learner: {self.learner}.diagnostics at episode {t}"
        fine = {*DIAGNOSTICS[:4]} <= {*found} <= {*DIAGNOSTICS}
        expected = f"nothing, or the names {', '.join(DIAGNOSTICS[:4])}"
        check_that(fine, what, expected, ", ".join(map(str, found)))
        for name, value in found.items():
            fine = isinstance(value, Tensor) and tuple(value.shape) == (len(self.seeds),)
            expected = f"{name} to be a tensor of shape ({len(self.seeds)},)"
            check_that(fine, what, expected, _kind(value))
        return found

    def _where(self, what: str, t: int, count: int) -> Where:
        """The episode and the seed of a batch element; all seeds if there is one element."""
        names = [f"seed {seed}" for seed in self.seeds] if count == len(self.seeds) else []
        return lambda i: f"{what} at episode {t}, {names[i] if names else 'every seed'}, "


def check_estimate(
    mdp: LayeredMDP, estimator: Estimator, estimate: Tensor, t: int, count: int
) -> None:
    """Check that an estimate is finite and of shape `(N, S, A)`."""
    if built_in(estimator):
        return
    what = f"estimator: {type(estimator).__name__}"
    check_tensor(what, estimate, mdp, (count,), f"episode {t}", strict=True)
    good, expected = estimate.isfinite() | ~mdp.actions, "expected finite numbers"
    refuse_first(estimate, good, mdp, lambda i: f"{what} at episode {t}, seeds[{i}], ", expected)


def refuse_policy(policy: Tensor, mdp: LayeredMDP, where: Where) -> None:
    """Raise a ValueError that names the first row of `(N, S, A)` that is no distribution."""
    good = (policy >= 0) & policy.isfinite()
    refuse_first(policy, good | ~mdp.actions, mdp, where, "expected a probability")
    absent, expected = mdp.actions | (policy == 0), "expected 0, as there is no such action"
    refuse_first(policy, absent, mdp, where, expected)
    sums = policy.sum(-1)
    off = ((sums - 1).abs() > occupancy_tolerance(mdp.dtype)).nonzero()
    for i, state in off[:1].tolist():
        found = f"the probabilities sum to {float(sums[i, state]):.12g}"
        raise ValueError(f"{where(i)}{mdp.locate(state)}: {found}; expected 1")


def check_tensor(
    what: str, x: Any, mdp: LayeredMDP, batch: Sequence[int], when: str, *, strict: bool = False
) -> None:
    """Check type, device and shape `(*batch, S, A)`; 1 stands for any size unless `strict`."""
    expected = (*batch, mdp.num_states, mdp.num_actions)
    at, fine = f" at {when}" if when else "", isinstance(x, Tensor)
    check_that(fine, f"{what}{at}", f"a tensor of shape {expected}", _kind(x), TypeError)
    free = [{size} if strict else {size, 1} for size in batch]
    fits = x.dim() == len(expected) and tuple(x.shape[len(batch) :]) == expected[len(batch) :]
    if not fits or any(size not in sizes for size, sizes in zip(x.shape, free, strict=False)):
        ones = "; a 1 in place of a batch dimension means the same for all"
        ones = "" if strict or not batch else ones
        raise ValueError(f"{what}{at}: expected shape {expected}{ones}, got {tuple(x.shape)}")
    check_dtype(f"{what}{at}", x, mdp, "the MDP")


def refuse_first(x: Tensor, good: Tensor, mdp: LayeredMDP, where: Where, expected: str) -> None:
    """Raise a ValueError that names the first entry of x `(N, S, A)` that is not good."""
    if not bool(good.all()):
        i, state, action = (~good.expand_as(x)).nonzero()[0].tolist()
        found = f"{mdp.locate(state)}, action {action} is {float(x[i, state, action])}"
        raise ValueError(f"{where(i)}{found}; {expected}")


def occupancy_tolerance(dtype: torch.dtype) -> float:
    """The largest accepted violation of the flow constraints, for solvers of users."""
    return 1e-6 if dtype == torch.float64 else 1e-4


def built_in(part: Any) -> bool:
    """Whether the class of `part` belongs to this package."""
    return type(part).__module__.partition(".")[0] == __name__.partition(".")[0]


def _kind(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


class UncertifiedWarning(UserWarning):
    """Some steps of a run could not be certified, so its q and its regret may be wrong."""


def warn_of_first(run: Simulation) -> bool:
    """Warn of the first step that was not certified; return whether there was one."""
    first = run.sums["first_uncertified"]
    if not bool(first.any()):
        return False
    t, i = min((t, i) for i, t in enumerate(first.long().tolist()) if t)
    status = Status(int(run.sums["first_status"][i]))
    why = f": {status.name}, {status.advice}" if status else ""
    warnings.warn(
        f"{type(run.learner).__name__}: the step of episode {t}, seed {run.seeds[i]}, was not "
        f"certified{why}. The run goes on; history.uncertified counts such steps",
        UncertifiedWarning,
        stacklevel=4,
    )
    return True


def warn_of_all(run: Simulation) -> None:
    """Warn of uncertified steps, with their number, at the end of a run."""
    if count := int(run.sums["uncertified"].sum()):
        warnings.warn(
            f"{type(run.learner).__name__}: {count:,} of {run.t * len(run.seeds):,} steps were not "
            "certified; their q, and with it the regret, may be wrong",
            UncertifiedWarning,
            stacklevel=3,
        )
