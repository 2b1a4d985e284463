"""The step with budgets ⟨G_i, q⟩ <= h_i: its multipliers, and its derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_occ.mdp.checks import broadcast
from torch_occ.mdp.occupancy import join
from torch_occ.regularizers.parameters import spread_batch, with_rank
from torch_occ.regularizers.terms import keep
from torch_occ.step.implicit import ImplicitSolution, Setting, Stationarity, Tensors
from torch_occ.step.newton import potential, shape_finely
from torch_occ.step.solution import (
    Budgets,
    InfeasibleError,
    Solution,
    Status,
    check_batches,
    check_budgets,
    least_cost,
    over,
    report,
)
from torch_occ.step.system import Factorization

if TYPE_CHECKING:
    from torch_occ.step.compiled import CompiledStep
    from torch_occ.step.ftrl import FTRLStep

Array = NDArray[Any]

# -- The multipliers, by Newton's method on the dual problem ---------------------------------------
#
# Let q(y) be the step without budgets for the loss L + G'y. The multipliers y >= 0 maximize
#
#     D(y) = min over q in Omega of ⟨q, L + G'y⟩ + psi_t(q) - ⟨y, h⟩,
#
# with grad D = G q(y) - h and hess D = - G Pi G' (torch_occ.step.implicit): m solutions of a linear
# system that is factored once, by torch or by the engine.
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

#: The largest number of Newton steps on the multipliers, and how often one is shortened.
_STEPS, _SHORTENINGS = 30, 30

#: In one step, a multiplier becomes at most about this factor larger.
_GROWTH = 10.0

#: The largest number of shares of the loss that are tried, the least one, and the least factor.
_SHARES, _LEAST_SHARE, _LEAST_RATIO = 60, 1e-9, 1.05

#: Violations below this multiple of the rounding error are not reduced further.
_NOISE = 8.0

#: How many more steps are tried where rounding errors of the budgets are above the tolerance.
_RETRIES = 6


def raised(q: Tensor) -> Tensor:
    """Return q, and the least number that linear systems take where an entropy underflowed."""
    number = torch.finfo(q.dtype)
    return q.clamp(min=number.tiny / number.eps)


class _Point(NamedTuple):
    """The step without budgets at multipliers y, for N elements; arrays are small and in NumPy."""

    solution: Solution  # (*batch, ...)
    y: Array  # (N, m)
    excess: Array  # (N, m), G q - h
    size: Array  # (N, m), the sum of the sizes of the terms of G q - h
    steps: Array  # (N,), Newton steps so far
    status: Array  # (N,), of the step without budgets; of the search at its end
    dual_residual: Array  # (N,), of the step without budgets
    proof: Array  # (N, m), weights that prove that the budgets are infeasible

    def merge(self, other: _Point, where: Array) -> _Point:
        """Return `other` at the elements given by `where` `(N,)`, this one elsewhere."""
        if where.all():
            return other
        status = self.solution.status
        here = torch.from_numpy(where).view(status.shape).to(status.device)
        arrays = (
            np.where(where.reshape(-1, *(1,) * (mine.ndim - 1)), theirs, mine)
            for mine, theirs in zip(self[1:], other[1:], strict=True)
        )
        return _Point(self.solution.merge(other.solution, here), *arrays)


class _MultiplierSearch:
    """The search of one call, for plain tensors with the full batch shape."""

    def __init__(
        self, step: FTRLStep, setting: BudgetedSetting, loss: Tensor, costs: Tensor, limits: Tensor
    ) -> None:
        self.step, self.setting, self.loss, self.costs = step, setting, loss, costs
        self.batch, self.count = limits.shape[:-1], limits.shape[-1]
        self.mdp = None if setting.mdp is step.mdp else setting.mdp
        self.system = setting.systems(self.batch, self.batch.numel() * self.count)
        self.sums = torch.cat([self.costs, self.costs.abs()], -3)
        self.limits = self._array(limits)
        self.eps = torch.finfo(loss.dtype).eps
        self.tolerance = step.options.tolerance_in(loss.dtype)
        # The price at which a budget matters as much as the loss.
        largest = self._array(self.costs.abs().amax((-2, -1)))
        most = loss.abs().amax((-2, -1)).reshape(-1, 1).numpy(force=True) + 1.0
        self.natural = np.where(largest > 0, most / np.where(largest > 0, largest, 1.0), 1.0)

    def _array(self, x: Tensor) -> Array:
        return x.reshape(-1, self.count).numpy(force=True).astype(np.float64)

    def tensor(self, x: Array) -> Tensor:
        return torch.from_numpy(x).view((*self.batch, *x.shape[1:])).to(self.loss)

    def weigh(self, y: Array) -> Tensor:
        """Return G'y, `(*batch, S, A)`."""
        return (self.costs * over(self.tensor(y), 2)).sum(-3)

    def solve(self, start: Tensor, guess: Tensor, todo: Array) -> _Point:
        """Find the multipliers of the elements in `todo`; each element stops on its own."""
        found = self.climb(np.ones(len(todo)), start, self._array(guess), todo)
        failed = todo & (found.status != Status.CONVERGED) & (found.status != Status.INFEASIBLE)
        return found.merge(self.follow(start, failed), failed) if failed.any() else found

    def follow(self, start: Tensor, going: Array) -> _Point:
        """Solve the elements in `going` for a growing share of the loss, from 0 to 1."""
        share, before = np.zeros(len(going)), np.zeros_like(self.limits)
        last, ratio, tried = share - 1.0, share + 10.0, share + 1.0
        found = now = self.climb(share, start, before, going)
        going = going & (now.status == Status.CONVERGED)
        for _ in range(_SHARES):
            if not going.any():
                break
            slope = np.where(share > 0, tried - share, 0.0) / (share - last)
            y = np.maximum(now.y + slope[:, None] * (now.y - before), 0.0)
            trial = self.climb(tried, now.solution.q, y, going)
            good = going & (trial.status == Status.CONVERGED)
            before, last = np.where(good[:, None], now.y, before), np.where(good, share, last)
            now, found = now.merge(trial, good), found.merge(trial, going)
            share = np.where(good, tried, share)
            raised = np.where(good, np.minimum(ratio * ratio, 10.0), np.sqrt(ratio))
            ratio = np.where(share > 0, raised, ratio)
            tried = np.where(share > 0, np.minimum(1.0, share * ratio), tried / 10)
            going = going & (share < 1) & (tried >= _LEAST_SHARE) & (ratio >= _LEAST_RATIO)
        return found

    def at(self, share: Array, y: Array, start: Tensor) -> _Point:
        """Solve the step for shares of the loss `(N,)` and the prices G'y."""
        loss = self.loss if (share == 1.0).all() else over(self.tensor(share), 2) * self.loss
        priced = (loss + self.weigh(y)).nan_to_num() if y.any() else loss
        start = torch.where(start.isfinite(), start, self.step.interior)
        given = (self.setting.parameters, priced, self.setting.t, start, self.mdp)
        found = self.step.solve_at(*given, check=False)
        sums = (self.sums * found.q.unsqueeze(-3)).sum((-2, -1))
        totals = sums.reshape(-1, 2 * self.count).numpy(force=True)
        excess = totals[:, : self.count] - self.limits
        size = totals[:, self.count :] + np.abs(self.limits)
        status, steps, *_, dual = found.certificate.reshape(-1, 5).numpy(force=True).T
        return _Point(found, y, excess, size, steps, status, dual, np.zeros_like(y))

    def respond(self, q: Tensor) -> tuple[Tensor, Array]:
        """Return Pi G', `(*batch, m, S, A)`, and G Pi G', `(N, m, m)`, at q."""
        rows = self.costs.movedim(-3, 0)
        response = self.system(q).solve(rows, torch.zeros_like(rows[..., 0]))[0].movedim(0, -3)
        curvature = self.costs.flatten(-2) @ response.flatten(-2).mT
        C = curvature.reshape(-1, self.count, self.count).numpy(force=True).astype(np.float64)
        return response, np.where(np.isfinite(C), C, 0.0)

    def climb(self, share: Array, start: Tensor, y: Array, running: Array) -> _Point:
        """Newton's method on the multipliers, for shares of the loss."""
        kept = now = self.at(share, y, start)
        status, dual = np.full(len(y), float(Status.MAX_STEPS)), np.full(len(y), np.nan)
        patience, best = np.full(len(y), 3), np.full(len(y), np.inf)
        for _ in range(_STEPS):
            violated = np.where(now.y > 0, np.abs(now.excess), np.maximum(now.excess, 0.0))
            error = (violated / now.size).max(-1)
            patience = np.where(error < 0.5 * best, 3, patience - 1)
            best = np.fmin(best, error)
            converged = now.status == Status.CONVERGED
            lost = running & ~(converged & np.isfinite(error))
            status[lost] = np.where(converged, float(Status.STALLED), now.status)[lost]
            running = running & ~lost
            # At the level of rounding errors, a step no longer improves.
            final = (patience <= 0) | (error <= _NOISE * self.eps)
            final = running & (error <= self.tolerance) & final
            if (running & ~final).any() or now.y.any():
                response, curvature = self.respond(now.solution.q)
            if final.any():
                left = self.error_of(now, response, curvature) if now.y.any() else 0.0
                left = np.maximum(now.dual_residual, left)
                better = final & ~(left >= dual)
                dual, kept = np.where(better, left, dual), kept.merge(now, better)
                good = (dual <= self.tolerance) | (share < 1)
                # Some more steps are tried: rounding errors may be smaller there.
                done = final & (good | (patience < -_RETRIES))
                status[done] = np.where(good, float(Status.CONVERGED), float(Status.STALLED))[done]
                running = running & ~done
            if running.any():
                impossible = self.refute(now, running)
                status[impossible] = Status.INFEASIBLE
                running = running & ~impossible
            if not running.any():
                break
            most = _GROWTH * (now.y + self.natural)
            step = _best_multipliers(curvature, now.excess, now.y, most, self.eps) - now.y
            now = self.move(share, now, step, running, error)
        now = now.merge(kept, ~np.isnan(dual))._replace(steps=now.steps)
        certificate = now.solution.certificate.clone()
        dual = np.where(np.isnan(dual), now.dual_residual, dual)
        for column, x in ((0, status), (1, now.steps), (4, dual)):
            certificate[..., column] = self.tensor(x)
        return now._replace(solution=now.solution._replace(certificate=certificate), status=status)

    def refute(self, now: _Point, running: Array) -> Array:
        """Return whether y or the present violations prove that no policy meets the budgets.

        The proof, with largest weight one, is written into `now.proof`.
        """
        found = np.zeros_like(running)
        for weights in (now.y, np.maximum(now.excess, 0.0)):
            largest = weights.max(-1, keepdims=True)
            weights = weights / np.where(largest > 0, largest, 1.0)
            allowed = (weights * self.limits).sum(-1)
            # What a proof says of all policies must hold for this one.
            maybe = (weights * now.excess).sum(-1) > self.tolerance * np.abs(allowed)
            if not (maybe & running & ~found).any():
                continue
            cheapest = least_cost(self.setting.mdp, self.weigh(weights)).expand(self.batch)
            least = cheapest.reshape(-1).numpy(force=True)
            proved = least - allowed > self.tolerance * (np.abs(least) + np.abs(allowed))
            proved = proved & running & ~found
            now.proof[proved] = weights[proved]
            found = found | proved
        return found

    def error_of(self, now: _Point, response: Tensor, curvature: Array) -> Array:
        """Return the relative error of q that remains, since a budget is met only up to rounding.

        It is the change of q that would remove the violations, and the rounding errors of the sums
        and of q(s), whatever their signs. Where budgets leave little room, q answers strongly.
        """
        positive, exists = now.y > 0, self.setting.mdp.actions
        flow = now.solution.flow_residual.reshape(-1, 1).numpy(force=True)
        noise = (2 * self.eps + flow) * now.size * np.eye(self.count)[:, None]
        C, scale = _scaled(curvature, curvature.diagonal(0, -2, -1), self.eps)
        change = torch.zeros_like(now.solution.q)
        for column in (now.excess, *noise):  # (N, m)
            step = self.tensor(_solve_positive(C, column * scale, positive) * scale)
            change += (response * over(step, 2)).sum(-3).abs()
        change = change / torch.where(exists, raised(now.solution.q), torch.inf)
        return change.amax((-2, -1)).reshape(-1).numpy(force=True)

    def move(self, share: Array, now: _Point, step: Array, running: Array, error: Array) -> _Point:
        """Take a step, shortened until the slope of D at its end is nearly positive."""
        climb = (now.excess * step).sum(-1)
        low, high = np.zeros_like(climb), np.full_like(climb, np.inf)
        at_low, at_high, length = climb, climb, running * 1.0
        steps, trial = now.steps, now
        for _ in range(_SHORTENINGS):
            y = np.maximum(now.y + length[:, None] * step, 0.0)
            trial = self.at(share, y, now.solution.q)
            steps = steps + np.where(running, trial.steps, 0.0)
            slope = (trial.excess * step).sum(-1)
            slope = np.where(trial.status == Status.CONVERGED, slope, -np.inf)
            above = slope < 0
            far = (error > self.tolerance) & (slope < -0.1 * np.abs(climb))
            # Slopes that are positive again after a bracket was found: go on towards the zero.
            far = running & (far | ((high < np.inf) & (slope > 0.5 * climb)))
            far = far & (high - low > 1e-14 * low)
            if not far.any():
                break
            high, at_high = np.where(far & above, (length, slope), (high, at_high))
            low, at_low = np.where(far & ~above, (length, slope), (low, at_low))
            # Where the slope is zero if it is linear, but inside the bracket by a tenth.
            with np.errstate(invalid="ignore", divide="ignore"):
                ratio = np.clip(np.nan_to_num(at_low / (at_low - at_high), nan=0.1), 0.1, 0.9)
                length = np.where(far, low + ratio * (high - low), length)
        return now.merge(trial, running)._replace(steps=steps)


