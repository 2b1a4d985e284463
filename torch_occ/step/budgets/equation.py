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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_occ.mdp.occupancy import flow_of, join
from torch_occ.mdp.validation import broadcast
from torch_occ.step.budgets.search import Without, find_multipliers
from torch_occ.step.implicit import Bound, Setting, Stationarity
from torch_occ.step.kkt import Factorization
from torch_occ.step.newton import newton
from torch_occ.step.solution import Solution, over

if TYPE_CHECKING:
    from torch_occ.step.compiled.budgets import CompiledBudgets


@dataclass(frozen=True)
class BudgetedBound(Bound):
    """A setting with its tensors, and the budgets that hold with equality."""

    costs: Tensor  # (*batch, m, S, A), zero for the other budgets
    limits: Tensor  # (*batch, m), zero for the other budgets
    active: Tensor  # (*batch, m), 0 or 1
    engine: CompiledBudgets | None = None

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
        rows = self.costs.movedim(-3, 0)
        # The batch dimensions of costs may be fewer than those of x.
        rows = rows.expand(m, *broadcast(rows.shape[1:], x.shape))
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
class BudgetedSetting(Setting):
    """A setting whose last tensors are G, h and a.

    With `engine`, which must have the same weights, compiled kernels solve its linear systems.
    """

    engine: CompiledBudgets | None = None

    @property
    def event_dims(self) -> tuple[int | None, ...]:
        return (*super().event_dims, 3, 1, 1)

    def bind(self, tensors: Sequence[Tensor]) -> BudgetedBound:
        *rest, costs, limits, active = tensors
        bound = super().bind(rest)
        return BudgetedBound(
            bound.mdp,
            bound.evaluator,
            bound.t,
            bound.parameters,
            costs * over(active, 2),
            limits * active,
            active,
            self.engine,
        )

    def bind_without(self, tensors: Sequence[Tensor]) -> Bound:
        """Return the same without budgets."""
        return super().bind(tensors[:-3])


@dataclass(frozen=True)
class BudgetedStationarity(Stationarity):
    """The equations above; tensors `(x, start, *setting, G, h, guess of y)`."""

    interior: Tensor
    #: reports failures, from the solution, costs, limits and certificates of infeasibility
    tell: Callable[[Solution, Tensor, Tensor, Tensor], None]

    def solve(self, x: Tensor, start: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        setting = self.setting
        assert isinstance(setting, BudgetedSetting)
        bound, (costs, limits, guess) = setting.bind_without(tensors), tensors[-3:]
        self.check(bound, x, start)
        batch = broadcast(
            x.shape[:-2],
            start.shape[:-2],
            bound.t.shape,
            bound.mdp.batch_shape,
            bound.evaluator.batch_shape(bound.parameters),
            costs.shape[:-3],
            limits.shape[:-1],
            guess.shape[:-1],
        )
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

    def _without(self, bound: Bound, batch: torch.Size) -> Without:
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
