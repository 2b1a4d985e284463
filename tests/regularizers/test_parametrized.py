"""Parameters with a batch shape: whatever sizes coincide, each problem has its own parameters.

One function is written at three levels, with parameters that multiply entries:

    - strength sum ( sqrt(q(s,a)) + alpha sqrt(q(s) - q(s,a)) )
    - beta sum log q(s,a)  +  mix sum q(s,a) log( q(s,a) / q(s) )

Built-in regularizers can express it too, with scalars and element by element: that is the truth.
"""

import copy
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributions import constraints
from zoo import PROBLEMS, expect, random_loss, random_point

import torch_occ as occ
from torch_occ.regularizers.base import Sum
from torch_occ.regularizers.derivatives import Evaluator, derivatives

F64 = torch.float64
NAMES = ("strength", "alpha", "beta", "mix")
DOMAINS = dict.fromkeys(NAMES, constraints.nonnegative)


def tensor(*values):
    return torch.tensor(*values, dtype=F64)


class BySeparable(occ.SeparableRegularizer):
    arg_constraints: ClassVar = DOMAINS

    def pair(self, x):
        return -self.strength * x.sqrt() - self.beta * x.log() + self.mix * x * x.log()

    def rest(self, x):
        return -self.strength * self.alpha * x.sqrt()

    def state(self, x):
        return -self.mix * x * x.log()


class ByState(occ.StatewiseRegularizer):
    arg_constraints: ClassVar = DOMAINS

    def per_state(self, q_s):
        total = q_s.sum(-1, keepdim=True)
        rest = q_s @ (1 - torch.eye(q_s.shape[-1], dtype=F64))
        roots = q_s.sqrt() + (self.alpha * rest.sqrt() if q_s.shape[-1] > 1 else 0.0)
        entropy = self.mix * q_s * (q_s / total).log()
        return (-self.strength * roots - self.beta * q_s.log() + entropy).sum(-1)


class Jointly(occ.JointRegularizer):
    arg_constraints: ClassVar = DOMAINS

    def __init__(self, actions, **parameters):
        super().__init__(**parameters)
        self.actions = actions

    def joint(self, q):
        x, total = torch.where(self.actions, q, 1.0), q.sum(-1, keepdim=True)
        shared = self.actions & (self.actions.sum(-1, keepdim=True) > 1)
        rest = torch.where(shared, q @ (1 - torch.eye(q.shape[-1], dtype=F64)), 1.0)
        roots = x.sqrt() * self.actions + self.alpha * rest.sqrt() * shared
        entropy = self.mix * q * (x / total).log()
        return (-self.strength * roots - self.beta * x.log() + entropy).sum((-2, -1))


LEVELS = {
    "separable": lambda mdp, **parameters: BySeparable(**parameters),
    "statewise": lambda mdp, **parameters: ByState(**parameters),
    "joint": lambda mdp, **parameters: Jointly(mdp.actions, **parameters),
}


def built_in(mdp, strength, alpha, beta, mix):
    hybrid = occ.HybridTsallis(alpha) * occ.Constant(strength)
    return hybrid + occ.LogBarrier(beta) + occ.ConditionalEntropy() * occ.Constant(mix)


STEPS = LEVELS | {"built-in": built_in}


def owned(psi):
    """The parameters in the order of NAMES."""
    if not isinstance(psi, Sum):
        return [getattr(psi, name) for name in NAMES]
    hybrid, barrier, entropy = psi.terms
    return [hybrid.factor.rate, hybrid.regularizer.alpha, barrier.beta, entropy.factor.rate]


def uneven():
    """Five states with one, two or three actions in three layers."""
    actions = torch.ones(5, 3, dtype=torch.bool)
    actions[1, 1:] = actions[2, 0] = False
    generator = torch.Generator().manual_seed(3)
    shapes = [(n, 3, m) for n, m in pairwise((1, 2, 2, 1))]
    rows = [torch.rand(shape, dtype=F64, generator=generator) + 0.1 for shape in shapes]
    return occ.LayeredMDP([x / x.sum(-1, keepdim=True) for x in rows], actions=actions)


