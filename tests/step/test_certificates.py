"""Certificates: a certified q solves the problem, a solution is certified, and a maximum is not."""

from fractions import Fraction

import mpmath
import pytest
import torch
from mpmath import mp, mpf
from torch import Tensor
from zoo import contexts, random_loss, tensor

import torch_occ as occ
from torch_occ import Status
from torch_occ.regularizers.base import TabularRegularizer
from torch_occ.regularizers.terms import Power, Term, XLogX

pytestmark = pytest.mark.usefixtures("both_backends")


def newton_step(
    mdp: occ.LayeredMDP, loss: Tensor, q: Tensor, arguments: dict, barrier: bool = False
) -> float:
    """The largest relative change of q in a Newton step with 80 digits.

    psi = - sum weight * sqrt(argument), or log in its place, and rows of P are read as
    distributions. A weight may be a table.
    """
    with mp.workdps(80):
        pairs = [tuple(pair) for pair in mdp.actions.nonzero().tolist()]
        n, S, layer = len(pairs), mdp.num_states, mdp.layer.tolist()
        x = [mpf(float(q[pair])) for pair in pairs]
        K, rhs = mp.zeros(n + S), [-mpf(float(loss[pair])) for pair in pairs] + [mpf(0)] * S
        for (i, (s, _)), (name, weight) in (
            (p, w) for p in enumerate(pairs) for w in arguments.items()
        ):
            others = [j for j, (r, _) in enumerate(pairs) if j != i and layer[r] == layer[s]]
            members = [i] if name == "pair" else others
            value = mp.fsum(x[j] for j in members)
            own = mpf(float(weight[pairs[i]])) if isinstance(weight, Tensor) else weight
            slope = own / value if barrier else own / (2 * mp.sqrt(value))
            for j in members:
                rhs[j] += slope
                for k in members:
                    K[j, k] += slope / value if barrier else slope / (2 * value)
        initial = [mpf(float(p)) for p in mdp.initial]
        for s, p in enumerate(initial):
            rhs[n + s] = p / mp.fsum(initial)
        for i, pair in enumerate(pairs):
            row = [mpf(float(p)) for p in mdp.joint_transitions[pair]]
            for s in range(S):
                e = int(s == pair[0]) - (row[s] / mp.fsum(row) if any(row) else 0)
                K[n + s, i], K[i, n + s] = e, -e
                rhs[n + s] -= e * x[i]
        for i in range(n):  # relative changes
            for j in range(n + S):
                K[j, i] *= x[i]
        change = mpmath.lu_solve(K, mp.matrix(rhs))
        return float(max(abs(change[i]) for i in range(n)))


# The first was certified with an error of 4e-8, the others stalled.
@pytest.mark.parametrize(("seed", "number"), [(46, 58), (3, 54), (7, 3)])
def test_a_pair_that_takes_nearly_all_of_its_layer(seed, number):
    mdp = occ.LayeredMDP.random(3, 2, 2, seed=seed, concentration=0.05)
    generator = torch.Generator().manual_seed(seed)
    losses = torch.rand(
        60, mdp.num_states, mdp.num_actions, generator=generator, dtype=torch.float64
    )
    loss = 1e8 * (losses[number] < 0.5).double()
    q = occ.FTRLStep(mdp, occ.HybridComplement() / occ.InverseSqrt())(loss, 1).detach()
    assert newton_step(mdp, loss, q, {"pair": mpf(1), "complement": mpf(1)}) < 1e-11


@pytest.mark.parametrize("beta", [1e-12, 1e-6])
@pytest.mark.parametrize("gap", [1e5, 1e12])
def test_rare_pairs_are_no_underflow(beta, gap):
    """q = beta / (gap + beta / (1 - q)); the first step makes it fall by a factor of up to 1e24."""
    mdp = occ.LayeredMDP([torch.ones(1, 2, 1, dtype=torch.float64)])
    q = occ.FTRLStep(mdp, occ.LogBarrier(beta))(torch.tensor([[0.0, gap]], dtype=torch.float64))
    assert q[0, 1].item() == pytest.approx(beta / (gap + beta), rel=1e-12)


@pytest.mark.parametrize("sparse", [False, True])
def test_what_all_pairs_of_a_layer_pay_does_not_matter(sparse):
    mdp = occ.LayeredMDP.random(4, 3, 3, seed=2)
    loss = 1e12 + random_loss(mdp, 100.0)
    if sparse:
        tables = [p.flatten(0, 1).to_sparse() for p in mdp.transitions]
        mdp = occ.LayeredMDP(tables, actions=mdp.actions)
    step = occ.FTRLStep(mdp, occ.Tsallis() / occ.InverseSqrt())
    torch.testing.assert_close(step(loss, 10.0), step(loss - 1e12, 10.0), rtol=1e-12, atol=0)
    assert step.solve(loss, 10.0).value[0].item() == pytest.approx(4e12, rel=1e-9)


def test_rounding_that_nobody_can_undo_is_no_success():
    """Two actions have the same value, 0.3e96, up to a rounding error that decides the solution."""
    table = torch.tensor([[[0.3, 0.7, 1e-40], [0.3, 0.7, 2e-40]]], dtype=torch.float64)
    mdp = occ.LayeredMDP([table, torch.ones(3, 2, 1, dtype=torch.float64)])
    loss = torch.tensor([0.0, 1e96, 0.0, 1e96], dtype=torch.float64)[:, None].repeat(1, 2)
    solution = occ.FTRLStep(mdp, occ.LogBarrier(1e-12)).solve(loss, check=False)
    assert solution.status == Status.STALLED
    assert solution.dual_residual > 1


