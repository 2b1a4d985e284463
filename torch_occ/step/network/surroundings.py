"""What surrounds a step in a network: other number types, autocast, inference mode."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.step.solution import Solution


def promote(loss: Tensor, mdp: LayeredMDP) -> Tensor:
    """Convert a loss of lower precision, from a float32 network for example, to that of the MDP.

    Autograd converts its gradient back. Other tensors are returned as they are.
    """
    dtype = mdp.dtype
    if getattr(loss, "dtype", dtype) is dtype:  # isinstance would cost a microsecond
        return loss
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        return loss
    return loss.to(dtype) if loss.dtype.itemsize < dtype.itemsize else loss


def autocasts(loss: Tensor) -> bool:
    """Return whether autocast is active; it would compute products of Newton's method in 16 bits.

    torch leaves double precision alone.
    """
    plain = getattr(loss, "dtype", None) in (torch.float64, None)
    return not plain and torch.is_autocast_enabled(loss.device.type)


def solve_plainly(
    solve: Callable[..., Solution],
    loss: Tensor,
    t: Tensor | float,
    warm_start: Tensor | None,
    multipliers: Tensor | None,
) -> Solution:
    """Solve a step without autocast and without inference mode.

    Newton's method needs autograd for Hessians, which inference mode excludes. The solution found
    there does not require gradients.
    """
    if not torch.is_inference_mode_enabled():
        with torch.autocast(loss.device.type, enabled=False):
            return solve(loss, t, warm_start=warm_start, multipliers=multipliers)
    with torch.inference_mode(False), torch.no_grad():
        # Autograd refuses tensors that were made in inference mode.
        start, prices = (x if x is None else x.clone() for x in (warm_start, multipliers))
        episode = t.clone() if isinstance(t, Tensor) else t
        return solve(loss.clone(), episode, warm_start=start, multipliers=prices)
