"""The same bits, as docs/performance.md promises: on this machine, and on a simulated other one."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from other_machine import OtherMachine
from threads import THREADS
from torch import Tensor
from zoo import random_loss

import torch_occ as occ
from torch_occ.mdp.layers import running_total
from torch_occ.mdp.occupancy import optimal_policy

pytestmark = pytest.mark.bits

MDP = occ.LayeredMDP.random(3, 5, 3, seed=0)
MDPS = {
    "dense": MDP,
    "sparse": MDP.to_sparse(),
    "one layer": occ.LayeredMDP.random(1, 1, 7, seed=2),
}
SEEDS = [0, 7, 3]

PSI = {
    "paper": lambda mdp: occ.jin_luo(mdp, beta=0.5),
    "powers": lambda mdp: occ.Tsallis(0.7) / occ.Polynomial(0.8, 0.37) + occ.LogBarrier(0.3),
}


def losses_of(mdp) -> dict[str, occ.LossProcess]:
    mean = random_loss(mdp, seed=1)
    tables = torch.stack([random_loss(mdp, seed=seed) for seed in range(2, 7)])
    return {
        "bernoulli": occ.BernoulliLosses(mean),
        "uniform": occ.UniformLosses(mean),
        "switching": occ.SwitchingLosses(tables, 20),
        "walk": occ.RandomWalkLosses(0.1, "bernoulli"),
        "front": occ.Corrupted(occ.BernoulliLosses(mean), 30.0),
        "spread": occ.Corrupted(occ.RandomWalkLosses(0.1, "uniform"), 30.0, "uniform", episodes=50),
        "targeted": occ.Corrupted(occ.BernoulliLosses(mean), 30.0, "targeted", target=mean),
        "adaptive": occ.GreedyAdversary(),
        "constrained": occ.StochasticallyConstrained(mean),
    }


LEARNERS = {
    "importance weighted": lambda mdp: occ.FTRL(mdp, PSI["paper"](mdp)),
    "powers": lambda mdp: occ.FTRL(mdp, PSI["powers"](mdp), occ.ImplicitExploration(0.01)),
    "reduced variance": lambda mdp: occ.FTRL(
        mdp, PSI["powers"](mdp), occ.ReducedVariance(occ.Polynomial(0.2, 0.37))
    ),
    "full information": lambda mdp: occ.FTRL(mdp, PSI["paper"](mdp), occ.FullInformation()),
    "mean hints": lambda mdp: occ.ShiftedFTRL(mdp, occ.LogBarrier(3.0)),
    "shifted": occ.ShiftedFTRL,
    "frozen": lambda mdp: occ.ShiftedFTRL(mdp, budget=0.02, ledger="frozen"),
    "ucbvi": lambda mdp: occ.rivals.UCBVI(mdp, 3000),
    "kl-ucb": occ.rivals.KLUCB,
    "thompson": occ.rivals.Thompson,
    "euler": lambda mdp: occ.rivals.StrongEuler(mdp, 0.1),
    "optimistic": occ.OptimisticValueIteration,
    "leader": occ.FollowTheLeader,
    "best": lambda mdp: occ.FixedPolicy(
        mdp, occ.optimal_policy(mdp, random_loss(mdp, seed=1)).policy
    ),
}


def play(
    learner: str, losses: str, seeds=SEEDS, mdp=MDP, threads: int = 1, episodes: int = 70, **options
) -> occ.History:
    """On another machine, with so many threads in the engine, and in the mind of that machine."""
    torch.set_num_threads(threads)
    try:
        with OtherMachine(threads):
            found = occ.simulate(
                mdp,
                LEARNERS[learner](mdp),
                losses_of(mdp)[losses],
                episodes,
                seeds,
                backend="engine",
                **options,
            )
    finally:
        torch.set_num_threads(THREADS)
    assert found.backend == "engine"
    return found


def same(found: occ.History, expected: occ.History, rows=slice(None)) -> None:
    """Everything but the time that it took."""
    for field in fields(occ.History):
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, Tensor) and field.name != "wall_time":
            theirs = theirs if field.name == "episodes" else theirs[rows]
            assert torch.equal(mine, theirs), (
                f"{field.name}: off by {float((mine - theirs).abs().max())}"
            )


@pytest.mark.parametrize(
    ("learner", "losses", "mdp"),
    [
        *(("importance weighted", losses, "dense") for losses in losses_of(MDP)),
        *((learner, "bernoulli", "dense") for learner in LEARNERS),
        *((x, "front", "sparse") for x in ("powers", "mean hints", "optimistic", "euler")),
        *((x, "front", "one layer") for x in ("powers", "mean hints", "kl-ucb", "euler")),
    ],
)
def test_a_seed_has_the_same_bits_in_every_batch_order_and_number_of_threads(learner, losses, mdp):
    """One or two seeds alone are played in other lanes, compiled anew: below, and in the record."""
    among = play(learner, losses, [7, 0, 5, 3], MDPS[mdp], threads=2)
    same(play(learner, losses, SEEDS, MDPS[mdp]), among, [1, 0, 3])


@pytest.mark.parametrize("learner", ["powers", "reduced variance", "frozen", "optimistic", "ucbvi"])
def test_neither_checkpoints_nor_the_length_of_a_run_change_a_bit(learner):
    """3,000 episodes end in the second block of weights, and some stretch lies across its edge."""

    def run(*checkpoints):
        given = {"episodes": checkpoints[-1], "checkpoints": checkpoints}
        return play(learner, "bernoulli", [5], **given)

    whole, same_at_the_end = run(100, 2047, 2048, 2049, 3000), run(1, 2, 77, 2500, 3000)
    shorter = run(2049)
    assert torch.equal(same_at_the_end.regret[:, -1], whole.regret[:, -1])
    assert torch.equal(same_at_the_end.last_q, whole.last_q)
    assert torch.equal(shorter.regret[:, 0], whole.regret[:, 3])


# -- sums in order -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_maps_in_order_are_sums_one_after_the_other(kind):
    """To the bit, for any place in memory and any size of the batch."""
    dense, layer = MDP.layers[1].dense, MDPS[kind].layers[1]
    num_states, num_actions, num_next = dense.shape
    v = torch.rand(
        11, 2 * num_next + 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )[:, 3::2]  # no place is aligned
    x = torch.rand(
        num_actions, num_states, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    ).permute(2, 1, 0)
    ahead, arrived = layer.ahead(v, in_order=True), layer.arrive(x, in_order=True)
    for n in (0, 10):
        for s in range(num_states):
            for a in range(num_actions):
                expected = 0.0
                for there in range(num_next):
                    expected += float(dense[s, a, there]) * float(v[n, there])
                assert float(ahead[n, s, a]) == expected
        for there in range(num_next):
            expected = 0.0
            for s in range(num_states):
                for a in range(num_actions):
                    expected += float(dense[s, a, there]) * float(x[n, s, a])
            assert float(arrived[n, there]) == expected
    torch.testing.assert_close(ahead, MDP.layers[1].ahead(v), rtol=1e-14, atol=0)
    torch.testing.assert_close(arrived, MDP.layers[1].arrive(x), rtol=1e-14, atol=0)


def test_batches_that_do_not_fit_go_in_parts(monkeypatch):
    layer, v = MDP.layers[1], random_loss(MDP, batch=(2, 9))[..., 0][..., :5]
    ahead = layer.ahead(v, in_order=True)
    arrived = layer.arrive(ahead, in_order=True)
    monkeypatch.setattr("torch_occ.mdp.layers._MOST", 200)
    assert torch.equal(layer.ahead(v, in_order=True), ahead)
    assert torch.equal(layer.arrive(ahead, in_order=True), arrived)


def test_a_sum_in_order():
    x = torch.tensor([1e16, 1.0, 1.0, -1e16], dtype=torch.float64)
    assert float(running_total(x, 0)) == 0.0  # each 1 is lost in turn; 2.0 if they were added first


# -- the other machine -------------------------------------------------------------------------


def test_on_the_other_machine_a_product_depends_on_its_batch():
    """Or the tests above could not fail."""
    totals = 100 * random_loss(MDP, batch=(3,), seed=1)

    def values(in_order: bool, batch: Tensor) -> Tensor:
        return optimal_policy(MDP, batch, in_order=in_order).value

    with OtherMachine() as machine:
        assert not torch.equal(values(False, totals[:1])[0], values(False, totals)[0])
        assert machine.changed
    with OtherMachine() as machine:
        assert torch.equal(values(True, totals[:1])[0], values(True, totals)[0])
        assert not machine.changed
    with OtherMachine(threads=2):
        q = (totals * totals).sum((-2, -1))
    with OtherMachine(threads=1):
        assert not torch.equal((totals * totals).sum((-2, -1)), q)
    t = torch.arange(1.0, 71.0, dtype=torch.float64)
    with OtherMachine():
        assert not torch.equal((t**0.37)[:50], t[:50] ** 0.37)
        assert torch.equal((t**0.37)[:32], t[:32] ** 0.37)


@pytest.mark.parametrize(
    ("learner", "losses", "kind"),
    [
        ("importance weighted", "adaptive", "dense"),
        ("importance weighted", "walk", "sparse"),
        ("optimistic", "adaptive", "dense"),
    ],
)
def test_a_seed_has_the_same_bits_in_every_group_of_lanes(learner, losses, kind):
    """One or two seeds are played in few lanes, more in eight; the last group is not full."""
    seeds, mdp = list(range(17)), MDPS[kind]
    together = play(learner, losses, seeds, mdp, threads=2)
    same(play(learner, losses, seeds[:9], mdp), together, seeds[:9])
    for seed in (0, 8, 16):
        same(play(learner, losses, [seed], mdp), together, [seed])
