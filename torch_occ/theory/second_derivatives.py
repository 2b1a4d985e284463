"""phi_H, phi_L and their second derivatives, with q(s) the inflow of a state (`app:Hessian`).

The paper has two definitions of q(s): sum_a q(s,a), and the inflow of s. They agree on Omega, so
phi_H is the same function there. Their Hessians agree as quadratic forms on the tangent space of
Omega, {w : E w = 0}, and nowhere else. Only the inflow contains P and couples neighbouring layers,
which the recursion in torch_occ.theory.recursion needs.

The pair (s, a) has number s * A + a, and a matrix is `(*batch, SA, SA)`. Rows and columns of masked
pairs are zero. A state with one action has q(s) - q(s,a) = 0 on all of Omega: its term of phi_H is
zero there and its second derivative is infinite, so the Hessian is refused. The inverse of the
Hessian is finite (torch_occ.theory.recursion).
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_occ.mdp.layered import LayeredMDP
from torch_occ.mdp.occupancy import flow_of, flow_residual, flow_source
from torch_occ.regularizers.arguments import keep, marginal
from torch_occ.theory.parameters import Parameters


def hybrid(mdp: LayeredMDP, q: Tensor, alpha: float) -> Tensor:
    """phi_H(q) = - sum_{s,a} ( sqrt(q(s,a)) + alpha sqrt(q(s) - q(s,a)) ), `eq:hybrid`.

    Here q(s) = sum_a q(s,a). `(*batch, S, A)` -> `(*batch,)`.
    """
    return _negative_roots(mdp, q, keep("rest", mdp, marginal("rest", mdp, q), 0.0), alpha)


def hybrid_alternative(mdp: LayeredMDP, q: Tensor, alpha: float) -> Tensor:
    """phi_H with q(s) = sum_{s',a'} q(s',a') P(s|s',a'), `eq:hybrid_alternative`; `(*batch,)`.

    In the first layer q(s) is the initial distribution. The paper writes 1, for its single s_0.
    """
    arrivals = flow_of(mdp).inflow(q) + flow_source(mdp)
    return _negative_roots(mdp, q, keep("rest", mdp, arrivals.unsqueeze(-1) - q, 0.0), alpha)


def _negative_roots(mdp: LayeredMDP, q: Tensor, rest: Tensor, alpha: float) -> Tensor:
    return -(keep("pair", mdp, q, 0.0).sqrt() + alpha * rest.sqrt()).sum((-2, -1))


def log_barrier(mdp: LayeredMDP, q: Tensor, beta: float) -> Tensor:
    """phi_L(q) = beta sum_{s,a} log(1 / q(s,a)), `eq:log-barrier`; `(*batch,)`."""
    return -beta * keep("pair", mdp, q, 1.0).log().sum((-2, -1))


def inflow_rest(mdp: LayeredMDP, q: Tensor) -> Tensor:
    """q(s) - q(s,a) with q(s) the inflow, `(*batch, S, A)`.

    The other actions of the state are added up, and the flow residual of the state is subtracted.
    On Omega nothing cancels then. A residual within its own rounding error counts as zero.
    """
    residual = flow_residual(mdp, q)
    none = residual.abs() <= 16 * mdp.num_actions * max(mdp.layer_sizes) * torch.finfo(
        q.dtype
    ).eps * q.sum(-1)
    return marginal("rest", mdp, q) - torch.where(none, 0.0, residual).unsqueeze(-1)


def curvatures(mdp: LayeredMDP, q: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """c = alpha / (4 (q(s) - q(s,a))^(3/2)) and d = 1 / (4 q(s,a)^(3/2)), `(*batch, S, A)` each.

    Both are zero on masked pairs.

    Raises:
        ValueError: if a state has one action and alpha > 0; c is infinite there.
    """
    lonely = (mdp.actions.sum(-1) == 1).nonzero()
    if len(lonely) and alpha > 0:
        raise ValueError(
            f"mdp: {mdp.locate(int(lonely[0]))} has one action, where the Hessian of "
            "eq:hybrid_alternative is infinite; "
            "its inverse is finite, see theory.inverse_hessian"
        )
    c = keep("pair", mdp, alpha / (4 * inflow_rest(mdp, q) ** 1.5), 0.0)
    return c, keep("pair", mdp, 1 / (4 * keep("pair", mdp, q, 1.0) ** 1.5), 0.0)


def hessian(mdp: LayeredMDP, q: Tensor, alpha: float) -> Tensor:
    """The Hessian of `hybrid_alternative`, `lem:hessian_derivaties`; `(*batch, SA, SA)`.

    Its entries, with rest(s,a) = q(s) - q(s,a):

    `eq:derivative_1`, one layer apart:   - alpha P(s|s',a') / (4 rest(s,a)^(3/2));
    `eq:derivative_2`, in one layer:      sum_{s'',a''} alpha P(s''|s,a) P(s''|s',a')
                                          / (4 rest(s'',a'')^(3/2));
    `eq:derivative_3`, on the diagonal:   that sum, plus 1 / (4 q(s,a)^(3/2))
                                          + alpha / (4 rest(s,a)^(3/2)).

    Read: the proof says that entries are non-zero only one layer apart. Entries within a layer
    are non-zero too, as its own second case says.

    Raises:
        ValueError: if a state has one action and alpha > 0.
    """
    c, d = curvatures(mdp, q, alpha)
    to_states = mdp.joint_transitions.flatten(-3, -2)  # (*batch, SA, S)
    within = (to_states * c.sum(-1).unsqueeze(-2)) @ to_states.mT
    # The column of (s, a) has P(s | s', a') for every a.
    between = to_states.repeat_interleave(mdp.num_actions, -1) * c.flatten(-2).unsqueeze(-2)
    return torch.diag_embed((c + d).flatten(-2)) + within - between - between.mT


def quadratic_form(mdp: LayeredMDP, q: Tensor, w: Tensor, alpha: float) -> Tensor:
    """w' (Hessian) w without the Hessian, `eq:quadratic_form`; w `(*batch, S, A)` -> `(*batch,)`.

    1/4 sum_{s,a} ( w(s,a)^2 / q(s,a)^(3/2) + alpha (h(s) - w(s,a))^2 / (q(s) - q(s,a))^(3/2) ),

    where h(s) is the inflow of w. Every summand is non-negative, so phi_H is convex.

    Raises:
        ValueError: if a state has one action and alpha > 0.
    """
    c, d = curvatures(mdp, q, alpha)
    w = keep("pair", mdp, w, 0.0)
    h = flow_of(mdp).inflow(w).unsqueeze(-1)
    return (d * w.square() + c * (h - w).square()).sum((-2, -1))


def hessian_of_step(mdp: LayeredMDP, q: Tensor, parameters: Parameters, t: Tensor) -> Tensor:
    """The Hessian of psi_t = phi_H / eta_t + phi_L at q, `(*batch, SA, SA)`; t `()` or `(*batch,)`.

    Raises:
        ValueError: if a state has one action and alpha > 0.
    """
    barrier = keep("pair", mdp, parameters.beta / keep("pair", mdp, q, 1.0) ** 2, 0.0)
    return hessian(mdp, q, parameters.alpha) / parameters.eta(t)[
        ..., None, None
    ] + torch.diag_embed(barrier.flatten(-2))


def bregman(mdp: LayeredMDP, q: Tensor, p: Tensor, parameters: Parameters, t: Tensor) -> Tensor:
    """psi_t(q) - psi_t(p) - ⟨grad psi_t(p), q - p⟩ >= 0, the Bregman divergence; `(*batch,)`.

    q and p are positive and in Omega. If p minimizes <., x> + psi_t over Omega, the divergence is
    the difference of the values at q and at p, because grad psi_t(p) = E'v - x and E (q - p) = 0.
    Each summand is written so that no digits cancel when q and p are close:

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
