"""The Kullback-Leibler projection against cvxpy, closed forms and finite differences."""

import copy
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, jacfwd, jacrev, vmap
from zoo import PROBLEMS, random_loss, tensor

import torch_occ as occ
from torch_occ import SolveError, Status
from torch_occ.reference import clarabel

MDP = occ.LayeredMDP.random(3, 3, 3, seed=1)


class Case(NamedTuple):
    """The arguments of a projection."""

    q: Tensor
    transitions: tuple[Tensor, ...]
    lower: tuple[Tensor, ...]
    upper: tuple[Tensor, ...]
    loss: Tensor
    learning_rate: float


def case(mdp: occ.LayeredMDP, seed: int, width: float, scale: float = 1.0) -> Case:
    """A random reference, and bounds of random widths up to `width` around random rows."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(like: Tensor) -> Tensor:
        return torch.rand(like.shape, dtype=torch.float64, generator=generator)

    def rows() -> list[Tensor]:
        found = [uniform(p) + 0.05 for p in mdp.transitions]
        return [p / p.sum(-1, keepdim=True) for p in found]

    q = torch.where(mdp.actions, uniform(mdp.actions) + 0.05, 0.0)
    centre = rows()
    return Case(
        torch.cat([part / part.sum() for part in mdp.split(q, -2)]),
        tuple(rows()),
        tuple((p - width * uniform(p)).clamp(min=0) for p in centre),
        tuple((p + width * uniform(p)).clamp(max=1) for p in centre),
        scale * uniform(mdp.actions),
        0.7,
    )


def project_cvxpy(mdp: occ.LayeredMDP, given: Case) -> tuple[tuple[Tensor, ...], float]:
    """The projection with one variable per (s, a, s'), as in its definition: q and the value."""
    cp = pytest.importorskip("cvxpy")
    inflow = mdp.initial.numpy()
    variables, constraints, objective = [], [], 0
    parts = zip(
        *(mdp.split(x, -2) for x in (given.q, given.loss, mdp.actions)),
        *(given.transitions, given.lower, given.upper),
        strict=True,
    )
    for weight, cost, mask, p, low, high in parts:
        pairs = mask.nonzero()  # (m, 2), the existing pairs
        reference = (weight.unsqueeze(-1) * p)[mask].numpy()  # (m, n)
        x = cp.Variable(reference.shape)
        total = cp.sum(x, axis=1)
        across = cp.reshape(total, (len(pairs), 1), order="C") @ np.ones((1, p.shape[-1]))
        states = (pairs[:, :1] == torch.arange(len(mask))).double().numpy().T  # (S_k, m)
        constraints += [states @ total == inflow]
        constraints += [x >= cp.multiply(low[mask].numpy(), across)]
        constraints += [x <= cp.multiply(high[mask].numpy(), across)]
        objective += given.learning_rate * (cost[mask].numpy() @ total)
        # What is impossible under the reference is zero; its upper bound says so.
        possible = reference > 0
        divergence = cp.kl_div(x, np.where(possible, reference, 1.0))
        objective += cp.sum(cp.multiply(possible, divergence))
        inflow = cp.sum(x, axis=0)
        variables.append((x, mask))
    problem = cp.Problem(cp.Minimize(objective), constraints)
    with warnings.catch_warnings():
        # If Clarabel cannot certify the digits asked for, it returns its best point.
        warnings.filterwarnings("ignore", "Solution may be inaccurate", UserWarning)
        # With its usual steps of 0.99 Clarabel stalls at errors of up to 1e-7 in some problems.
        problem.solve(solver="CLARABEL", max_step_fraction=0.95, **clarabel(1e-13))
    found = []
    for x, mask in variables:
        whole = torch.zeros(*mask.shape, x.shape[1], dtype=torch.float64)
        whole[mask] = torch.as_tensor(x.value)
        found.append(whole)
    return tuple(found), float(problem.value)


def joint(mdp: occ.LayeredMDP, q: Tensor, p: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.unsqueeze(-1) * y for x, y in zip(mdp.split(q, -2), p, strict=True))


def objective(mdp: occ.LayeredMDP, found: occ.step.Projection, given: Case) -> float:
    total = given.learning_rate * (found.q * given.loss).sum()
    mine = joint(mdp, found.q, found.transitions)
    for x, y in zip(mine, joint(mdp, given.q, given.transitions), strict=True):
        total += (torch.xlogy(x, torch.where(x > 0, x / y, 1.0)) - x + y).sum()
    return float(total)


def share_of_active(found: occ.step.Projection, given: Case) -> float:
    """The share of transitions at a bound; the last layer has no choice."""
    layers = list(zip(found.transitions, given.lower, given.upper, strict=True))[:-1]
    active = sum(int(((p <= low) | (p >= high)).sum()) for p, low, high in layers)
    return active / sum(p.numel() for p, _, _ in layers)


# -- against cvxpy ---------------------------------------------------------------------------------


def agree(mdp: occ.LayeredMDP, given: Case) -> float:
    found = occ.KLProjection(mdp).solve(*given)
    expected, value = project_cvxpy(mdp, given)
    for mine, theirs in zip(joint(mdp, found.q, found.transitions), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-8)
    assert abs(objective(mdp, found, given) - value) < 1e-10
    assert float(found.flow_residual) <= 1e-12
    assert float(found.dual_residual) <= 1e-12
    assert int(found.steps) <= 10
    return share_of_active(found, given)


def test_it_is_cvxpy_with_any_number_of_active_bounds():
    widths = (0.01, 0.03, 0.12, 0.25, 1.0, 20.0)
    shares = [agree(MDP, case(MDP, seed, width)) for seed, width in enumerate(widths)]
    assert max(shares) > 0.6
    assert min(shares) < 0.1


@pytest.mark.slow
def test_it_is_cvxpy_on_a_hundred_references():
    shares = [agree(MDP, case(MDP, 100 + i, 0.005 * 1.09**i)) for i in range(100)]
    assert max(shares) > 0.65
    assert min(shares) == 0


@pytest.mark.parametrize("name", ["masked", "layers"])
def test_it_is_cvxpy_with_masked_actions_and_several_first_states(name):
    mdp = PROBLEMS[name]().mdp.to_dense()
    agree(mdp, case(mdp, 5, 0.3))


def test_large_losses_take_few_steps():
    """Beyond, states of positive probability underflow, and the status says so."""
    for scale in (1.0, 10.0, 100.0, 500.0):
        found = occ.KLProjection(MDP).solve(*case(MDP, 3, 0.3, scale))
        assert int(found.steps) <= 10
        assert float(found.flow_residual) <= 1e-12
        assert float(found.dual_residual) <= 1e-12


def test_values_of_successors_may_differ_by_any_amount():
    """Rows are filled greedily then: first the successors without a loss."""
    mdp = occ.LayeredMDP([torch.full((1, 1, 4), 0.25).double(), torch.ones(4, 1, 1).double()])
    lower, upper = (
        [0.1 * mdp.transitions[0], 0 * mdp.transitions[1]],
        [
            1.4 * mdp.transitions[0],
            mdp.transitions[1],
        ],
    )
    loss = tensor([0.0, 0.0, 1e3, 1e6, 1e9]).unsqueeze(-1)
    found = occ.KLProjection(mdp).solve(
        torch.ones(5, 1).double(), mdp.transitions, lower, upper, loss
    )
    expected = tensor([0.35, 0.35, 0.275, 0.025])
    torch.testing.assert_close(found.transitions[0][0, 0], expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("distance", [1e-4, 1e-7, 1e-9, 1e-12, 0.0, -1e-9, -1e-7])
def test_bounds_that_are_only_just_active(distance):
    """The Newton step crosses a kink, so a short one need not be the last."""
    given = case(MDP, 2, 0.5)
    found = occ.KLProjection(MDP).solve(*given)
    upper = [x.clone() for x in given.upper]
    for k in (0, 1):
        p = found.transitions[k]
        upper[k][:, 1] = torch.maximum(p + distance, given.lower[k])[:, 1]
        upper[k][:, 1, 0] = given.upper[k][:, 1, 0]
    again = occ.KLProjection(MDP).solve(*given._replace(upper=tuple(upper)))
    assert float(again.dual_residual) < 1e-12
    if distance >= 0:
        torch.testing.assert_close(again.q, found.q, rtol=1e-11, atol=0)


# -- closed forms ----------------------------------------------------------------------------------


def test_one_layer_is_exponentiated_gradient():
    mdp = occ.LayeredMDP([torch.ones(2, 4, 1).double()], initial=tensor([0.3, 0.7]))
    given = case(mdp, 0, 0.5)
    found = occ.KLProjection(mdp).solve(*given)
    weights = given.q * (-given.learning_rate * given.loss).exp()
    expected = mdp.initial[:, None] * weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(found.q, expected, rtol=1e-15, atol=0)


def test_without_widths_it_is_the_step_of_o_reps():
    """The mirror step with Shannon's entropy: the loss is less the logarithm of the reference."""
    given = case(MDP, 0, 0.5)
    known = given._replace(
        transitions=MDP.transitions, lower=MDP.transitions, upper=MDP.transitions
    )
    found = occ.KLProjection(MDP).solve(*known)
    step = occ.FTRLStep(MDP, occ.Shannon())
    expected = step(given.learning_rate * given.loss - given.q.log())
    torch.testing.assert_close(found.q, expected, rtol=1e-12, atol=0)
    assert all(map(torch.equal, found.transitions, MDP.transitions))


def test_a_reference_inside_stays():
    q = occ.occupancy(MDP, occ.uniform_policy(MDP))
    lower = tuple(0.5 * p for p in MDP.transitions)
    upper = tuple((1.5 * p).clamp(max=1) for p in MDP.transitions)
    found = occ.KLProjection(MDP).solve(q, MDP.transitions, lower, upper)
    torch.testing.assert_close(found.q, q, rtol=1e-14, atol=0)
    assert float(found.value.abs().max()) < 1e-14


def test_bounds_hold_to_the_last_bit():
    given = case(MDP, 2, 0.05)
    found = occ.KLProjection(MDP).solve(*given)
    for p, low, high in zip(found.transitions, given.lower, given.upper, strict=True):
        assert bool(((p >= low) & (p <= high)).all())
        torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]), rtol=0, atol=1e-15)


