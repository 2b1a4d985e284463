"""The blocks of the Newton system: one state, with its actions eliminated.

The rest of the MDP needs only the inverse of the bordered block,

    [ H_s  1 ]^-1     [ R_s     p_s    ]
    [ 1'   0 ]     =  [ p_s'  -kappa_s ]

R x is the response of the actions to x at constant q(s) (R >= 0, R 1 = 0). p divides a change of
q(s) among the actions (sum p = 1, a signed policy). kappa >= 0 is the curvature in q(s). For
separable terms, with D = d + w, a = sum 1/D and e = 1 - sum w/D,

    R x = (x - (sum x/D) / a) / D,    p = (e/a + w) / D,    kappa = c + sum w d / D + e^2 / a.

This costs O(A). Nothing cancels if e is computed from its dominant action. H_s itself may be
singular: a regularizer that is linear in q(s) at a fixed policy, such as the conditional entropy,
has kappa = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.kernels.constants import NOISE
from torch_occ.regularizers.hessians import Blocks, Separable


class SeparableStates:
    """(R, p, kappa) of every state from d, w, c, at the cost O(A)."""

    def __init__(self, hessian: Separable) -> None:
        d, w = hessian.d, hessian.w
        inverse = hessian.curvature.reciprocal()
        if not bool(hessian.actions.all()):
            inverse = inverse.masked_fill(~hessian.actions, 0.0)
        share = w * inverse
        # e = 1 - sum w/D cancels when one action dominates its state, so 1 - w/D of that action is
        # computed as d/D. The sign in the key keeps masked actions, where d = w = 0, from being
        # chosen if all shares are zero.
        dominant = (share + inverse.sign()).argmax(-1, keepdim=True)
        e = (-share).scatter(-1, dominant, (d * inverse).gather(-1, dominant)).sum(-1)
        self.inverse = inverse  # (*batch, S, A)
        self.softest = inverse.argmax(-1, keepdim=True)  # (*batch, S, 1)
        self.total = inverse.sum(-1)  # (*batch, S)
        self.p = (e / self.total).unsqueeze(-1) * inverse + share  # (*batch, S, A)
        self.parts = hessian.c, (share * d).sum(-1), e * e / self.total  # of kappa
        self.kappa = (self.parts[0] + self.parts[1] + self.parts[2]).clamp(min=0)  # (*batch, S)

    def respond(self, x: Tensor) -> Tensor:
        """Return R x.

        Since R 1 = 0, x is first taken relative to its entry at the softest action, the one with
        the largest 1/D. Then nothing cancels there.
        """
        x = x - x.gather(-1, self.softest.expand(*x.shape[:-1], 1))
        return (x - ((self.inverse * x).sum(-1) / self.total).unsqueeze(-1)) * self.inverse

    def covariance(self, kernel: Tensor, layer: slice = slice(None)) -> Tensor:
        """Return P' R P `(*batch, S', S')` for transitions `(*batch, S_k, A, S')` of a layer."""
        weight = self.inverse[..., layer, :].unsqueeze(-1)
        softest = self.softest[..., layer, :].unsqueeze(-1)
        softest = softest.expand(*weight.shape[:-2], 1, kernel.shape[-1])
        deviation = kernel - kernel.expand(*weight.shape[:-1], -1).gather(-2, softest)
        mean = (weight / self.total[..., layer, None, None]).mT @ deviation
        # In place, because these are the largest tensors of a step.
        deviation = deviation.sub_(mean).mul_(weight.sqrt()).flatten(-3, -2)
        return deviation.mT @ deviation

    def curves_upwards(self) -> tuple[Tensor, Tensor]:
        """Return whether R >= 0 and whether kappa >= 0 before clamping, up to rounding.

        Both have the shape `(*batch, S)`.
        """
        parts = torch.stack(self.parts)
        return (self.inverse >= 0).all(-1), parts.sum(0) >= -NOISE * parts.abs().sum(0)


class GeneralStates:
    """(R, p, kappa) of every state from its block H_s, by inverting the bordered matrix."""

    def __init__(self, hessian: Blocks) -> None:
        actions = hessian.actions
        present = actions.to(hessian.blocks.dtype)
        # Scale the diagonal to one and the border to length one, so that the inverse is accurate.
        scale = torch.where(actions & (hessian.curvature > 0), hessian.curvature, 1.0).rsqrt()
        length = (scale * present).norm(dim=-1, keepdim=True)
        border = (scale * present / length).unsqueeze(-1)
        core = scale.unsqueeze(-1) * hessian.blocks * scale.unsqueeze(-2)
        core = core + torch.diag_embed(1 - present)
        upper, lower = torch.cat([core, border], -1), torch.nn.functional.pad(border.mT, (0, 1))
        bordered = torch.cat([upper, lower], -2)
        inverse = torch.linalg.inv_ex(bordered).inverse
        pairs = actions.unsqueeze(-1) & actions.unsqueeze(-2)
        R = scale.unsqueeze(-1) * inverse[..., :-1, :-1] * scale.unsqueeze(-2)
        self.R = torch.where(pairs, R, 0.0)
        self.p = inverse[..., :-1, -1] * scale * present / length
        self.bordered, self.corner = bordered, -inverse[..., -1, -1]
        self.kappa = (self.corner / length.squeeze(-1) ** 2).clamp(min=0)

    def respond(self, x: Tensor) -> Tensor:
        return (self.R @ x.unsqueeze(-1)).squeeze(-1)

    def covariance(self, kernel: Tensor, layer: slice = slice(None)) -> Tensor:
        return kernel.flatten(-3, -2).mT @ (self.R[..., layer, :, :] @ kernel).flatten(-3, -2)

    def curves_upwards(self) -> tuple[Tensor, Tensor]:
        """Return whether R >= 0 and whether kappa >= 0, up to rounding; `(*batch, S)` each.

        R >= 0 holds if the bordered matrix has exactly one negative eigenvalue, due to the border.
        """
        return has_inertia(self.bordered, 1), self.corner >= -NOISE


def has_inertia(matrix: Tensor, negative: int) -> Tensor:
    """Return whether symmetric matrices have this number of negative eigenvalues, up to rounding.

    Args:
        matrix: `(*batch, n, n)`, scaled to entries of size one.
        negative: the number of negative eigenvalues.
    """
    finite = matrix.isfinite().all(-1).all(-1)
    eigenvalues = torch.linalg.eigvalsh(torch.where(finite[..., None, None], matrix, 0.0))
    return finite & ((eigenvalues < -NOISE).sum(-1) == negative)


States = SeparableStates | GeneralStates