def _best_multipliers(curvature: Array, excess: Array, y: Array, most: Array, eps: float) -> Array:
    """Maximize ⟨excess, z - y⟩ - (z - y)' C (z - y) / 2 over z >= 0.

    Block principal pivoting: guess which z are positive, solve for them, and exchange those that
    violate a sign. If that cycles, only the last one is exchanged, which ends for certain.

    Args:
        curvature: C, `(N, m, m)`, symmetric and positive semidefinite.
        most: `(N, m)`, positive. Where the curvature alone would ask for a larger step, it is
            raised.
    """
    m = y.shape[-1]
    C, scale = _scaled(curvature, np.abs(excess) / most, eps)
    start = y / scale
    target = excess * scale + (C @ start[..., None])[..., 0]  # C z = target where z > 0
    positive = (start > 0) | (excess > 0)
    fewest, tries, z = np.full(len(y), m + 1), np.full(len(y), 3), start
    for _ in range(20 * m + 20):
        z = _solve_positive(C, target, positive)
        slope = target - (C @ z[..., None])[..., 0]
        noise = 64 * eps * (np.abs(target) + (np.abs(C) @ np.abs(z)[..., None])[..., 0])
        wrong = np.where(positive, z < 0, slope > noise)
        count = wrong.sum(-1)
        if not count.any():
            break
        tries = np.where(count < fewest, 3, tries - 1)
        fewest = np.minimum(fewest, count)
        last = wrong & (wrong[:, ::-1].cumsum(-1)[:, ::-1] == 1)
        positive = positive ^ np.where(tries[:, None] > 0, wrong, last)
    return np.maximum(z, 0.0) * scale


