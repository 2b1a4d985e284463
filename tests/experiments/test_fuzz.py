"""The experiment fuzz in small; its judge against an oracle, 60 digits and planted errors."""

import csv

import numpy as np
import pytest
import torch
from many_digits import Oracle
from mpmath import mp

import torch_occ as occ
from experiments import fuzz, fuzz_problems
from experiments.fuzz import HARMLESS, try_batch
from experiments.fuzz_problems import FAMILIES, KINDS, Batch, draw, neighbours


def one(family, mdp, loss, t=1.0, **parameters):
    """A batch of one step."""
    arrays = {name: np.array([value]) for name, value in parameters.items()}
    return Batch(family, mdp, np.asarray(loss, dtype=float)[None], np.array([t]), arrays)


def small(root, kinds, *families):
    """A campaign of 8 cold and up to 8 warm starts in each cell."""
    given = {"regularizers": families, "kinds": kinds, "backends": ("engine",), "root": root}
    return fuzz.Args(steps=1, batch=8, processes=1, **given)


def bandit(*losses):
    mdp = occ.LayeredMDP([torch.ones(1, len(losses), 1, dtype=torch.float64)])
    return mdp, [list(losses)]


# -- the campaign ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KINDS)[2:])
def test_every_kind(kind):
    """In torch, with budgets judged too; families that differ most."""
    args = fuzz.Args(batch=24, backends=("torch",))
    for family in ("tsallis", "jin_luo", "visits", "conditional_entropy"):
        cell = fuzz.Cell(family, kind, "torch")
        (found,) = fuzz.play(fuzz.Task(args, cell, 1)).values()
        assert found.wrong == found.unjudged == found.missed == 0
        assert found.certified > 0


def test_a_hundred_thousand_steps(tmp_path):
    """None is wrong, and no reasonable one is refused."""
    kinds, given = ("reasonable", "extreme"), {"backends": ("auto",), "processes": 1}
    args = fuzz.Args(steps=100_000, kinds=kinds, batch=256, seed=1, **given)
    tallies = fuzz.campaign(args, tmp_path)
    assert sum(found.steps for found in tallies.values()) > 95_000
    assert fuzz.conclude(tallies.values())[1] == 0
    for cell, found in tallies.items():
        assert found.judged == found.certified
        assert found.certified == found.steps or cell.kind == "extreme"


def test_from_the_command_line(tmp_path, capsys):
    kinds = ("reasonable", "extreme")
    code = fuzz.main(small(tmp_path, kinds, "tsallis", "shannon"))
    (directory,) = tmp_path.iterdir()
    report = (directory / "fuzz.md").read_text()
    assert report in capsys.readouterr().out
    assert "| Tsallis 1/2 (engine) |" in report
    with (directory / "fuzz.csv").open() as file:
        rows = list(csv.DictReader(file))
    cells = [(row["family"], row["kind"]) for row in rows]
    assert cells == [(a, b) for a in ("tsallis", "shannon") for b in kinds]
    assert all(row["judged"] == row["certified"] for row in rows)
    assert code == int(any(row["wrong"] != "0" for row in rows))


def test_a_wrong_certificate_ends_with_an_error_and_can_be_replayed(tmp_path, monkeypatch):
    solve = Batch.solve

    def slightly_off(batch, backend):
        solution = solve(batch, backend)
        first = (torch.arange(solution.q.shape[-1]) == 0).double()
        return solution._replace(q=solution.q * (1 + 1e-8 * first))

    monkeypatch.setattr(Batch, "solve", slightly_off)
    assert fuzz.main(small(tmp_path, ("reasonable",), "jin_luo")) == 1
    path = next(tmp_path.glob("*/problems/jin_luo_reasonable_engine_wrong_1.npz"))
    assert fuzz.main(fuzz.Args(replay=path)) == 1
    monkeypatch.undo()
    assert fuzz.main(fuzz.Args(replay=path)) == 0


def test_what_does_not_settle_is_counted_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz_problems, "judge", lambda case, *_: np.full(len(case.loss), np.nan))
    assert fuzz.main(small(tmp_path, ("reasonable",), "tsallis")) == 1
    (report,) = tmp_path.glob("*/fuzz.md")
    assert "16 unjudged" in report.read_text()
    assert len(list(tmp_path.glob("*/problems/*_unjudged_*.npz"))) == 2