def test_impossible_successors_stay_impossible():
    zero = [p.clone() for p in MDP.transitions]
    zero[0][..., 0] = 0.0
    zero[1][0, 1, 2] = 0.0
    zero = [p / p.sum(-1, keepdim=True) for p in zero]
    lower, upper = [0.5 * p for p in zero], [(2 * p).clamp(max=1) for p in zero]
    with pytest.raises(ValueError, match=r"upper: layer 1, state 0: cannot be reached"):
        occ.KLProjection(MDP).solve(torch.ones(7, 3).double(), zero, lower, upper)
    zero[0] = MDP.transitions[0]
    lower[0], upper[0] = 0.5 * zero[0], (2 * zero[0]).clamp(max=1)
    given = case(MDP, 4, 0.5)._replace(transitions=tuple(zero), lower=lower, upper=upper)
    found = occ.KLProjection(MDP).solve(*given)
    assert float(found.transitions[1][0, 1, 2]) == 0
    agree(MDP, given)


# -- batches ---------------------------------------------------------------------------------------


def stacked(cases: list[Case]) -> Case:
    def stack(*parts: Tensor) -> Tensor:
        return torch.stack(parts)

    q, p, low, high, loss, _ = zip(*cases, strict=True)
    rows = [tuple(map(stack, *x)) for x in (p, low, high)]
    return Case(stack(*q), *rows, stack(*loss), tensor([0.1, 0.7, 2.0]))


