"""A sparse MDP and its dense twin: the same results, and the same errors."""

import copy
import pickle
import re

import pytest
import torch
from zoo import PROBLEMS, random_loss

import torch_occ as occ
from torch_occ.mdp.layers import SparseLayer
from torch_occ.mdp.occupancy import LayeredFlow, flow_of

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


DENSE = {name: (lambda build=build: build().mdp) for name, build in PROBLEMS.items()} | {
    "unreachable": unreachable
}
DENSE |= {
    "concentration 0.01": lambda: occ.LayeredMDP.random(5, 4, 3, seed=3, concentration=0.01).prune()
}
every_mdp = pytest.mark.parametrize("build", DENSE.values(), ids=DENSE)


def sparse(index, values, shape):
    return torch.sparse_coo_tensor(index, values, shape, check_invariants=False)


def policies(mdp, *batch, seed=0):
    weights = (random_loss(mdp, seed=seed, batch=batch) + 0.01) * mdp.actions
    return weights / weights.sum(-1, keepdim=True)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


def expect(*fragments):
    return pytest.raises(ValueError, match=".*".join(re.escape(fragment) for fragment in fragments))


# -- the same model ----------------------------------------------------------------------------


@every_mdp
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_layout_is_read(build, layout):
    dense = build()
    sparse = occ.LayeredMDP(
        [layout(p) for p in dense.to_sparse().transitions],
        actions=dense.actions,
        initial=dense.initial,
    )
    assert sparse.is_sparse
    assert (sparse.layer_sizes, sparse.num_actions, sparse.batch_shape) == (
        dense.layer_sizes,
        dense.num_actions,
        (),
    )
    assert all(p.layout == torch.sparse_coo and p.dim() == 2 for p in sparse.transitions)
    back = sparse.to_dense()
    assert not back.is_sparse
    assert all(
        torch.equal(p, expected)
        for p, expected in zip(back.transitions, dense.transitions, strict=True)
    )
    assert torch.equal(sparse.reachable, dense.reachable)


def test_the_number_of_actions_is_found_without_a_mask():
    dense = occ.LayeredMDP.random(3, 4, 2)
    assert occ.LayeredMDP(dense.to_sparse().transitions).num_actions == 2
    bandit = occ.LayeredMDP(
        [torch.ones(6, 1, dtype=F64).to_sparse()], initial=torch.tensor([0.5, 0.5], dtype=F64)
    )
    assert (bandit.num_actions, bandit.layer_sizes) == (3, (2,))
    mixed = occ.LayeredMDP([dense.to_sparse().transitions[0], *dense.transitions[1:]])
    assert (mixed.num_actions, mixed.layer_sizes, mixed.is_sparse) == (2, (1, 4, 4), True)


def test_entries_that_occur_twice_add_up():
    twice = sparse(
        [[0, 0, 0, 1], [1, 0, 1, 0]], torch.tensor([0.25, 0.5, 0.25, 1.0], dtype=F64), (2, 2)
    )
    mdp = occ.LayeredMDP([twice, torch.ones(4, 1, dtype=F64).to_sparse()])
    assert mdp.to_dense().transitions[0].tolist() == [[[0.5, 0.5], [1.0, 0.0]]]
    assert len(mdp.probabilities[1]) == 3


@every_mdp
def test_pruning_keeps_the_same_states(build):
    dense, sparse = build().prune(), build().to_sparse().prune()
    assert torch.equal(sparse.origin, dense.origin)
    assert torch.equal(sparse.actions, dense.actions)
    assert all(
        torch.equal(p, expected)
        for p, expected in zip(sparse.to_dense().transitions, dense.transitions, strict=True)
    )
    assert bool(sparse.reachable.all())


def test_conversion_keeps_the_indices():
    mdp = occ.LayeredMDP.random(3, 3, 2).to_sparse()
    single = mdp.to(dtype=torch.float32)
    assert {p.dtype for p in (*single.probabilities, *single.transitions)} == {torch.float32}
    assert {layer.pattern.pair.dtype for layer in single.layers} == {torch.int32}
    assert mdp.to("meta").device.type == "meta"