def _scaled(C: Array, least: Array, eps: float) -> tuple[Array, Array]:
    """Raise the diagonal of C to at least this, and scale it to one; return C and the scale.

    So budgets in any unit are treated alike. The ridge makes budgets that say the same twice share
    their multiplier.
    """
    diagonal, unit = C.diagonal(0, -2, -1), np.eye(C.shape[-1])
    raised = np.maximum(np.maximum(diagonal, 0.0), least)
    scale = np.where(raised > 0, raised, 1.0) ** -0.5
    C = (C + unit * (raised - diagonal)[:, None]) * scale[:, :, None] * scale[:, None]
    return C + 16 * len(unit) * eps * unit, scale


def _solve_positive(C: Array, target: Array, positive: Array) -> Array:
    """Solve C z = target for the entries that are positive, the others zero."""
    both = positive[:, :, None] & positive[:, None]
    matrix = torch.from_numpy(np.where(both, C, np.eye(C.shape[-1])))
    right = torch.from_numpy(np.where(positive, target, 0.0)[..., None])
    return torch.linalg.solve_ex(matrix, right).result.numpy()[..., 0]


# -- Derivatives -----------------------------------------------------------------------------------
#
# A budget that holds with equality is one more linear constraint, beside the flow constraints. With
# a_i = 1 for such budgets and 0 for the others, the solution satisfies
#
#     grad psi_t(q) + sum_i a_i y_i G_i - E'v = x,    E q = b,
#     a_i (h_i - ⟨G_i, q⟩) + (1 - a_i) y_i = 0.
#
# This is `torch_occ.step.implicit.Stationarity` with the multipliers (v, y) in place of v. Its
# derivatives need m more solutions of the factored system, and a matrix of size m (a bordered
# system). They exist where no budget holds with equality and has the multiplier zero.


