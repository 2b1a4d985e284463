"""Newton's method by conjugate gradients, compared with factorizations, on the torch path.

Solutions, certificates and derivatives are the same. tests/game/test_sparse_games.py compares the
engine with the torch path.
"""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import PROBLEMS, REGULARIZERS, Problem, random_loss

import torch_occ as occ
from torch_occ.mdp.occupancy import LayeredFlow
from torch_occ.regularizers.derivatives import Evaluator, derivatives
from torch_occ.step import system as iterative
from torch_occ.step.solution import Status
from torch_occ.step.system import ConjugateGradients, SeparableStates

F64 = torch.float64
TorchStep = partial(occ.FTRLStep, backend="torch")


def line(num_states, horizon, num_actions=3):
    """Walks on a line, sparse, with masks in every seventh state.

    Each action stays, goes left or goes right, and may slip.
    """
    state, action = (
        torch.arange(num_states).repeat_interleave(num_actions),
        torch.arange(num_actions).repeat(num_states),
    )
    meant = (state + action % 3 - 1).clamp(0, num_states - 1)
    pair = torch.arange(num_states * num_actions)
    index = torch.cat([torch.stack([pair, meant]), torch.stack([pair, state])], -1)
    values = torch.cat(
        [torch.full_like(pair, 0.8, dtype=F64), torch.full_like(pair, 0.2, dtype=F64)]
    )
    step = torch.sparse_coo_tensor(index, values, (len(pair), num_states), check_invariants=False)
    actions = torch.ones(num_states, num_actions, dtype=torch.bool)
    actions[::7, 0] = False
    actions[::14, 2] = False
    end = torch.ones(len(pair), 1, dtype=F64).to_sparse()
    initial = torch.full((num_states,), 1 / num_states, dtype=F64)
    return occ.LayeredMDP(
        [*[step] * (horizon - 1), end], actions=actions.repeat(horizon, 1), initial=initial
    )


def rare():
    """Nearly deterministic, many layers: occupancies down to 1e-15."""
    mdp = occ.LayeredMDP.random(12, 5, 3, seed=1, concentration=0.03).prune()
    return Problem(mdp, random_loss(mdp, 300.0), 1e4)


def walk():
    mdp = line(15, 6)
    return Problem(mdp, random_loss(mdp, 100.0), 1000.0)


CASES = {**PROBLEMS, "rare": rare, "walk": walk}
SMOOTH = [name for name in REGULARIZERS if name not in ("custom_joint", "all_levels")]


def close(found, expected, tolerance=1e-11):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-300)


# -- solutions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("regularizer", SMOOTH)
def test_the_solution_is_the_same(name, regularizer):
    mdp, loss, t = CASES[name]()
    found, expected = (
        TorchStep(model, REGULARIZERS[regularizer](model)).solve(loss, t)
        for model in (mdp.to_sparse(), mdp.to_dense())
    )
    close(found.q, expected.q)
    size = float(expected.value.detach().abs().max())
    torch.testing.assert_close(found.value, expected.value, rtol=1e-10, atol=1e-11 * size)
    assert int(found.status) == Status.CONVERGED


# -- the solver ------------------------------------------------------------------------------------


def solver_at(mdp, q, psi, t=100.0):
    t = torch.tensor(t, dtype=F64)
    evaluate = Evaluator(psi).bind(tuple(psi.parameters()), t)
    hessian = derivatives(mdp, psi, evaluate, q).hessian
    return ConjugateGradients(SeparableStates(hessian), LayeredFlow(mdp), q.sum(-1)), hessian


@pytest.mark.parametrize("name", ["masked", "corridor", "rare", "walk"])
def test_without_numba_the_sweeps_are_those_in_torch(name, monkeypatch):
    mdp, loss, t = CASES[name]()
    mdp = mdp.to_sparse()
    step, losses = TorchStep(mdp, occ.jin_luo(mdp, beta=0.5)), torch.stack([loss, loss.sqrt()])
    compiled = step(losses, t)
    monkeypatch.setattr(iterative, "_has_numba", lambda: False)
    close(step(losses, t), compiled)


def test_wide_and_sparse_layers_are_not_factored():
    for mdp, kind in (
        (walk().mdp, ConjugateGradients),
        (occ.LayeredMDP.random(3, 400, 2), ConjugateGradients),
        (occ.LayeredMDP.random(3, 20, 2), iterative.LayeredFactorization),
    ):
        q = occ.interior_point(mdp)
        _, hessian = solver_at(mdp, q, occ.Tsallis())
        for exact in (False, True):
            found = iterative.factorize(hessian, LayeredFlow(mdp), q, exact=exact)
            assert isinstance(found, kind)


def test_a_solve_that_fails_returns_nan(monkeypatch):
    mdp, loss, _ = walk()
    solver, _ = solver_at(mdp, occ.interior_point(mdp), occ.jin_luo(mdp, beta=0.1))
    monkeypatch.setattr(iterative, "MAX_ITERATIONS", 1)
    dq, v = solver.solve(-loss, torch.zeros_like(loss[:, 0]))
    assert bool(dq.isnan().all() and v.isnan().all())


