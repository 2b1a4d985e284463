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


# -- validation --------------------------------------------------------------------------------


def test_rounding_and_masked_rows_are_no_errors():
    good = tables()
    good[1][2, 1] += torch.tensor([1e-11, -1e-12], dtype=F64)
    good[1][0, 1] = torch.nan
    actions = torch.ones(6, 2, dtype=torch.bool)
    actions[1, 1] = False
    assert occ.LayeredMDP(good, actions=actions).transitions[1][0, 1].tolist() == [0.0, 0.0]


def no_action_for(state):
    actions = torch.ones(6, 2, dtype=torch.bool)
    actions[state] = False
    return actions


# -- immutability ------------------------------------------------------------------------------


def test_the_model_cannot_be_changed_and_keeps_its_own_copy_of_every_tensor():
    actions, initial = torch.ones(6, 2, dtype=torch.bool), torch.ones(1, dtype=F64)
    given = {"actions": actions, "initial": initial, "origin": torch.arange(6)}
    transitions = tables()
    mdp = occ.LayeredMDP(transitions, **given)
    for tensor in (*transitions, *given.values()):
        tensor.zero_()
    for name in given:
        assert torch.equal(getattr(mdp, name), getattr(occ.LayeredMDP(tables()), name))
        with pytest.raises(FrozenInstanceError):
            setattr(mdp, name, None)
    assert all(map(torch.equal, mdp.transitions, tables()))


def test_gradients_reach_the_tensors_of_the_caller():
    transitions = [p.requires_grad_() for p in tables()]
    mdp = occ.LayeredMDP(transitions)
    with torch.no_grad():
        occ.interior_point(mdp)  # must not switch them off
    occ.interior_point(mdp)[4].sum().backward()
    assert all(bool(p.grad.any()) for p in transitions[:2])


def test_numbers_that_are_changed_in_place_are_read_again():
    mdp = occ.LayeredMDP(tables())
    for model in (mdp, mdp.to_sparse()):
        policy = occ.uniform_policy(model)
        before = occ.occupancy(model, policy)
        with torch.no_grad():
            model.probabilities[1].copy_(model.probabilities[1].flip(-1))
        assert not torch.allclose(occ.occupancy(model, policy), before)
    torch.testing.assert_close(occ.occupancy(mdp.to_sparse(), policy), occ.occupancy(mdp, policy))


# -- random ------------------------------------------------------------------------------------


@pytest.mark.parametrize("concentration", [0.01, 1.0, 30.0])
def test_random_rows_are_dirichlet_and_depend_on_the_seed_alone(concentration):
    """Of n entries, each p has mean 1 / n, and sum p^2 has mean (c + 1) / (n c + 1)."""
    n, before = 4, torch.get_rng_state()

    def draw(seed):
        mdp = occ.LayeredMDP.random(3, n, 2000, concentration=concentration, seed=seed)
        return mdp.transitions[1].flatten(0, 1)

    rows = draw(5)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draw(5), rows)
    assert not torch.equal(draw(6), rows)
    error, squares = 5 * len(rows) ** -0.5, rows.square().sum(-1)
    assert (rows.sum(-1) - 1).abs().max() < 1e-15 * n
    assert float((rows.mean(0) - 1 / n).abs().max()) < error * float(rows.std())
    mean = (concentration + 1) / (n * concentration + 1)
    assert abs(float(squares.mean()) - mean) < error * float(squares.std())


# -- layout and derived models -----------------------------------------------------------------


def test_sizes_and_places():
    mdp = occ.LayeredMDP(tables((7,)))
    expected = "LayeredMDP(horizon=3, layers=[1, 3, 2], num_actions=2, num_pairs=12, batch=(7,))"
    assert repr(mdp) == expected
    assert mdp.layer.tolist() == [0, 1, 1, 1, 2, 2]
    assert mdp.layer_slices == (slice(0, 1), slice(1, 4), slice(4, 6))
    assert [mdp.locate(s) for s in (0, 3)] == ["layer 0, state 0", "layer 1, state 2"]


def test_with_transitions_changes_the_probabilities_and_nothing_else():
    actions = no_action_for(3) | torch.tensor([True, False])
    mdp = occ.LayeredMDP(tables(), actions=actions, origin=torch.arange(6) + 10)
    mdp.joint_transitions, mdp.batch_shape  # noqa: B018 (cached; must not be carried over)
    given = tables((2,), seed=1)
    other = mdp.with_transitions(given, torch.ones(2, 1, dtype=F64))
    assert (other.batch_shape, mdp.batch_shape) == ((2,), ())
    assert torch.equal(other.joint_transitions[..., 0, :, 1:4], given[0][..., 0, :, :])
    assert torch.equal(other.actions, actions)
    assert torch.equal(other.origin, mdp.origin)


def test_to_converts_every_floating_point_tensor():
    mdp = occ.LayeredMDP(tables())
    singles = mdp.to(torch.float32), mdp.to(dtype=torch.float32), mdp.to(torch.ones(1))
    for single in (*singles, mdp.to("cpu", torch.float32)):
        floating = (single.initial, single.joint_transitions, *single.transitions)
        assert {x.dtype for x in (*floating, single.other_actions)} == {torch.float32}
        assert (single.actions.dtype, single.origin.dtype) == (torch.bool, torch.int64)
    assert mdp.dtype == F64
    assert mdp.to("meta").device == mdp.to("meta").layer.device == torch.device("meta")
    sparse = mdp.to_sparse().to(torch.float32)
    assert {p.dtype for p in (*sparse.probabilities, *sparse.transitions)} == {torch.float32}
    assert {layer.pattern.pair.dtype for layer in sparse.layers} == {torch.int32}


def test_arrays_are_tables():
    arrays, actions = [p.numpy() for p in tables()], np.ones((6, 2), dtype=bool)
    arrays[1].flags.writeable = False
    actions[3, 1] = False
    mdp = occ.LayeredMDP(arrays, actions=actions, initial=np.ones(1), origin=np.arange(6))
    twin = occ.LayeredMDP(tables(), actions=torch.from_numpy(actions))
    assert all(map(torch.equal, (*mdp.transitions, mdp.actions), (*twin.transitions, twin.actions)))
    loss = np.random.default_rng(0).random((6, 2))
    plan, expected = (occ.optimal_policy(mdp, x) for x in (loss, torch.from_numpy(loss)))
    assert all(map(torch.equal, plan, expected))
    assert torch.equal(occ.occupancy(mdp, plan.policy.numpy()), occ.occupancy(mdp, plan.policy))
    assert torch.equal(mdp.lift(loss), torch.from_numpy(loss))
    budgets = occ.Budgets(loss[None], np.array([4.0]))
    step = occ.FTRLStep(mdp, occ.Tsallis(), backend="torch", constraints=budgets)
    assert torch.equal(step(loss), step(torch.from_numpy(loss)))
    forest = occ.LayeredMDP.from_arrays(np.ones((3, 2, 2)) / 2, np.zeros(2), 3, initial=[0.3, 0.7])
    assert forest.initial.tolist() == [0.3, 0.7]
    assert torch.equal(occ.BernoulliLosses(loss).mean, torch.from_numpy(loss))
