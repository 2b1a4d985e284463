"""The step with budgets in compiled kernels, and the linear system of its derivatives."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_occ._support.choices import compile_message
from torch_occ._support.processes import for_each
from torch_occ.engine.budgets import Budget, find_multipliers, make_room
from torch_occ.engine.layout import PAIR, Floats, Terms, V, make_work
from torch_occ.step.arrays import number, rows, tabulate
from torch_occ.step.budgets import Found
from torch_occ.step.compiled import CompiledStep
from torch_occ.step.solution import Solution


class CompiledBudgets:
    """The compiled step at an episode t; weights and exponents are those of now.

    Args:
        t: plain, `(*batch,)` or fewer dimensions.
    """

    def __init__(self, step: CompiledStep, t: Tensor, interior: Tensor) -> None:
        self.step, self.middle = step, interior.numpy().flatten()
        formula, values = step.formula, [number(v) for v in (t, *(s[n] for s, n in step.slots))]
        if formula is None:
            formula, _, values = step.computed_by_torch(t)
        self.numbers = formula.replay(formula.spread(values))[1]

    def search(
        self, loss: Tensor, costs: Tensor, limits: Tensor, start: Tensor, guess: Tensor
    ) -> Found:
        """The compiled twin of `torch_occ.step.budgets.find_multipliers`."""
        step, batch = self.step, loss.shape[:-2]
        count, pairs, m = batch.numel(), loss.shape[-2:].numel(), limits.shape[-1]
        table = tabulate(self.numbers, batch, step.pairs)
        given = [rows(x, batch, 2).reshape(-1, pairs) for x in (loss, start)]
        prices = rows(costs.flatten(-2), batch, 2).reshape(-1, m, pairs)
        allowed = rows(limits, batch, 1).reshape(-1, m)
        q, v = np.empty((count, pairs)), np.empty((count, step.shape[0]))
        y = np.array(guess.reshape(-1, m).numpy(), copy=True)
        proof, certificate = np.zeros((count, m)), np.empty((count, 5))
        nowhere = np.zeros(0)

        def own(x: Floats, n: int) -> Floats:
            return x[min(n, len(x) - 1)]

        def solve(n: int) -> None:
            work, weights = make_work(step.model), own(table[0], n)
            terms = Terms(*step.kinds, own(table[1], n))
            work.pairs[PAIR] = own(given[1], n)
            budget = Budget(
                own(given[0], n),
                own(prices, n),
                own(allowed, n),
                y[n],
                proof[n],
                self.middle,
                nowhere,
                step.tolerance,
                step.options.max_steps,
            )
            certificate[n] = find_multipliers(
                step.model, terms, weights, budget, make_room(pairs, m), work
            )
            q[n], v[n] = work.pairs[PAIR], work.states[V]

        with compile_message:
            for_each(solve, count)
        solution = Solution(
            torch.from_numpy(q.reshape(*batch, *step.shape)),
            torch.from_numpy(v.reshape(*batch, step.shape[0])),
            torch.from_numpy(certificate.reshape(*batch, 5)),
            "engine",
        )
        shape = (*batch, m)
        return Found(
            solution, torch.from_numpy(y.reshape(shape)), torch.from_numpy(proof.reshape(shape))
        )

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