MDPS = {
    "contexts": PROBLEMS["contexts"]().mdp,  # L = 1, S = A = 3
    "masked": PROBLEMS["masked"]().mdp,  # L = A = 2, S = 4, groups of two states
    "uneven": uneven(),  # L = A = 3, S = 5, groups of 1, 1 and 3 states
    "cube": occ.LayeredMDP.random(horizon=2, width=3, num_actions=3, seed=4),  # L = 2, A = 3, S = 4
}


def shapes_of(mdp):
    """Every size that occurs in the MDP as a batch, alone and beside others."""
    S, A = mdp.num_states, mdp.num_actions
    groups = {n for _, group in mdp.action_groups for n in group.shape}
    alone = {(n,) for n in {1, mdp.horizon, S, A, S * A} | groups}
    return sorted(alone | {(S, 1), (A, 1), (S, A), (A, S), (A, A), (S, S), (1, 1), (2, 1, 3)})


CASES = [(name, shape) for name, mdp in MDPS.items() for shape in shapes_of(mdp)]
SMALL = [(name, shape) for name, shape in CASES if torch.Size(shape).numel() <= 15]
SOLVED = [(name, shape) for name, shape in SMALL if name in ("contexts", "uneven")]


def of_sizes(cases):
    ids = [f"{name}-{'x'.join(map(str, shape))}" for name, shape in cases]
    return pytest.mark.parametrize(("name", "shape"), cases, ids=ids)


at_all_levels = pytest.mark.parametrize("level", LEVELS)


def some(shape, seed, low=0.3, high=2.0):
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(shape, dtype=F64, generator=generator)


def parameters(shape, only=NAMES):
    """Each of this shape, or scalars where they are not named."""
    return {name: some(shape if name in only else (), seed) for seed, name in enumerate(NAMES)}


def indices(batch):
    return [tuple(index) for index in torch.ones(batch).nonzero().tolist()]


def element(values, batch, index):
    """The scalars that belong to one element of a batch."""
    return {name: float(value.expand(batch)[index]) for name, value in values.items()}


def each(function, values, batch):
    """function(index, scalars) for every element, stacked."""
    found = [function(index, element(values, batch, index)) for index in indices(batch)]
    return torch.stack(found).reshape(*batch, *found[0].shape)


def derive(mdp, psi, q, t=4.0):
    evaluator = Evaluator(psi)
    return derivatives(mdp, psi, evaluator.bind(evaluator.parameters(tensor(t)), tensor(t)), q)


def close(found, expected, tolerance=1e-12):
    assert found.shape == expected.shape
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * scale)


# -- all coincidences of sizes ---------------------------------------------------------------------


@pytest.mark.parametrize("level", STEPS)
@of_sizes(CASES)
def test_values_and_derivatives_are_those_of_each_element(name, shape, level):
    mdp, values, rate = MDPS[name], parameters(shape), some(shape, 9)
    q, psi = random_point(mdp, *shape, seed=7), STEPS[level](mdp, **values) / occ.InverseSqrt(rate)
    found = derive(mdp, psi, q)

    def alone(index, scalars):
        truth = built_in(mdp, **scalars) / occ.InverseSqrt(float(rate[index]))
        at = derive(mdp, truth, q[index])
        value, hessian = truth(q[index], 4.0, mdp), at.hessian.to_full().matrix
        return torch.cat([value[None], at.gradient.flatten(), hessian.flatten()]).detach()

    gradient, hessian = found.gradient.flatten(-2), found.hessian.to_full().matrix.flatten(-2)
    parts = [psi(q, 4.0, mdp)[..., None].detach(), gradient, hessian]
    expected = each(alone, values, shape).split([x.shape[-1] for x in parts], -1)
    for x, y in zip(parts, expected, strict=True):
        close(x, y)


@pytest.mark.parametrize("level", STEPS)
@of_sizes(SOLVED)
def test_solutions_and_their_gradients_are_those_of_each_element(name, shape, level):
    mdp, values = MDPS[name], parameters(shape)
    loss, c = random_loss(mdp, 5.0, seed=1, batch=shape), random_loss(mdp, seed=2)
    psi = STEPS[level](mdp, **values)
    q = occ.FTRLStep(mdp, psi)(loss)
    found = torch.autograd.grad((q * c * mdp.actions).sum(), owned(psi))

    def alone(index, scalars):
        truth = built_in(mdp, **scalars)
        q = occ.FTRLStep(mdp, truth)(loss[index])
        slopes = torch.autograd.grad((q * c * mdp.actions).sum(), owned(truth))
        return torch.cat([q.detach().flatten(), torch.stack(slopes)])

    expected_q, expected = each(alone, values, shape).split([c.numel(), len(NAMES)], -1)
    close(q.detach().flatten(-2), expected_q, 1e-10)
    close(torch.stack(found, -1), expected, 1e-8)