def test_weights_of_all_sizes_are_certified_and_right():
    """Rounding of multipliers between stiff states once hid what moves soft pairs."""
    random = np.random.default_rng(17)
    mdp = occ.LayeredMDP.random(horizon=3, width=3, num_actions=3, seed=1)
    shape = (24, mdp.num_states, mdp.num_actions)
    loss, beta = 100 * random.random(shape), random.choice([1e-12, 1.0], shape)
    batch = Batch("log_barrier", mdp, loss, np.ones(24), {"tiny": beta})
    for backend in ("auto", "torch"):
        found, _ = try_batch(random, batch, backend)
        assert found.certified == found.judged == 24
        assert found.wrong == found.missed == 0


def test_a_hopeless_step_does_not_refuse_its_neighbour():
    """Each element of a batch lowers w in stages of its own."""
    batch = draw(np.random.default_rng(16), "visits", "endless", 64).take(np.array([54, 0]))
    assert bool(batch.solve("torch").converged[1])


@pytest.mark.parametrize(
    ("family", "kind", "seed", "number", "batch"),
    [
        ("hybrid", "budgets", 25, 3, 2048),  # multipliers of dependent budgets
        ("shannon", "budgets", 79, 40, 2048),  # rounding of loss plus prices
        ("log_barrier", "spread", 77, 184, 1024),  # soft pairs before stiff states
        ("visits", "extreme", 78, 241, 1024),  # rounding of kappa log u
        ("visits", "endless", 78, 30, 16384),  # an error of the action that dominates
    ],
)
def test_what_was_wrong_once(family, kind, seed, number, batch):
    args, cell = fuzz.Args(seed=seed, batch=batch), fuzz.Cell(family, kind, "auto")
    (found,) = fuzz.play(fuzz.Task(args, cell, number)).values()
    assert found.wrong == found.unjudged == 0


def test_budgets_that_leave_little_room():
    """Rounding errors of three of them may have any signs, and no multiplier becomes infinite."""
    random, (mdp, _) = np.random.default_rng(0), bandit(0.0, 0.0, 0.0)
    losses, costs = 20 * random.random((16, 1, 3)), random.random((16, 3, 1, 3))
    ones, limits = np.ones(16), (costs * [1e-6, 1e-6, 1 - 2e-6]).sum((-2, -1))
    batch = Batch("conditional_entropy", mdp, losses, ones, {"gamma": ones}, None, costs, limits)
    found, _ = try_batch(random, batch, "auto")
    assert found.judged == found.certified > found.wrong == 0
    batch = draw(np.random.default_rng([7, 11, 1047]), "log_barrier", "budgets", 2)
    assert bool(batch.solve("auto").converged[0])


def test_problems_are_kept_as_they_are(tmp_path):
    random = np.random.default_rng(5)
    for family in FAMILIES:
        batch = draw(random, family, "extreme", 3)
        batch = neighbours(random, batch, np.ones_like(batch.loss), np.array([True, False, True]))
        batch.save(tmp_path / "a.npz", "something")
        again = Batch.load(tmp_path / "a.npz")
        assert (again.family, again.mdp.is_sparse) == (family, batch.mdp.is_sparse)
        before, after = (x.mdp.to_dense().transitions for x in (batch, again))
        assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        for name in ("loss", "t", "start"):
            assert np.array_equal(getattr(batch, name), getattr(again, name))
        assert batch.parameters.keys() == again.parameters.keys()


@pytest.mark.parametrize(
    "wrong", [{"regularizers": ("tsalis",)}, {"kinds": ("all",)}, {"steps": 0}]
)
def test_arguments_name_every_family_and_are_checked(wrong):
    assert fuzz.Args().regularizers == tuple(FAMILIES)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        fuzz.Args(**wrong)


# -- the judge ------------------------------------------------------------------------------------


def dyadic(seed):
    """An MDP whose rows sum to one exactly, so that there is one way to read them."""
    random = np.random.default_rng(seed)
    sizes, tables = [2, 3, 2], []
    for here, there in zip(sizes, [3, 2, 1], strict=True):
        counts = random.multinomial(8, np.full(there, 1 / there), size=(here, 3))
        tables.append(torch.from_numpy(counts / 8))
    actions = torch.ones(7, 3, dtype=torch.bool)
    actions[1, 0] = actions[3, 1] = actions[3, 2] = False
    initial = torch.tensor([0.25, 0.75], dtype=torch.float64)
    return occ.LayeredMDP(tables, actions=actions, initial=initial).prune()