def test_a_batch_is_its_elements():
    cases = [case(MDP, seed, width) for seed, width in enumerate((0.02, 0.2, 1.0))]
    whole = stacked(cases)
    found = occ.KLProjection(MDP).solve(*whole)
    assert found.status.shape == (3,)
    for i, one in enumerate(cases):
        alone = occ.KLProjection(MDP).solve(*one[:5], float(whole.learning_rate[i]))
        torch.testing.assert_close(found.q[i], alone.q, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.value[i], alone.value, rtol=0, atol=1e-12)
        assert int(found.steps[i]) == int(alone.steps)


def test_arguments_broadcast():
    given = case(MDP, 0, 0.2)
    losses = random_loss(MDP, batch=(2, 1))
    rates = tensor([0.1, 1.0, 2.0])
    found = occ.KLProjection(MDP).solve(*given[:4], losses, rates)
    assert found.q.shape == (2, 3, 7, 3)
    assert found.transitions[0].shape == (2, 3, 1, 3, 3)
    alone = occ.KLProjection(MDP).solve(*given[:4], losses[1, 0], 2.0)
    torch.testing.assert_close(found.q[1, 2], alone.q, rtol=1e-12, atol=0)
    mapped = vmap(lambda loss: occ.KLProjection(MDP)(*given[:4], loss, 2.0)[0])(losses[:, 0])
    torch.testing.assert_close(mapped, found.q[:, 2], rtol=1e-12, atol=0)