def test_copies_and_files_after_use():
    mdp = occ.LayeredMDP.random(3, 3, 2).to_sparse()
    q = occ.interior_point(mdp)  # fills the caches
    for other in (copy.deepcopy(mdp), pickle.loads(pickle.dumps(mdp))):
        assert torch.equal(occ.interior_point(other), q)


# -- the same functions ------------------------------------------------------------------------


@every_mdp
@pytest.mark.parametrize("leading", [(), (1,), (5,), (2, 3)])
def test_the_flow_is_the_same(build, leading):
    mdp = build()
    dense, sparse = LayeredFlow(mdp), flow_of(mdp.to_sparse())
    x, v = random_loss(mdp, batch=leading), random_loss(mdp, seed=1, batch=leading).sum(-1)
    policy = policies(mdp, *leading)
    close(sparse.inflow(x), dense.inflow(x))
    close(sparse.lookahead(v), dense.lookahead(v))
    close(sparse.forward(policy, v), dense.forward(policy, v))
    close(sparse.backward(policy, v), dense.backward(policy, v))


@every_mdp
def test_occupancy_planning_and_reachability_are_the_same(build):
    dense = build()
    sparse, policy, loss = dense.to_sparse(), policies(dense, 4), random_loss(dense, batch=(4,))
    close(occ.interior_point(sparse), occ.interior_point(dense))
    close(occ.mdp.reachability(sparse, policy), occ.mdp.reachability(dense, policy))
    for found, expected in zip(
        occ.optimal_policy(sparse, loss), occ.optimal_policy(dense, loss), strict=True
    ):
        close(found, expected)


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
    policy = policies(mdp).requires_grad_()
    entries = [p.clone().requires_grad_() for p in mdp.probabilities]
    function = lambda policy, *entries: occ.occupancy(mdp.with_probabilities(*entries), policy)  # noqa: E731
    assert torch.autograd.gradcheck(
        function, (policy, *entries), check_forward_ad=True, check_batched_grad=True
    )
    assert torch.autograd.gradgradcheck(function, (policy, *entries))


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_user_s_sparse_tensor_gets_a_gradient(layout):
    dense = occ.LayeredMDP.random(3, 3, 2, seed=5)
    table = dense.transitions[1].clone().requires_grad_()
    given = LAYOUTS[layout](table.detach().flatten(0, 1).to_sparse()).requires_grad_()
    rest = (dense.transitions[0], dense.transitions[2])
    weight = random_loss(dense)

    def objective(tensor):
        return (weight * occ.interior_point(occ.LayeredMDP([rest[0], tensor, rest[1]]))).sum()

    (found,), (expected,) = (
        torch.autograd.grad(objective(tensor), tensor) for tensor in (given, table)
    )
    close(found.to_dense().unflatten(0, (3, 2)), expected)


# -- draws -------------------------------------------------------------------------------------


@every_mdp
def test_the_same_numbers_draw_the_same_states(build):
    dense = build()
    sparse = dense.to_sparse()
    generator = torch.Generator().manual_seed(0)
    for table, entries, actions in zip(
        dense.layers, sparse.layers, dense.split(dense.actions, -2), strict=True
    ):
        assert isinstance(entries, SparseLayer)
        state, action = actions.nonzero().repeat(200, 1).T
        uniform = torch.rand(len(state), dtype=F64, generator=generator)
        uniform[:2] = torch.tensor([0.0, 1 - 2.0**-53])
        assert torch.equal(entries.draw(state, action, uniform), table.draw(state, action, uniform))


# -- bad input ---------------------------------------------------------------------------------


