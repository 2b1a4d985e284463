"""A sparse MDP and its dense twin: the same results, and the same errors."""

import copy
import pickle

import pytest
import torch
from zoo import expect, mdps, random_loss, random_policy

import torch_occ as occ

F64 = torch.float64
LAYOUTS = {
    "coo": lambda p: p,
    "csr": lambda p: p.to_sparse_csr(),
    "csc": lambda p: p.to_sparse_csc(),
}

# torch says so whenever a user makes a compressed tensor; the package itself must not.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CS. tensor support is in beta state:UserWarning"
)


def unreachable():
    """Zero probabilities, a state that nobody reaches, masks."""
    first = torch.tensor([[[0.5, 0.0, 0.5], [1.0, 0.0, 0.0]]], dtype=F64)
    actions = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    return occ.LayeredMDP([first, torch.ones(3, 2, 1, dtype=F64)], actions=actions)


every_mdp = mdps(
    unreachable=unreachable,
    extreme=lambda: occ.LayeredMDP.random(5, 4, 3, seed=3, concentration=0.01).prune(),
)


def sparse(index, values, shape):
    return torch.sparse_coo_tensor(index, values, shape, check_invariants=False)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


# -- the same model ----------------------------------------------------------------------------


@every_mdp
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_layout_is_read(build, layout):
    dense = build()
    given = [layout(p) for p in dense.to_sparse().transitions]
    sparse = occ.LayeredMDP(given, actions=dense.actions, initial=dense.initial)
    assert sparse.is_sparse
    assert repr(sparse) == repr(dense)
    assert all(p.layout == torch.sparse_coo and p.dim() == 2 for p in sparse.transitions)
    back = sparse.to_dense()
    assert not back.is_sparse
    assert all(map(torch.equal, back.transitions, dense.transitions))
    assert torch.equal(sparse.reachable, dense.reachable)
    dense, sparse = dense.prune(), sparse.prune()
    assert torch.equal(sparse.origin, dense.origin)
    assert torch.equal(sparse.actions, dense.actions)
    assert all(map(torch.equal, sparse.to_dense().transitions, dense.transitions))
    assert bool(sparse.reachable.all())


def test_the_number_of_actions_is_found_without_a_mask():
    dense = occ.LayeredMDP.random(3, 4, 2)
    assert occ.LayeredMDP(dense.to_sparse().transitions).num_actions == 2
    halves = torch.tensor([0.5, 0.5], dtype=F64)
    bandit = occ.LayeredMDP([torch.ones(6, 1, dtype=F64).to_sparse()], initial=halves)
    assert (bandit.num_actions, bandit.layer_sizes) == (3, (2,))
    mixed = occ.LayeredMDP([dense.to_sparse().transitions[0], *dense.transitions[1:]])
    assert (mixed.num_actions, mixed.layer_sizes, mixed.is_sparse) == (2, (1, 4, 4), True)


def test_entries_that_occur_twice_add_up():
    values = torch.tensor([0.25, 0.5, 0.25, 1.0], dtype=F64)
    twice = sparse([[0, 0, 0, 1], [1, 0, 1, 0]], values, (2, 2))
    mdp = occ.LayeredMDP([twice, torch.ones(4, 1, dtype=F64).to_sparse()])
    assert mdp.to_dense().transitions[0].tolist() == [[[0.5, 0.5], [1.0, 0.0]]]
    assert len(mdp.probabilities[1]) == 3


def test_copies_and_files_after_use():
    mdp = occ.LayeredMDP.random(3, 3, 2).to_sparse()
    policy = occ.uniform_policy(mdp)
    q = occ.occupancy(mdp, policy)  # fills the caches
    mdp.transitions[1].values().zero_()  # a copy: its writes would not be noticed
    for other in (copy.deepcopy(mdp), pickle.loads(pickle.dumps(mdp))):
        assert torch.equal(occ.occupancy(other, policy), q)


# -- the same functions ------------------------------------------------------------------------


