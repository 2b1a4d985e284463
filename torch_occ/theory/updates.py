"""One update of FTRL: tilde q_t, and how far it is from q_t (`app:appendix_proof_ftrl`).

q_t minimizes F_t(q) = ⟨q, hat L_{t-1}⟩ + psi_t(q) over Omega, and tilde q_t minimizes
G_t(q) = ⟨q, hat L_t⟩ + psi_t(q). The log-barrier keeps the two close.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.regularizers.arguments import keep
from torch_occ.step.ftrl import FTRLStep
from torch_occ.theory.parameters import Parameters
from torch_occ.theory.second_derivatives import curvatures, hessian_of_step
from torch_occ.theory.stability import norm
from torch_occ.theory.statements import Statement, statement


def tilde(step: FTRLStep, q: Tensor, cumulative_loss: Tensor, t: Tensor | float) -> Tensor:
    """tilde q_t = argmin over Omega of G_t(q) = ⟨q, hat L_t⟩ + psi_t(q), `eq:tilde_q_def`.

    hat L_t = `cumulative_loss` includes the estimate of episode t. The shape is that of q.

    Read: G_t is printed as ⟨q_t, hat L_t⟩ + psi_t(q). Its minimizer would not depend on the losses.
    """
    with torch.no_grad():
        solution = step.solve(cumulative_loss, t, warm_start=q, check=False)
        # A warm start can be too close to the boundary. From the middle Newton's method converges.
        return solution.q if bool(solution.converged.all()) else step.solve(cumulative_loss, t).q


def close_hessian(
    mdp: LayeredMDP, q: Tensor, p: Tensor, parameters: Parameters, t: Tensor
) -> Statement:
    """`lem:close_hessian`: if q/2 <= p, then (Hessian of psi_t at p) <= 4 (Hessian of psi_t at q).

    The left side is a quarter of the largest eigenvalue of the first matrix in the norm of the
    second, over the pairs that exist, and the right side is 1. q and p are in Omega, and every
    state has at least two actions.

    Raises:
        ValueError: if a state has one action.
    """
    exists = mdp.actions.flatten()
    identity = torch.eye(len(exists), dtype=q.dtype, device=q.device)
    inflow = mdp.joint_transitions.flatten(-3, -2).mT.repeat_interleave(
        mdp.num_actions, -2
    )  # row (s, a) is the inflow of s
    # By eq:quadratic_form the Hessian is A' diag(weights) A. Without forming it, twice as many
    # digits are kept.
    A = torch.cat([identity.expand_as(inflow), inflow - identity], -2)[..., exists]
    at_q, at_p = (_weights(mdp, x, parameters, t).sqrt().unsqueeze(-1) for x in (q, p))
    length = (at_q * A).norm(dim=-2, keepdim=True)
    R = torch.linalg.qr(at_q * A / length).R
    ratio = torch.linalg.solve_triangular(R, at_p * A / (2 * length), upper=True, left=False)
    condition = torch.linalg.matrix_norm(torch.linalg.inv(R))
    largest = torch.linalg.matrix_norm(ratio, 2).square()
    return statement("lem:close_hessian", largest, 1.0, mdp.num_pairs, scale=condition)


def _weights(mdp: LayeredMDP, q: Tensor, parameters: Parameters, t: Tensor) -> Tensor:
    """The weights of w(s,a)^2 and (h(s) - w(s,a))^2 in the Hessian of psi_t, `(*batch, 2 S A)`.

    They are zero on masked pairs.
    """
    (c, d), eta = curvatures(mdp, q, parameters.alpha), parameters.eta(t)[..., None, None]
    barrier = keep("pair", mdp, parameters.beta / keep("pair", mdp, q, 1.0).square(), 0.0)
    return torch.cat([(d / eta + barrier).flatten(-2), (c / eta).flatten(-2)], -1)


def smooth_update(mdp: LayeredMDP, q: Tensor, tilde_q: Tensor) -> tuple[Statement, Statement]:
    """`lem:smooth_update`, for beta >= 64 L: q_t(s,a) / 2 <= tilde q_t(s,a) <= 2 q_t(s,a).

    The left sides are the largest q / tilde q and the largest tilde q / q, the right sides are 2.
    """
    down, up = (torch.where(mdp.actions, x, 1.0).amax((-2, -1)) for x in (q / tilde_q, tilde_q / q))
    return statement("lem:smooth_update, below", down, 2.0, 1), statement(
        "lem:smooth_update, above", up, 2.0, 1
    )


def step_length(
    mdp: LayeredMDP, q: Tensor, tilde_q: Tensor, parameters: Parameters, t: Tensor
) -> tuple[Statement, Statement]:
    """`eq:earlier_argument`, for beta >= 64 L:

        beta sum_{s,a} (tilde q - q)^2 / q^2 <= |tilde q - q|^2 <= 1,

    in the norm of the Hessian of psi_t at q_t. With beta >= 9 this gives `lem:smooth_update`, even
    with 4/3 in place of 2.

    Read: the norms are printed without their squares.
    """
    change = keep("pair", mdp, tilde_q - q, 0.0)
    barrier = parameters.beta * (change / keep("pair", mdp, q, 1.0)).square().sum((-2, -1))
    whole = norm(hessian_of_step(mdp, q, parameters, t), change)
    label = "eq:earlier_argument"
    return statement(f"{label}, log-barrier", barrier, whole, mdp.num_pairs**2), statement(
        f"{label}, whole", whole, 1.0, mdp.num_pairs**2
    )
