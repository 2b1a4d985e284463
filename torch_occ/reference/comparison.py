"""The cross-check: torch_occ and cvxpylayers side by side, q and all gradients, judged by their KKT
residuals.

`print(compare(mdp, psi, loss, t))` shows it; docs/cvxpylayers.md tells what to make of it. The
layer itself is in torch_occ.reference.cvxpy_layer, the judge in torch_occ.reference.judging.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.reference.cvxpy_layer import ALL_SETTINGS, CvxpyLayer, Settings
from torch_occ.reference.judging import Answer, Comparison, Equations, differentiable_inputs, judge
from torch_occ.regularizers.base import Regularizer
from torch_occ.step.ftrl import FTRLStep


def compare(
    mdp: LayeredMDP,
    regularizer: Regularizer,
    loss: Tensor,
    t: Tensor | float = 1.0,
    settings: Sequence[Settings] = ALL_SETTINGS,
    *,
    tolerance: float = 1e-3,
) -> Comparison:
    """torch_occ, and cvxpylayers under each of the settings: q, and the gradients of <c, q> for
    some fixed c.

    Settings whose packages are not installed are left out, and named in `Comparison.left_out` and
    where it is printed.

    Raises:
        ImportError: none of the settings is installed, so there is nothing to compare with.
        ValueError: there are no settings.
    """
    if not settings:
        raise ValueError(
            "settings: expected at least one to compare with; `judge` measures answers without "
            "cvxpylayers"
        )
    left_out = {_name(each): each.missing for each in settings if each.missing}
    if len(left_out) == len({_name(each) for each in settings}):
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise ImportError(f"settings: nothing to compare with. {reasons}")
    c = torch.arange(1, mdp.actions.numel() + 1, dtype=mdp.dtype).cos().view(mdp.actions.shape)
    equations = Equations(
        mdp,
        regularizer,
        loss.detach(),
        torch.as_tensor(t, dtype=mdp.dtype).detach().requires_grad_(),
    )
    layers: dict[str, nn.Module] = {"torch_occ": FTRLStep(mdp, regularizer)}
    # the first derivative of a process takes torch a second; do not time it
    ask("torch_occ", layers["torch_occ"], equations, c)
    layers |= {
        _name(each): CvxpyLayer(mdp, regularizer, each) for each in settings if each.installed
    }
    found = judge(
        equations,
        c,
        [ask(name, layer, equations, c) for name, layer in layers.items()],
        tolerance=tolerance,
    )
    return replace(found, left_out=left_out)


def _name(settings: Settings) -> str:
    return f"cvxpylayers, {settings.name}"


def ask(name: str, layer: nn.Module, equations: Equations, c: Tensor) -> Answer:
    """Solve and differentiate once with a layer that maps (loss, t) to q."""
    loss = equations.loss.clone().requires_grad_()
    inputs = {"loss": loss} | differentiable_inputs(equations.regularizer, equations.t)
    with warnings.catch_warnings(record=True) as caught:
        # diffcp tells of an inaccurate solve in this way
        warnings.simplefilter("always", UserWarning)
        start = time.perf_counter()
        q = layer(loss, equations.t)
        found = torch.autograd.grad((c * q).sum(), list(inputs.values()), allow_unused=True)
        seconds = time.perf_counter() - start
    warning = "; ".join(
        sorted({str(each.message) for each in caught if issubclass(each.category, UserWarning)})
    )
    return Answer(name, q.detach(), dict(zip(inputs, found, strict=True)), seconds, warning)
