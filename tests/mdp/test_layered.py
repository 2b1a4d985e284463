import re
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

import torch_occ as occ

SIZES = (1, 3, 2)
F64 = torch.float64


def tables(batch=(), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = zip(SIZES, (*SIZES[1:], 1), strict=True)
    return [
        torch.rand(*batch, here, 2, there, dtype=F64, generator=generator).softmax(-1)
        for here, there in shapes
    ]


def expect(*fragments):
    """A ValueError whose message holds every fragment, in this order."""
    return pytest.raises(ValueError, match=".*".join(re.escape(fragment) for fragment in fragments))


# -- validation --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ([0.5, 0.25], "sum to 0.75"),
        ([0.5, 0.500001], "sum to 1.000001"),
        ([-0.25, 1.25], "next state 0 is -0.25"),
        ([0.5, torch.nan], "next state 1 is nan"),
        ([torch.inf, 0.0], "next state 0 is inf"),
    ],
)
def test_a_bad_row_is_named_with_its_value(batch, row, fault):
    bad = tables(batch)
    element = tuple(size - 1 for size in batch)
    bad[1][(*element, 2, 1)] = torch.tensor(row, dtype=F64)
    with expect(
        "transitions[1]: "
        + (f"batch element {element}, " if batch else "")
        + "layer 1, state 2, action 1: ",
        fault,
    ):
        occ.LayeredMDP(bad)


def test_rounding_and_masked_rows_are_no_errors():
    good = tables()
    good[1][2, 1] += torch.tensor([1e-11, -1e-12], dtype=F64)
    good[1][0, 1] = torch.nan
    actions = torch.ones(6, 2, dtype=torch.bool)
    actions[1, 1] = False
    assert occ.LayeredMDP(good, actions=actions).transitions[1][0, 1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (lambda P: [], ("transitions", "got none")),
        (lambda P: [P[0], P[1].tolist(), P[2]], ("transitions[1]", "tensor", "list")),
        (lambda P: [P[0], P[1], P[2].long()], ("transitions[2]", "floating-point", "int64")),
        (
            lambda P: [P[0], P[1].float(), P[2]],
            ("transitions[1]", "float32", "transitions[0]", "float64"),
        ),
        (lambda P: [P[0], P[1][0], P[2]], ("transitions[1]", "(2, 2)")),
        (lambda P: [P[0], P[1][:, :1], P[2]], ("transitions[1]", "(3, 1, 2)")),
        (
            lambda P: [P[0], P[1][:2], P[2]],
            ("transitions[1]", "layer 1 has 2 states", "transitions[0] leads to 3"),
        ),
        (lambda P: [P[0], P[1]], ("transitions[1]", "terminal", "(3, 2, 2)")),
        (lambda P: [P[0][:0], P[1], P[2]], ("transitions[0]", "(0, 2, 3)")),
        (
            lambda P: [P[0], P[1], P[2] / 2],
            ("transitions[2]: layer 2, state 0, action 0: ", "sum to 0.5"),
        ),
        (
            lambda P: [P[0].expand(2, 1, 2, 3), P[1].expand(3, 3, 2, 2), P[2]],
            ("transitions[1]", "batch"),
        ),
    ],
)
def test_a_wrong_layout_is_named(change, fragments):
    with expect(*fragments):
        occ.LayeredMDP(change(tables()))


