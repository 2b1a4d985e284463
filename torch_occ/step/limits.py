"""Budgets: upper limits on expected costs, ⟨G_i, q⟩ <= h_i for i = 1, ..., m."""

from __future__ import annotations

from torch import Tensor, nn

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import optimal_policy
from torch_occ.step.checks import SolveError
from torch_occ.step.solution import Solution


class Budgets(nn.Module):
    """Upper limits on expected costs, ⟨G_i, q⟩ <= h_i for i = 1, ..., m.

    ⟨G_i, q⟩ is the expected cost of an episode if taking action a in state s costs G_i(s,a). Both
    tensors may have a batch and may require gradients. They are buffers, so they move with the
    step.

    Args:
        costs: G, `(*batch, m, S, A)`. Values on masked pairs are ignored.
        limits: h, `(*batch, m)`.

    Raises:
        TypeError: if an argument is not a tensor of floating-point numbers.
        ValueError: if the number of budgets differs, or is zero, or a number is not finite.

    Example:
        >>> budgets = Budgets(costs, limits)  # costs (m, S, A), limits (m,)
        >>> step = FTRLStep(mdp, jin_luo(mdp), constraints=budgets)
    """

    costs: Tensor
    limits: Tensor

    def __init__(self, costs: Tensor, limits: Tensor) -> None:
        super().__init__()
        for name, x, least in (("costs", costs, 3), ("limits", limits, 1)):
            if not isinstance(x, Tensor) or not x.is_floating_point():
                found = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"{name}: expected a tensor of floating-point numbers, got {found}")
            if x.dim() < least:
                shape = "(*batch, m, S, A)" if least == 3 else "(*batch, m)"
                raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
        if costs.shape[-3] != limits.shape[-1] or limits.shape[-1] == 0:
            raise ValueError(
                "limits: expected one limit per budget and at least one budget, got "
                f"{limits.shape[-1]} limits for {costs.shape[-3]} rows of costs"
            )
        wrong = (~limits.isfinite()).nonzero()
        if len(wrong):
            raise ValueError(
                f"limits: entry {tuple(wrong[0].tolist())} is {float(limits[tuple(wrong[0])])}; "
                "expected a finite number. Leave out a budget that has no limit"
            )
        self.register_buffer("costs", costs)
        self.register_buffer("limits", limits)

    def __len__(self) -> int:
        return self.limits.shape[-1]

    def __repr__(self) -> str:
        return f"Budgets({len(self)} budgets, costs {tuple(self.costs.shape)})"

    def check(self, mdp: LayeredMDP) -> None:
        """Check that the costs fit an MDP.

        Raises:
            ValueError: if shape, number type or device differ, or a cost is not finite.
        """
        expected = (mdp.num_states, mdp.num_actions)
        if tuple(self.costs.shape[-2:]) != expected:
            raise ValueError(
                f"constraints: expected costs of shape (*batch, m, {expected[0]}, {expected[1]}), "
                f"got {tuple(self.costs.shape)}"
            )
        for name, x in (("costs", self.costs), ("limits", self.limits)):
            if x.dtype != mdp.dtype or x.device != mdp.device:
                raise ValueError(
                    f"constraints: {name} are {x.dtype} on {x.device}, the MDP {mdp.dtype} on "
                    f"{mdp.device}; convert one of them"
                )
        wrong = (~self.costs.isfinite() & mdp.actions).nonzero()
        if len(wrong):
            *batch, budget, state, action = wrong[0].tolist()
            element = f"batch element {tuple(batch)}, " if batch else ""
            raise ValueError(
                f"constraints: the cost of {element}budget {budget}, {mdp.locate(state)}, action "
                f"{action} is {float(self.costs[tuple(wrong[0])])}; expected a finite number"
            )

    def on_existing_pairs(self, mdp: LayeredMDP) -> Tensor:
        """The costs, zero on masked pairs."""
        return self.costs if bool(mdp.actions.all()) else self.costs.where(mdp.actions, 0.0)


class InfeasibleError(SolveError):
    """Raised when no policy meets all budgets.

    `certificate` holds weights y >= 0, `(m,)`. Every policy has ⟨sum_i y_i G_i, q⟩ > ⟨y, h⟩, so it
    violates at least one budget. `element` is the index of the batch element.
    """

    def __init__(
        self,
        solution: Solution,
        element: tuple[int, ...],
        certificate: Tensor,
        least: float,
        allowed: float,
    ) -> None:
        where = f"batch element {element}: " if element else ""
        weights = ", ".join(f"{y:.6g}" for y in certificate.tolist())
        super().__init__(
            f"{where}no policy meets the budgets. With weights y = ({weights}), the least possible "
            f"value of sum_i y_i ⟨G_i, q⟩ is {least:.6g}, and the limits allow {allowed:.6g}. "
            "Raise a limit whose weight is positive",
            solution,
        )
        self.certificate, self.element = certificate, element


def least_cost(mdp: LayeredMDP, costs: Tensor) -> Tensor:
    """min over q in Omega of ⟨costs, q⟩, `(*batch,)`, by backward induction."""
    value = optimal_policy(mdp, costs).value
    return (value[..., : mdp.layer_sizes[0]] * mdp.initial).sum(-1)
