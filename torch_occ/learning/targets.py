"""Targets: occupancy measures that a plan should equal, checked before they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ._support.private import inside_transform
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_residual
from torch_occ.step.checks import check_like, place_of


def tolerance_in(dtype: torch.dtype) -> float:
    """Return the largest error of a target: 1e-6, as of a linear-programming solver, or more."""
    return max(1e-6, torch.finfo(dtype).eps ** 0.5)


def check_target(mdp: LayeredMDP, target: Tensor) -> Tensor:
    """Check that a target is an occupancy measure of the MDP, up to `tolerance_in` its dtype.

    Returns:
        The target in the number type of the MDP, with tiny negative numbers set to zero.

    Raises:
        TypeError: if it is not a tensor.
        ValueError: if its shape is wrong, or it is outside Omega; the message names the place.
    """
    tolerance = tolerance_in(mdp.dtype)
    if isinstance(target, Tensor) and target.is_floating_point():
        tolerance = max(tolerance, tolerance_in(target.dtype))
        target = target.to(mdp.dtype)
    check_like("target", target, mdp)
    if not inside_transform():
        _check_polytope(mdp, target.detach(), tolerance)
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
