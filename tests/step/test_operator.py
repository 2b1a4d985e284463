"""The step in torch.compile and torch.export: as without them, or refused with the reason."""

import copy

import pytest
import torch
from torch import nn
from zoo import REGULARIZERS, random_loss, tensor

import torch_occ as occ
from torch_occ.learning.losses import fenchel_young
from torch_occ.step.graph import pull_back_step, solve_step

pytestmark = [
    pytest.mark.usefixtures("both_backends", "fresh_compiler"),
    # torch hides these two of its own from users.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]


@pytest.fixture
def fresh_compiler():
    yield
    torch.compiler.reset()


def small(seed=0):
    return occ.LayeredMDP.random(horizon=2, width=2, num_actions=2, seed=seed)


class Net(nn.Module):
    """A network in front of a step, in single precision."""

    def __init__(self, step, features=3):
        super().__init__()
        self.step = step
        self.shape = step.mdp.num_states, step.mdp.num_actions
        generator = torch.Generator().manual_seed(0)
        size = step.mdp.num_states * step.mdp.num_actions
        self.weight = nn.Parameter(torch.rand(features, size, generator=generator))

    def forward(self, x, t=2.0):
        return self.step((x @ self.weight).unflatten(-1, self.shape), t)


def features(count=4):
    return torch.rand(count, 3, generator=torch.Generator().manual_seed(1))


def run(net, function, *inputs):
    """q and all gradients of an expected cost."""
    net.zero_grad()
    q = function(*inputs)
    (q * random_loss(net.step.mdp, seed=3)).sum().backward()
    return [q.detach(), *(p.grad.clone() for p in net.parameters())]


def same(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(
            x, y, atol=1e-10, rtol=1e-6 if x.dtype == torch.float32 else 1e-9
        )


@pytest.mark.parametrize("name", ["jin_luo", "shannon", "all_levels"])
def test_a_compiled_network_equals_the_eager_one(name):
    mdp = small()
    net = Net(occ.FTRLStep(mdp, REGULARIZERS[name](mdp)))
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    same(run(net, compiled, features()), run(net, net, features()))
    with torch.no_grad():  # the parameters are read at every call
        for p in net.step.parameters():
            p.mul_(0.9)
    same(run(net, compiled, features()), run(net, net, features()))
    with torch.no_grad():
        torch.testing.assert_close(compiled(features()), net(features()))


@pytest.mark.slow
def test_inductor(both_backends):
    if both_backends == "auto":
        return  # the graph is the same
    net = Net(occ.FTRLStep(small(), occ.jin_luo(small(), beta=1.0)))
    compiled = torch.compile(net, fullgraph=True)
    same(run(net, compiled, features()), run(net, net, features()))


def test_other_sizes_of_a_batch_and_tensors_t():
    net = Net(occ.FTRLStep(small(), occ.jin_luo(small(), beta=1.0)))
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (2, 5, 7):
        t = torch.arange(1.0, 1 + count)
        same(run(net, compiled, features(count), t), run(net, net, features(count), t))


def test_derivatives_in_t_and_warm_starts():
    step = occ.FTRLStep(small(), occ.jin_luo(small(), beta=1.0))
    loss, cost = random_loss(small()), random_loss(small(), seed=2)

    def value(t, start):
        return (step(loss, t, warm_start=start) * cost).sum()

    compiled = torch.compile(value, backend="aot_eager", fullgraph=True)
    t, start = tensor(3.0).requires_grad_(), step(loss, 2.0).detach()
    found, expected = (torch.autograd.grad(f(t, start), t)[0] for f in (compiled, value))
    torch.testing.assert_close(found, expected)
    assert step.solve(loss, 1.0).backend == step.expected_backend


def test_losses_for_learning():
    mdp = small()
    step = occ.FTRLStep(mdp, occ.ConditionalEntropy())
    target = step(random_loss(mdp, seed=5)).detach()
    states, actions = torch.tensor([[0, 1]]), torch.tensor([[1, 0]])
    functions = {
        "fenchel_young": lambda x: occ.fenchel_young_loss(step, 2 * x, target),
        "cost": lambda x: occ.expected_cost(step, 2 * x, target),
        "likelihood": lambda x: occ.negative_log_likelihood(step, 2 * x, states, actions),
    }
    for function in functions.values():
        loss = random_loss(mdp).requires_grad_()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        (found, by_found), (expected, by_expected) = (
            (value, torch.autograd.grad(value, loss)[0])
            for value in (compiled(loss), function(loss))
        )
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(by_found, by_expected)


def test_budgets_are_part_of_a_graph():
    mdp = small()
    step = occ.FTRLStep(mdp, occ.Shannon() / occ.Constant(2.0))
    costs, cost = random_loss(mdp, seed=2).unsqueeze(0), random_loss(mdp, seed=3)
    limits = (costs[0] * step(random_loss(mdp))).sum().detach() * tensor([0.95])

    def outcome(loss, costs, limits):
        solution = step.solve(2 * loss, constraints=occ.Budgets(costs, limits))
        return (solution.q * cost).sum() + solution.multipliers.sum() + solution.slack.sum()

    given = [x.clone().requires_grad_() for x in (random_loss(mdp), costs, limits)]
    compiled = torch.compile(outcome, backend="aot_eager", fullgraph=True)
    moving = [*given, *step.parameters()]
    found, expected = (torch.autograd.grad(f(*given), moving) for f in (compiled, outcome))
    assert all(float(x.abs().max()) > 0 for x in expected)
    torch.testing.assert_close(found, expected)


def test_the_operators_keep_the_rules_of_torch():
    mdp = small()
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=1.0))
    loss, t = random_loss(mdp, batch=(2,)).requires_grad_(), tensor(3.0).requires_grad_()
    parameters = [x.detach().requires_grad_() for x in step.evaluator.parameters(t)]
    budgets = [random_loss(mdp, seed=2).unsqueeze(0), tensor([9.0])]
    for given in ([], budgets):
        torch.library.opcheck(solve_step, (step.name_in_graphs, loss, t, None, parameters, given))
    found = [x.detach() for x in solve_step(step.name_in_graphs, loss, t, None, parameters, [])]
    bars, plain = [torch.ones_like(found[0]), None], [loss.detach(), t.detach()]
    numbers = [x.detach() for x in parameters]
    for more in (False, True):
        given = (step.name_in_graphs, bars, found[:1], *plain, numbers, [], more)
        torch.library.opcheck(pull_back_step, given)
    entropy = occ.FTRLStep(mdp, occ.ConditionalEntropy())
    target, name = entropy(random_loss(mdp, seed=5)).detach(), entropy.name_in_graphs
    torch.library.opcheck(solve_step, (name, loss, None, None, [], []))
    torch.library.opcheck(fenchel_young, (name, loss, target, t.detach(), None, False))