# -- derivatives -----------------------------------------------------------------------------------


def flat(given: Case) -> list[Tensor]:
    q, p, low, high, loss, rate = given
    parts = [q, *p, *low, *high, loss, torch.as_tensor(rate, dtype=torch.float64)]
    return [x.clone().requires_grad_() for x in parts]


def project(mdp: occ.LayeredMDP, *parts: Tensor) -> Tensor:
    """A smooth function of the projection."""
    L = mdp.horizon
    q, p, low, high, (loss, rate) = (
        *(parts[0], parts[1 : 1 + L], parts[1 + L : 1 + 2 * L]),
        *(parts[1 + 2 * L : 1 + 3 * L], parts[1 + 3 * L :]),
    )
    found = occ.KLProjection(mdp).solve(q, p, low, high, loss, rate)
    outputs = [found.q, found.value, *found.transitions[:-1]]
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in outputs]
    return sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))


@pytest.mark.parametrize("width", [0.03, 0.15, 0.6])
def test_gradients_are_finite_differences(width):
    """In a random direction of every argument; the last layer's bounds have no effect."""
    parts = flat(case(MDP, 11, width))
    gradients = torch.autograd.grad(project(MDP, *parts), parts)
    generator = torch.Generator().manual_seed(0)
    for i, (x, gradient) in enumerate(zip(parts, gradients, strict=True)):
        move = torch.randn(x.shape, dtype=x.dtype, generator=generator)
        if x.dim() == 3:  # a bound of 0 or 1 is not moved, so that rows stay feasible
            move = torch.where((x == 0) | (x == 1), 0.0, move * x).detach()
        # Steps this small do not change which bounds are active; differences of fourth order.
        h = 1e-5

        def at(length: float, i: int = i, move: Tensor = move) -> float:
            moved = [y.detach() for y in parts]
            moved[i] = moved[i] + length * move
            return float(project(MDP, *moved))

        difference = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
        assert abs(float((gradient * move).sum()) - difference) < 1e-6 * max(1, abs(difference))


