"""The Hessian of phi_H under the paper's second definition of q(s), the inflow (`app:Hessian`).

On Omega the inflow of a state equals sum_a q(s,a), so phi_H is the same function there whichever of the two stands for q(s), and the two
Hessians agree as quadratic forms on Omega's tangent space {w : E w = 0}. Off it they do not: only the inflow carries P, and only it couples
layers, which is what the recursion of torch_occ.theory.recursion lives on.

Pairs (s, a) are numbered s * A + a; a matrix is `(*batch, SA, SA)`. Rows and columns of masked pairs are zero. A state of one action
has q(s) - q(s,a) = 0 on all of Omega: its term is zero there, its Hessian infinite, and asking for it is an error. The *inverse* of the
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
    """phi_H(q) = - sum_{s,a} ( sqrt(q(s,a)) + alpha sqrt(q(s) - q(s,a)) ) with q(s) = sum_a q(s,a), `eq:hybrid`; `(*batch,)`."""
    return _negative_roots(mdp, q, keep("rest", mdp, marginal("rest", mdp, q), 0.0), alpha)


def hybrid_alternative(mdp: LayeredMDP, q: Tensor, alpha: float) -> Tensor:
    """The same with q(s) = sum_{s',a'} q(s',a') P(s | s',a'), and the initial distribution in the first layer, `eq:hybrid_alternative`.

    The paper writes 1 for q(s_0); with several start states that is the initial distribution.
    """
    arrivals = flow_of(mdp).inflow(q) + flow_source(mdp)
    return _negative_roots(mdp, q, keep("rest", mdp, arrivals.unsqueeze(-1) - q, 0.0), alpha)


def _negative_roots(mdp: LayeredMDP, q: Tensor, rest: Tensor, alpha: float) -> Tensor:
    return -(keep("pair", mdp, q, 0.0).sqrt() + alpha * rest.sqrt()).sum((-2, -1))


def log_barrier(mdp: LayeredMDP, q: Tensor, beta: float) -> Tensor:
    """phi_L(q) = beta sum log(1 / q(s,a)), `eq:log-barrier`; `(*batch,)`."""
    return -beta * keep("pair", mdp, q, 1.0).log().sum((-2, -1))


def inflow_rest(mdp: LayeredMDP, q: Tensor) -> Tensor:
    """q(s) - q(s,a) with q(s) the inflow, `(*batch, S, A)`.

    On Omega it is summed from the other actions, without cancellation; off it, the flow residual is taken away from that. A residual
    as small as its own rounding counts as none.
    """
    residual = flow_residual(mdp, q)
    none = residual.abs() <= 16 * mdp.num_actions * max(mdp.layer_sizes) * torch.finfo(q.dtype).eps * q.sum(-1)
    return marginal("rest", mdp, q) - torch.where(none, 0.0, residual).unsqueeze(-1)


def curvatures(mdp: LayeredMDP, q: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """c(s,a) = alpha / (4 (q(s) - q(s,a))^(3/2)) and d(s,a) = 1 / (4 q(s,a)^(3/2)), `(*batch, S, A)`; zero on masked pairs."""
    lonely = (mdp.actions.sum(-1) == 1).nonzero()
    if len(lonely) and alpha > 0:
        raise ValueError(
            f"mdp: {mdp.locate(int(lonely[0]))} has one action, where the Hessian of eq:hybrid_alternative is infinite; "
            "its inverse is finite, see theory.inverse_hessian"
        )
    c = keep("pair", mdp, alpha / (4 * inflow_rest(mdp, q) ** 1.5), 0.0)
    return c, keep("pair", mdp, 1 / (4 * keep("pair", mdp, q, 1.0) ** 1.5), 0.0)


def hessian(mdp: LayeredMDP, q: Tensor, alpha: float) -> Tensor:
    """The Hessian of `hybrid_alternative`, `lem:hessian_derivaties`, `(*batch, SA, SA)`.

    `eq:derivative_1`, one layer apart:      - alpha P(s|s',a') / (4 (q(s) - q(s,a))^(3/2));
    `eq:derivative_2`, in the same layer:    sum_{s'',a''} alpha P(s''|s,a) P(s''|s',a') / (4 (q(s'') - q(s'',a''))^(3/2));
    `eq:derivative_3`, on the diagonal:      that sum, and 1 / (4 q(s,a)^(3/2)) + alpha / (4 (q(s) - q(s,a))^(3/2)).

    Read: the proof says that an entry is non-zero only one layer apart; entries within a layer are too, as its own second case has it.
    """
    c, d = curvatures(mdp, q, alpha)
    to_states = mdp.joint_transitions.flatten(-3, -2)  # (*batch, SA, S)
    within = (to_states * c.sum(-1).unsqueeze(-2)) @ to_states.mT
    # A column (s, a) sees P(s | s', a'), whatever a is.
    between = to_states.repeat_interleave(mdp.num_actions, -1) * c.flatten(-2).unsqueeze(-2)
    return torch.diag_embed((c + d).flatten(-2)) + within - between - between.mT


def quadratic_form(mdp: LayeredMDP, q: Tensor, w: Tensor, alpha: float) -> Tensor:
    """w' (Hessian) w without the Hessian, `eq:quadratic_form`; w `(*batch, S, A)` -> `(*batch,)`.

    1/4 sum_{s,a} ( w(s,a)^2 / q(s,a)^(3/2) + alpha (h(s) - w(s,a))^2 / (q(s) - q(s,a))^(3/2) ), where h is the inflow of w.
    Every summand is non-negative, so phi_H is convex.
    """
    c, d = curvatures(mdp, q, alpha)
    w = keep("pair", mdp, w, 0.0)
    h = flow_of(mdp).inflow(w).unsqueeze(-1)
    return (d * w.square() + c * (h - w).square()).sum((-2, -1))


def hessian_of_step(mdp: LayeredMDP, q: Tensor, parameters: Parameters, t: Tensor) -> Tensor:
    """The Hessian of psi_t = phi_H / eta_t + phi_L at q, `(*batch, SA, SA)`; t is `()` or `(*batch,)`."""
    barrier = keep("pair", mdp, parameters.beta / keep("pair", mdp, q, 1.0) ** 2, 0.0)
    return hessian(mdp, q, parameters.alpha) / parameters.eta(t)[..., None, None] + torch.diag_embed(barrier.flatten(-2))


def bregman(mdp: LayeredMDP, q: Tensor, p: Tensor, parameters: Parameters, t: Tensor) -> Tensor:
    """The Bregman divergence of psi_t, psi_t(q) - psi_t(p) - <grad psi_t(p), q - p> >= 0, `(*batch,)`; q and p are positive, in Omega.

    If p minimizes <., x> + psi_t over Omega, this is how much more q costs: grad psi_t(p) = E'v - x and E (q - p) = 0. Each summand is
    written so that no digits cancel when q and p are close:

        of - sqrt(x):    (sqrt(x) - sqrt(y))^2 / (2 sqrt(y))          of - log(x):    r - log(1 + r),    r = (x - y) / y.
    """
    roots = []
    for name in ("pair", "rest"):
        x, y = (keep(name, mdp, marginal(name, mdp, point), 1.0) for point in (q, p))
        # sqrt(x) - sqrt(y) = (x - y) / (sqrt(x) + sqrt(y)); where the argument does not exist both are 1.
        roots.append(((x - y) / (x.sqrt() + y.sqrt())).square() / (2 * y.sqrt()))
    hybrid_part = (roots[0] + parameters.alpha * roots[1]).sum((-2, -1)) / parameters.eta(t)
    x, y = (keep("pair", mdp, point, 1.0) for point in (q, p))
    r = (x - y) / y
    # By its series where r - log(1 + r) would cancel, and from the quotient where 1 + r would.
    small = r.square() * (0.5 - r * (1 / 3 - r * (1 / 4 - r * (1 / 5 - r / 6))))
    large = r - torch.where(r.abs() < 0.5, torch.log1p(r), (x / y).log())
    barrier_part = torch.where(r.abs() < 1e-3, small, large).sum((-2, -1))
    return hybrid_part + parameters.beta * barrier_part