def test_sums_that_lose_no_digit_are_certified():
    """Two actions have exactly the same value, 0.75e20: only the log-barrier decides."""
    table = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]], dtype=torch.float64)
    mdp = occ.LayeredMDP([table, torch.ones(2, 2, 1, dtype=torch.float64)])
    loss = torch.tensor([[0.0, 0.25e20], [0.0, 0.0], [1e20, 1e20]], dtype=torch.float64)
    q = occ.FTRLStep(mdp, occ.LogBarrier(1e-12), backend="engine")(loss)
    torch.testing.assert_close(q, occ.FTRLStep(mdp, occ.LogBarrier(1.0))(0 * loss))


@pytest.mark.parametrize("seed", [5, 9, 14])
def test_values_of_very_different_size_keep_their_digits(seed):
    """Two actions lead to values of 1e9, a third to one of 1e17; beside it, they were rounded.

    A small difference decides between the two. Rows of P are read as distributions.
    """
    random = torch.Generator().manual_seed(seed)
    a, b = torch.rand(2, generator=random, dtype=torch.float64).tolist()
    first = [[[a, 1 - a, 0.0], [b, 1 - b, 0.0], [0.0, 0.0, 1.0]]]
    mdp = occ.LayeredMDP([tensor(first), torch.ones(3, 3, 1, dtype=torch.float64)])
    large = 10 ** (10 + 8 * float(torch.rand(1, generator=random)))
    value = 2e9 * float(torch.rand(1, generator=random, dtype=torch.float64)) + 1 / 3
    loss = torch.zeros(4, 3, dtype=torch.float64)
    loss[1:] = torch.rand(3, 3, generator=random, dtype=torch.float64)
    loss[2], loss[3] = loss[2] + value, loss[3] + large
    apart = float((Fraction(1 - a) - Fraction(1 - b)) * Fraction(value))
    loss[0, 0], loss[0, 1] = max(-apart, 0), max(apart, 0)
    q = occ.FTRLStep(mdp, occ.LogBarrier(1.0))(loss).detach()
    assert newton_step(mdp, loss, q, {"pair": mpf(1)}, barrier=True) < 1e-10


@pytest.mark.parametrize("values", [(1e-3, 1.0, 192.0), (1e-6, 1.0)])
def test_barriers_of_very_different_size(values):
    """Up to half were refused: the multipliers had too few digits for the small barriers."""
    for seed in (1, 4, 8):
        random = torch.Generator().manual_seed(seed)
        mdp = occ.LayeredMDP.random(3, 3, 2, seed=seed)
        beta = tensor(values)[torch.randint(len(values), mdp.actions.shape, generator=random)]
        loss = torch.rand(8, *mdp.actions.shape, generator=random, dtype=torch.float64)
        q = occ.FTRLStep(mdp, occ.LogBarrier(occ.PerPair(mdp, beta)))(loss).detach()
        assert newton_step(mdp, loss[0], q[0], {"pair": beta}, barrier=True) < 1e-10


# -- maxima ----------------------------------------------------------------------------------------


class Table(TabularRegularizer):
    def __init__(self, *terms: Term) -> None:
        self.terms = terms
        super().__init__()

    def table(self) -> tuple[Term, ...]:
        return self.terms


class Statewise(occ.StatewiseRegularizer):
    def per_state(self, q_s):
        return -q_s.square().sum(-1)


class Joint(occ.JointRegularizer):
    def joint(self, q):
        return -q.square().sum((-2, -1))


MAXIMA = {
    "statewise": (Statewise(), {Status.NOT_CONVEX}),
    "joint": (Joint(), {Status.NOT_CONVEX}),
    "pairs": (Table(Term("pair", Power(0.5), 1.0)), {Status.NOT_CONVEX}),
    "states": (
        Table(Term("pair", XLogX(), 1.0), Term("state", XLogX(), -3.0)),
        {Status.NOT_CONVEX},
    ),
}


@pytest.mark.parametrize("name", MAXIMA)
def test_a_maximum_is_not_certified(name):
    """All rows of P are equal, so the uniform policy is stationary. The iteration starts there."""
    mdp = occ.LayeredMDP(
        [torch.full((n, 2, m), 1 / m, dtype=torch.float64) for n, m in ((1, 2), (2, 2), (2, 1))]
    )
    psi, expected = MAXIMA[name]
    solution = occ.FTRLStep(mdp, psi).solve(torch.zeros(5, 2, dtype=torch.float64), check=False)
    assert Status(int(solution.status)) in expected
    assert "convex" in Status(int(solution.status)).advice


def test_state_terms_of_the_first_layer_change_nothing():
    """q(s) is fixed there, so that a concave function of it makes no maximum."""
    mdp, loss, _ = contexts()
    psi = Table(Term("pair", XLogX(), 1.0), Term("state", XLogX(), -3.0))
    expected = occ.FTRLStep(mdp, occ.Shannon())(loss)
    torch.testing.assert_close(occ.FTRLStep(mdp, psi)(loss), expected, rtol=1e-10, atol=0)


def test_torch_compares_what_is_returned():
    mdp = occ.LayeredMDP.random(horizon=2, width=2, num_actions=2, seed=0)
    loss = torch.rand(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    budgets = occ.Budgets(loss[None], torch.tensor([1.3], dtype=torch.float64))
    steps = [occ.FTRLStep(mdp, occ.Shannon(), constraints=x) for x in (None, budgets)]
    for function in (*(step.solve for step in steps), lambda x: occ.optimal_policy(mdp, x)):
        torch.testing.assert_close(function(loss), function(loss))
        with pytest.raises(AssertionError, match="not close"):
            torch.testing.assert_close(function(loss), function(loss.flip(0)))