@pytest.mark.parametrize("offset", [0.0, 1e12])
@pytest.mark.parametrize("kind", ["hybrid", "complement", "shannon"])
def test_against_an_oracle_with_40_digits(kind, offset):
    """The errors that the judge finds are the distance to a solution found in another way."""
    mdp = dyadic(1)
    random = np.random.default_rng(2)
    loss = offset + np.round(2**12 * 30 * random.random((mdp.num_states, mdp.num_actions))) / 2**12
    theta = {"alpha": 0.7, "beta": 0.5, "gamma": 1.2}
    family = {"hybrid": "jin_luo", "complement": "complement", "shannon": "shannon"}[kind]
    names = FAMILIES[family].parameters
    batch = one(family, mdp, loss, t=7.0, **{name: theta[name] for name in names})
    near = one(family, mdp, loss - offset, t=7.0, **{name: theta[name] for name in names})
    start = near.solve("engine").q[0]  # 1e12 is not what the oracle's start is about
    with mp.workdps(60):  # 1e12 takes some of them
        truth, _ = Oracle(mdp, torch.from_numpy(loss), theta | {"t": 7.0}, kind).solve(start)
    q = np.zeros((1, *loss.shape))
    q[0, mdp.actions.numpy()] = [float(x) for x in truth]
    for exact in (False, True):
        assert batch.errors(q, exact=exact)[0] < 3e-16
        for size in (1e-3, 1e-6, 1e-12):
            noise = size * random.uniform(-1, 1, q.shape)
            expected = abs(np.log1p(noise[0][mdp.actions.numpy()])).max()
            found = batch.errors(q * (1 + noise), exact=exact)[0]
            assert found == pytest.approx(expected, rel=1e-3, abs=5e-16)


@pytest.mark.parametrize("family", FAMILIES)
def test_32_digits_agree_with_60(family):
    """On the solver's own answers and on answers moved along Omega, in extreme problems too."""
    for kind in ("reasonable", "extreme"):
        random = np.random.default_rng(7)
        batch, q, moved = moved_answers(random, family, kind)
        for given in (q.numpy(), moved.numpy()):
            found, truth = batch.errors(given), batch.errors(given, exact=True)
            assert np.allclose(found, truth, rtol=1e-9, atol=1e-20)
        assert (truth > HARMLESS[0]).all()


def moved_answers(random, family, kind):
    """Two problems or fewer, their certified q, and q moved by about 1e-6.

    Where an entropy leaves one action per state, a relative change of q changes nothing. Such
    problems are not taken.
    """
    while True:
        batch = draw(random, family, kind, 12)
        if not 4 <= batch.mdp.num_pairs <= 14 or batch.mdp.num_pairs == batch.mdp.num_states:
            continue
        solution = batch.solve("engine")
        noise = torch.from_numpy(random.uniform(-1e-6, 1e-6, solution.q.shape))
        moved = occ.occupancy(batch.mdp, occ.policy_of(batch.mdp, solution.q * (1 + noise)))
        change = ((moved - solution.q).abs() / solution.q.clamp(min=1e-300)).amax((-2, -1))
        chosen = torch.nonzero(solution.converged & (change > 1e-8)).flatten()[:2]
        if len(chosen):
            return batch.take(chosen.numpy()), solution.q[chosen], moved[chosen]


def test_an_offset_of_a_layer_moves_nothing():
    """Rows of P sum to one only up to rounding; 1e12 times that would be 1e-4."""
    mdp = occ.LayeredMDP.random(4, 3, 3, seed=1)
    random = np.random.default_rng(0)
    loss = np.round(2**10 * random.random((mdp.num_states, 3))) / 2**10
    offset = 2.0**40 * (mdp.layer.numpy() % 2)[:, None]
    plain, moved = (one("tsallis", mdp, x, gamma=1.0) for x in (loss, loss + offset))
    q = plain.solve("engine").q.numpy()
    assert abs(plain.errors(q) - moved.errors(q)).max() < 1e-18


def test_zeros_where_doubles_end():
    """q = 0 is right where the solution is below 1e-300, and nowhere else."""
    mdp, loss = bandit(0.0, 800.0, 1e12)
    batch = one("shannon", mdp, loss, gamma=1.0)
    assert batch.errors(np.array([[[1.0, 0.0, 0.0]]]))[0] == 0
    assert batch.errors(np.array([[[1.0, 1e-310, 1e-305]]]))[0] == 0
    assert batch.errors(np.array([[[1.0, 0.0, 1e-290]]]))[0] == pytest.approx(10 * np.log(10))
    mdp, loss = bandit(0.0, 600.0)
    batch = one("shannon", mdp, loss, gamma=1.0)
    assert batch.errors(np.array([[[1.0, np.exp(-600.0)]]]))[0] < 1e-13
    assert batch.errors(np.array([[[1.0, 0.0]]]))[0] > 90
    mdp, loss = bandit(0.0, 1.0)  # far from the solution: an error of order one, found all the same
    batch = one("log_barrier", mdp, loss, tiny=1e-12)
    assert batch.errors(np.array([[[0.5, 0.5]]]))[0] == pytest.approx(np.log(0.5e12), rel=1e-6)