def test_vmap_inside_a_compiled_function():
    mdp = small()
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=1.0))
    losses, t = random_loss(mdp, batch=(3, 2)), tensor([1.0, 2.0, 3.0])
    for in_dims in ((0, 0), (0, None), (1, None)):
        times = tensor(2.0) if in_dims[1] is None else t

        def mapped(loss, t, in_dims=in_dims):
            return torch.func.vmap(lambda x, s: step(x, s), in_dims=in_dims)(loss, t)

        compiled = torch.compile(mapped, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(losses, times), mapped(losses, times))


def test_what_is_not_an_operator_runs_between_two_graphs():
    """Transitions that require gradients, and check=False."""
    mdp = small()
    step = occ.FTRLStep(mdp, occ.jin_luo(mdp, beta=1.0))
    scores = tensor([[[0.1, 0.2], [0.3, -0.4]]]).requires_grad_()
    loss, cost = random_loss(mdp, 2.0), random_loss(mdp, seed=2)

    def through_transitions(scores):
        other = mdp.with_transitions([scores.softmax(-1), mdp.transitions[1]])
        return (step(2 * loss, 1.0, mdp=other) * cost).sum()

    compiled = torch.compile(through_transitions, backend="aot_eager")
    pair = [torch.autograd.grad(f(scores), scores)[0] for f in (compiled, through_transitions)]
    torch.testing.assert_close(*pair)
    solved = torch.compile(lambda x: step.solve(2 * x, 1.0, check=False).q, backend="aot_eager")(
        loss
    )
    torch.testing.assert_close(solved, step(2 * loss, 1.0))


