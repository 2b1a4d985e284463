"""The optimality conditions of the step with budgets, for implicit derivatives.

A budget that holds with equality is one more linear constraint, beside the flow constraints. With
a_i = 1 for such budgets and 0 for the others, the solution satisfies

    grad psi_t(q) + sum_i a_i y_i G_i - E'v = x,    E q = b,
    a_i (h_i - ⟨G_i, q⟩) + (1 - a_i) y_i = 0.

This is `torch_occ.step.implicit.Stationarity` with the multipliers (v, y) in place of v. Its
derivatives need m more solutions of the factored system, and a matrix of size m (a bordered
system). They exist where no budget holds with equality and has the multiplier zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torch_occ._support.choices import later
from torch_occ._support.constants import (
    GROWTH,
    LEAST_RATIO,
    LEAST_SHARE,
    SHARES,
    SHORTENINGS,
    STEPS,
)
from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_of, join
from torch_occ.regularizers.parameters import with_rank
from torch_occ.step.implicit import ImplicitSolution, Setting, Stationarity
from torch_occ.step.newton import newton
from torch_occ.step.solution import (
    Budgets,
    InfeasibleError,
    Solution,
    Status,
    check_batches,
    event_dims_of,
    least_cost,
    over,
    report,
)
from torch_occ.step.system import Factorization

if TYPE_CHECKING:
    from torch_occ.step.compiled import CompiledBudgets, CompiledStep
    from torch_occ.step.ftrl import FTRLStep


@dataclass(frozen=True)
class BudgetedSetting(Setting):
    """A setting whose last tensors are G, h and a.

    With `engine`, which must have the same weights, compiled kernels solve its linear systems.
    """

    engine: CompiledBudgets | None = None
    costs: Tensor = None  # type: ignore[assignment]  # (*batch, m, S, A), zero if not active
    limits: Tensor = None  # type: ignore[assignment]  # (*batch, m), zero if not active
    active: Tensor = None  # type: ignore[assignment]  # (*batch, m), 0 or 1

    @property
    def event_dims(self) -> tuple[int | None, ...]:
        return (*super().event_dims, 3, 1, 1)

    def bind(self, tensors: Sequence[Tensor]) -> BudgetedSetting:
        *rest, costs, limits, active = tensors
        bound = super().bind(rest)
        assert isinstance(bound, BudgetedSetting)
        return replace(bound, costs=costs * over(active, 2), limits=limits * active, active=active)

    def bind_without(self, tensors: Sequence[Tensor]) -> Setting:
        """Return the same without budgets."""
        return Setting(self.mdp, self.evaluator, self.probabilities).bind(tensors[:-3])

    def _split(self, v: Tensor) -> tuple[Tensor, Tensor]:
        m = self.active.shape[-1]
        return v[..., :-m], v[..., -m:]

    def constrain(self, q: Tensor, v: Tensor) -> Tensor:
        flow, y = super().constrain(q, v), self._split(v)[1]
        spent = (self.costs * q.unsqueeze(-3)).sum((-2, -1))
        return join([flow, (1 - self.active) * y - spent], 1)

    def adjoint(self, v: Tensor) -> Tensor:
        v, y = self._split(v)
        return super().adjoint(v) - (self.costs * over(y, 2)).sum(-3)

    @property
    def source(self) -> Tensor:
        return join([super().source, -self.limits], 1)

    def factorize(self, q: Tensor, batch: torch.Size, elements: int) -> Factorization:
        inner = self.engine.factorize(q) if self.engine else super().factorize(q, batch, elements)
        return Bordered(inner, self.costs, self.active)


class Bordered:
    """The factored system with one more constraint per active budget."""

    def __init__(self, inner: Factorization, costs: Tensor, active: Tensor) -> None:
        self.inner, self.costs, self.active = inner, costs, active

    def solve(self, x: Tensor, r: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Solve H u - E'w + G'z = x, E u = r1, (1 - a) z - G u = r2 for u and (w, z).

        With U = Pi G', the response to the budgets, (G U + 1 - a) z = r2 + G u0, where u0 is the
        solution for z = 0.
        """
        m = self.active.shape[-1]
        r, rest = r[..., :-m], r[..., -m:]
        batch = broadcast(self.costs.shape[:-3], x.shape[:-2])
        rows = self.costs.expand(*batch, *self.costs.shape[-3:]).movedim(-3, 0)
        U, W = self.inner.solve(rows, torch.zeros_like(rows[..., 0]))
        U, W = U.movedim(0, -3), W.movedim(0, -2)
        u, w = self.inner.solve(x, r)
        spent = (self.costs * u.unsqueeze(-3)).sum((-2, -1))
        matrix = self.costs.flatten(-2) @ U.flatten(-2).mT + torch.diag_embed(1 - self.active)
        right = (rest + spent).unsqueeze(-1)
        # Budgets that say the same twice make the matrix singular; any solution will do.
        z = (torch.linalg.pinv(matrix, hermitian=True, rtol=1e-12) @ right).squeeze(-1)
        u = u - (U * over(z, 2)).sum(-3)
        w = w - (W * z.unsqueeze(-1)).sum(-2)
        return u, join([w, z], 1)


