"""The Fenchel-Young loss of a target occupancy measure (Blondel, Martins and Niculae, 2020).

    FY(loss, target) = psi*(-loss) + psi(target) + ⟨target, loss⟩
                     = [⟨target, loss⟩ + psi(target)] - min over q in Omega [⟨q, loss⟩ + psi(q)]

It is convex in the loss, nonnegative, and zero exactly if the step answers with the target. Its
gradient in the loss is target - q, and its second derivative is Pi (torch_occ.step.linearization).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ._support.private import outside_graphs, values_are_hidden
from torch_occ.learning.envelope import optimal_value
from torch_occ.learning.targets import check_target
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.arguments import keep
from torch_occ.step.ftrl import FTRLStep


def fenchel_young_loss(
    step: FTRLStep,
    loss: Tensor,
    target: Tensor,
    t: Tensor | float = 1.0,
    *,
    warm_start: Tensor | None = None,
    mdp: LayeredMDP | None = None,
) -> Tensor:
    """Compute the Fenchel-Young loss between predicted losses and a target.

        ⟨target, loss⟩ + psi_t(target) - min over q in Omega of [⟨q, loss⟩ + psi_t(q)]

    The gradient in the loss is exact: target - q, with q = step(loss, t). It costs no linear solve.
    The derivatives in t and in the parameters of psi are exact too, and so are second derivatives
    (but NaN in the power of `Tsallis`, twice, at a target with zeros).

    The target may have zeros: a vertex of Omega, such as a shortest path. Where psi_t(target) is
    not finite, as with a `LogBarrier` at a vertex, this constant is left out. The value is then the
    loss up to a constant, and may be negative; its gradient in the loss is the same. Do not learn
    the parameters of psi with such targets: what is left has no minimum in them. A regularizer of
    your own is finite at zeros if it writes x log x as `-torch.special.entr(x)`.

    Args:
        step: its regularizer is psi.
        loss: the predicted losses, `(*batch, S, A)`.
        target: occupancy measures, `(*batch, S, A)`. `occupancy(mdp, policy)` makes one.
        t: the episode, as in the step.
        warm_start: where the step starts, as in `FTRLStep.solve`.
        mdp: other probabilities, as in `FTRLStep.solve`.

    Returns:
        One number per element, `(*batch,)`.

    Raises:
        ValueError: if the target is not an occupancy measure of the MDP; the message names the
            place. Inside transforms of torch.func the values of the target are not checked.
        NotImplementedError: if the budgets of the step require gradients.
        SolveError, TypeError, ValueError: as the step.
    """
    if torch.compiler.is_compiling():
        return _between_graphs(step, loss, target, t, warm_start=warm_start, mdp=mdp)
    model = step.mdp if mdp is None else mdp
    target = check_target(model, target, step.constraints)
    solution = step.solve(loss, t, warm_start=warm_start, mdp=mdp)
    t = torch.as_tensor(t, dtype=model.dtype, device=model.device)
    loss = keep("pair", model, loss.to(model.dtype), 0.0)
    paid = (target * loss).sum((-2, -1)) + _psi_if_finite(step, target, t, model)
    return paid - optimal_value(step, solution, loss, t, model)


#: torch.compile divides the graph here: the derivative of psi is computed by transforms.
_between_graphs = outside_graphs(fenchel_young_loss)


def _psi_if_finite(step: FTRLStep, target: Tensor, t: Tensor, mdp: LayeredMDP) -> Tensor:
    """Return psi_t(target) with its derivatives, or zero for elements where it is not finite."""
    psi = step.regularizer
    value = psi(target, t, mdp)
    finite = value.detach().isfinite()
    if not values_are_hidden() and bool(finite.all()):
        return value
    # Derivatives of the infinite elements would be NaN, even behind a `where`.
    inside = torch.where(finite[..., None, None], target, step.interior)
    return torch.where(finite, psi(inside, t, mdp), 0.0)