def test_second_derivatives():
    mdp = occ.LayeredMDP.random(2, 2, 2, seed=3)
    parts = flat(case(mdp, 0, 0.2))
    smooth = [parts[0], parts[1], parts[-2], parts[-1]]

    def function(q: Tensor, p: Tensor, loss: Tensor, rate: Tensor) -> Tensor:
        return project(mdp, q, p, *parts[2:-2], loss, rate)

    assert torch.autograd.gradgradcheck(function, smooth, eps=1e-6, atol=1e-5, rtol=1e-5)


def test_forward_mode_is_reverse_mode():
    given = case(MDP, 2, 0.2)

    def q_of(loss: Tensor) -> Tensor:
        return occ.KLProjection(MDP)(*given[:4], loss, 0.7)[0]

    forward, reverse = jacfwd(q_of)(given.loss), jacrev(q_of)(given.loss)
    torch.testing.assert_close(forward, reverse, rtol=1e-10, atol=1e-13)


def test_the_bounds_matter_only_where_they_are_active():
    given = case(MDP, 2, 0.2)
    lower = [x.clone().requires_grad_() for x in given.lower]
    found = occ.KLProjection(MDP).solve(*given[:2], lower, *given[3:])
    found.q[0, 0].backward()
    for p, low in zip(found.transitions[:-1], lower[:-1], strict=True):
        active = p.detach() <= low.detach()
        assert bool(active.any())
        assert bool((low.grad[~active] == 0).all())
        assert bool((low.grad[active] != 0).any())


def test_the_gradient_of_a_failed_element_is_nan():
    wide = [(p + 0.2).clamp(max=1) for p in MDP.transitions]
    given = occ.interior_point(MDP), MDP.transitions, [0 * p for p in wide], wide
    loss = torch.stack([0 * random_loss(MDP), 5 * random_loss(MDP)]).requires_grad_()
    impatient = occ.KLProjection(MDP, max_steps=2)
    found = impatient.solve(*given, loss, check=False)
    assert found.status.tolist() == [Status.CONVERGED, Status.MAX_STEPS]
    assert found.converged.tolist() == [True, False]
    found.q.sum(0)[0, 0].backward()
    assert bool(loss.grad[0].isfinite().all())
    assert bool(loss.grad[1].isnan().any())
    message = r"the projection was not solved.*\n.*batch element \(1,\): MAX_STEPS after 2"
    with pytest.raises(SolveError, match=message) as caught:
        impatient.solve(*given, loss)
    assert caught.value.solution.status.tolist() == [0, Status.MAX_STEPS]


def test_the_initial_distribution_has_a_gradient():
    start = tensor([0.3, 0.7]).requires_grad_()
    mdp = occ.LayeredMDP([torch.ones(2, 4, 1).double()], initial=start)
    given = case(mdp, 0, 0.5)
    q, _ = occ.KLProjection(mdp)(*given)
    jacobian = torch.autograd.grad(q[0].sum(), start)[0]
    torch.testing.assert_close(jacobian, tensor([1.0, 0.0]), rtol=0, atol=1e-14)


# -- the module ------------------------------------------------------------------------------------


def test_it_can_be_moved_and_copied():
    given = case(MDP, 1, 0.2)
    low = [x.float() if isinstance(x, Tensor) else [y.float() for y in x] for x in given[:5]]
    single = occ.KLProjection(MDP).to(torch.float32)
    found = single.solve(*low, 0.7)
    assert found.q.dtype == torch.float32
    exact = copy.deepcopy(occ.KLProjection(MDP)).solve(*given)
    torch.testing.assert_close(found.q.double(), exact.q, rtol=1e-4, atol=1e-6)


def test_derivatives_by_torch_func():
    given = case(MDP, 1, 0.2)

    def cost(loss: Tensor) -> Tensor:
        return occ.KLProjection(MDP)(*given[:4], loss, 0.7)[0][0, 0]

    losses = random_loss(MDP, batch=(3,))
    each = vmap(grad(cost))(losses)
    torch.testing.assert_close(each[1], grad(cost)(losses[1]), rtol=1e-9, atol=1e-12)


