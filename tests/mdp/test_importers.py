"""Imported MDPs against backward induction and Markov chains on the original tables."""

import pickle
import sys

import numpy as np
import pytest
import scipy.sparse
import torch
from zoo import expect

import torch_occ as occ
from torch_occ.mdp.unroll import ABSORBING

gymnasium = pytest.importorskip("gymnasium")

F64 = torch.float64
SLIPPERY = ("FrozenLake-v1", 12, {})
ENVIRONMENTS = [
    SLIPPERY,
    ("FrozenLake8x8-v1", 9, {"is_slippery": False}),
    ("CliffWalking-v1", 14, {}),
    ("CliffWalkingSlippery-v1", 6, {}),
    ("Taxi-v4", 4, {}),
    ("Taxi-v4", 3, {"is_rainy": True}),
]


def best_return(mdp):
    plan = occ.optimal_policy(mdp, mdp.loss)
    return float(mdp.expected_return(occ.occupancy(mdp, plan.policy)))


def chain(env, horizon):
    """The state distributions `(horizon, S)` of the uniform policy, and its expected return."""
    table = env.unwrapped.P
    now, rows, collected = np.array(env.unwrapped.initial_state_distrib), [], 0.0
    for _ in range(horizon):
        rows.append(now)
        then = np.zeros_like(now)
        for s, mass in enumerate(now):
            for row in table[s].values():
                for p, after, r, done in row:
                    collected += mass / len(table[s]) * p * r
                    if not done:
                        then[after] += mass / len(table[s]) * p
        now = then
    return np.stack(rows), collected


@pytest.mark.parametrize(
    ("name", "horizon", "options"), ENVIRONMENTS, ids=lambda x: x if isinstance(x, str) else None
)
def test_an_environment_is_its_table(name, horizon, options):
    env = gymnasium.make(name, **options)
    mdp = occ.LayeredMDP.from_gymnasium(env, horizon)
    uniform = occ.occupancy(mdp, occ.uniform_policy(mdp))
    visits, collected = chain(env, horizon)
    over = mdp.origin == ABSORBING
    expected = torch.from_numpy(visits)[mdp.layer, mdp.origin.clamp(min=0)]
    torch.testing.assert_close(uniform.sum(-1)[~over], expected[~over], rtol=1e-12, atol=0)
    assert float(mdp.expected_return(uniform)) == pytest.approx(collected, abs=1e-10)
    # The same through losses, and all that was left out is what no policy reaches, and the end.
    low, high = mdp.reward_range
    total = float((uniform * mdp.loss).sum())
    assert horizon * high - (high - low) * total == pytest.approx(collected, abs=1e-10)
    assert int((~over).sum()) == int((visits > 0).sum())
    assert bool(mdp.reachable.all())


def test_it_survives_pickling_for_other_processes_and_conversion():
    mdp = occ.LayeredMDP.from_gymnasium("FrozenLake-v1", 4, 3)
    assert mdp.origin[0] == 3
    again = pickle.loads(pickle.dumps(mdp))
    assert torch.equal(again.loss, mdp.loss)
    assert torch.equal(mdp.to(torch.float32).reward, mdp.reward.float())
    assert again.reward_range == mdp.reward_range
    assert again.num_pairs == mdp.num_pairs


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*out of date.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("NoSuchLake-v1", ("env: there is no 'NoSuchLake-v1'", "pprint_registry")),
        ("FrozenLake-v0", ("env: there is no 'FrozenLake-v0'", "FrozenLake-v1")),
        ("ALE/Pong-v5", ("env: there is no 'ALE/Pong-v5'", "import the package")),
        ("CartPole-v1", ("env: CartPole-v1 publishes no table", "from_tables")),
    ],
)
def test_an_environment_that_cannot_be_imported_is_refused_with_the_reason(name, fragments):
    with expect(*fragments):
        occ.LayeredMDP.from_gymnasium(name, 3)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with expect("'tabular/CliffWalking-v0' needs a package that is not", "jax", error=ImportError):
        occ.LayeredMDP.from_gymnasium("tabular/CliffWalking-v0", 3)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with expect("pip install 'torch-occ[gymnasium]'", error=ImportError):
        occ.LayeredMDP.from_gymnasium("FrozenLake-v1", 3)


def test_options_that_do_not_exist_or_do_not_apply():
    with expect("options: 'FrozenLake-v1' does not take {'is_slipery': False}"):
        occ.LayeredMDP.from_gymnasium("FrozenLake-v1", 3, is_slipery=False)
    with expect("options", "made already"):
        occ.LayeredMDP.from_gymnasium(gymnasium.make("FrozenLake-v1"), 3, is_slippery=False)
    with expect("env: expected a Gymnasium environment or its id, got int", error=TypeError):
        occ.LayeredMDP.from_gymnasium(3, 3)
    with expect("fickle_passenger=True does not do what its table says"):
        occ.LayeredMDP.from_gymnasium("Taxi-v4", 3, fickle_passenger=True)


