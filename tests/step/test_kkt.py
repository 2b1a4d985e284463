import mpmath
import pytest
import torch
from zoo import PROBLEMS, random_loss

import torch_occ as occ
from torch_occ.mdp.occupancy import DenseFlow, LayeredFlow, flow_source
from torch_occ.regularizers.derivatives import Separable
from torch_occ.regularizers.terms import sum_of_others
from torch_occ.step.system import (
    ConjugateGradients,
    DenseFactorization,
    FullFactorization,
    GeneralStates,
    LayeredFactorization,
    SeparableStates,
    factorize,
)

F64 = torch.float64


def hessian_at(mdp, q, kind):
    """Closed forms, so that nothing but kkt.py is under test."""
    several = (mdp.actions.sum(-1, keepdim=True) > 1) & mdp.actions
    x, rest = torch.where(mdp.actions, q, 1.0), torch.where(several, sum_of_others(q), 1.0)
    zero, state = torch.zeros_like(q), q.sum(-1)
    d, w, c = {
        "tsallis": (x**-1.5 / 4, zero, 0 * state),
        "barrier": (0.3 / x**2, zero, 0 * state),
        "hybrid": (x**-1.5 / 4, rest**-1.5 / 8, 0 * state),
        "jin_luo": (5 * x**-1.5 + 0.3 / x**2, 3 * rest**-1.5, 0 * state),
        "conditional_entropy": (1 / x, zero, -1 / state),
        "everything": (1 / x, 0.5 * rest**-1.5, 2 + state),
    }[kind]
    return Separable(torch.where(mdp.actions, d, 0.0), torch.where(several, w, 0.0), c, mdp.actions)


KINDS = ["tsallis", "hybrid", "jin_luo", "conditional_entropy", "everything"]

# -- one state -------------------------------------------------------------------------------------


def exact_bordered_inverse(hessian, state):
    """(R, p, kappa) of one state from its d, w and c in 100 digits, as dictionaries by action."""
    actions = hessian.actions[state].nonzero().flatten().tolist()
    with mpmath.workdps(100):
        d, w = (
            {a: mpmath.mpf(float(x[state, a])) for a in actions} for x in (hessian.d, hessian.w)
        )
        common = sum(w.values()) + mpmath.mpf(float(hessian.c[state]))
        bordered = mpmath.matrix(len(actions) + 1)
        for i, a in enumerate(actions):
            bordered[i, len(actions)] = bordered[len(actions), i] = 1
            for j, b in enumerate(actions):
                bordered[i, j] = common - w[a] - w[b] + (d[a] + w[a] if a == b else 0)
        inverse = bordered**-1
        R = {(a, b): inverse[i, j] for i, a in enumerate(actions) for j, b in enumerate(actions)}
        p = {a: inverse[i, len(actions)] for i, a in enumerate(actions)}
        return R, p, -inverse[len(actions), len(actions)]


def compare(states, hessian, relative, absolute=0.0):
    """Compare R, P'RP, p and kappa, each entry relative to its own size.

    `absolute` is in units of the curvature.
    """
    num_states, num_actions = hessian.actions.shape
    # One action of every state at a time.
    units = torch.eye(num_actions, dtype=F64).unsqueeze(1).expand(-1, num_states, -1)
    responses = states.respond(units * hessian.actions)
    kernel = torch.rand(
        num_states, num_actions, 1, dtype=F64, generator=torch.Generator().manual_seed(0)
    ) * hessian.actions.unsqueeze(-1)
    assert not bool(responses[:, ~hessian.actions].any() or states.p[~hessian.actions].any())

    def near(found, expected, unit):
        return abs(float(found) - expected) <= relative * abs(expected) + absolute * unit

    for s in range(num_states):
        R, p, kappa = exact_bordered_inverse(hessian, s)
        scale, P = (
            hessian.curvature[s].rsqrt().tolist(),
            [mpmath.mpf(x) for x in kernel[s, :, 0].tolist()],
        )
        with mpmath.workdps(100):
            variance = mpmath.fsum(P[a] * R[a, b] * P[b] for a, b in R)
        assert near(
            states.covariance(kernel[s : s + 1], slice(s, s + 1)),
            variance,
            max(scale[a] for a in p) ** 2,
        )
        assert near(states.kappa[s], kappa, abs(float(hessian.c[s])))
        # p is a sum of signed parts of the size w / D.
        rounding = {a: 1e-15 * float(hessian.w[s, a] * scale[a] ** 2) for a in p}
        assert all(
            near(states.p[s, a], p[a], 1.0) or abs(float(states.p[s, a]) - p[a]) <= rounding[a]
            for a in p
        )
        assert all(near(responses[b, s, a], R[a, b], scale[a] * scale[b]) for a, b in R)