@dataclass(frozen=True)
class BudgetedStationarity(Stationarity):
    """The equations above; tensors `(x, start, *setting, G, h, guess of y)`."""

    interior: Tensor
    #: reports failures, from the solution, costs, limits and certificates of infeasibility
    tell: Callable[[Solution, Tensor, Tensor, Tensor], None]

    def solve(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, start, *rest = tensors
        setting = self.setting
        assert isinstance(setting, BudgetedSetting)
        bound, (costs, limits, guess) = setting.bind_without(rest), rest[-3:]
        bound.validate(x, start)
        shapes = (x.shape[:-2], start.shape[:-2], costs.shape[:-3], limits.shape[:-1])
        batch = bound.batch_shape(*shapes, guess.shape[:-1])
        m = limits.shape[-1]
        given = (
            -x.expand(*batch, *x.shape[-2:]),
            costs.expand(*batch, m, *x.shape[-2:]),
            limits.expand(*batch, m),
            start.expand(*batch, *x.shape[-2:]),
            guess.expand(*batch, m),
        )
        if setting.engine:
            found = setting.engine.search(*given)
        else:
            without = self._without(bound, batch)
            tolerance = self.options.tolerance_in(x.dtype)
            found = find_multipliers(bound.mdp, without, *given, tolerance)
        q, value, certificate = found.solution[:3]
        self.tell(found.solution, *given[1:3], found.certificate)
        return q, torch.cat([value, found.multipliers], -1), certificate

    def _without(self, bound: Setting, batch: torch.Size) -> Without:
        """Return the step without budgets in torch; failed elements start again in the middle."""
        flow, derive = flow_of(bound.mdp, batch.numel()), bound.deriver(batch)

        def solve(loss: Tensor, start: Tensor) -> Solution:
            found = newton(flow, derive, loss, start, self.options)
            if not bool(found.converged.all()):
                again = newton(flow, derive, loss, self.interior, self.options)
                found = found.merge(again, again.converged & ~found.converged)
            return found

        def respond(solution: Solution, x: Tensor) -> Tensor:
            system = bound.factorize(solution.q, batch, x.shape[:-2].numel())
            return system.solve(x, torch.zeros_like(x[..., 0]))[0]

        return Without(solve, respond)

    def point(
        self, tensors: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        return outputs[0], (*tensors[2:-1], self._active(outputs, tensors[-1]))

    def operator(
        self, outputs: Sequence[Tensor], arguments: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        active = self._active(outputs, arguments[-1])
        return super().operator(outputs, (*arguments[:-1], active))

    @staticmethod
    def _active(outputs: Sequence[Tensor], guess: Tensor) -> Tensor:
        return (outputs[1][..., -guess.shape[-1] :].detach() > 0).to(outputs[0].dtype)


# -- The multipliers of budgets, by Newton's method on the dual problem ----------------------------
#
# For multipliers y >= 0, the budgets act on the step as an additional loss G'y. Let q(y) be the
# solution of the step without budgets for the loss L + G'y. The multipliers maximize
#
#     D(y) = min over q in Omega of ⟨q, L + G'y⟩ + psi_t(q) - ⟨y, h⟩,
#
# which is concave, with the derivatives
#
#     grad D = G q(y) - h,        hess D = - G Pi G',
#
# where -Pi is the derivative of q with respect to the loss (torch_occ.step.linearization). So one
# step on m multipliers needs q(y) and m solutions of a linear system that is factored once. Nothing
# else is added to the step.
#
# **Step.** The multipliers of the quadratic model that are best among y >= 0, by pivoting. Where
# q(y) hardly responds, the model would ask for huge steps; no multiplier grows more than tenfold.
# **Step length.** D is concave, so its slope along a step decreases. If the slope at the end is
# negative, the zero of the slope is bracketed and approached. No function values are compared.
# **Large losses.** If the loss is large compared with psi, q(y) changes abruptly, and Newton's
# method may fail. Then the budgets are met for the loss zero first, and for a growing share of the
# loss after that. The multipliers are nearly linear in this share, so each solution predicts the
# next. **Infeasible budgets.** If no policy meets them, D is unbounded. Some y >= 0 then has min
# over q of ⟨G'y, q⟩ > ⟨y, h⟩, which proves it. Every iterate is tried as such a y.


#: Violations below this multiple of the rounding error are not reduced further.
_NOISE = 8.0


class Without(NamedTuple):
    """The step without budgets, for plain tensors with the full batch shape."""

    #: (loss `(*batch, S, A)`, start) -> solution, with a status per element
    solve: Callable[[Tensor, Tensor], Solution]
    #: (solution, x `(m, *batch, S, A)`) -> Pi x at the solution
    respond: Callable[[Solution, Tensor], Tensor]


class BudgetSearch(NamedTuple):
    """The solution with budgets."""

    solution: Solution  # of the loss with the price of the budgets, with the status of the search
    multipliers: Tensor  # (*batch, m)
    certificate: Tensor  # (*batch, m), weights that prove that the budgets are infeasible

    def merge(self, other: BudgetSearch, element: tuple[int, ...]) -> BudgetSearch:
        """Return `other` at one element, this one elsewhere."""
        where = torch.zeros(self.solution.status.shape, dtype=torch.bool)
        where[element] = True
        where = where.to(self.multipliers.device)
        return BudgetSearch(
            self.solution.merge(other.solution, where),
            torch.where(over(where, 1), other.multipliers, self.multipliers),
            torch.where(over(where, 1), other.certificate, self.certificate),
        )


def find_multipliers(
    mdp: LayeredMDP,
    without: Without,
    loss: Tensor,
    costs: Tensor,
    limits: Tensor,
    start: Tensor,
    guess: Tensor,
    tolerance: float,
) -> BudgetSearch:
    """Solve the step with budgets for a batch; each element stops on its own.

    Args:
        loss: `(*batch, S, A)`, with the full batch shape.
        costs: `(*batch, m, S, A)`, zero on masked pairs.
        limits: `(*batch, m)`.
        start: where the step without budgets starts, `(*batch, S, A)`.
        guess: multipliers to start from, `(*batch, m)`, at least zero.
        tolerance: the largest violation that counts as solved, relative to the terms of the sum
            ⟨G_i, q⟩ - h_i.
    """
    search = _Search(mdp, without, loss, costs, limits, tolerance)
    found = search.climb(1.0, start, guess)
    failed = (found.solution.status != Status.CONVERGED) & (
        found.solution.status != Status.INFEASIBLE
    )
    for index in failed.nonzero().tolist():
        # Each element has its own share of the loss. Few fail, so they are solved one by one.
        element = tuple(index)
        again = search.alone(element).follow(start)
        found = found.merge(again, element)
    return found


class _Search(NamedTuple):
    """The problem of `find_multipliers`; `only` marks the elements that are solved."""

    mdp: LayeredMDP
    without: Without
    loss: Tensor
    costs: Tensor
    limits: Tensor
    tolerance: float
    only: Tensor | None = None

    def alone(self, element: tuple[int, ...]) -> _Search:
        """Return the same search, in which the other elements stay where they are."""
        only = torch.zeros(self.loss.shape[:-2], dtype=torch.bool, device=self.loss.device)
        only[element] = True
        return self._replace(only=only)

    def solve(self, share: float, y: Tensor, q: Tensor) -> tuple[Solution, Tensor]:
        """Return the solution for a share of the loss and the prices G'y, and G q - h."""
        priced = share * self.loss + (self.costs * over(y, 2)).sum(-3)
        found = self.without.solve(priced, q)
        return found, (self.costs * found.q.unsqueeze(-3)).sum((-2, -1)) - self.limits

    def follow(self, start: Tensor) -> BudgetSearch:
        """Solve for a growing share of the loss, from 0 to 1."""
        assert self.only is not None
        share, ratio, tried = 0.0, 10.0, 1.0
        before, share_before = torch.zeros_like(self.limits), -1.0
        now = self.climb(0.0, start, before)
        if int(now.solution.status[self.only]) != Status.CONVERGED:
            return now
        trial = now
        for _ in range(SHARES):
            slope = (now.multipliers - before) / (share - share_before) if share > 0 else 0.0
            y = (now.multipliers + (tried - share) * slope).clamp(min=0)
            trial = self.climb(tried, now.solution.q, y)
            if int(trial.solution.status[self.only]) == Status.CONVERGED:
                before, share_before = now.multipliers, share
                now, share = trial, tried
                if share == 1.0:
                    break
                ratio = min(ratio * ratio, 10.0)
                tried = min(1.0, share * ratio)
            elif share == 0.0:
                tried /= 10.0
            else:
                ratio = ratio**0.5
                tried = min(1.0, share * ratio)
            if tried < LEAST_SHARE or ratio < LEAST_RATIO:
                break
        return trial

    def climb(self, share: float, start: Tensor, guess: Tensor) -> BudgetSearch:
        """Newton's method on the multipliers, for a share of the loss."""
        loss, costs, limits, tolerance = self.loss, self.costs, self.limits, self.tolerance
        rows = costs.movedim(-3, 0)  # (m, *batch, S, A)
        y, eps = guess, torch.finfo(loss.dtype).eps
        now, excess = self.solve(share, y, start)
        steps = now.certificate[..., 1].clone()
        status = torch.full(y.shape[:-1], Status.MAX_STEPS, device=y.device)
        running = torch.ones_like(status, dtype=torch.bool) if self.only is None else self.only
        certificate = torch.zeros_like(y)
        patience, best = torch.full_like(status, 3), torch.full_like(loss[..., 0, 0], torch.inf)
        # The price at which a budget matters as much as the loss.
        natural = (loss.abs().amax((-2, -1)) + 1.0).unsqueeze(-1) / costs.abs().amax((-2, -1))
        natural = torch.where(natural.isfinite(), natural, 1.0)
        for _ in range(STEPS):
            size = (costs.abs() * now.q.unsqueeze(-3)).sum((-2, -1)) + limits.abs()
            error = (torch.where(y > 0, excess.abs(), excess.clamp(min=0)) / size).amax(-1)
            # At the level of rounding errors, a step no longer improves. Two more are tried.
            patience = torch.where(error < 0.5 * best, 3, patience - 1)
            best = torch.minimum(best, error)
            solved = now.converged & (error <= tolerance)
            done = running & solved & ((error <= _NOISE * eps) | (patience <= 0))
            status = torch.where(done, Status.CONVERGED, status)
            lost = running & ~done & ~(error.isfinite() & now.converged)
            status = torch.where(
                lost, torch.where(now.converged, Status.STALLED, now.status), status
            )
            running = running & ~done & ~lost
            if bool(running.any()):
                impossible = running & _is_infeasible(
                    self.mdp, costs, limits, y, excess, certificate, tolerance
                )
                status = torch.where(impossible, Status.INFEASIBLE, status)
                running = running & ~impossible
            if not bool(running.any()):
                break
            response = self.without.respond(now, rows).movedim(0, -3)  # (*batch, m, S, A)
            curvature = costs.flatten(-2) @ response.flatten(-2).mT
            step = _best_multipliers(curvature, excess, y, GROWTH * (y + natural)) - y
            y, now, excess = self._move(share, y, step, now, excess, running, error, steps)
        dual = torch.maximum(now.dual_residual, self._error_of_q(now, y, excess))
        status = torch.where(
            (status == Status.CONVERGED) & ~(dual <= tolerance), Status.STALLED, status
        )
        numbers = (status.to(loss), steps, *now.certificate[..., 2:4].unbind(-1), dual)
        return BudgetSearch(now._replace(certificate=torch.stack(numbers, -1)), y, certificate)

    def _error_of_q(self, now: Solution, y: Tensor, excess: Tensor) -> Tensor:
        """Return the relative error of q that remains, since a budget is met only up to rounding.

        It is the change of q that would remove the violation, or the rounding error of its sum.
        Where budgets leave little room, q answers strongly.
        """
        costs, q, eps = self.costs, now.q, torch.finfo(y.dtype).eps
        response = self.without.respond(now, costs.movedim(-3, 0)).movedim(0, -3)
        size = (costs.abs() * q.unsqueeze(-3)).sum((-2, -1)) + self.limits.abs()
        noise = torch.maximum(excess.abs(), 4 * eps * size).copysign(excess)
        curvature = (costs.flatten(-2) @ response.flatten(-2).mT).nan_to_num(0.0)
        diagonal = curvature.diagonal(dim1=-2, dim2=-1)
        scale = torch.where((y > 0) & (diagonal > 0), diagonal.clamp(min=0).rsqrt(), 0.0)
        matrix = curvature * scale.unsqueeze(-1) * scale.unsqueeze(-2)
        inverse = torch.linalg.pinv(matrix, hermitian=True, rtol=16 * y.shape[-1] * eps)
        step = (inverse @ (noise * scale).unsqueeze(-1)).squeeze(-1) * scale
        change = (response * over(step, 2)).sum(-3).abs() / torch.where(q > 0, q, torch.inf)
        return change.amax((-2, -1))

    def _move(
        self,
        share: float,
        y: Tensor,
        step: Tensor,
        now: Solution,
        excess: Tensor,
        running: Tensor,
        error: Tensor,
        steps: Tensor,
    ) -> tuple[Tensor, Solution, Tensor]:
        """Take a step, shortened until the slope of D at its end is nearly positive."""
        climb = (excess * step).sum(-1)
        low, high = torch.zeros_like(climb), torch.full_like(climb, torch.inf)
        at_low, at_high = climb, climb
        length = torch.where(running, 1.0, 0.0).to(y.dtype)
        trial, after = now, excess
        for _ in range(SHORTENINGS):
            trial, after = self.solve(share, y + over(length, 1) * step, now.q)
            steps += torch.where(running, trial.certificate[..., 1], 0.0)
            slope = torch.where(trial.converged, (after * step).sum(-1), -torch.inf)
            above = slope < 0
            far = running & (error > self.tolerance) & (slope < -0.1 * climb)
            # Slopes that are positive again after a bracket was found: go on towards the zero.
            far = far | (running & (high < torch.inf) & (slope > 0.5 * climb))
            far = far & (high - low > 1e-14 * low)
            if not bool(far.any()):
                break
            high = torch.where(far & above, length, high)
            at_high = torch.where(far & above, slope, at_high)
            low = torch.where(far & ~above, length, low)
            at_low = torch.where(far & ~above, slope, at_low)
            # Where the slope is zero if it is linear, but inside the bracket by a tenth.
            ratio = (at_low / (at_low - at_high)).nan_to_num(0.1).clamp(0.1, 0.9)
            length = torch.where(far, low + ratio * (high - low), length)
        moved = over(running, 1)
        return (
            torch.where(moved, (y + over(length, 1) * step).clamp(min=0), y),
            now.merge(trial, running),
            torch.where(moved, after, excess),
        )


def _is_infeasible(
    mdp: LayeredMDP,
    costs: Tensor,
    limits: Tensor,
    y: Tensor,
    excess: Tensor,
    certificate: Tensor,
    tolerance: float,
) -> Tensor:
    """Return whether y or the present violations prove that no policy meets the budgets.

    The proof, with largest weight one, is written into `certificate`.
    """
    found = torch.zeros(y.shape[:-1], dtype=torch.bool, device=y.device)
    for weights in (y, excess.clamp(min=0)):
        largest = weights.amax(-1, keepdim=True)
        weights = weights / torch.where(largest > 0, largest, 1.0)
        weighted = (costs * over(weights, 2)).sum(-3)
        least, allowed = least_cost(mdp, weighted), (weights * limits).sum(-1)
        proved = least - allowed > tolerance * (least.abs() + allowed.abs())
        certificate[proved & ~found] = weights[proved & ~found]
        found = found | proved
    return found


def _best_multipliers(curvature: Tensor, excess: Tensor, y: Tensor, most: Tensor) -> Tensor:
    """Maximize ⟨excess, z - y⟩ - (z - y)' C (z - y) / 2 over z >= 0.

    Block principal pivoting: guess which z are positive, solve for them, and exchange those that
    violate a sign. If that cycles, only the last one is exchanged, which ends for certain.

    Args:
        curvature: C, `(*batch, m, m)`, symmetric and positive semidefinite.
        excess: `(*batch, m)`.
        y: `(*batch, m)`, at least zero.
        most: `(*batch, m)`, positive. Where the curvature alone would ask for a larger step, it is
            raised.
    """
    m = y.shape[-1]
    curvature = curvature.nan_to_num(0.0)
    diagonal = curvature.diagonal(dim1=-2, dim2=-1).clamp(min=0)
    raised = torch.maximum(diagonal, excess.abs() / most)
    curvature = curvature + torch.diag_embed(raised - diagonal)
    diagonal = raised
    # Scale to a unit diagonal, so that budgets in any unit are treated alike. The ridge makes
    # budgets that say the same twice share their multiplier.
    scale = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    eps = torch.finfo(y.dtype).eps
    unit = torch.eye(m, dtype=y.dtype, device=y.device)
    C = curvature * scale.unsqueeze(-1) * scale.unsqueeze(-2) + 16 * m * eps * unit
    start = y / scale
    target = excess * scale + (C @ start.unsqueeze(-1)).squeeze(-1)  # C z = target where z > 0
    positive = (start > 0) | (excess > 0)
    fewest = torch.full(y.shape[:-1], m + 1, device=y.device)
    tries = torch.full_like(fewest, 3)
    z = start
    for _ in range(20 * m + 20):
        both = positive.unsqueeze(-1) & positive.unsqueeze(-2)
        matrix = torch.where(both, C, unit)
        right = torch.where(positive, target, 0.0)
        z = torch.linalg.solve_ex(matrix, right.unsqueeze(-1)).result.squeeze(-1)
        slope = target - (C @ z.unsqueeze(-1)).squeeze(-1)
        noise = 64 * eps * (target.abs() + (C.abs() @ z.abs().unsqueeze(-1)).squeeze(-1))
        wrong = (positive & (z < 0)) | (~positive & (slope > noise))
        count = wrong.sum(-1)
        if not bool(count.any()):
            break
        better = count < fewest
        tries = torch.where(better, 3, tries - 1)
        fewest = torch.where(better, count, fewest)
        last = wrong & (wrong.flip(-1).cumsum(-1).flip(-1) == 1)
        positive = positive ^ torch.where(over(tries > 0, 1), wrong, last)
    return z.clamp(min=0) * scale


# -- The step with budgets, from the arguments of `FTRLStep.solve` to a solution -------------------


def solve_with_budgets(
    step: FTRLStep,
    compiled: CompiledStep | None,
    given: tuple[Setting, Tensor, int],
    x: Tensor,
    budgets: Budgets,
    multipliers: Tensor | None,
    check: bool,
) -> Solution:
    """Solve the step with budgets.

    Args:
        compiled: the compiled step, or None to use torch.
        given: the setting with its tensors, where to start, and the number of batch dimensions.
        x: minus the cumulative loss, `(*batch, S, A)`.
        multipliers: where to start those of the budgets, `(*batch, m)`; by default zero.
        check: whether to raise `SolveError` if an element fails.
    """
    setting, start, rank = given
    mdp = setting.mdp
    budgets.check(mdp)
    costs, limits = budgets.on_existing_pairs(mdp), budgets.limits
    guess = torch.zeros_like(limits).detach() if multipliers is None else multipliers.detach()
    if guess.shape[-1:] != limits.shape[-1:] or bool((guess < 0).any()):
        raise ValueError(
            f"multipliers: expected numbers of at least 0 of shape (*batch, {len(budgets)}), got "
            f"shape {tuple(guess.shape)}, least {float(guess.min())}"
        )
    shapes = {"cumulative_loss": x.shape[:-2], "t": setting.t.shape}
    shapes |= {"warm_start": start.shape[:-2], "mdp": mdp.batch_shape}
    shapes |= {"constraints: costs": costs.shape[:-3], "constraints: limits": limits.shape[:-1]}
    check_batches(shapes | {"multipliers": guess.shape[:-1]})
    rank = max(rank, costs.dim() - 3, limits.dim() - 1, guess.dim() - 1)
    tensors = setting.align(rank, x, start)
    tensors += [with_rank(costs, rank, 3), with_rank(limits, rank, 1), with_rank(guess, rank, 1)]
    engine = None
    if compiled is not None:
        values = [setting.t.detach(), *setting.parameters]
        engine = later("step.compiled").CompiledBudgets(compiled, values, step.interior)
    equation = BudgetedStationarity(
        BudgetedSetting(mdp, setting.evaluator, setting.probabilities, engine=engine),
        step.options,
        check,
        step.interior,
        partial(_tell, check, mdp),
    )
    q, value, certificate = ImplicitSolution.apply(equation, *tensors)
    m = len(budgets)
    slack = limits - (costs * q.unsqueeze(-3)).sum((-2, -1))
    name = "torch" if engine is None else "engine"
    return Solution(q, value[..., :-m], certificate, name, value[..., -m:], slack)


def _tell(
    check: bool,
    mdp: LayeredMDP,
    solution: Solution,
    costs: Tensor,
    limits: Tensor,
    certificate: Tensor,
) -> None:
    """Report failed elements if `check` is set; infeasible ones first, with their certificate."""
    if not check:
        return
    infeasible = (solution.status == Status.INFEASIBLE).nonzero()
    if len(infeasible):
        element = tuple(infeasible[0].tolist())
        weights = certificate[element]
        weighted = (costs[element] * over(weights, 2)).sum(-3)
        model = mdp.with_probabilities(
            *(
                p.expand(*solution.status.shape, *p.shape[p.dim() - dims :])[element]
                for p, dims in zip(mdp.probabilities, event_dims_of(mdp), strict=True)
            )
        )
        least, allowed = least_cost(model, weighted), (weights * limits[element]).sum()
        raise InfeasibleError(solution, element, weights, float(least), float(allowed))
    report(check, solution)