@every_mdp
def test_occupancy_planning_and_reachability_are_the_same(build):
    dense = build()
    sparse, policy, loss = (
        dense.to_sparse(),
        random_policy(dense, 4),
        random_loss(dense, batch=(4,)),
    )
    close(occ.interior_point(sparse), occ.interior_point(dense))
    close(occ.mdp.reachability(sparse, policy), occ.mdp.reachability(dense, policy))
    close([*occ.optimal_policy(sparse, loss)], [*occ.optimal_policy(dense, loss)])


@every_mdp
def test_derivatives_and_transforms_take_the_other_way_to_the_same_numbers(build):
    """Compressed rows for plain numbers, gathers and scatters for all else."""
    mdp = build().to_sparse()
    layer = mdp.layers[0]
    x = random_loss(mdp, batch=(3,))[:, : layer.sizes[0]]
    v = torch.rand(3, layer.sizes[2], dtype=F64, generator=torch.Generator().manual_seed(1))
    for function, argument in ((layer.arrive, x), (layer.ahead, v)):
        plain = function(argument)
        close(function(argument.clone().requires_grad_()).detach(), plain)
        close(torch.func.vmap(function)(argument), plain)
        close(torch.stack([function(row) for row in argument]), plain)
    batch = layer.with_probabilities(
        layer.probabilities * torch.tensor([[1.0], [2.0], [3.0]], dtype=F64)
    )
    close(batch.arrive(x), torch.stack([(i + 1) * layer.arrive(x[i]) for i in range(3)]))
    close(batch.ahead(v), torch.stack([(i + 1) * layer.ahead(v[i]) for i in range(3)]))


def test_occupancy_has_derivatives_in_the_entries():
    mdp = occ.LayeredMDP.random(3, 3, 2, seed=5).to_sparse()
    policy = random_policy(mdp).requires_grad_()
    entries = [p.clone().requires_grad_() for p in mdp.probabilities]
    function = lambda policy, *entries: occ.occupancy(mdp.with_probabilities(*entries), policy)  # noqa: E731
    assert torch.autograd.gradcheck(
        function, (policy, *entries), check_forward_ad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(function, (policy, *entries))


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_user_s_sparse_tensor_gets_a_gradient(layout):
    dense = occ.LayeredMDP.random(3, 3, 2, seed=5)
    first, table, last = (p.clone() for p in dense.transitions)
    given = LAYOUTS[layout](table.flatten(0, 1).to_sparse())
    weight, found = random_loss(dense), []
    for tensor in (given.requires_grad_(), table.requires_grad_()):
        q = occ.interior_point(occ.LayeredMDP([first, tensor, last]))
        found += torch.autograd.grad((weight * q).sum(), tensor)
    close(found[0].to_dense().unflatten(0, (3, 2)), found[1])


@every_mdp
def test_the_same_numbers_draw_the_same_states(build):
    dense = build()
    generator = torch.Generator().manual_seed(0)
    masks = dense.split(dense.actions, -2)
    for table, entries, mask in zip(dense.layers, dense.to_sparse().layers, masks, strict=True):
        state, action = mask.nonzero().repeat(200, 1).T
        uniform = torch.rand(len(state), dtype=F64, generator=generator)
        uniform[:2] = torch.tensor([0.0, 1 - 2.0**-53])
        assert torch.equal(entries.draw(state, action, uniform), table.draw(state, action, uniform))


# -- bad input ---------------------------------------------------------------------------------


def test_what_a_masked_pair_says_is_ignored():
    """The messages are in the record, to the word."""
    first, middle, last = (torch.full(shape, 0.5, dtype=F64) for shape in ((2, 2), (4, 2), (4, 1)))
    actions = torch.ones(5, 2, dtype=torch.bool)
    actions[2, 0] = False
    for bad in ([0.25, 0.5], [-0.25, 1.25], [0.5, torch.nan]):
        middle[2] = torch.tensor(bad)
        given = [p.to_sparse() for p in (first, middle, 2 * last)]
        occ.LayeredMDP(given, actions=actions)


def test_blocks_are_no_layout():
    blocks = torch.full((4, 2), 0.5, dtype=F64).to_sparse_bsr((2, 1))
    with expect("transitions[0]", "layout", "to_sparse_csr()"):
        occ.LayeredMDP([blocks, torch.ones(4, 1, dtype=F64).to_sparse()])