def change(entries, value):
    """A valid MDP with some middle entries replaced; state 1, action 0 leads to states 0 and 1."""
    mdp = occ.LayeredMDP(
        [
            torch.full((1, 2, 2), 0.5, dtype=F64),
            torch.full((2, 2, 2), 0.5, dtype=F64),
            torch.ones(2, 2, 1, dtype=F64),
        ]
    )
    transitions = list(mdp.to_sparse().transitions)
    values = transitions[1].values().clone()
    values[entries] = value
    transitions[1] = sparse(transitions[1].indices(), values, transitions[1].shape).coalesce()
    return transitions


@pytest.mark.parametrize(
    ("entries", "value", "fault"),
    [
        ([4], 0.25, "sum to 0.75"),
        ([4, 5], torch.tensor([-0.25, 1.25], dtype=F64), "next state 0 is -0.25"),
        ([5], torch.nan, "next state 1 is nan"),
        ([5], torch.inf, "next state 1 is inf"),
    ],
)
def test_a_bad_entry_is_named_with_its_value(entries, value, fault):
    with expect("transitions[1]: layer 1, state 1, action 0: ", fault):
        occ.LayeredMDP(change(entries, value))
    actions = torch.ones(5, 2, dtype=torch.bool)
    actions[2, 0] = False
    occ.LayeredMDP(change(entries, value), actions=actions)  # what a masked pair says is ignored


def test_an_empty_row_is_named():
    transitions = change([], 0.0)
    transitions[1] = sparse(
        transitions[1].indices()[:, 2:], transitions[1].values()[2:], transitions[1].shape
    )
    with expect(
        "transitions[1]: layer 1, state 0, action 0: the probabilities sum to 0; expected 1"
    ):
        occ.LayeredMDP(transitions)


ONES = torch.ones(4, 1, dtype=F64).to_sparse()


@pytest.mark.parametrize(
    ("transitions", "fragments"),
    [
        (
            lambda P: [P[0], P[1].to_dense(), P[2]],
            ("transitions[1]", "make it sparse", "three dimensions"),
        ),
        (lambda P: [P[0], ONES, P[2]], ("transitions[2]", "layer 2 has 2 states", "leads to 1")),
        (
            lambda P: [P[0], P[1], torch.ones(5, 1, dtype=F64).to_sparse()],
            ("transitions[2]", "2 actions", "5 rows"),
        ),
        (
            lambda P: [P[0], torch.full((3, 2), 0.5, dtype=F64).to_sparse(), P[2]],
            ("transitions[1]", "2 states", "3 rows"),
        ),
        (lambda P: [P[0], P[1].float(), P[2]], ("transitions[1]", "float32")),
        (lambda P: [P[0], P[1]], ("transitions[1]", "terminal", "(4, 1)")),
        (
            lambda P: [P[0], sparse([[0, 4], [0, 0]], torch.ones(2, dtype=F64), (4, 2)), P[2]],
            ("transitions[1]", "row index 4", "(4, 2)"),
        ),
        (
            lambda P: [P[0], sparse([[0, 1], [0, -1]], torch.ones(2, dtype=F64), (4, 2)), P[2]],
            ("transitions[1]", "column index -1"),
        ),
        (
            lambda P: [P[0], P[1].to_sparse_bsr((2, 1)), P[2]],
            ("transitions[1]", "layout", "to_sparse_csr()"),
        ),
        (
            lambda P: [P[0], torch.stack([P[1], P[1]]), P[2]],
            ("transitions[1]", "sparse tensor of shape", "(2, 4, 2)"),
        ),
    ],
)
def test_bad_shapes_are_named(transitions, fragments):
    with expect(*fragments):
        occ.LayeredMDP(transitions(change([], 0.0)))


def test_nothing_is_made_dense_unasked():
    mdp = occ.LayeredMDP.random(3, 3, 2).to_sparse()
    with expect("sparse", "to_dense()"):
        mdp.joint_transitions  # noqa: B018
    with expect("batch", "(2,)"):
        occ.LayeredMDP([torch.ones(2, 1, 2, 1, dtype=F64) for _ in range(2)]).to_sparse()