@dataclass(frozen=True)
class BudgetedSetting(Setting):
    """A setting whose last tensors are G, h and a; with `engine`, kernels solve its systems."""

    engine: CompiledStep | None = None
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

    def shape(self, loss: Tensor, tolerance: float) -> tuple[Tensor, Tensor | float]:
        """Return gaps in place of a loss beside which prices lose digits, and what v lacks."""
        given = (spread_batch(self.t), *self.parameters)
        values = [x if x.dim() else x.item() for x in given]  # numbers take less time
        weights = self.evaluator.composition.weigh(values).terms
        sizes = (x.abs().min().item() if isinstance(x, Tensor) else abs(x) for x in weights)
        least = min(sizes, default=0.0)
        loss = keep("pair", self.mdp, loss, 0.0)
        if torch.finfo(loss.dtype).eps * float(loss.abs().max()) <= tolerance / 4 * least:
            return loss, 0.0
        shaped = shape_finely(self.mdp, loss)
        shift = shaped.value + potential(self.mdp, shaped.constants)
        fine = shaped.gaps.isfinite().all(-1).all(-1)  # not beside the largest numbers
        return torch.where(over(fine, 2), shaped.gaps, loss), torch.where(over(fine, 1), shift, 0.0)

    def systems(self, batch: torch.Size, elements: int) -> Callable[[Tensor], Factorization]:
        """Return the function from q to the factored system without budgets."""
        if self.engine is not None:
            return self.engine.systems(self.t, self.parameters)
        factorize = super().factorize
        return lambda q: factorize(keep("pair", self.mdp, raised(q), 0.0), batch, elements)

    def factorize(self, q: Tensor, batch: torch.Size, elements: int) -> Factorization:
        return Bordered(self.systems(batch, elements)(q), self.costs, self.active)