def test_export():
    net = Net(occ.FTRLStep(small(), occ.jin_luo(small(), beta=1.0)))
    program = torch.export.export(net, (features(),))
    torch.testing.assert_close(program.module()(features()), net(features()))
    assert "torch_occ.solve_step" in str(program.graph)


def test_export_refuses_what_is_not_an_operator():
    class Unchecked(Net):
        def forward(self, x):
            return self.step.solve((x @ self.weight).unflatten(-1, self.shape), check=False).q

    net = Unchecked(occ.FTRLStep(small(), occ.Shannon()))
    with pytest.raises(Exception, match="a step with check=False is not an operator of a graph"):
        torch.export.export(net, (features(),), strict=False)


def test_copies_have_their_own_parameters():
    net = Net(occ.FTRLStep(small(), occ.jin_luo(small(), beta=1.0)))
    other = copy.deepcopy(net)
    assert other.step.name_in_graphs != net.step.name_in_graphs
    with torch.no_grad():
        other.step.regularizer.terms[1].beta.fill_(5.0)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(features()), other(features()))
    assert not torch.allclose(other(features()), net(features()))


def test_functional_call_inside_a_compiled_function():
    """The graph uses the parameters that it is given, not those of the module."""
    net = Net(occ.FTRLStep(small(), occ.jin_luo(small(), beta=1.0)))
    name = next(n for n, _ in net.named_parameters() if n.endswith("beta"))
    cost, x = random_loss(small(), seed=3), features()

    def value(beta):
        return (torch.func.functional_call(net, {name: beta}, (x,)) * cost).sum()

    beta = tensor(4.0).requires_grad_()
    compiled = torch.compile(value, backend="aot_eager", fullgraph=True)
    found, expected = (torch.autograd.grad(f(beta), beta)[0] for f in (compiled, value))
    torch.testing.assert_close(found, expected)
    assert value(beta).item() == pytest.approx(compiled(beta).item())
    assert dict(net.named_parameters())[name].item() == 1.0


def test_errors_keep_their_message():
    step = occ.FTRLStep(small(), occ.jin_luo(small(), beta=1.0))
    compiled = torch.compile(lambda x: step(2 * x, 1.0), backend="aot_eager", fullgraph=True)
    wrong = random_loss(small())
    wrong[0, 1] = torch.nan
    with pytest.raises(ValueError, match="layer 0, state 0, action 1 is nan"):
        compiled(wrong)


def test_a_step_that_has_moved_is_compiled_again():
    step = occ.FTRLStep(small(), occ.ConditionalEntropy())
    compiled = torch.compile(lambda x: step(x), backend="aot_eager", fullgraph=True)
    loss = random_loss(small())
    assert compiled(loss).dtype == torch.float64
    step.float()
    torch.testing.assert_close(compiled(loss), step(loss))
    assert compiled(loss).dtype == torch.float32


def test_second_derivatives_are_refused_without_aot():
    """Other backends of torch.compile would differentiate the operators again."""
    step = occ.FTRLStep(small(), occ.ConditionalEntropy())
    cost, loss = random_loss(small(), seed=3), random_loss(small()).requires_grad_()
    compiled = torch.compile(lambda x: (step(x) * cost).sum(), backend="eager", fullgraph=True)
    (slope,) = torch.autograd.grad(compiled(loss), loss, create_graph=True)
    with pytest.raises(NotImplementedError, match="has first derivatives only"):
        torch.autograd.grad((slope * cost).sum(), loss)
