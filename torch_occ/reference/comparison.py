"""A comparison of torch_occ and cvxpylayers: q and all gradients, checked by KKT residuals.

`print(compare(mdp, psi, loss, t))` shows it, and docs/cvxpylayers.md explains it. The layer is in
torch_occ.reference.cvxpy_layer, the residuals in torch_occ.reference.judging.
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
    """Solve one step with torch_occ, and with cvxpylayers under each of the settings.

    Compared are q and the gradients of ⟨c, q⟩ for a fixed c. Settings whose packages are not
    installed are listed in `Comparison.left_out`, and when the comparison is printed.

    Returns:
        All answers with their residuals.

    Raises:
        ImportError: if none of the settings is installed.
        ValueError: if there are no settings.
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
    # The first derivative in a process takes torch a second, which is not timed.
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
        # diffcp reports an inaccurate solve by a UserWarning.
        warnings.simplefilter("always", UserWarning)
        start = time.perf_counter()
        q = layer(loss, equations.t)
        found = torch.autograd.grad((c * q).sum(), list(inputs.values()), allow_unused=True)
        seconds = time.perf_counter() - start
    warning = "; ".join(
        sorted({str(each.message) for each in caught if issubclass(each.category, UserWarning)})
    )
    return Answer(name, q.detach(), dict(zip(inputs, found, strict=True)), seconds, warning)
