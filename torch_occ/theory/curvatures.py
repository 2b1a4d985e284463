"""phi_H, phi_L and their second derivatives, with q(s) the inflow of a state (`app:Hessian`).

The paper has two definitions of q(s): sum_a q(s,a), and the inflow of s. They agree on Omega, so
phi_H is the same function there, and their Hessians agree on the tangent space of Omega. Only the
inflow couples neighbouring layers, which the recursion needs.

The pair (s, a) has number s * A + a, and a matrix is `(*batch, SA, SA)`. Rows and columns of masked
pairs are zero. In a state with one action c is infinite: the Hessian is refused, its inverse is
finite.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_occ.mdp import occupancy as measures
from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_of
from torch_occ.regularizers.terms import keep, marginal
from torch_occ.theory.statements import Parameters


def hybrid(mdp: LayeredMDP, q: Tensor, alpha: float) -> Tensor:
    """phi_H(q) = - sum_{s,a} ( sqrt(q(s,a)) + alpha sqrt(q(s) - q(s,a)) ), `eq:hybrid`.

    Here q(s) = sum_a q(s,a). `(*batch, S, A)` -> `(*batch,)`.
    """
    return _negative_roots(mdp, q, keep("rest", mdp, marginal("rest", mdp, q), 0.0), alpha)


def hybrid_alternative(mdp: LayeredMDP, q: Tensor, alpha: float) -> Tensor:
    """phi_H with q(s) = sum_{s',a'} q(s',a') P(s|s',a'), `eq:hybrid_alternative`; `(*batch,)`.

    In the first layer q(s) is the initial distribution. The paper writes 1, for its single s_0.
    """
    arrivals = flow_of(mdp).inflow(q) + measures.flow_source(mdp)
    return _negative_roots(mdp, q, keep("rest", mdp, arrivals.unsqueeze(-1) - q, 0.0), alpha)


def _negative_roots(mdp: LayeredMDP, q: Tensor, rest: Tensor, alpha: float) -> Tensor:
    return -(keep("pair", mdp, q, 0.0).sqrt() + alpha * rest.sqrt()).sum((-2, -1))


def log_barrier(mdp: LayeredMDP, q: Tensor, beta: float) -> Tensor:
    """phi_L(q) = beta sum_{s,a} log(1 / q(s,a)), `eq:log-barrier`; `(*batch,)`."""
    return -beta * keep("pair", mdp, q, 1.0).log().sum((-2, -1))


def inflow_rest(mdp: LayeredMDP, q: Tensor) -> Tensor:
    """q(s) - q(s,a) with q(s) the inflow, `(*batch, S, A)`.

    It is the sum of the other actions minus the flow residual, so that nothing cancels on Omega.
    """
    residual, terms = measures.flow_residual(mdp, q), 16 * mdp.num_actions * max(mdp.layer_sizes)
    none = residual.abs() <= terms * torch.finfo(q.dtype).eps * q.sum(-1)
    return marginal("rest", mdp, q) - torch.where(none, 0.0, residual).unsqueeze(-1)


def curvatures(
    mdp: LayeredMDP, q: Tensor, alpha: float, eta: Tensor | float = 1.0, beta: float = 0.0
) -> tuple[Tensor, Tensor]:
    """c = alpha / (4 (q(s) - q(s,a))^(3/2)) and d = 1 / (4 q(s,a)^(3/2)), `(*batch, S, A)` each.

    With eta and beta they are those of psi_t: c / eta and d / eta + beta / q(s,a)^2.
    """
    for state in ((mdp.actions.sum(-1) == 1) & (alpha > 0)).nonzero().flatten().tolist()[:1]:
        raise ValueError(
            f"mdp: {mdp.locate(state)} has one action, where the Hessian of eq:hybrid_alternative "
            "is infinite; its inverse is finite, see theory.inverse_hessian"
        )
    four = 4 * torch.as_tensor(eta, dtype=q.dtype, device=q.device)[..., None, None]
    x = keep("pair", mdp, q, 1.0)
    c, d = alpha / (four * inflow_rest(mdp, q) ** 1.5), 1 / (four * x**1.5) + beta / x.square()
    return keep("pair", mdp, c, 0.0), keep("pair", mdp, d, 0.0)


def hessian(mdp: LayeredMDP, q: Tensor, alpha: float) -> Tensor:
    """The Hessian of `hybrid_alternative`, `lem:hessian_derivaties`; `(*batch, SA, SA)`.

    Its entries, with rest(s,a) = q(s) - q(s,a):

    `eq:derivative_1`, one layer apart:   - alpha P(s|s',a') / (4 rest(s,a)^(3/2));
    `eq:derivative_2`, in one layer:      sum_{s'',a''} alpha P(s''|s,a) P(s''|s',a')
                                          / (4 rest(s'',a'')^(3/2));
    `eq:derivative_3`, on the diagonal:   that sum, plus 1 / (4 q(s,a)^(3/2))
                                          + alpha / (4 rest(s,a)^(3/2)).
    """
    return _hessian(mdp, *curvatures(mdp, q, alpha))


def _hessian(mdp: LayeredMDP, c: Tensor, d: Tensor) -> Tensor:
    to_states = mdp.joint_transitions.flatten(-3, -2)  # (*batch, SA, S)
    within = (to_states * c.sum(-1).unsqueeze(-2)) @ to_states.mT
    # The column of (s, a) has P(s | s', a') for every a.
    between = to_states.repeat_interleave(mdp.num_actions, -1) * c.flatten(-2).unsqueeze(-2)
    return torch.diag_embed((c + d).flatten(-2)) + within - between - between.mT


def quadratic_form(mdp: LayeredMDP, q: Tensor, w: Tensor, alpha: float) -> Tensor:
    """w' (Hessian) w without the Hessian, `eq:quadratic_form`; w `(*batch, S, A)` -> `(*batch,)`.

    1/4 sum_{s,a} ( w(s,a)^2 / q(s,a)^(3/2) + alpha (h(s) - w(s,a))^2 / (q(s) - q(s,a))^(3/2) ),

    where h(s) is the inflow of w. Every summand is non-negative, so phi_H is convex.
    """
    c, d = curvatures(mdp, q, alpha)
    w = keep("pair", mdp, w, 0.0)
    h = flow_of(mdp).inflow(w).unsqueeze(-1)
    return (d * w.square() + c * (h - w).square()).sum((-2, -1))


def hessian_of_step(mdp: LayeredMDP, q: Tensor, parameters: Parameters, t: Tensor) -> Tensor:
    """The Hessian of psi_t = phi_H / eta_t + phi_L at q, `(*batch, SA, SA)`."""
    return _hessian(mdp, *curvatures(mdp, q, parameters.alpha, parameters.eta(t), parameters.beta))


def bregman(mdp: LayeredMDP, q: Tensor, p: Tensor, parameters: Parameters, t: Tensor) -> Tensor:
    """psi_t(q) - psi_t(p) - ⟨grad psi_t(p), q - p⟩ >= 0, the Bregman divergence; `(*batch,)`.

    q and p are positive and in Omega. Each summand is written so that no digits cancel when q and
    p are close:

        - sqrt(x):    (sqrt(x) - sqrt(y))^2 / (2 sqrt(y)),
        - log(x):     r - log(1 + r) with r = (x - y) / y.
    """
    roots = []
    for name in ("pair", "rest"):
        x, y = (keep(name, mdp, marginal(name, mdp, point), 1.0) for point in (q, p))
        # sqrt(x) - sqrt(y) = (x - y) / (sqrt(x) + sqrt(y)). Masked arguments are 1 in both.
        roots.append(((x - y) / (x.sqrt() + y.sqrt())).square() / (2 * y.sqrt()))
    hybrid_part = (roots[0] + parameters.alpha * roots[1]).sum((-2, -1)) / parameters.eta(t)
    x, y = (keep("pair", mdp, point, 1.0) for point in (q, p))
    r = (x - y) / y
    # The series where r - log(1 + r) would cancel, the quotient where 1 + r would.
    small = r.square() * (0.5 - r * (1 / 3 - r * (1 / 4 - r * (1 / 5 - r / 6))))
    large = r - torch.where(r.abs() < 0.5, torch.log1p(r), (x / y).log())
    barrier_part = torch.where(r.abs() < 1e-3, small, large).sum((-2, -1))
    return hybrid_part + parameters.beta * barrier_part


# -- The inverse of the Hessian of phi_H, layer by layer (`app:Hessian_inverse`) -------------------
#
# C_k and D_k are the diagonal matrices of c(s,a) and d(s,a) on the pairs U_k of layer k. The paper
# defines
#
#     M_k = ( M_{k-1} 0 ; 0 D_k ) + ( P~_k ; -I ) C_k ( P~_k' , -I ),    M_0 = C_0 + D_0,
#     W_k = ( C_k^-1 + D_k^-1 + P_k' N_{k-1} P_k )^-1,
#     N_k = D_k^-1 - D_k^-1 W_k D_k^-1,                                  N_0 = M_0^-1.
#
# The Hessian is M_{L-1}, and N_k is the last block of M_k^-1. Only the inverses of c and d are
# needed, which stay finite. P_k' N_{k-1} P_k depends on a pair only through its state, so
#
#     N_k = (C_k + D_k)^-1 + B_k K_k B_k',   K_k = (G_k^-1 + Sigma_k)^-1,    G_k = T_k' N_{k-1} T_k,
#
# with T_k((s,a),s') = P(s'|s,a), B_k((s,a),s) = c / (c + d), and Sigma_k the diagonal matrix over
# states of sum_a 1 / (c^-1 + d^-1). Only non-negative matrices are added, so nothing cancels.
# In a state with one action c^-1 = 0.


class Curvature(NamedTuple):
    """1 / c(s,a) and 1 / d(s,a), `(*batch, S, A)` each; on masked pairs 1 / d is zero."""

    c_inverse: Tensor
    d_inverse: Tensor


def curvature(
    mdp: LayeredMDP, q: Tensor, alpha: float, *, eta: Tensor | float = 1.0, beta: float = 0.0
) -> Curvature:
    """1 / c and 1 / d of phi_H at q, or of psi_t = phi_H / eta + phi_L if eta and beta are given.

    phi_H has c^-1 = 4 (q(s) - q(s,a))^(3/2) / alpha and d^-1 = 4 q(s,a)^(3/2).
    """
    if not alpha > 0:
        raise ValueError(
            f"alpha: the recursion needs a positive number, got {alpha}; "
            "with 0 the Hessian is diagonal"
        )
    eta = torch.as_tensor(eta, dtype=q.dtype, device=q.device)[..., None, None]
    rest = keep("rest", mdp, inflow_rest(mdp, q), 0.0)
    d_inverse = q.square() / (q.sqrt() / (4 * eta) + beta)
    return Curvature(4 * eta * rest**1.5 / alpha, keep("pair", mdp, d_inverse, 0.0))


def all_N(mdp: LayeredMDP, curve: Curvature) -> list[Tensor]:
    """N_0, N_1, ..., N_{L-1} (`eq:def_N`), `(*batch, S_k A, S_k A)` each.

    N_k = D_k^-1 - D_k^-1 W_k D_k^-1, and N_0 = M_0^-1.
    """
    layers: list[Tensor] = []
    for k, here in enumerate(mdp.layer_slices):
        exists, (c_inverse, d_inverse) = mdp.actions[here], (part[..., here, :] for part in curve)
        both = torch.where(exists, c_inverse + d_inverse, 1.0)
        share = d_inverse / both
        found = torch.diag_embed((share * torch.where(exists, c_inverse, 0.0)).flatten(-2))
        if k:
            T = mdp.transitions[k - 1].flatten(-3, -2)
            # (G^-1 + Sigma)^-1 for a G that may be singular, by X = Sigma^1/2 G Sigma^1/2
            root = torch.where(exists, 1 / both, 0.0).sum(-1).sqrt()
            X = scale(T.mT @ layers[-1] @ T, root)
            identity = torch.eye(share.shape[-2], dtype=share.dtype, device=share.device)
            core = torch.cholesky_solve(X, torch.linalg.cholesky(identity + X))
            core = scale((core + core.mT) / 2, 1 / root)
            B = (share.unsqueeze(-1) * identity.unsqueeze(-2)).flatten(-3, -2)
            found = found + B @ core @ B.mT
        layers.append(found)
    return layers


def N_diagonal(mdp: LayeredMDP, layers: list[Tensor]) -> Tensor:
    """R(s,a) = N_{k(s)}((s,a),(s,a)) of `all_N`, `(*batch, S, A)`."""
    parts = [layer.diagonal(dim1=-2, dim2=-1) for layer in layers]
    return torch.cat(parts, -1).unflatten(-1, mdp.actions.shape)


def P(mdp: LayeredMDP, k: int) -> Tensor:
    """P_k((s,a),(s',a')) = P(s'|s,a) for k >= 1, `(*batch, S_{k-1} A, S_k A)`."""
    to_states = mdp.transitions[k - 1].flatten(-3, -2).repeat_interleave(mdp.num_actions, -1)
    return to_states * mdp.actions[mdp.layer_slices[k]].flatten()


def scale(matrix: Tensor, root: Tensor) -> Tensor:
    """Rows and columns times `root`."""
    return root.unsqueeze(-1) * matrix * root.unsqueeze(-2)


def W(mdp: LayeredMDP, curve: Curvature, k: int, before: Tensor) -> Tensor:
    """W_k = ( C_k^-1 + D_k^-1 + P~_k' M_{k-1}^-1 P~_k )^-1 of `lem:M_inverse`, for k >= 1.

    Only the rows of P~_k for layer k - 1 are not zero: P~_k' M_{k-1}^-1 P~_k = P_k' N_{k-1} P_k,
    where N_{k-1} is `before`.
    """
    here, exists = mdp.layer_slices[k], mdp.actions[mdp.layer_slices[k]].flatten()
    both = torch.where(exists, (curve.c_inverse + curve.d_inverse)[..., here, :].flatten(-2), 1.0)
    step, root = P(mdp, k), both.rsqrt()
    inside = torch.diag_embed(both) + step.mT @ before @ step
    # Unit diagonal first: the entries span many orders of magnitude.
    factor = torch.linalg.cholesky(scale(inside, root))
    scaling = root.unsqueeze(-1) * root.unsqueeze(-2)
    return torch.cholesky_inverse(factor) * torch.where(exists.unsqueeze(-1) & exists, scaling, 0.0)


def M_inverse(mdp: LayeredMDP, curve: Curvature, layers: list[Tensor]) -> Tensor:
    """M_k^-1 by Woodbury, `lem:M_inverse`, `eq:M_k_inv_decomp`; `(*batch, U_{0:k}, U_{0:k})`.

    With M = M_{k-1} and P~, W, D of layer k, it is (`lem:M_k_inverse_decomp`)

        ( M^-1 - M^-1 P~ W P~' M^-1 ,  M^-1 P~ W D^-1 ; D^-1 W P~' M^-1 ,  D^-1 - D^-1 W D^-1 ).

    `layers` are N_0, ..., N_k.
    """
    found = layers[0]
    for j in range(1, len(layers)):
        d_inverse = curve.d_inverse[..., mdp.layer_slices[j], :].flatten(-2)
        before = layers[j - 1]
        seen = found[..., -before.shape[-1] :] @ P(mdp, j)  # M_{j-1}^-1 P~_j
        across = seen @ W(mdp, curve, j, before)
        corner = across * d_inverse.unsqueeze(-2)
        top = torch.cat([found - across @ seen.mT, corner], -1)
        found = torch.cat([top, torch.cat([corner.mT, layers[j]], -1)], -2)
    return found


def inverse_hessian(mdp: LayeredMDP, curve: Curvature) -> Tensor:
    """H^-1 = M_{L-1}^-1 (`lem:def_M`, `lem:M_inverse`), `(*batch, SA, SA)`."""
    return M_inverse(mdp, curve, all_N(mdp, curve))
