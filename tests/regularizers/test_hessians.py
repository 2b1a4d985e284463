"""The paper's Hessian (`lem:hessian_derivaties`)."""

import pytest
import torch
from torch.autograd.functional import hessian as autograd_hessian
from zoo import PROBLEMS, random_loss

import torch_occ as occ
from torch_occ.mdp.occupancy import DenseFlow

F64 = torch.float64


ALPHA = 0.625


def inflow(mdp, q):
    """q(s) as in the analysis: the inflow, and in the first layer the initial distribution."""
    later = mdp.num_states - mdp.layer_sizes[0]
    return DenseFlow(mdp).inflow(q) + torch.nn.functional.pad(mdp.initial, (0, later))


def phi_by_inflow(mdp, q):
    """`eq:hybrid_alternative`."""
    return -(q.sqrt() + ALPHA * (inflow(mdp, q).unsqueeze(-1) - q).sqrt()).sum()


def lemma(mdp, q):
    """`eq:derivative_1` to `eq:derivative_3`, entry by entry, `(S, A, S, A)`.

    Read with s'' != s_L in `eq:derivative_2` too: the terminal state has no actions.
    """
    S, A, P, layer = mdp.num_states, mdp.num_actions, mdp.joint_transitions, mdp.layer
    bend = ALPHA / (4 * (inflow(mdp, q).unsqueeze(-1) - q) ** 1.5)  # (S, A)
    H = torch.zeros(S, A, S, A, dtype=F64)
    for s, a, s2, a2 in torch.cartesian_prod(*(torch.arange(n) for n in (S, A, S, A))).tolist():
        if layer[s2] == layer[s] - 1:
            H[s2, a2, s, a] = H[s, a, s2, a2] = -P[s2, a2, s] * bend[s, a]
        elif layer[s2] == layer[s]:
            # The sum is over s''; P is zero except in the next layer.
            H[s2, a2, s, a] = (P[s, a] * P[s2, a2] * bend.sum(-1)).sum()
            if (s, a) == (s2, a2):
                H[s, a, s, a] += 1 / (4 * q[s, a] ** 1.5) + bend[s, a]
    return H


def ours(mdp, q):
    return autograd_hessian(lambda q: occ.HybridTsallis(ALPHA)(q, 1.0, mdp), q)


def quadratic_form(H, w):
    return float((w.flatten() @ H.reshape(w.numel(), -1) @ w.flatten()).detach())


@pytest.fixture(params=["layers", "contexts", "short"])
def point(request):
    short = request.param == "short"
    mdp = occ.LayeredMDP.random(3, 2, 2, seed=4) if short else PROBLEMS[request.param]().mdp
    return mdp, occ.occupancy(mdp, random_loss(mdp, 2.0).softmax(-1))


def test_the_lemma_is_the_hessian_of_the_inflow_version(point):
    mdp, q = point
    expected = autograd_hessian(lambda q: phi_by_inflow(mdp, q), q)
    torch.testing.assert_close(lemma(mdp, q), expected, rtol=1e-11, atol=1e-11)


def test_both_definitions_agree_on_omega_and_on_its_tangent_space_only(point):
    mdp, q = point
    expected = occ.HybridTsallis(ALPHA)(q, 1.0, mdp).detach()
    torch.testing.assert_close(phi_by_inflow(mdp, q), expected, rtol=1e-13, atol=0)
    paper, package = lemma(mdp, q), ours(mdp, q)
    anything = random_loss(mdp, seed=7) - 0.5
    tangent = q - occ.occupancy(mdp, random_loss(mdp, 3.0, seed=8).softmax(-1))  # E w = 0
    assert float((occ.mdp.flow_residual(mdp, q + tangent)).abs().max()) < 1e-15
    on_omega, off_omega = quadratic_form(package, tangent), quadratic_form(package, anything)
    assert quadratic_form(paper, tangent) == pytest.approx(on_omega, rel=1e-10)
    assert quadratic_form(paper, anything) != pytest.approx(off_omega, rel=1e-3)


def test_the_quadratic_form_of_the_lemma(point):
    """`eq:quadratic_form`: 1/4 sum w^2 / q^(3/2) + alpha (h(s) - w)^2 / (q(s) - q)^(3/2).

    h is the inflow of w.
    """
    mdp, q = point
    w = random_loss(mdp, seed=7) - 0.5
    h = DenseFlow(mdp).inflow(w).unsqueeze(-1)
    terms = w**2 / q**1.5 + ALPHA * (h - w) ** 2 / (inflow(mdp, q).unsqueeze(-1) - q) ** 1.5
    assert quadratic_form(lemma(mdp, q), w) == pytest.approx(float(terms.sum()) / 4, rel=1e-11)
