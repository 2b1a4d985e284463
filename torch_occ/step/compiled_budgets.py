"""The step without budgets in compiled kernels, for the search for the multipliers of budgets."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.step.arrays import number, rows, tabulate
from torch_occ.step.budgets import Without
from torch_occ.step.compiled import CompiledStep, EngineSolution
from torch_occ.step.solution import Solution


class CompiledBudgets:
    """The compiled step at an episode t; weights and exponents are those of now.

    Args:
        t: plain, `(*batch,)` or fewer dimensions.
        interior: where failed elements start again.
    """

    def __init__(self, step: CompiledStep, t: Tensor, interior: Tensor) -> None:
        self.step, self.interior = step, interior
        values = [number(x) for x in step.read(t)]
        if type(values[0]) is not float:
            values[0] = values[0][..., None, None]
        found = step.composition.weigh(values)
        self.numbers = [*found.terms, *found.exponents]

    def without(self) -> Without:
        """The step without budgets, as `torch_occ.step.budgets.find_multipliers` needs it."""

        def solve(loss: Tensor, start: Tensor) -> Solution:
            found = self._solve(loss, start)
            if bool(found.converged.all()):
                return found
            again = self._solve(loss, self.interior)
            return found.merge(again, again.converged & ~found.converged)

        def respond(solution: Solution, x: Tensor) -> Tensor:
            return self.factorize(solution.q).solve(x, torch.zeros_like(x[..., 0]))[0]

        return Without(solve, respond)

    def _solve(self, loss: Tensor, start: Tensor) -> Solution:
        step, batch = self.step, loss.shape[:-2]
        table = tabulate(self.numbers, batch, step.pairs)
        found: EngineSolution = step.solve(step.world, batch, start, loss, table)
        q, v = found.tensors(batch, step.shape)
        certificate = torch.from_numpy(found.certificate.reshape(*batch, 5))
        return Solution(q, v, certificate, "engine")

    def factorize(self, q: Tensor) -> CompiledSystem:
        """The linear system at q, `(*batch, S, A)`."""
        return CompiledSystem(self, q)


class CompiledSystem:
    """A `torch_occ.step.system.Factorization` in compiled kernels."""

    def __init__(self, budgets: CompiledBudgets, q: Tensor) -> None:
        self.budgets, self.q = budgets, q

    def solve(self, x: Tensor, r: Tensor, guess: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Solve H u - E'w = x, E u = r, for x `(*more, *batch, S, A)`."""
        step, whole = self.budgets.step, x.shape[:-2]
        table = tabulate(self.budgets.numbers, whole, step.pairs)
        at = rows(self.q.expand_as(x), whole, 2)
        given = (at, rows(-x, whole, 2), rows(r, whole, 1))
        u, w, _ = step.groups.linear(step.world, whole, table, *given, wanted=0)
        return torch.from_numpy(u.reshape(x.shape)), torch.from_numpy(w.reshape(r.shape))