def no_action_for(state):
    actions = torch.ones(6, 2, dtype=torch.bool)
    actions[state] = False
    return actions


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ({"actions": no_action_for(3)}, ("actions: layer 1, state 2",)),
        ({"actions": torch.ones(6, 3, dtype=torch.bool)}, ("actions", "(6, 2)", "(6, 3)")),
        ({"actions": torch.ones(6, 2)}, ("actions", "boolean", "float32")),
        ({"initial": torch.ones(2, dtype=F64) / 2}, ("initial", "(1,)", "(2,)")),
        ({"initial": torch.ones(1)}, ("initial", "float64", "float32")),
        ({"initial": torch.full((1,), 0.5, dtype=F64)}, ("initial: the probabilities sum to 0.5",)),
        (
            {"initial": torch.tensor([[1.0], [torch.nan]], dtype=F64)},
            ("initial: ", "batch element (1,)", "state 0 is nan"),
        ),
        ({"origin": torch.arange(5)}, ("origin", "(6,)", "(5,)")),
    ],
)
def test_wrong_actions_initial_and_origin_are_named(arguments, fragments):
    with expect(*fragments):
        occ.LayeredMDP(tables(), **arguments)


def test_several_start_states_need_an_initial_distribution():
    ways_out = torch.ones(2, 2, 1, dtype=F64)
    for initial, fault in (
        (None, "layer 0 has 2 states"),
        (torch.tensor([-0.5, 1.5], dtype=F64), "state 0 is -0.5"),
    ):
        with expect("initial: ", fault):
            occ.LayeredMDP([ways_out], initial=initial)


# -- immutability ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["transitions", "actions", "initial", "origin", "horizon", "new"])
def test_attributes_cannot_be_set(name):
    mdp = occ.LayeredMDP(tables())
    with pytest.raises(FrozenInstanceError):
        setattr(mdp, name, None)
    with pytest.raises(FrozenInstanceError):
        delattr(mdp, name)


def test_the_model_keeps_its_own_copy_of_every_tensor():
    given = {
        "actions": torch.ones(6, 2, dtype=torch.bool),
        "initial": torch.ones(1, dtype=F64),
        "origin": torch.arange(6),
    }
    transitions = tables()
    mdp = occ.LayeredMDP(transitions, **given)
    for tensor in (*transitions, *given.values()):
        tensor.zero_()
    for name in given:
        assert torch.equal(getattr(mdp, name), getattr(occ.LayeredMDP(tables()), name))
    assert all(map(torch.equal, mdp.transitions, tables()))


def test_gradients_reach_the_tensors_of_the_caller():
    transitions = [p.requires_grad_() for p in tables()]
    occ.interior_point(occ.LayeredMDP(transitions))[4].sum().backward()
    assert all(bool(p.grad.any()) for p in transitions[:2])


# -- random ------------------------------------------------------------------------------------


def test_random_depends_on_the_seed_alone():
    def draw(seed):
        return occ.LayeredMDP.random(4, 3, 2, seed=seed).joint_transitions

    before = torch.get_rng_state()
    first = draw(5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draw(5), first)
    assert not torch.equal(draw(6), first)


@pytest.mark.parametrize("concentration", [0.01, 1.0, 30.0])
def test_random_rows_are_dirichlet(concentration):
    """Of n entries, each p has mean 1 / n, and sum p^2 has mean (c + 1) / (n c + 1)."""
    n = 4
    rows = (
        occ.LayeredMDP.random(3, n, 2000, concentration=concentration).transitions[1].flatten(0, 1)
    )
    error = 5 * len(rows) ** -0.5
    assert (rows.sum(-1) - 1).abs().max() < 1e-15 * n
    torch.testing.assert_close(
        rows.mean(0), torch.full((n,), 1 / n, dtype=F64), rtol=0, atol=error * float(rows.std())
    )
    squares = rows.square().sum(-1)
    assert abs(
        float(squares.mean()) - (concentration + 1) / (n * concentration + 1)
    ) < error * float(squares.std())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("horizon", 0),
        ("width", 0),
        ("num_actions", -1),
        ("concentration", 0.0),
        ("concentration", torch.nan),
    ],
)
def test_random_names_a_bad_argument(name, value):
    with expect(f"{name}: ", str(value)):
        occ.LayeredMDP.random(**({"horizon": 2, "width": 2, "num_actions": 2} | {name: value}))


# -- layout and derived models -----------------------------------------------------------------


