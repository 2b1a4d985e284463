"""Targets: occupancy measures that a plan should equal, checked before they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ._support.private import carries_derivative, values_are_hidden
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_residual
from torch_occ.step.budgets.limits import Budgets
from torch_occ.step.checks import check_like, place_of


def tolerance_in(dtype: torch.dtype) -> float:
    """Return the largest error of a target: 1e-6, as of a linear-programming solver, or more."""
    return max(1e-6, torch.finfo(dtype).eps ** 0.5)


def check_target(mdp: LayeredMDP, target: Tensor, budgets: Budgets | None = None) -> Tensor:
    """Check that a target is an occupancy measure of the MDP, up to `tolerance_in` its dtype.

    It must meet the budgets, too.

    Returns:
        The target in the number type of the MDP, with tiny negative numbers set to zero.

    Raises:
        TypeError: if it is not a tensor.
        ValueError: if its shape is wrong, it is outside Omega, or it exceeds a budget; the message
            names the place.
        NotImplementedError: if the budgets require gradients.
    """
    tolerance = tolerance_in(mdp.dtype)
    if isinstance(target, Tensor) and target.is_floating_point():
        tolerance = max(tolerance, tolerance_in(target.dtype))
        target = target.to(mdp.dtype)
    check_like("target", target, mdp)
    if not values_are_hidden():
        _check_polytope(mdp, target.detach(), tolerance)
        if budgets is not None:
            _check_budgets(mdp, target.detach(), budgets, tolerance)
    return target.clamp(min=0.0)


def _check_polytope(mdp: LayeredMDP, target: Tensor, tolerance: float) -> None:
    wrong = (~target.isfinite() | (target < -tolerance)).nonzero()
    if len(wrong):
        raise ValueError(
            f"target: {place_of(mdp, wrong[0])} is {float(target[tuple(wrong[0])])}; "
            "expected an occupancy of at least 0"
        )
    wrong = ((target > tolerance) & ~mdp.actions).nonzero()
    if len(wrong):
        raise ValueError(
            f"target: {place_of(mdp, wrong[0])} is {float(target[tuple(wrong[0])])}, but this "
            "action does not exist"
        )
    residual = flow_residual(mdp, target).detach()
    wrong = (residual.abs() > tolerance).nonzero()
    if len(wrong):
        *batch, state = wrong[0].tolist()
        element = f"batch element {tuple(batch)}, " if batch else ""
        mass = float(target.expand(*residual.shape, -1).sum(-1)[tuple(wrong[0])])
        arriving = mass - float(residual[tuple(wrong[0])])
        raise ValueError(
            f"target: {element}{mdp.locate(state)} has the mass {mass:.6g}, but {arriving:.6g} "
            "arrives there, so the target is no occupancy measure of this MDP; make one with "
            "occupancy(mdp, policy), or use negative_log_likelihood for demonstrations"
        )


def _check_budgets(mdp: LayeredMDP, target: Tensor, budgets: Budgets, tolerance: float) -> None:
    if carries_derivative(budgets.costs) or carries_derivative(budgets.limits):
        raise NotImplementedError(
            "fenchel_young_loss is not differentiable in budgets; detach costs and limits, or use "
            "expected_cost"
        )
    costs = budgets.on_existing_pairs(mdp)
    spent = (costs * target.unsqueeze(-3)).sum((-2, -1))
    excess = spent - budgets.limits
    wrong = (excess > tolerance * (1 + budgets.limits.abs())).nonzero()
    if len(wrong):
        *batch, budget = wrong[0].tolist()
        element = f"batch element {tuple(batch)}, " if batch else ""
        limit = float(budgets.limits.expand_as(excess)[tuple(wrong[0])])
        raise ValueError(
            f"target: {element}budget {budget}: its expected cost is "
            f"{float(spent.expand_as(excess)[tuple(wrong[0])]):.6g}, the limit {limit:.6g}"
        )