# -- several batch shapes at once, and none of q's own ---------------------------------------------


@at_all_levels
def test_parameters_of_different_batch_shapes_broadcast(level):
    mdp, batch = MDPS["cube"], (2, 4, 3)  # S = 4, A = 3
    shapes = ((3,), (4, 1), (2, 1, 1), ())
    values = {name: some(shape, 1) for name, shape in zip(NAMES, shapes, strict=True)}
    t, rates, loss = 1 + some((4, 3), 4), some((2, 1, 3), 5), random_loss(mdp, 5.0, seed=1)
    psi = LEVELS[level](mdp, **values) / occ.InverseSqrt(rates)
    q = occ.FTRLStep(mdp, psi)(loss, t)

    def alone(index, scalars):
        truth = built_in(mdp, **scalars) / occ.InverseSqrt(float(rates.expand(batch)[index]))
        return occ.FTRLStep(mdp, truth)(loss, float(t.expand(batch)[index])).detach()

    close(q.detach(), each(alone, values, batch), 1e-10)
    found = torch.autograd.grad(q.square().sum(), list(psi.parameters()))
    assert [x.shape for x in found] == [x.shape for x in psi.parameters()]


# -- under transforms ------------------------------------------------------------------------------


def solver(step, names):
    """(loss, *values of the named parameters) -> q"""

    def solve(loss, *values):
        return torch.func.functional_call(step, dict(zip(names, values, strict=True)), (loss,))

    return solve


SHORT = {  # two parameters of each
    **dict.fromkeys(LEVELS, ("regularizer.strength", "regularizer.beta")),
    "built-in": ("regularizer.terms.0.factor.rate", "regularizer.terms.1.beta"),
}


@pytest.mark.parametrize("level", STEPS)
@pytest.mark.parametrize(
    ("in_dims", "shapes"),
    [  # of the loss, strength and beta, without the events of the loss; S = 4, A = 3
        ((0, None, None), ((4, 3), (3,), (4, 1))),
        ((None, 0, None), ((3,), (3, 3), (3,))),
        ((None, 0, 0), ((4,), (3, 4), (3,))),
        ((None, 0, 0), ((), (4, 3, 4), (4,))),
        ((0, 0, None), ((3,), (3, 3), (3,))),
        ((1, 1, 0), ((4, 3), (4, 3), (3, 2, 1))),
    ],
)
def test_vmap_over_losses_and_parameters(level, in_dims, shapes):
    mdp = MDPS["cube"]
    step = occ.FTRLStep(mdp, STEPS[level](mdp, **parameters(())), backend="torch")
    solve = solver(step, SHORT[level])
    given = [random_loss(mdp, 5.0, batch=shapes[0]), some(shapes[1], 1), some(shapes[2], 2)]
    count = next(x.shape[dim] for x, dim in zip(given, in_dims, strict=True) if dim is not None)
    found = torch.func.vmap(solve, in_dims)(*given)

    def at(i):
        chosen = zip(given, in_dims, strict=True)
        return solve(*(x if dim is None else x.select(dim, i) for x, dim in chosen))

    close(found.detach(), torch.stack([at(i) for i in range(count)]).detach())


# -- what counts as a parameter with a batch -------------------------------------------------------


class PerPair(occ.SeparableRegularizer):
    """A weight for every pair, and one for all of them."""

    arg_constraints: ClassVar = {"weights": constraints.independent(constraints.positive, 2)}

    def pair(self, x):
        return -self.scale * self.weights * x.log()