@pytest.mark.parametrize("problem", ["contexts", "masked", "layers", "no_choice"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_state_is_its_bordered_inverse(kind, problem):
    mdp = PROBLEMS[problem]().mdp
    hessian = hessian_at(mdp, occ.interior_point(mdp), kind)
    compare(SeparableStates(hessian), hessian, 1e-13, 1e-14)
    compare(GeneralStates(hessian.to_blocks()), hessian, 1e-12, 1e-12)


@pytest.mark.parametrize("small", [1e-6, 1e-12])
@pytest.mark.parametrize("kind", ["tsallis", "barrier", "hybrid", "jin_luo", "everything"])
def test_a_nearly_deterministic_state_keeps_its_digits(kind, small):
    """The tiny entries of the dominant action too: they are the derivative of its occupancy."""
    visits = torch.linspace(0.1, 1.0, 23, dtype=F64)  # many, because rounding is kind to some
    mdp = occ.LayeredMDP([torch.ones(23, 3, 1, dtype=F64)], initial=visits / visits.sum())
    hessian = hessian_at(
        mdp,
        visits.unsqueeze(-1) * torch.tensor([small, 1 - 1.5 * small, 0.5 * small], dtype=F64),
        kind,
    )
    compare(SeparableStates(hessian), hessian, 1e-10)


def test_a_function_of_the_policy_alone_costs_nothing_in_a_state_with_one_action():
    """Its block is [0]; the bordered inverse exists all the same, with R = 0, p = 1, kappa = 0."""
    actions = torch.tensor([[True, True], [True, False]])
    d, c = (
        torch.tensor([[2.0, 4.0], [3.0, 0.0]], dtype=F64),
        torch.tensor([-4 / 3, -3.0], dtype=F64),
    )
    hessian = Separable(d, torch.zeros_like(d), c, actions)
    for states in (SeparableStates(hessian), GeneralStates(hessian.to_blocks())):
        torch.testing.assert_close(states.kappa, torch.zeros(2, dtype=F64), rtol=0, atol=1e-15)
        torch.testing.assert_close(
            states.p, torch.tensor([[2 / 3, 1 / 3], [1.0, 0.0]], dtype=F64), rtol=1e-15, atol=0
        )
        torch.testing.assert_close(
            states.respond(torch.ones(2, 2, dtype=F64)),
            torch.zeros(2, 2, dtype=F64),
            rtol=0,
            atol=1e-15,
        )


# -- all states ------------------------------------------------------------------------------------


def iterative(states, mdp):
    return ConjugateGradients(states, LayeredFlow(mdp), occ.interior_point(mdp).sum(-1))


FACTORIZATIONS = {
    "dense": lambda hessian, mdp: DenseFactorization(SeparableStates(hessian), DenseFlow(mdp)),
    "layered": lambda hessian, mdp: LayeredFactorization(
        SeparableStates(hessian), LayeredFlow(mdp)
    ),
    "dense, blocks": lambda hessian, mdp: DenseFactorization(
        GeneralStates(hessian.to_blocks()), DenseFlow(mdp)
    ),
    "layered, blocks": lambda hessian, mdp: LayeredFactorization(
        GeneralStates(hessian.to_blocks()), LayeredFlow(mdp)
    ),
    "iterative": lambda hessian, mdp: iterative(SeparableStates(hessian), mdp),
    "iterative, blocks": lambda hessian, mdp: iterative(GeneralStates(hessian.to_blocks()), mdp),
    "iterative, sparse": lambda hessian, mdp: iterative(
        SeparableStates(hessian), mdp if mdp.batch_shape else mdp.to_sparse()
    ),
    "full": lambda hessian, mdp: FullFactorization(hessian.to_full(), mdp),
}
every_factorization = pytest.mark.parametrize("build", FACTORIZATIONS.values(), ids=FACTORIZATIONS)


def batch_of_mdps():
    mdps = [occ.LayeredMDP.random(3, 3, 2, seed=seed) for seed in range(4)]
    actions = torch.ones(7, 2, dtype=torch.bool)
    actions[2, 0] = False
    return occ.LayeredMDP(
        [torch.stack(layer) for layer in zip(*(mdp.transitions for mdp in mdps), strict=True)],
        actions=actions,
    )


MDPS = {name: (lambda build=build: build().mdp) for name, build in PROBLEMS.items()}
MDPS |= {
    "batch": batch_of_mdps,
    "concentration 0.01": lambda: occ.LayeredMDP.random(
        5, 4, 3, seed=3, concentration=0.01
    ).prune(),
}


def system(name, kind, *batch):
    mdp = MDPS[name]()
    weights = (random_loss(mdp, seed=9) + 0.05) * mdp.actions
    q = occ.occupancy(mdp, weights / weights.sum(-1, keepdim=True))
    curvature = hessian_at(mdp, q, kind).curvature
    # Right-hand sides as large as in a run: x in units of the curvature, r in units of the flow.
    x = (random_loss(mdp, seed=1, batch=batch) - 0.5) * curvature.sqrt()
    r = (random_loss(mdp, seed=2, batch=batch).sum(-1) - 0.5) * q.sum(-1)
    return mdp, hessian_at(mdp, q, kind), x, r


def residuals(mdp, hessian, x, r, dq, v):
    """The residuals of H dq - E'v = x and of E dq = r.

    Their units are the root of the curvature and the largest flow.
    """
    H = hessian.to_full().matrix
    H_dq = (H @ dq.flatten(-2).unsqueeze(-1)).squeeze(-1).unflatten(-1, dq.shape[-2:])
    E_v = occ.mdp.flow_adjoint(mdp, v)
    root = torch.where(mdp.actions, hessian.curvature, torch.inf).sqrt()
    size = torch.stack(
        [(part / root).abs().amax((-2, -1)) for part in torch.broadcast_tensors(H_dq, E_v, x)]
    ).amax(0)
    flow = occ.mdp.flow_residual(mdp, dq) + flow_source(mdp) - r
    return ((H_dq - E_v - x) / root).abs().amax((-2, -1)) / size, flow.abs().amax(
        -1
    ) / dq.abs().amax((-2, -1))


@every_factorization
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MDPS)
def test_the_system_is_solved(build, kind, name):
    mdp, hessian, x, r = system(name, kind)
    dq, v = build(hessian, mdp).solve(x, r)
    dual, primal = residuals(mdp, hessian, x, r, dq, v)
    assert float(dual.max()) < 1e-10
    assert float(primal.max()) < 1e-13
    assert not bool(dq[..., ~mdp.actions].any())


@every_factorization
@pytest.mark.parametrize("name", ["masked", "batch"])
def test_many_right_hand_sides_share_a_factor(build, name):
    mdp, hessian, x, r = system(name, "hybrid", 5, *(1 for _ in MDPS[name]().batch_shape))
    factor = build(hessian, mdp)
    dq, v = factor.solve(x, r)
    assert dq.shape == (5, *mdp.batch_shape, *mdp.actions.shape)
    for i in range(5):
        alone = factor.solve(x[i].expand(dq.shape[1:]), r[i].expand(v.shape[1:]))
        torch.testing.assert_close((dq[i], v[i]), alone, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MDPS)
def test_the_matrix_that_is_factored_has_no_eigenvalue_below_one(kind, name):
    mdp, hessian, *_ = system(name, kind)
    L = DenseFactorization(SeparableStates(hessian), DenseFlow(mdp)).cholesky
    eigenvalues = torch.linalg.eigvalsh(L @ L.mT)
    assert float(eigenvalues.min()) > 1 - 1e-15 * mdp.num_states * float(eigenvalues.max())


def test_the_cheapest_factorization_is_chosen():
    mdp, hessian, *_ = system("layers", "hybrid")
    q = occ.interior_point(mdp)
    assert isinstance(factorize(hessian, DenseFlow(mdp), q), DenseFactorization)
    assert isinstance(factorize(hessian.to_blocks(), LayeredFlow(mdp), q), LayeredFactorization)
    assert isinstance(factorize(hessian.to_full(), DenseFlow(mdp), q), FullFactorization)
    assert isinstance(factorize(hessian, LayeredFlow(mdp.to_sparse()), q), ConjugateGradients)
    wide, narrow = (LayeredFlow(occ.LayeredMDP.random(3, width, 2)) for width in (400, 20))
    for flow, kind in ((wide, ConjugateGradients), (narrow, LayeredFactorization)):
        q = occ.interior_point(flow.mdp)
        for exact in (False, True):
            assert isinstance(
                factorize(hessian_at(flow.mdp, q, "hybrid"), flow, q, exact=exact), kind
            )
