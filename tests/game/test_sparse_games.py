"""Sparse MDPs in the engine: the same game as in torch, without dense memory."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from zoo import random_loss

import torch_occ as occ
from experiments import wide
from torch_occ.engine.layout import Rows, make_work
from torch_occ.step.arrays import model_of


def lake() -> occ.LayeredMDP:
    """FrozenLake: absorbing states with a single action, and layers that grow."""
    return occ.LayeredMDP.from_gymnasium("FrozenLake-v1", horizon=6).to_sparse()


def masked() -> occ.LayeredMDP:
    """Two or three successors per pair, masked actions, and a random first state."""
    generator = torch.Generator().manual_seed(3)
    transitions = []
    for here, there in ((3, 6), (6, 5), (5, 4), (4, 1)):
        scores = torch.rand(here, 4, there, generator=generator, dtype=torch.float64)
        kept = scores >= scores.topk(min(3, there), -1).values[..., -1:]
        P = torch.where(kept, scores, 0.0)
        transitions.append((P / P.sum(-1, keepdim=True)).flatten(0, 1).to_sparse())
    actions = torch.rand(18, 4, generator=generator) < 0.6
    actions[:, 1] |= ~actions.any(-1)
    return occ.LayeredMDP(
        transitions, actions=actions, initial=torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    ).prune()


def mixed() -> occ.LayeredMDP:
    """One layer dense, the others sparse."""
    mdp = occ.LayeredMDP.random(4, 5, 3, seed=1)
    layers = [P if k == 1 else P.flatten(0, 1).to_sparse() for k, P in enumerate(mdp.transitions)]
    return occ.LayeredMDP(layers, initial=mdp.initial)


def alone() -> occ.LayeredMDP:
    """A single layer: there are no transitions to speak of."""
    return occ.LayeredMDP([torch.ones(3, 1, dtype=torch.float64).to_sparse()])


STORED_SPARSELY = {
    "lake": lake,
    "masked": masked,
    "mixed": mixed,
    "alone": alone,
    "grid": lambda: wide.grid(3, 5),
}

LEARNERS = {
    "jin_luo": lambda mdp: occ.FTRL(mdp, occ.jin_luo(mdp, beta=0.5)),
    "shannon": lambda mdp: occ.FTRL.o_reps(mdp, 60),
    "complement": lambda mdp: occ.FTRL(
        mdp, occ.HybridComplement() / occ.InverseSqrt() + occ.LogBarrier(0.1)
    ),
    "full information": lambda mdp: occ.FTRL(
        mdp, occ.jin_luo(mdp, beta=0.5), occ.FullInformation()
    ),
    "optimistic": occ.OptimisticValueIteration,
}

#: Every learner in some MDP, and every MDP with the paper's learner.
GAMES = [("jin_luo", name) for name in STORED_SPARSELY] + [
    (learner, "masked") for learner in LEARNERS if learner != "jin_luo"
]


@pytest.mark.parametrize(("learner", "name"), GAMES)
def test_the_game_is_the_same(learner, name):
    """Same random numbers, same trajectories."""
    mdp = STORED_SPARSELY[name]()
    check_game(mdp, LEARNERS[learner], occ.BernoulliLosses(random_loss(mdp, seed=3)))


def check_game(mdp, build, losses, episodes=40):
    assert mdp.is_sparse
    expected, found = (
        occ.simulate(mdp, build(mdp), losses, episodes, [0, 7], backend=backend)
        for backend in ("torch", "auto")
    )
    assert (expected.backend, found.backend) == ("torch", "engine")
    # In eight lanes, with neighbours that need other numbers of iterations.
    among = occ.simulate(mdp, build(mdp), losses, episodes, [5, 7, 9], backend="engine")
    assert torch.equal(among.cumulative_occupancy[1], found.cumulative_occupancy[1])
    assert torch.equal(among.last_q[1], found.last_q[1])
    torch.testing.assert_close(found.realised_regret, expected.realised_regret, rtol=0, atol=1e-12)
    # The step of an entropy keeps factors only in the engine, and may need one step more for it.
    learner = build(mdp)
    more = 1.0 if isinstance(learner, occ.FTRL) and learner.step.evaluator.in_logs else 1e-12
    torch.testing.assert_close(found.newton_steps, expected.newton_steps, rtol=0, atol=more)
    assert float(found.uncertified.max()) == 0.0
    assert float(found.dual_residual.max()) < 4e-11
    assert float(found.flow_residual.max()) < 1e-14
    for name in ("regret", "comparator", "corruption", "cumulative_occupancy", "total_mean"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-9
        )
    torch.testing.assert_close(found.last_q, expected.last_q, rtol=1e-8, atol=0)


def test_nothing_as_large_as_a_dense_layer_is_ever_made():
    """A grid whose dense transitions would take 35 GiB, 0.5 GiB for one square of a layer."""
    mdp = wide.grid(90, 3)
    pairs = mdp.num_states * mdp.num_actions
    entries = sum(layer.probabilities.numel() for layer in mdp.layers[:-1])
    losses = occ.BernoulliLosses(random_loss(mdp, seed=8))
    occ.simulate(mdp, LEARNERS["jin_luo"](mdp), losses, 1, backend="engine")  # may compile
    tracemalloc.start()
    try:
        found = occ.simulate(mdp, LEARNERS["jin_luo"](mdp), losses, 2, backend="engine")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found.backend, float(found.uncertified.max())) == ("engine", 0.0)
    assert peak < 8 * (40 * pairs + 4 * entries)
    model, work = model_of(mdp), make_work(model_of(mdp))
    assert isinstance(model.next_state, Rows)
    assert sum(array.nbytes for array in (*model.next_state, *work)) < 8 * (
        30 * pairs + 2 * entries
    )


def test_dense_transitions_are_read_as_what_is_faster():
    """Layers of a map are mostly zeros; those of a small random MDP are not."""
    tables = (occ.LayeredMDP.random(3, 3, 3, seed=0), occ.LayeredMDP.random(10, 20, 10, seed=0))
    maps = (
        occ.LayeredMDP.from_gymnasium("FrozenLake-v1", horizon=12),
        occ.LayeredMDP.from_gymnasium("CliffWalking-v1", horizon=6),
    )
    assert not any(mdp.is_sparse or isinstance(model_of(mdp).next_state, Rows) for mdp in tables)
    for mdp in maps:
        rows, again = model_of(mdp).next_state, model_of(mdp.to_sparse()).next_state
        assert not mdp.is_sparse
        assert all((a == b).all() for a, b in zip(rows, again, strict=True))


def test_leaps_agree_however_the_mdp_is_stored():
    """The last bit of q decides how many random numbers a leap draws, so only means agree."""
    mdp = occ.LayeredMDP.from_gymnasium("FrozenLake-v1", horizon=4)
    mean = random_loss(mdp, seed=9)
    runs = [
        occ.leap(m, occ.jin_luo(m, beta=0.5), mean, 300, particles=60)
        for m in (mdp.to_dense(), mdp.to_sparse())
    ]
    first, last = (torch.stack([run.regret[:, i] for run in runs]) for i in (0, -1))
    torch.testing.assert_close(first[1], first[0], rtol=1e-12, atol=1e-12)
    assert abs(float(last[1].mean() - last[0].mean())) < 4 * float((last.var(-1).sum() / 60).sqrt())
    assert int(runs[1].uncertified.max()) == 0
