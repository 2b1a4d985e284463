"""The step with budgets, from the arguments of `FTRLStep.solve` to a solution."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_occ._support.backends import later
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.step.budgets.equation import BudgetedSetting, BudgetedStationarity
from torch_occ.step.budgets.limits import Budgets, InfeasibleError, least_cost
from torch_occ.step.checks import check_batches, report
from torch_occ.step.implicit import ImplicitSolution
from torch_occ.step.problem import Problem, with_rank
from torch_occ.step.solution import Solution, Status, over

if TYPE_CHECKING:
    from torch_occ.step.compiled.solving import CompiledStep


def solve_with_budgets(
    problem: Problem,
    compiled: CompiledStep | None,
    x: Tensor,
    budgets: Budgets,
    multipliers: Tensor | None,
    check: bool,
) -> Solution:
    """Solve the step with budgets.

    Args:
        problem: the checked arguments of the step.
        compiled: the compiled step, or None to use torch.
        x: minus the cumulative loss, `(*batch, S, A)`.
        multipliers: where to start those of the budgets, `(*batch, m)`; by default zero.
        check: whether to raise `SolveError` if an element fails.
    """
    budgets.check(problem.mdp)
    costs, limits = budgets.on_existing_pairs(problem.mdp), budgets.limits
    guess = torch.zeros_like(limits).detach() if multipliers is None else multipliers.detach()
    if guess.shape[-1:] != limits.shape[-1:] or bool((guess < 0).any()):
        raise ValueError(
            f"multipliers: expected numbers of at least 0 of shape (*batch, {len(budgets)}), got "
            f"shape {tuple(guess.shape)}, least {float(guess.min())}"
        )
    shapes = {"cumulative_loss": x.shape[:-2], "t": problem.t.shape}
    shapes |= {"warm_start": problem.start.shape[:-2], "mdp": problem.mdp.batch_shape}
    shapes |= {"constraints: costs": costs.shape[:-3], "constraints: limits": limits.shape[:-1]}
    check_batches(shapes | {"multipliers": guess.shape[:-1]})
    rank = max(problem.rank, costs.dim() - 3, limits.dim() - 1, guess.dim() - 1)
    problem = problem._replace(rank=rank)
    tensors = problem.align(x)
    tensors += [with_rank(costs, rank, 3), with_rank(limits, rank, 1), with_rank(guess, rank, 1)]
    engine = None
    if compiled is not None:
        engine = later("step.compiled.budgets").CompiledBudgets(
            compiled, problem.t.detach(), problem.step.interior
        )
    equation = BudgetedStationarity(
        BudgetedSetting(problem.mdp, problem.step.evaluator, problem.probabilities, engine),
        problem.step.options,
        problem.validate,
        lambda _: None,
        problem.step.interior,
        partial(_tell, check, problem.mdp),
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
                for p, dims in zip(
                    mdp.probabilities, (1, *(layer.event_dims for layer in mdp.layers)), strict=True
                )
            )
        )
        least, allowed = least_cost(model, weighted), (weights * limits[element]).sum()
        raise InfeasibleError(solution, element, weights, float(least), float(allowed))
    report(check, solution)
