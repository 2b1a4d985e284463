from itertools import product

import pytest
import torch
from zoo import PROBLEMS, mdps, random_loss, random_policy

import torch_occ as occ
from torch_occ.mdp.occupancy import DenseFlow, LayeredFlow, flow_source

F64 = torch.float64


def batch_of_mdps(*batch):
    """MDPs of one layout, with two start states, masks and a batch in every tensor but one."""
    generator = torch.Generator().manual_seed(3)

    def distribution(*shape):
        return torch.rand(*shape, dtype=F64, generator=generator).mul(4).softmax(-1)

    actions = torch.ones(7, 3, dtype=torch.bool)
    actions[0, 2] = actions[3, 0] = actions[3, 1] = False
    transitions = [
        distribution(*batch, 2, 3, 3),
        distribution(3, 3, 2),
        torch.ones(2, 3, 1, dtype=F64),
    ]
    return occ.LayeredMDP(transitions, actions=actions, initial=distribution(*batch, 2))


BATCHES = {"batch": lambda: batch_of_mdps(4), "two_dims": lambda: batch_of_mdps(2, 3)}
every_mdp = mdps(**BATCHES)


def close(found, expected, tolerance=1e-13):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# -- the operators -----------------------------------------------------------------------------


@every_mdp
@pytest.mark.parametrize("leading", [(), (1,), (5, 1, 1)])
def test_dense_and_layered_flow_agree(build, leading):
    mdp = build()
    dense, layered = DenseFlow(mdp), LayeredFlow(mdp)
    x, v = random_loss(mdp, batch=leading), random_loss(mdp, seed=1, batch=leading).sum(-1)
    close(dense.inflow(x), layered.inflow(x))
    close(dense.lookahead(v), layered.lookahead(v))
    policy = random_policy(mdp, *leading)
    close(dense.forward(policy, v), layered.forward(policy, v))
    close(dense.backward(policy, v), layered.backward(policy, v))
    batch = torch.broadcast_shapes(leading, mdp.joint_transitions.shape[:-3])
    assert dense.inflow(x).shape == (*batch, mdp.num_states)
    u, ahead = layered.forward(policy, v), layered.backward(policy, v)
    close(u, v + layered.inflow(policy * u.unsqueeze(-1)))
    close(ahead, v + (policy * layered.lookahead(ahead)).sum(-1))


@every_mdp
def test_the_adjoint_is_the_adjoint(build):
    """<E q, v> = <q, E'v> for every q that vanishes on masked pairs."""
    mdp = build()
    q, v = random_loss(mdp) * mdp.actions, random_loss(mdp, seed=1).sum(-1)
    E_q = occ.mdp.flow_residual(mdp, q) + flow_source(mdp)
    adjoint = occ.mdp.flow_adjoint(mdp, v)
    close((E_q * v).sum(-1), (q * adjoint).sum((-2, -1)))
    assert not bool(adjoint[..., ~mdp.actions].any())


# -- policies and occupancies ------------------------------------------------------------------


@every_mdp
def test_policy_to_occupancy_and_back(build):
    mdp = build()
    policy = random_policy(mdp)
    q = occ.occupancy(mdp, policy)
    assert float(occ.mdp.flow_residual(mdp, q).abs().max()) < 1e-15
    for layer in mdp.split(q, -2):
        close(layer.sum((-2, -1)), torch.ones(mdp.batch_shape, dtype=F64), 1e-15)
    torch.testing.assert_close(occ.policy_of(mdp, q), policy.expand_as(q), rtol=1e-15, atol=0)
    assert bool((occ.interior_point(mdp)[..., mdp.actions] > 0).all())


def test_the_policy_of_an_unvisited_state_is_uniform_over_its_actions():
    mdp = batch_of_mdps(2)
    policy = occ.policy_of(mdp, torch.zeros(2, 7, 3, dtype=F64))
    assert torch.equal(policy[1], occ.uniform_policy(mdp))
    assert policy[0, 0].tolist() == [0.5, 0.5, 0.0]
    assert policy[0, 3].tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("leading", [(), (4,)])
@every_mdp
def test_reachability_is_the_product_of_the_steps_between(build, leading):
    mdp = build()
    policy = random_policy(mdp, *(leading if len(mdp.batch_shape) < 2 else ()))
    steps = [
        torch.einsum("...sa,...sap->...sp", pi, P)
        for pi, P in zip(mdp.split(policy, -2), mdp.transitions, strict=True)
    ]
    batch = torch.broadcast_shapes(policy.shape[:-2], mdp.batch_shape)
    expected = torch.zeros(*batch, mdp.num_states, mdp.num_states, dtype=F64)
    for k, here in enumerate(mdp.layer_slices):
        way = torch.eye(mdp.layer_sizes[k], dtype=F64)
        for there, step in zip(mdp.layer_slices[k:], steps[k:], strict=True):
            expected[..., here, there] = way
            way = way @ step
    close(occ.mdp.reachability(mdp, policy), expected)


# -- planning ----------------------------------------------------------------------------------


def deterministic_policies(mdp):
    """All of them, `(N, S, A)`."""
    choices = product(*(row.nonzero().flatten().tolist() for row in mdp.actions))
    return torch.nn.functional.one_hot(torch.tensor(list(choices)), mdp.num_actions).to(F64)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["bandit", "contexts", "masked", "no_choice", "random", "batch"])
def test_the_optimal_policy_is_the_best_of_all_deterministic_ones(name, seed):
    small = {"random": lambda: occ.LayeredMDP.random(3, 2, 3, seed=seed)} | BATCHES
    mdp = small[name]() if name in small else PROBLEMS[name]().mdp
    loss = random_loss(mdp, seed=seed) - 0.5
    plan = occ.optimal_policy(mdp, loss)
    policies = deterministic_policies(mdp)[(slice(None), *(None,) * len(mdp.batch_shape))]
    costs = (occ.occupancy(mdp, policies) * loss).sum((-2, -1))
    best = costs.amin(0)
    close((plan.value[..., mdp.layer == 0] * mdp.initial).sum(-1), best)
    close((occ.occupancy(mdp, plan.policy) * loss).sum((-2, -1)), best)
    assert bool((plan.policy.sum(-1) == 1).all())
    assert not bool(plan.policy[..., ~mdp.actions].any())


@every_mdp
def test_gaps_and_the_performance_difference(build):
    """<q - q_opt, loss> = sum q gaps, for every q in Omega."""
    mdp = build()
    loss = random_loss(mdp, batch=mdp.batch_shape)
    plan = occ.optimal_policy(mdp, loss)
    assert bool((plan.gaps >= 0).all())
    assert not bool(plan.gaps[plan.policy > 0].any())
    assert not bool(plan.gaps[..., ~mdp.actions].any())
    assert bool((plan.Q[..., ~mdp.actions] == torch.inf).all())
    q, q_opt = occ.occupancy(mdp, random_policy(mdp)), occ.occupancy(mdp, plan.policy)
    close(((q - q_opt) * loss).sum((-2, -1)), (q * plan.gaps).sum((-2, -1)))


def test_the_first_of_equal_actions_is_chosen():
    plan = occ.optimal_policy(
        occ.LayeredMDP([torch.ones(1, 3, 1, dtype=F64)]), torch.tensor([[2.0, 1.0, 1.0]], dtype=F64)
    )
    assert plan.policy.tolist() == [[0.0, 1.0, 0.0]]
    assert plan.gaps.tolist() == [[1.0, 0.0, 0.0]]
