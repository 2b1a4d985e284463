"""What must not be silently wrong: each of these was, once."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from zoo import SmoothedHybrid, contexts, corridor, layers

import torch_occ as occ
from torch_occ import Status

F64 = torch.float64
MDP = occ.LayeredMDP.random(3, 3, 3, seed=0)
LOSS = torch.rand(7, 3, dtype=F64, generator=torch.Generator().manual_seed(1))


def grid(rows, columns):
    """The grid in which every step goes right or down."""
    cells = [(i, j) for i in range(rows) for j in range(columns)]
    ends = [(cell, (cell[0] + a, cell[1] + 1 - a)) for cell in cells for a in (0, 1)]
    return occ.LayeredMDP.from_graph([x for x in ends if x[1] in cells], (0, 0), cells[-1])


class Net(torch.nn.Module):
    def __init__(self, psi):
        super().__init__()
        self.step = occ.FTRLStep(MDP, psi, backend="torch")

    def forward(self, loss):
        return self.step(loss, t=4.0)


def test_plans_take_other_number_types():
    taken = torch.nn.functional.one_hot(occ.optimal_policy(MDP, LOSS.float()).policy.argmax(-1))
    for policy in (taken, taken.float(), taken.bool(), taken.numpy()):
        assert torch.equal(occ.occupancy(MDP, policy), occ.occupancy(MDP, taken.to(F64)))


def test_attributes_of_users_regularizers_name_a_step():
    parts = [SmoothedHybrid(weight) for weight in (1.0, 2.0, 2.0)]  # parameters do not
    parts[2].shift = 0.1
    names = [occ.FTRLStep(MDP, psi).name_in_graphs.split()[-1] for psi in parts]
    assert names[0] == names[1] != names[2]


def test_a_program_solves_the_step_that_it_was_made_with(tmp_path):
    net = Net(occ.ConditionalEntropy() / occ.InverseSqrt(0.5))
    program = torch.export.export(net, (LOSS,))
    torch.export.save(program, tmp_path / "step.pt2")
    torch.save(net(LOSS).detach(), tmp_path / "q.pt")
    code = f"""
import torch, torch_occ as occ
mdp = occ.LayeredMDP.random(3, 3, 3, seed=0)
loss = torch.rand(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
other = occ.FTRLStep(mdp, occ.Shannon(), backend="torch")
program = torch.export.load(r"{tmp_path / "step.pt2"}").module()
try:
    program(loss)
except RuntimeError as error:
    assert "make an equal FTRLStep" in str(error), error
else:
    raise AssertionError("it solved another step")
own = occ.FTRLStep(mdp, occ.ConditionalEntropy() / occ.InverseSqrt(9.0), backend="torch")
q = torch.load(r"{tmp_path / "q.pt"}")
torch.testing.assert_close(program(loss), q, rtol=1e-12, atol=0)  # with its own gamma
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_programs_with_other_parameters_leave_the_step_alone():
    step = occ.FTRLStep(MDP, occ.jin_luo(MDP, beta=1.0), backend="torch")
    expected = step(LOSS, 4.0).detach()
    others = {name: 2 * p.detach() for name, p in step.named_parameters()}
    given = [2 * p.detach() for p in step.evaluator.parameters(torch.tensor(4.0, dtype=F64))]
    doubled = torch.func.functional_call(step, others, (LOSS, 4.0)).detach()

    def call(i):
        if i % 2:
            return torch.equal(step(LOSS, 4.0).detach(), expected)
        t = torch.tensor(4.0, dtype=F64)
        q = torch.ops.torch_occ.solve_step(step.name_in_graphs, LOSS, t, None, given, [])[0]
        return torch.allclose(q, doubled, rtol=1e-12)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(40)))