def test_sizes_and_places():
    mdp = occ.LayeredMDP(tables((7,)))
    assert (mdp.horizon, mdp.num_states, mdp.num_actions, mdp.num_pairs, mdp.layer_sizes) == (
        3,
        6,
        2,
        12,
        SIZES,
    )
    assert mdp.layer.tolist() == [0, 1, 1, 1, 2, 2]
    assert mdp.layer_slices == (slice(0, 1), slice(1, 4), slice(4, 6))
    assert [mdp.locate(s) for s in (0, 3, 4)] == [
        "layer 0, state 0",
        "layer 1, state 2",
        "layer 2, state 0",
    ]
    assert (
        repr(mdp)
        == "LayeredMDP(horizon=3, layers=[1, 3, 2], num_actions=2, num_pairs=12, batch=(7,))"
    )


def test_with_transitions_changes_the_probabilities_and_nothing_else():
    actions = no_action_for(3) | torch.tensor([True, False])
    mdp = occ.LayeredMDP(tables(), actions=actions, origin=torch.arange(6) + 10)
    mdp.joint_transitions, mdp.batch_shape  # noqa: B018 (cached; must not be carried over)
    other = mdp.with_transitions(tables((2,), seed=1), torch.ones(2, 1, dtype=F64))
    assert other.batch_shape == (2,)
    assert torch.equal(
        other.joint_transitions[..., 0, :, 1:4], tables((2,), seed=1)[0][..., 0, :, :]
    )
    assert other.actions.tolist() == actions.tolist()
    assert (other.origin.tolist(), mdp.batch_shape) == (mdp.origin.tolist(), ())


def test_to_converts_every_floating_point_tensor():
    mdp = occ.LayeredMDP(tables())
    singles = mdp.to(torch.float32), mdp.to(dtype=torch.float32), mdp.to(torch.ones(1))
    for single in (*singles, mdp.to("cpu", torch.float32)):
        floating = (single.initial, single.joint_transitions, *single.transitions)
        assert {x.dtype for x in (*floating, single.other_actions)} == {torch.float32}
        assert (single.actions.dtype, single.origin.dtype) == (torch.bool, torch.int64)
    assert mdp.dtype == F64
    assert mdp.to("meta").device == mdp.to("meta").layer.device == torch.device("meta")
    with pytest.raises(TypeError, match=r"dtype: expected a floating-point type, got torch\.int64"):
        mdp.to(torch.int64)


def test_arrays_are_tables():
    arrays, actions = [p.numpy() for p in tables()], np.ones((6, 2), dtype=bool)
    arrays[1].flags.writeable = False
    actions[3, 1] = False
    mdp = occ.LayeredMDP(arrays, actions=actions, initial=np.ones(1), origin=np.arange(6))
    twin = occ.LayeredMDP(tables(), actions=torch.from_numpy(actions))
    assert all(map(torch.equal, mdp.transitions, twin.transitions))
    assert torch.equal(mdp.actions, twin.actions)
    loss = np.random.default_rng(0).random((6, 2))
    plan, expected = (occ.optimal_policy(mdp, x) for x in (loss, torch.from_numpy(loss)))
    assert all(map(torch.equal, plan, expected))
    policy = plan.policy.numpy()
    assert torch.equal(occ.occupancy(mdp, policy), occ.occupancy(mdp, plan.policy))
    assert torch.equal(mdp.lift(loss), torch.from_numpy(loss))
    step = occ.FTRLStep(mdp, occ.Tsallis(), backend="torch")
    assert torch.equal(step(loss), step(torch.from_numpy(loss)))
    assert torch.equal(occ.BernoulliLosses(loss).mean, torch.from_numpy(loss))
    with expect("transitions: expected one tensor per layer, got one tensor of shape (2, 2, 2)"):
        occ.LayeredMDP(np.full((2, 2, 2), 0.5))
