import pytest
import torch

import torch_occ as occ
from torch_occ.mdp.unroll import ABSORBING

F64 = torch.float64
HORIZON = 6
ACTIONS = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 1], [1, 1, 1]], dtype=torch.bool)
INITIALS = {"index": 2, "distribution": torch.tensor([0.5, 0.0, 0.25, 0.25, 0.0], dtype=F64)}


def table(seed=0):
    """Five states: 0 -> {0, 1}, 1 -> {2, 3}, 2 -> {0, 4}, 3 -> {3, 4}, 4 -> {1}.

    Pairs outside ACTIONS stay where they are.
    """
    generator = torch.Generator().manual_seed(seed)
    edges = torch.zeros(5, 1, 5, dtype=F64)
    for state, nexts in enumerate([(0, 1), (2, 3), (0, 4), (3, 4), (1,)]):
        edges[state, 0, list(nexts)] = 1.0
    edges = torch.where(ACTIONS.unsqueeze(-1), edges, torch.eye(5, dtype=F64).unsqueeze(1))
    weights = edges * torch.rand(5, 3, 5, dtype=F64, generator=generator)
    return weights / weights.sum(-1, keepdim=True)


def markov_chain(P, initial, terminal, policy):
    """The state distributions `(HORIZON, S)`, by matrix powers; terminal states are absorbing."""
    step = torch.einsum("sa,sap->sp", policy, P)
    step[list(terminal)] = torch.eye(5, dtype=F64)[list(terminal)]
    start = torch.eye(5, dtype=F64)[initial] if isinstance(initial, int) else initial
    return torch.stack([start @ torch.linalg.matrix_power(step, k) for k in range(HORIZON)])


def random_policy(seed=1):
    weights = torch.rand(5, 3, dtype=F64, generator=torch.Generator().manual_seed(seed)) * ACTIONS
    return weights / weights.sum(-1, keepdim=True)


@pytest.mark.parametrize("terminal", [(), (3,), (0, 4), (2,)])
@pytest.mark.parametrize("initial", INITIALS.values(), ids=INITIALS)
def test_the_occupancy_is_that_of_the_markov_chain(initial, terminal):
    P, policy = table(), random_policy()
    mdp = occ.LayeredMDP.from_tables(P, HORIZON, initial, terminal=terminal, actions=ACTIONS)
    over = mdp.origin == ABSORBING
    lifted = torch.where(over.unsqueeze(-1), occ.uniform_policy(mdp), mdp.lift(policy))
    q = occ.occupancy(mdp, lifted)

    chain = markov_chain(P, initial, terminal, policy)
    ended = chain[:, list(terminal)].sum(-1)
    alive = chain[mdp.layer, mdp.origin.clamp(min=0)]
    expected = torch.where(over, ended[mdp.layer], alive).unsqueeze(-1) * lifted
    torch.testing.assert_close(q, expected, rtol=1e-13, atol=0)

    # Exactly the states that a policy reaches at each step were created, and one end a layer.
    chain[:, list(terminal)] = 0.0
    created = {(int(k), int(s)) for k, s in zip(mdp.layer, mdp.origin, strict=True)}
    possible = {(int(k), int(s)) for k, s in chain.nonzero()}
    assert created == possible | {(k, ABSORBING) for k in range(HORIZON) if ended[k] > 0}
    assert mdp.num_states == len(created)
    assert bool(mdp.reachable.all())


def test_terminal_states_and_masks():
    P = table()
    P[3] = torch.nan  # ignored: terminal
    P[1, 1] = -1.0  # ignored: no such action
    mdp = occ.LayeredMDP.from_tables(
        P, 3, torch.tensor([0.0, 0.75, 0.0, 0.25, 0.0], dtype=F64), terminal=[3], actions=ACTIONS
    )
    assert mdp.origin.tolist() == [1, ABSORBING, 2, ABSORBING, 0, 4, ABSORBING]
    assert mdp.initial.tolist() == [0.75, 0.25]
    end = torch.tensor([True, False, False])
    assert torch.equal(
        mdp.actions, torch.stack([ACTIONS[1], end, ACTIONS[2], end, ACTIONS[0], ACTIONS[4], end])
    )
    assert mdp.transitions[1][1, 0].tolist() == [0.0, 0.0, 1.0]  # the end waits


def test_all_mass_may_be_terminal_from_the_start():
    mdp = occ.LayeredMDP.from_tables(table(), 3, 4, terminal=[4])
    assert mdp.origin.tolist() == [ABSORBING] * 3
    assert mdp.num_pairs == 3


def test_lift_reads_a_table_by_origin():
    mdp = occ.LayeredMDP.from_tables(table(), HORIZON, 2, terminal=[3])
    loss = torch.arange(1.0, 31.0, dtype=F64).reshape(2, 5, 3)
    lifted = mdp.lift(loss)
    assert lifted.shape == (2, mdp.num_states, 3)
    for state, origin in enumerate(mdp.origin.tolist()):
        expected = torch.zeros(2, 3, dtype=F64) if origin == ABSORBING else loss[:, origin]
        assert torch.equal(lifted[:, state], expected)


# -- states that no policy reaches -------------------------------------------------------------


def test_prune_keeps_what_is_reached():
    """Only masked pairs and unreachable states lead to the states 1, 4 and 6."""
    first = [[[0.5, 0, 0.5], [0, 1, 0]], [[0, 1, 0], [0, 1, 0]], [[0.25, 0, 0.75], [1, 0, 0]]]
    second = [[[0.0, 1], [0, 1]], [[1, 0], [1, 0]], [[0, 1], [1, 0]]]
    actions = torch.ones(8, 2, dtype=torch.bool)
    actions[0, 1] = actions[5, 1] = False
    layers = [torch.tensor(P, dtype=F64) for P in (first, second, [[[1]] * 2] * 2)]
    initial = torch.tensor([0.5, 0.0, 0.5], dtype=F64)
    mdp = occ.LayeredMDP(layers, actions=actions, initial=initial)
    assert mdp.reachable.tolist() == [True, False, True, True, False, True, False, True]
    pruned = mdp.prune()
    assert pruned.layer_sizes == (2, 2, 1)
    assert pruned.origin.tolist() == [0, 2, 3, 5, 7]
    assert pruned.prune() is pruned
    policy = occ.uniform_policy(mdp)
    q = occ.occupancy(pruned, pruned.lift(policy))
    assert torch.equal(q, occ.occupancy(mdp, policy)[pruned.origin])


def test_in_a_batch_a_state_is_reachable_if_every_element_reaches_it_by_whatever_way():
    def crossing(first, second):
        return torch.tensor([[first], [second]], dtype=F64)

    halves, ways_out = torch.full((1, 1, 2), 0.5, dtype=F64), torch.ones(2, 1, 1, dtype=F64)
    straight, crossed = crossing([1, 0], [0, 1]), crossing([0, 1], [1, 0])
    merged = crossing([1, 0], [1, 0])
    mdp = occ.LayeredMDP([halves, torch.stack([straight, crossed]), ways_out])
    assert mdp.reachable.tolist() == [True] * 5
    mdp = occ.LayeredMDP([halves, torch.stack([straight, merged]), ways_out])
    assert mdp.reachable.tolist() == [True, True, True, True, False]