def test_a_horizon_beyond_the_time_limit():
    with expect("horizon: FrozenLake-v1 is cut off after 100 steps", "max_episode_steps=101"):
        occ.LayeredMDP.from_gymnasium("FrozenLake-v1", 101)
    mdp = occ.LayeredMDP.from_gymnasium("FrozenLake-v1", 101, max_episode_steps=101)
    assert mdp.horizon == 101


def broken(change):
    env = gymnasium.make("FrozenLake-v1")
    change(env.unwrapped)
    return env


def row(*outcome):
    return lambda env: env.P[3].update({1: [outcome]})


def setting(name, value):
    return lambda env: setattr(env, name, value)


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (row(0.5, 2, 0.0, False), ("P: state 3, action 1", "sum to 0.5")),
        (row(1.5, 2, 0.0, False), ("P: state 3, action 1", "sum to 1.5")),
        (row(1.0, 16, 0.0, False), ("P[3][1]", "next state 16", "16 states")),
        (row(-1.0, 2, 0.0, False), ("state 3, action 1", "next state 2 is -1.0")),
        (row(1.0, 2, np.nan, False), ("rewards", "nan")),
        (row(1.0, 2, 0.0), ("P[3]", "next state, reward, terminated)", "expected 4, got 3")),
        (
            lambda env: env.P[3].update({9: [(1.0, 2, 0.0, False)]}),
            ("P[3][9]", "action 9", "4 actions"),
        ),
        (lambda env: env.P.pop(4), ("P[0][0] leads to state 4", "no action")),
        (
            lambda env: env.P.update({2: 5}),
            ("P[2]: expected lists of", "by action", "not iterable"),
        ),
        (setting("P", np.zeros((16, 4, 16))), ("P[0]", "lists of (probability")),
        (
            setting("initial_state_distrib", np.ones(3) / 3),
            ("initial: expected shape (16,), got (3,)",),
        ),
        (setting("initial_state_distrib", None), ("initial: FrozenLake-v1 does not publish",)),
        (setting("observation_space", gymnasium.spaces.Discrete(16, start=1)), ("Discrete",)),
    ],
)
def test_a_malformed_table_is_named_by_its_place(change, fragments):
    with expect(*fragments):
        occ.LayeredMDP.from_gymnasium(broken(change), 3)


def test_a_pair_that_the_table_leaves_out_is_no_action():
    env = broken(lambda env: env.P[0].pop(2))
    mdp = occ.LayeredMDP.from_gymnasium(env, 3)
    assert mdp.actions[0].tolist() == [True, True, False, True]


# -- arrays of other packages ------------------------------------------------------------------


def arrays(num_states=5, num_actions=3, seed=0):
    """P `(A, S, S)` with zeros and an absorbing last state, R of the same shape."""
    rng = np.random.default_rng(seed)
    shape = (num_actions, num_states, num_states)
    P = rng.random(shape) * (rng.random(shape) < 0.6)
    P[:, :, 0] += 0.1
    P /= P.sum(-1, keepdims=True)
    P[:, -1] = np.eye(num_states)[-1]
    return P, rng.normal(size=P.shape)


def dense_value(P, R, horizon, start):
    value = np.zeros(P.shape[1])
    for _ in range(horizon):
        value = ((P * (R + value)).sum(-1)).max(0)
    return value[start]


def as_sparse(x):
    return [scipy.sparse.csr_matrix(piece) for piece in x]


@pytest.mark.parametrize(
    "form",
    [
        lambda P, R: (P, R, None),
        lambda P, R: (P, (P * R).sum(-1).T, None),
        lambda P, R: (np.moveaxis(P, 0, 1), np.moveaxis(R, 0, 1), None),
        lambda P, R: (torch.from_numpy(P), torch.from_numpy(R), 0),
        lambda P, R: (as_sparse(P), as_sparse(R), None),
        lambda P, R: (as_sparse(P), R, None),
        lambda P, R: (*(np.fromiter(as_sparse(x), dtype=object) for x in (P, R)), None),
        lambda P, R: (list(P), R, None),
    ],
)
def test_arrays_in_every_form(form):
    P, R = arrays()
    transition, reward, axis = form(P, R)
    mdp = occ.LayeredMDP.from_arrays(transition, reward, 6, 2, action_axis=axis)
    assert best_return(mdp) == pytest.approx(dense_value(P, R, 6, 2), abs=1e-12)
    assert bool(((mdp.loss >= 0) & (mdp.loss <= 1)).all())


def test_a_state_that_only_waits_carries_one_action():
    P, _ = arrays()
    reward = np.arange(5.0)
    mdp = occ.LayeredMDP.from_arrays(P, reward, 6, 2)
    waiting = mdp.origin == 4
    assert mdp.actions[waiting].sum(-1).tolist() == [1] * int(waiting.sum())
    assert (mdp.reward[waiting][:, 0] == 4.0).all()
    # With another reward for one of its actions it decides something.
    pairs = np.tile(reward[:, None], 3)
    pairs[4, 1] = 7.0
    assert occ.LayeredMDP.from_arrays(P, pairs, 6, 2).actions[waiting].all()