def test_without_enough_iterations_newton_either_certifies_or_says_so(monkeypatch):
    mdp, loss, t = walk()
    monkeypatch.setattr(iterative, "MAX_ITERATIONS", 0)
    solution = TorchStep(mdp, occ.jin_luo(mdp, beta=0.1), max_steps=20).solve(loss, t, check=False)
    assert int(solution.status) != Status.CONVERGED
    assert float(solution.dual_residual) > 1e-6


# -- derivatives -----------------------------------------------------------------------------------


def test_gradients_of_every_kind_and_order():
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=3).to_sparse()
    step = TorchStep(mdp, occ.jin_luo(mdp, beta=0.3))
    inputs = [
        random_loss(mdp, 3.0).requires_grad_(),
        *(p.clone().requires_grad_() for p in mdp.probabilities),
    ]

    def function(loss, *probabilities):
        return step(loss, 10.0, mdp=mdp.with_probabilities(*probabilities))

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, inputs, rtol=1e-4, fast_mode=True)
    loss = random_loss(mdp, 3.0, batch=(3,))
    jacobians = [
        torch.func.vmap(transform(lambda x: step(x, 10.0)))(loss)
        for transform in (torch.func.jacrev, torch.func.jacfwd)
    ]
    torch.testing.assert_close(*jacobians, rtol=1e-10, atol=1e-12)


def test_what_no_policy_can_feel_has_no_derivative():
    """Only rounding is left of a constant loss, and it must not be taken for a failure."""
    mdp, loss, t = walk()
    step = TorchStep(mdp, occ.jin_luo(mdp, beta=0.5))
    potential = occ.mdp.flow_adjoint(mdp, random_loss(mdp).sum(-1))
    for direction in (torch.ones_like(loss), torch.zeros_like(loss), potential):
        _, tangent = torch.func.jvp(lambda x: step(x, t), (loss,), (direction,))
        assert float(tangent.detach().abs().max()) < 1e-15


def test_batches_of_losses_and_of_entries():
    mdp, loss, t = walk()
    step, losses = TorchStep(mdp, occ.jin_luo(mdp, beta=0.5)), random_loss(mdp, 10.0, batch=(3,))
    entries = [p.clone().requires_grad_() for p in mdp.probabilities]

    def gradients(loss):
        return torch.autograd.grad(
            step(loss, t, mdp=mdp.with_probabilities(*entries)).square().sum(), entries
        )

    for together, *alone in zip(gradients(losses), *map(gradients, losses), strict=True):
        torch.testing.assert_close(together, sum(alone), rtol=1e-9, atol=1e-12)
    doubled = [torch.stack([p, p]) for p in mdp.probabilities]
    expected = step(loss, t).detach()
    for q in (
        step(loss, t, mdp=mdp.with_probabilities(*doubled)),
        torch.func.vmap(lambda *p: step(loss, t, mdp=mdp.with_probabilities(*p)))(*doubled),
    ):
        close(q.detach(), expected.expand(2, -1, -1))


# -- what does not fit -----------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [
            x.nbytes // 8  # in numbers of double precision
            for x in tree_leaves(result)
            if isinstance(x, torch.Tensor) and x.layout == torch.strided
        ]
        self.found = max(self.found, *sizes, 0)
        return result


def test_no_tensor_is_larger_than_the_pairs_and_the_entries():
    """From construction through planning, a step, its gradient in everything, and a simulation."""
    with Largest() as largest:
        mdp = line(400, 5)
        step = TorchStep(mdp, occ.jin_luo(mdp, beta=0.5))
        loss = random_loss(mdp, 10.0).requires_grad_()
        entries = [p.clone().requires_grad_() for p in mdp.probabilities]
        q = step(loss, 100.0, mdp=mdp.with_probabilities(*entries))
        torch.autograd.grad(q.square().sum(), [loss, *entries, *step.parameters()])
        occ.optimal_policy(mdp, loss.detach())
        mdp.prune()
        occ.simulate(
            mdp,
            occ.FTRL(mdp, occ.jin_luo(mdp)),
            occ.BernoulliLosses(random_loss(mdp)),
            episodes=2,
            seeds=(0,),
        )
    pairs, nonzero = mdp.num_states * mdp.num_actions, sum(len(p) for p in mdp.probabilities[1:])
    assert largest.found <= pairs + nonzero < 400 * 3 * 400 / 10


@pytest.mark.parametrize("backend", ["torch", "engine"])
def test_steps_become_finer_where_the_first_error_is_far_above_the_change(backend):
    """A tree of 4,095 states: 0.01 times the first error squared would be 1% in every step."""
    layers = [torch.eye(2**k, dtype=F64).to_sparse() for k in range(1, 12)]
    mdp = occ.LayeredMDP([*layers, torch.ones(2**12, 1, dtype=F64).to_sparse()])
    loss = torch.rand(4095, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    step = occ.FTRLStep(mdp, occ.LogBarrier() / occ.Constant(1e5), backend=backend)
    assert int(step.solve(loss, 1.0).steps) < 20