@pytest.mark.parametrize(
    ("shape", "scale"),
    [((), (3,)), ((3,), ()), ((3,), (3,)), ((3, 1), (3,)), ((3, 3), (3, 3)), ((), ())],
)
def test_a_parameter_may_declare_an_event_shape(shape, scale):
    mdp = MDPS["contexts"]  # S = A = 3
    weights, scales, loss = some((*shape, 3, 3), 0), some(scale, 1), random_loss(mdp, 5.0)
    psi = PerPair(weights=weights, scale=scales)
    q = occ.FTRLStep(mdp, psi)(loss)
    batch = torch.broadcast_shapes(shape, scale)
    assert q.shape == (*batch, 3, 3)
    for index in indices(batch):
        own, scale = weights.expand(*batch, 3, 3)[index], float(scales.expand(batch)[index])
        alone = PerPair(weights=own, scale=scale)
        close(q[index].detach(), occ.FTRLStep(mdp, alone)(loss).detach(), 1e-12)
    with expect("PerPair: weights must satisfy GreaterThan", "got -3.0"):
        PerPair(weights=torch.where(torch.eye(3) > 0, -3.0, weights), scale=1.0)


class ByHand(occ.SeparableRegularizer):
    """Parameters set as attributes: one number an action, a scalar, and those of a network."""

    def __init__(self, tilt):
        super().__init__()
        self.tilt = nn.Parameter(tilt)
        self.scale = nn.Parameter(tensor(2.0))
        self.network = nn.Linear(1, 1, dtype=F64)
        self.network.load_state_dict({"weight": tensor([[0.3]]), "bias": tensor([0.1])})

    def pair(self, x):
        affine = self.network(x.unsqueeze(-1)).squeeze(-1)
        return self.scale * self.tilt * x.square() + affine - x.log()


def test_parameters_that_are_set_as_attributes_keep_their_own_shape():
    mdp, tilt, loss = MDPS["contexts"], tensor([0.5, 1.0, 2.0]), random_loss(MDPS["contexts"], 5.0)
    psi = ByHand(tilt)
    assert occ.FTRLStep(mdp, psi)(loss).shape == (3, 3)
    alone = torch.stack([occ.FTRLStep(mdp, ByHand(x * tilt))(loss) for x in (1.0, 3.0, 0.5)])
    psi.scale = nn.Parameter(tensor([2.0, 6.0, 1.0]))  # the same function, three of them
    found = occ.FTRLStep(mdp, psi)(loss)
    close(found.detach(), alone.detach(), 1e-12)
    for twin in (copy.deepcopy(psi), 1.0 * psi, psi / 2 + psi / 2):
        close(occ.FTRLStep(mdp, twin)(loss).detach(), alone.detach(), 1e-12)


# -- what cannot be done says so -------------------------------------------------------------------


class Wrong(occ.SeparableRegularizer):
    def __init__(self, function, strength):
        super().__init__(strength=strength)
        self.function = function

    def pair(self, x):
        return self.function(self.strength, x)


def test_a_function_that_fails_is_named():  # tests/record has more
    psi = Wrong(lambda a, x: a.expand(2, 5, 3) * x, tensor([1.0, 2.0]))
    with expect("got the error ", "strength (2, 1, 1)"):
        psi(random_point(MDPS["cube"], 2, seed=7), 1.0, MDPS["cube"])


def test_a_vmap_over_the_weights_of_a_network_is_refused():
    mdp, psi = MDPS["contexts"], ByHand(tensor([0.5, 1.0, 2.0]))
    solve = solver(occ.FTRLStep(mdp, psi), ["regularizer.network.weight"])
    with expect("nn.Linear, cannot be batched", error=NotImplementedError):
        torch.func.vmap(solve, (None, 0))(random_loss(mdp), some((2, 1, 1), 0))


def test_tune_and_leap_refuse_parameters_that_they_cannot_take():
    mdp = MDPS["contexts"]
    world = occ.tuning.World("stochastic", mdp, random_loss(mdp))
    objective = occ.tuning.ForecastObjective([world], 100)
    with expect("regularizer: network.weight belongs to a Linear", "only="):
        occ.tune(objective, ByHand(tensor(1.0)), only=["network.weight"])
    options = {"only": ["scale"], "steps": 0, "starts": 3, "bounds": {"scale": (0.1, 9.0)}}
    found = occ.tune(objective, ByHand(tensor(1.0)), **options)
    assert bool(found.values.isfinite().all())
    with expect("regularizer: ", "batch shape (2,)", "forecast"):
        occ.leap(mdp, occ.LogBarrier(tensor([1.0, 2.0])), random_loss(mdp), 100, particles=2)