def test_second_derivatives_of_rare_states():
    mdp = grid(30, 30)
    step = occ.FTRLStep(mdp, occ.ConditionalEntropy(), backend="torch")
    generator = torch.Generator().manual_seed(0)
    shape = (mdp.num_states, mdp.num_actions)
    loss = (100 * torch.rand(shape, dtype=F64, generator=generator)).requires_grad_()
    cost = (step(loss) * loss.detach()).sum()
    (slope,) = torch.autograd.grad(cost, loss, create_graph=True)
    assert bool(slope.isfinite().all())


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_nan_is_never_certified(backend):
    step = occ.FTRLStep(MDP, occ.ConditionalEntropy(), backend=backend)
    solution = step.solve(1e307 * (1 + LOSS), check=False)
    assert not bool(solution.converged) or bool(solution.q.isfinite().all())


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_an_infinite_curvature_certifies_nothing(backend):
    """The solution is 4e-172; at 3e-167, where 1/q^2 overflows, every residual was zero."""
    mdp = occ.LayeredMDP([torch.ones(1, 2, 1, dtype=F64)])
    loss, numbers = torch.tensor([[6.2e166, 0.0]], dtype=F64), (0.006, 2.3e-5, 132.0)
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, *numbers), backend=backend)
    assert int(step.solve(loss, 582467, check=False).status) == Status.NOT_FINITE


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_small_losses_count_beside_huge_ones_ahead(backend):
    """Two actions lead to the same state, whose value swallows what they cost themselves."""
    ahead = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]], dtype=F64)
    mdp = occ.LayeredMDP([ahead, torch.ones(2, 3, 1, dtype=F64)])
    loss = torch.zeros(3, 3, dtype=F64)
    loss[0], loss[1] = torch.tensor([2.0, 0.0, 4e210], dtype=F64), 1.9535100460638967e210
    q = occ.FTRLStep(mdp, occ.ConditionalEntropy(), backend=backend)(loss)
    torch.testing.assert_close(q[0, 0] / q[0, 1], torch.tensor(-2.0, dtype=F64).exp())


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_a_tie_hidden_by_rounding_is_not_decided(backend):
    """The two actions of the first state cost the same, but rounding of 1e277 says otherwise."""
    one, random = torch.ones(3, 2, 1, dtype=F64), torch.Generator().manual_seed(0)
    loss = torch.zeros(8, 2, dtype=F64)  # layers of 1, 3, 1 and 3 states
    loss[6], loss[7] = 7.814041685079887e277, 1e277
    for _ in range(8):
        rows = torch.rand(2, 1, 2, 3, dtype=F64, generator=random)
        rows = rows / rows.sum(-1, keepdim=True)
        mdp = occ.LayeredMDP([rows[0], one, rows[1], one])
        for psi in (occ.Shannon(), occ.ConditionalEntropy()):
            found = occ.FTRLStep(mdp, psi, backend=backend).solve(loss, check=False)
            assert not bool(found.converged) or float(found.q[0].min()) > 0.1


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_values_that_rounding_makes_equal_are_not(backend):
    """Both ways cost 2.5e275, and one of them 0.75 more."""
    eye, end = torch.eye(2, dtype=F64), torch.ones(2, 2, 1, dtype=F64)
    mdp = occ.LayeredMDP([eye[None], eye[:, None].expand(2, 2, 2).contiguous(), end])
    huge = 2.49154932e275
    loss = torch.tensor([0, 0.75, huge, huge, 0], dtype=F64)[:, None].expand(5, 2).contiguous()
    found = occ.FTRLStep(mdp, occ.ConditionalEntropy(), backend=backend).solve(loss, check=False)
    right = torch.tensor([-0.75, 0.0], dtype=F64).softmax(-1)
    assert not bool(found.converged) or torch.allclose(found.q[0], right)


@pytest.mark.parametrize("backend", ["torch", "engine"])
@pytest.mark.parametrize("ahead", [(9.5e95, 9.5e95, 0.0), (9.5e95, 0.0, 9.5e95)])
@pytest.mark.parametrize("regularizer", ["Shannon", "ConditionalEntropy", "LogBarrier"])
def test_tiny_probabilities_decide_beside_huge_losses(backend, ahead, regularizer):
    """Rows of P that differ in one tiny probability, which is worth more than 1e55 here."""
    rows, end = [[[0.3, 0.7, 1e-40], [0.3, 0.7, 3e-40]]], torch.ones(3, 2, 1, dtype=F64)
    mdp = occ.LayeredMDP([torch.tensor(rows, dtype=F64), end])
    loss = torch.tensor([0.0, *ahead], dtype=F64)[:, None].expand(4, 2).contiguous()
    step = occ.FTRLStep(mdp, getattr(occ, regularizer)(), backend=backend)
    with torch.no_grad():
        solution = step.solve(loss, check=False)
    # The last state is worse than the others on average only where these cost something.
    best = 1 if ahead[2] == 0.0 else 0
    assert not bool(solution.converged) or float(solution.q[0, best]) > 0.99