# -- bad input -------------------------------------------------------------------------------------


def spoiled(name: str, value: float, *index: int, k: int = 1) -> Case:
    given = case(MDP, 0, 0.2)
    old = getattr(given, name)
    new = old.clone() if isinstance(old, Tensor) else [x.clone() for x in old]
    (new if isinstance(new, Tensor) else new[k])[index] = value
    return given._replace(**{name: new})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (spoiled("q", 0.0, 2, 1), r"q: layer 1, state 1, action 1: is 0; expected a positive"),
        (spoiled("loss", torch.nan, 4, 0), r"loss: layer 2, state 0, action 0: is nan"),
        (
            spoiled("transitions", 0.0, 2, 1, 0),
            r"transitions: layer 1, state 2, action 1, successor 0: is 0; expected a positive",
        ),
        (
            spoiled("lower", 0.999, 2, 1, 0),
            r"upper: layer 1, state 2, action 1, successor 0: .*at least the lower bound, 0\.999",
        ),
        (
            spoiled("lower", -0.5, 0, 1, 2),
            r"lower: layer 1, state 0, action 1, successor 2: is -0\.5",
        ),
        (
            spoiled("upper", torch.inf, 0, 1, 2),
            r"upper: layer 1, state 0, action 1, successor 2: is inf",
        ),
        (case(MDP, 0, 0.2)._replace(learning_rate=-1.0), r"learning_rate: .* at least 0, got -1"),
        (
            case(MDP, 0, 0.2)._replace(q=torch.ones(3, 7).double()),
            r"q: expected shape \(\*batch, 7, 3\), got \(3, 7\)",
        ),
        (case(MDP, 0, 0.2)._replace(lower=[]), r"lower: expected 3 tensors, one per layer"),
        (
            case(MDP, 0, 0.2)._replace(upper=MDP.transitions[::-1]),
            r"upper\[0\]: expected shape \(\*batch, 1, 3, 3\), got \(3, 3, 1\)",
        ),
    ],
    ids=lambda x: "" if isinstance(x, Case) else x[:20],
)
def test_errors_name_the_place(given, message):
    with pytest.raises(ValueError, match=message):
        occ.KLProjection(MDP).solve(*given)


def test_errors_name_rows_without_a_distribution():
    given = case(MDP, 0, 0.2)
    wide = [torch.full_like(p, 0.6) for p in given.lower]
    high = [torch.full_like(p, 0.9) for p in given.upper]
    message = r"lower: layer 0, state 0, action 0: the bounds sum to 1\.8; expected at most 1"
    with pytest.raises(ValueError, match=message):
        occ.KLProjection(MDP).solve(*given[:2], wide, high)
    low = [torch.zeros_like(p) for p in given.lower]
    small = [p if k == 0 else torch.full_like(p, 0.3) for k, p in enumerate(high)]
    batch = [torch.stack([p, q]) for p, q in zip(high, small, strict=True)]
    batch[-1] = torch.ones_like(batch[-1])
    message = r"upper: batch element \(1,\), layer 1, state 0, action 0: .* sum to 0\.9; .*least 1"
    with pytest.raises(ValueError, match=message):
        occ.KLProjection(MDP).solve(*given[:2], low, batch)


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"mdp: its layers are sparse.*mdp\.to_dense\(\)"):
        occ.KLProjection(MDP.to_sparse())
    with pytest.raises(TypeError, match=r"mdp: expected an occ\.LayeredMDP, got int"):
        occ.KLProjection(3)
    with pytest.raises(ValueError, match="max_steps"):
        occ.KLProjection(MDP, max_steps=0)
    with pytest.raises(TypeError, match=r"lower\[0\]: expected a tensor .*got int"):
        occ.KLProjection(MDP).solve(*case(MDP, 0, 0.2)[:2], [1, 2, 3], MDP.transitions)