def test_terminal_states_pay_for_the_step_that_enters_them_and_nothing_after():
    P, R = arrays()
    mdp = occ.LayeredMDP.from_arrays(P, R, 6, 2, terminal=[4])
    alive = np.array(R)
    alive[:, 4] = 0.0
    assert best_return(mdp) == pytest.approx(dense_value(P, alive, 6, 2), abs=1e-12)


@pytest.mark.parametrize(
    ("rewards", "interval"),
    [([-100.0, -1.0], (-100.0, 0.0)), ([3.0, 5.0], (0.0, 5.0)), ([0.0, 0.0], (0.0, 1.0))],
)
def test_the_interval_has_all_rewards_and_zero(rewards, interval):
    P = np.array([[[0.5, 0.5], [1.0, 0.0]]])
    mdp = occ.LayeredMDP.from_arrays(P, np.array(rewards), 3)
    assert mdp.reward_range == interval
    low, high = interval
    torch.testing.assert_close(high - (high - low) * mdp.loss, mdp.reward)


# -- sparse tables -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_from_tables_reads_sparse_tables():
    P = torch.from_numpy(np.moveaxis(arrays()[0], 0, 1).copy())  # (S, A, S)
    dense = occ.LayeredMDP.from_tables(P, 4, 1, terminal=[3])
    rows = P.reshape(15, 5)
    options = {"terminal": [3], "actions": np.ones((5, 3), dtype=bool)}
    arrays_too = occ.LayeredMDP.from_tables(P.numpy(), 4, np.eye(5)[1], **options)
    assert all(map(torch.equal, arrays_too.transitions, dense.transitions))
    forms = [
        P.to_sparse_coo(),
        rows.to_sparse_coo(),
        rows.to_sparse_csr(),
        scipy.sparse.csr_array(rows.numpy()),
        scipy.sparse.coo_matrix(rows.numpy()),
    ]
    for form in forms:
        sparse = occ.LayeredMDP.from_tables(form, 4, 1, terminal=[3])
        assert sparse.is_sparse
        assert torch.equal(sparse.origin, dense.origin)
        for mine, other in zip(sparse.to_dense().transitions, dense.transitions, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
    values, index = torch.tensor([0.25, 0.75, 1.0], dtype=F64), [[0, 0, 1], [0, 0, 0]]
    twice = torch.sparse_coo_tensor(index, values, (2, 1), check_invariants=True)
    assert occ.LayeredMDP.from_tables(twice, 2).to_dense().transitions[0].tolist() == [[[1], [1]]]


def test_gradients_reach_the_table_zeros_included():
    P = torch.from_numpy(np.moveaxis(arrays()[0], 0, 1).copy()).requires_grad_()
    mdp = occ.LayeredMDP.from_tables(P, 3, 1)
    mdp.transitions[0].sum().backward()
    there = torch.isin(torch.arange(5), mdp.origin[mdp.layer == 1])
    assert torch.equal(P.grad[1] == 1, there.expand(3, 5))
    assert bool((P[1] == 0).any())
    loops = torch.eye(2, dtype=F64).unsqueeze(1).requires_grad_()
    assert occ.LayeredMDP.from_tables(loops, 3).origin.tolist() == [0, 0, 0]


def test_an_mdp_that_does_not_fit_is_refused_before_memory_is_asked_for(monkeypatch):
    monkeypatch.setattr("torch_occ.mdp.unroll.MAX_BYTES", 1000)
    P = torch.from_numpy(np.moveaxis(arrays()[0], 0, 1).copy())
    with expect("horizon: 4 steps", "up to 5 states", "GiB", "pass a sparse table"):
        occ.LayeredMDP.from_tables(P, 4)
    occ.LayeredMDP.from_tables(P.to_sparse(), 4)


def test_a_large_environment_is_stored_sparsely_and_a_small_one_densely(monkeypatch):
    assert not occ.LayeredMDP.from_gymnasium("FrozenLake-v1", 4).is_sparse
    taxi = occ.LayeredMDP.from_gymnasium("Taxi-v4", 20)
    assert taxi.is_sparse
    assert taxi.num_pairs == 45956
    # The storage changes nothing else.
    small = occ.LayeredMDP.from_gymnasium("CliffWalkingSlippery-v1", 6)
    monkeypatch.setattr("torch_occ.mdp.unroll.DENSE_ENTRIES", 0)
    sparse = occ.LayeredMDP.from_gymnasium("CliffWalkingSlippery-v1", 6)
    assert sparse.is_sparse
    found, expected = occ.interior_point(sparse), occ.interior_point(small)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    assert torch.equal(sparse.loss, small.loss)