class Bordered:
    """The factored system with one more constraint per active budget."""

    def __init__(self, inner: Factorization, costs: Tensor, active: Tensor) -> None:
        self.inner, self.costs, self.active = inner, costs, active

    def solve(self, x: Tensor, r: Tensor, inexact: bool = False) -> tuple[Tensor, Tensor]:
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

    step: FTRLStep

    def solve(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        x, start, *rest, guess = tensors
        setting = self.setting.bind((*rest, torch.ones_like(rest[-1])))
        assert isinstance(setting, BudgetedSetting)
        setting.validate(x, start)
        costs, limits = setting.costs, setting.limits
        shapes = (x.shape[:-2], start.shape[:-2], costs.shape[:-3], limits.shape[:-1])
        batch = setting.batch_shape(*shapes, guess.shape[:-1])
        loss, start, costs = (
            y.expand(*batch, *y.shape[y.dim() - dims :])
            for y, dims in ((-x, 2), (start, 2), (costs, 3))
        )
        limits, guess = (y.expand(*batch, y.shape[-1]) for y in (limits, guess))
        loss, shift = setting.shape(loss, self.options.tolerance_in(loss.dtype))
        known, todo = None, np.ones(batch.numel(), dtype=np.bool_)
        if setting.engine is not None:
            y = guess.clone(memory_format=torch.contiguous_format)
            given = (loss, setting.t, start, None, setting.parameters)
            if (answer := setting.engine(*given, (costs.flatten(-2), limits, y))) is not None:
                known, converged = answer
                known = known._replace(value=known.value + shift)
                if converged:
                    return known.q, torch.cat([known.value, y], -1), known.certificate
                todo = (~known.converged).reshape(-1).numpy()
        search = _MultiplierSearch(self.step, setting, loss, costs, limits)
        found = search.solve(start, guess, todo)
        solution = found.solution._replace(value=found.solution.value + shift)
        proof, prices = search.tensor(found.proof), search.tensor(found.y)
        if known is not None:
            solution = solution.merge(known, known.converged)
            prices = torch.where(over(known.converged, 1), y, prices)
        infeasible = (solution.status == Status.INFEASIBLE).nonzero()
        if self.check and len(infeasible):
            element = tuple(infeasible[0].tolist())
            least = least_cost(setting.mdp, search.weigh(found.proof)).expand(batch)[element]
            allowed = (proof * limits).sum(-1)[element]
            raise InfeasibleError(solution, element, proof[element], float(least), float(allowed))
        report(bool(self.check), solution)
        return solution.q, torch.cat([solution.value, prices], -1), solution.certificate

    def point(self, tensors: Tensors, outputs: Tensors) -> tuple[Tensor, Tensors]:
        return outputs[0], (*tensors[2:-1], self._active(outputs, tensors[-1]))

    def operator(self, outputs: Tensors, arguments: Tensors) -> tuple[Tensor, Tensor]:
        active = self._active(outputs, arguments[-1])
        return super().operator(outputs, (*arguments[:-1], active))

    @staticmethod
    def _active(outputs: Tensors, guess: Tensor) -> Tensor:
        return (outputs[1][..., -guess.shape[-1] :].detach() > 0).to(outputs[0].dtype)


def solve_with_budgets(
    step: FTRLStep,
    engine: CompiledStep | None,
    given: tuple[Setting, Tensor, int],
    x: Tensor,
    budgets: Budgets,
    multipliers: Tensor | None,
    check: bool,
) -> Solution:
    """Solve the step with budgets for x, minus the cumulative loss.

    Given are the setting, where to start, and the number of batch dimensions. Without `engine`,
    linear systems are solved in torch.
    """
    setting, start, rank = given
    mdp = setting.mdp
    check_budgets(budgets, mdp)
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
    budgeted = BudgetedSetting(mdp, setting.evaluator, setting.probabilities, engine=engine)
    equation = BudgetedStationarity(budgeted, step.options, check, step)
    q, value, certificate = ImplicitSolution.apply(equation, *tensors)
    m = len(budgets)
    slack = limits - (costs * q.unsqueeze(-3)).sum((-2, -1))
    return Solution(q, value[..., :-m], certificate, engine is not None, value[..., -m:], slack)
