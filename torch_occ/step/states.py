"""One state of the Newton system, with its actions eliminated.

Its bordered inverse holds all that the rest of the MDP needs to know of it:

    [ H_s  1 ]^-1     [ R_s     p_s    ]
    [ 1'   0 ]     =  [ p_s'  -kappa_s ]

R answers "how do the actions share a force when q(s) must not move" (R >= 0, R 1 = 0), p "how is a change of q(s) divided"
(sum p = 1, a signed policy), kappa >= 0 "what does a change of q(s) cost". For separable terms, with D = d + w and a = sum 1/D,

    R x = (x - (sum x/D) / a) / D,    p = (e/a + w) / D,    kappa = c + sum w d / D + e^2 / a,    e = 1 - sum w/D,

at O(A), and nothing cancels once e is summed around its dominant action. H_s itself need not be invertible: a regularizer
that does not feel q(s), such as the conditional entropy, has kappa = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.kernels.constants import NOISE
from torch_occ.regularizers.hessians import Blocks, Separable


class SeparableStates:
    """(R, p, kappa) of every state from d, w, c, at O(A)."""

    def __init__(self, hessian: Separable) -> None:
        d, w = hessian.d, hessian.w
        inverse = hessian.curvature.reciprocal()
        if not bool(hessian.actions.all()):
            inverse = inverse.masked_fill(~hessian.actions, 0.0)
        share = w * inverse
        # e = 1 - sum w/D cancels when one action dominates its state; there 1 - w/D is d/D. (A masked action has d = 0 and w = 0, and
        # is dominant only where all shares are zero, which is what the second term of the key is for.)
        dominant = (share + inverse.sign()).argmax(-1, keepdim=True)
        e = (-share).scatter(-1, dominant, (d * inverse).gather(-1, dominant)).sum(-1)
        self.inverse = inverse  # (*batch, S, A)
        self.softest = inverse.argmax(-1, keepdim=True)  # (*batch, S, 1)
        self.total = inverse.sum(-1)  # (*batch, S)
        self.p = (e / self.total).unsqueeze(-1) * inverse + share  # (*batch, S, A)
        self.parts = hessian.c, (share * d).sum(-1), e * e / self.total  # of kappa
        self.kappa = (self.parts[0] + self.parts[1] + self.parts[2]).clamp(min=0)  # (*batch, S)

    def respond(self, x: Tensor) -> Tensor:
        """R x. Since R 1 = 0, x may be taken relative to its entry at the softest action, which then cancels with nothing."""
        x = x - x.gather(-1, self.softest.expand(*x.shape[:-1], 1))
        return (x - ((self.inverse * x).sum(-1) / self.total).unsqueeze(-1)) * self.inverse

    def covariance(self, kernel: Tensor, layer: slice = slice(None)) -> Tensor:
        """P' R P for transitions `(*batch, S_k, A, S')` out of a layer, `(*batch, S', S')`."""
        weight = self.inverse[..., layer, :].unsqueeze(-1)
        softest = (
            self.softest[..., layer, :]
            .unsqueeze(-1)
            .expand(*weight.shape[:-2], 1, kernel.shape[-1])
        )
        deviation = kernel - kernel.expand(*weight.shape[:-1], -1).gather(-2, softest)
        mean = (weight / self.total[..., layer, None, None]).mT @ deviation
        deviation = (
            deviation.sub_(mean).mul_(weight.sqrt()).flatten(-3, -2)
        )  # in place: these are the largest tensors of a step
        return deviation.mT @ deviation

    def curves_upwards(self) -> tuple[Tensor, Tensor]:
        """Whether R >= 0 and whether kappa >= 0, before it was clamped and but for rounding; `(*batch, S)` each."""
        parts = torch.stack(self.parts)
        return (self.inverse >= 0).all(-1), parts.sum(0) >= -NOISE * parts.abs().sum(0)


class GeneralStates:
    """(R, p, kappa) of every state from its matrix, by inverting the bordered matrix."""

    def __init__(self, hessian: Blocks) -> None:
        actions = hessian.actions
        present = actions.to(hessian.blocks.dtype)
        # Scale the diagonal to one, and the border to length one, before a general-purpose inverse sees them.
        scale = torch.where(actions & (hessian.curvature > 0), hessian.curvature, 1.0).rsqrt()
        length = (scale * present).norm(dim=-1, keepdim=True)
        border = (scale * present / length).unsqueeze(-1)
        core = scale.unsqueeze(-1) * hessian.blocks * scale.unsqueeze(-2) + torch.diag_embed(
            1 - present
        )
        bordered = torch.cat(
            [torch.cat([core, border], -1), torch.nn.functional.pad(border.mT, (0, 1))], -2
        )
        inverse = torch.linalg.inv_ex(bordered).inverse
        pairs = actions.unsqueeze(-1) & actions.unsqueeze(-2)
        self.R = torch.where(
            pairs, scale.unsqueeze(-1) * inverse[..., :-1, :-1] * scale.unsqueeze(-2), 0.0
        )
        self.p = inverse[..., :-1, -1] * scale * present / length
        self.bordered, self.corner = bordered, -inverse[..., -1, -1]
        self.kappa = (self.corner / length.squeeze(-1) ** 2).clamp(min=0)

    def respond(self, x: Tensor) -> Tensor:
        return (self.R @ x.unsqueeze(-1)).squeeze(-1)

    def covariance(self, kernel: Tensor, layer: slice = slice(None)) -> Tensor:
        return kernel.flatten(-3, -2).mT @ (self.R[..., layer, :, :] @ kernel).flatten(-3, -2)

    def curves_upwards(self) -> tuple[Tensor, Tensor]:
        """The same. R >= 0 when the border is responsible for the only negative eigenvalue of the bordered matrix."""
        return has_inertia(self.bordered, 1), self.corner >= -NOISE


def has_inertia(matrix: Tensor, negative: int) -> Tensor:
    """Whether symmetric matrices `(*batch, n, n)` with entries of size one have so many negative eigenvalues, but for rounding."""
    finite = matrix.isfinite().all(-1).all(-1)
    eigenvalues = torch.linalg.eigvalsh(torch.where(finite[..., None, None], matrix, 0.0))
    return finite & ((eigenvalues < -NOISE).sum(-1) == negative)


States = SeparableStates | GeneralStates