@pytest.mark.parametrize("backend", ["torch", "engine"])
@pytest.mark.parametrize("scale", [1e7, 3.6e9])
def test_multipliers_keep_the_digits_that_small_weights_read(backend, scale):
    """Weights of 1e-17 and 1e-11 beside values of 1e10: single states in a row, nothing hard."""
    mdp = occ.LayeredMDP.random(5, 1, 4, seed=0)
    random = torch.Generator().manual_seed(1)
    loss = scale * torch.rand(20, 5, 4, dtype=F64, generator=random)
    weights = torch.tensor([1e-17, 1e-11], dtype=F64)
    psi = occ.LogBarrier(occ.PerPair(mdp, weights[torch.randint(2, loss.shape, generator=random)]))
    with torch.no_grad():
        solution = occ.FTRLStep(mdp, psi, backend=backend).solve(loss, check=False)
    assert bool(solution.converged.all())


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_gaps_beside_large_multipliers_count_what_they_lose(backend):
    """Newton's method pauses with multipliers of 1e16, which leave few digits of the gaps."""
    first = torch.tensor([0.267, 0.0738, 0.6592], dtype=F64)
    mdp = occ.LayeredMDP([torch.ones(n, 3, 1, dtype=F64) for n in (3, 1, 1, 1, 1)], initial=first)
    loss = 4 * torch.rand(50, 7, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    huge = torch.zeros(7, 3, dtype=torch.bool)
    huge[[0, 2, 2, 3, 4, 4, 5, 6], [2, 0, 2, 2, 0, 1, 1, 1]] = True
    rate = occ.InverseSqrt(0.0075013478888864326)
    psi = occ.HybridComplement(0.04279913524684772) / rate + occ.LogBarrier(0.0013411513069638734)
    step = occ.FTRLStep(mdp, psi, backend=backend)
    found, right = (step(torch.where(huge, x, loss), 1207.79572362) for x in (4.8e78, 1e12))
    torch.testing.assert_close(found[:, ~huge], right[:, ~huge], rtol=1e-12, atol=1e-14)


def test_a_gap_that_bounds_nothing_is_nan():
    certificate = torch.tensor([[Status.CONVERGED, 1, 0, 0, 0], [Status.MAX_STEPS, 1, 0, 0, 0]])
    two = torch.ones(2, 1, dtype=F64)
    solution = occ.Solution(LOSS, LOSS, certificate.to(F64), "torch", two, 1e-9 * two)
    assert solution.duality_gap[0] == 1e-9
    assert bool(solution.duality_gap[1].isnan())


@pytest.mark.parametrize(
    ("psi", "steps", "good", "bad"),
    [("LogBarrier", 5, 0, 1e8), ("Shannon", 2, 1e4, 1), ("ConditionalEntropy", 9, 1, 1.7e308)],
)
def test_a_failed_element_that_nothing_depends_on(psi, steps, good, bad):
    beta = occ.Constant(1.0)
    step = occ.FTRLStep(MDP, getattr(occ, psi)() * beta, max_steps=steps, backend="torch")
    solution = step.solve(torch.stack([good * LOSS, bad * LOSS]), check=False)
    assert solution.converged.tolist() == [True, False]
    (slope,) = torch.autograd.grad(solution.q[0, 0, 0], beta.rate, retain_graph=True)
    assert bool(slope.isfinite())
    (slope,) = torch.autograd.grad(solution.q[1, 0, 0], beta.rate)
    assert bool(slope.isnan())


def test_auto_lets_torch_try_what_the_engine_cannot_certify(monkeypatch):
    step = occ.FTRLStep(MDP, occ.jin_luo(MDP, beta=1.0))
    compiled = step._compiled
    assert compiled is not None
    bad = occ.Solution(
        torch.full((7, 3), torch.nan, dtype=F64),
        torch.zeros(7, dtype=F64),
        torch.tensor([Status.STALLED, 9.0, 0, 0, 1], dtype=F64),
        "engine",
    )
    monkeypatch.setattr(type(compiled), "__call__", lambda *_: (bad, False))
    expected = occ.FTRLStep(MDP, occ.jin_luo(MDP, beta=1.0), backend="torch")(LOSS, 5.0)
    solution = step.solve(LOSS, 5.0)
    assert torch.equal(solution.q, expected)
    assert solution.backend == "torch"
    step.use("engine")
    with pytest.raises(occ.SolveError, match="STALLED"):
        step(LOSS, 5.0)


def test_single_precision_on_a_grid():
    mdp = grid(12, 12)
    step = occ.FTRLStep(
        mdp.map_tensors(lambda x: x.float() if x.is_floating_point() else x),
        occ.ConditionalEntropy(),
    )
    shape = (mdp.num_states, mdp.num_actions)
    loss = 100 * torch.rand(shape, generator=torch.Generator().manual_seed(0))
    solution = step.solve(loss, check=False)
    assert bool(solution.flow_residual.isfinite())


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("size", [(24, 38), (40, 20), (30, 30)])
@pytest.mark.parametrize("slip", [0, 0.1])
def test_the_engine_solves_shannon_on_grids(size, slip, scale):
    """On the way from the interior point, states are visited less than 1e-300 times."""
    mdp = grid(size[0] // 2, size[1] // 2).to_dense() if slip else grid(*size)
    if slip:
        rows = [p + slip * (p.sum(-2, keepdim=True) - p) for p in mdp.transitions]
        mdp = mdp.with_probabilities(mdp.initial, *(p / p.sum(-1, True).clamp(1e-9) for p in rows))
    loss = scale * torch.rand(mdp.actions.shape, dtype=F64, generator=torch.Generator())
    solve = [occ.FTRLStep(mdp, occ.Shannon(), backend=x).solve for x in ("engine", "torch")]
    one, two = (x(loss) for x in solve)
    torch.testing.assert_close(one.q, two.q, rtol=1e-9, atol=0)
    assert int(one.steps) <= int(two.steps) + 1


def test_errors_of_all_layers_behind_count():
    """Those of log u were certified, and those of the policy were 70 times larger."""
    mdp = grid(2, 400)
    loss = torch.rand(16, *mdp.actions.shape, dtype=F64, generator=torch.Generator())
    one, two = (occ.FTRLStep(mdp, occ.Shannon(), backend=x)(loss) for x in ("engine", "torch"))
    torch.testing.assert_close(one, two, rtol=1e-10, atol=0)


def test_a_compiled_transform_says_what_to_do():
    step = occ.FTRLStep(MDP, occ.ConditionalEntropy(), backend="torch")
    slopes = torch.func.vmap(torch.func.grad(lambda loss: step(loss)[0, 0]))
    with pytest.raises(Exception, match=r"call them without torch\.compile, or"):
        torch.compile(slopes, backend="eager")(torch.stack([LOSS, LOSS]))


@pytest.mark.parametrize("problem", [contexts, layers, corridor])
def test_both_backends_damp_their_steps_alike(problem):
    """Far from the solution a step has the length 1 / (1 + fall), and longer ones are no faster."""
    mdp, loss, t = problem()
    for most in (5, 200):
        options = {"max_steps": most, "backend": "torch"}
        step = occ.FTRLStep(mdp, occ.LogBarrier(1e-6), **options)
        other = occ.FTRLStep(mdp, step.regularizer, **options | {"backend": "engine"})
        one, two = (x.solve(100 * loss, t, check=False) for x in (step, other))
        assert int(one.steps) == int(two.steps)
        assert most == 5 or int(one.steps) > 10
        if most == 5:  # far from the solution, what is left is no rounding error
            torch.testing.assert_close(one.decrement, two.decrement, rtol=1e-9, atol=0)


def barriers(values, seed, off=0):
    """Barriers so different that multipliers need more digits than a number has.

    Rows of P sum to one up to `off` rounding errors.
    """
    random = torch.Generator().manual_seed(seed)
    mdp = occ.LayeredMDP.random(3, 3, 2, seed=seed)
    pick = torch.randint(len(values), mdp.actions.shape, generator=random)
    sums = 1 + off * torch.finfo(F64).eps * torch.randint(-1, 2, (3, 2, 1), generator=random)
    mdp = mdp.with_transitions([p * sums[: len(p)] for p in mdp.transitions], mdp.initial)
    psi = occ.LogBarrier(occ.PerPair(mdp, torch.tensor(values, dtype=F64)[pick]))
    loss = torch.rand(mdp.actions.shape, generator=random, dtype=F64)
    return occ.FTRLStep(mdp, psi, backend="torch"), loss


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_large_multipliers_ahead_hide_no_digit(backend):
    """Multipliers of 1e12 ahead of barriers of size 1, and two actions that lead there alike."""
    rows, beta = torch.tensor([[[0.3, 0.7]] * 2], dtype=F64), torch.tensor([[1.0], [1e12], [1e12]])
    mdp = occ.LayeredMDP([rows, torch.ones(2, 2, 1, dtype=F64)])
    psi = occ.LogBarrier(occ.PerPair(mdp, beta.expand(3, 2).to(F64)))
    solution = occ.FTRLStep(mdp, psi, backend=backend).solve(LOSS[:3, :2])
    d, found = float(LOSS[0, 1] - LOSS[0, 0]), float(solution.q.detach()[0, 0])
    # 1 / (1 - q) - 1 / q = d
    assert found == pytest.approx((d - 2 + (d * d + 4) ** 0.5) / (2 * d), 1e-13)


def test_multipliers_read_rows_as_distributions():
    step, loss = barriers((1e-8, 1.0), seed=13, off=40)
    assert step.solve(loss, check=False).dual_residual < 5e-12
