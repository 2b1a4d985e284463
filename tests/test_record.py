"""The record: what the package computed before its restructuring, seen through the public face.

tests/record/cases.toml says what is recorded. `python tests/test_record.py --write`, with
tests/helpers on the path, writes numbers and messages beside it, and the tests compare: steps and
gradients agree to 1e-12, other numbers to 1e-9, messages to the word and histories to the bit.
tests/record/changed.json names what changed since, with the tolerance that holds instead, or null
if nothing can be compared, and the reason.
"""

import hashlib
import json
import os
import sys
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from zoo import Centred, Coupled, SmoothedHybrid, masked

import torch_occ as occ
from experiments import statements
from torch_occ.game.checks import DIAGNOSTICS
from torch_occ.games import Decision, End

EDGES = ("sa", "sb", "ab", "at", "bt", "st")
RECORD, F64 = Path(__file__).parent / "record", torch.float64
CASES = tomllib.loads((RECORD / "cases.toml").read_text())
CHANGED = json.loads((RECORD / "changed.json").read_text())


def uniform(*shape, seed=0):
    return torch.rand(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def table(mdp, *batch, seed=0):
    return uniform(*batch, mdp.num_states, mdp.num_actions, seed=seed)


def counting(size):
    return torch.arange(size, dtype=F64)


# -- models and regularizers -------------------------------------------------------------------

DENSE = occ.LayeredMDP.random(3, 3, 3, seed=1)
WIDE = occ.LayeredMDP.random(4, 5, 2, seed=3)
FOUR = [occ.LayeredMDP.random(3, 3, 3, seed=seed).transitions for seed in range(4)]
MASKED = masked().mdp
PROBLEMS = {  # the MDP, and the batch shape of losses
    "dense": (DENSE, ()),
    "sparse": (DENSE.to_sparse(), ()),
    "masked": (MASKED, ()),
    "wide": (WIDE, ()),
    "batch": (DENSE, (5,)),
    "sparse batch": (WIDE.to_sparse(), (3,)),
    "mdps": (occ.LayeredMDP([torch.stack(layer) for layer in zip(*FOUR, strict=True)]), (4,)),
}


class Empty(occ.SeparableRegularizer):
    """A regularizer without terms."""


OWN = {"Empty": Empty, "OwnSeparable": SmoothedHybrid, "OwnStatewise": Centred, "OwnJoint": Coupled}


def evaluate(section, name, mdp=DENSE, **more):
    """The case of this name, for this MDP."""
    names = OWN | {
        "__name__": __name__,
        "occ": occ,
        "torch": torch,
        "table": table,
        "mdp": mdp,
        "T": EPISODES,
    }
    names |= {"mean": table(mdp, seed=1), "tables": table(mdp, 5, seed=2)}
    if section in ("regularizers", "own", "model"):
        names |= {"states": counting(mdp.num_states), "actions": counting(mdp.num_actions)}
        names |= {"layers": counting(mdp.horizon), "eta": occ.InverseSqrt(0.9)}
    if section in ("ftrl", "learners", "errors"):
        names |= {"rate": occ.Tsallis() / occ.InverseSqrt(0.8) + occ.LogBarrier(1.0)}
        names |= {"powers": occ.Tsallis(0.7) / occ.Polynomial(0.8, 0.37) + occ.LogBarrier(0.3)}
        names |= {"psi": lambda name: evaluate("regularizers", name, mdp)}
        names |= {"practical": occ.rivals.Widths.of("practical", mdp)}
    return eval(CASES[section][name], names | more)


# -- steps: q, multipliers, gradients, products with the Hessian ---------------------------------


def derivatives(outputs, inputs):
    """The gradient of a fixed mean of the outputs, and its Hessian times a fixed direction."""
    given = list(inputs.values())
    value = sum((uniform(*x.shape, seed=7 + i) * x).sum() for i, x in enumerate(outputs))
    first = torch.autograd.grad(value, given, create_graph=True, materialize_grads=True)
    along = sum((uniform(*g.shape, seed=70 + i) * g).sum() for i, g in enumerate(first))
    second = torch.autograd.grad(along, given, materialize_grads=True)
    named = zip(inputs, first, second, strict=True)
    return {f"{n} {k}": g for n, *both in named for k, g in enumerate(both, 1)}


def step_inputs(mdp, batch, psi):
    inputs = {"loss": 3 * table(mdp, *batch, seed=2), "t": 2 + 8 * uniform(*batch, seed=3)}
    # Numbered: names and shapes of parameters are not recorded, their order and values are.
    inputs |= {f"parameter {i}": p for i, p in enumerate(psi.parameters())}
    return {name: x.requires_grad_() for name, x in inputs.items()}


def parts(found):
    return {"q": found.q, "value": found.value, "status": found.status}


def solve(problem, psi, backend, transitions=False):
    mdp, batch = PROBLEMS[problem]
    psi = psi if isinstance(psi, torch.nn.Module) else evaluate(*psi, mdp)
    step, inputs = occ.FTRLStep(mdp, psi, backend=backend), step_inputs(mdp, batch, psi)
    model = None
    if transitions:
        entries = [p.detach().clone().requires_grad_() for p in mdp.probabilities]
        inputs |= {f"probabilities {i}": p for i, p in enumerate(entries)}
        model = mdp.with_probabilities(*entries)
    found = step.solve(inputs["loss"], inputs["t"], mdp=model)
    assert found.backend == backend
    return parts(found) | derivatives([found.q], inputs)


def batched_parameters(backend):
    beta = 0.1 + 0.2 * counting(5)
    psi = occ.HybridTsallis(1 + beta) / occ.InverseSqrt(0.8) + occ.LogBarrier(beta)
    return solve("batch", psi, backend)


def warm_and_failing(backend):
    step = occ.FTRLStep(DENSE, occ.jin_luo(DENSE, beta=0.5), backend=backend)
    hasty = occ.FTRLStep(DENSE, occ.Tsallis(), backend=backend, max_steps=2)
    loss = 3 * table(DENSE, seed=2)
    steep = 10 ** counting(4)[:, None, None] * loss
    q = step(1.1 * loss, 11.0, warm_start=step(loss, 10.0).detach())
    return {"q": q, "status": hasty.solve(steep, check=False).status}


def with_budgets(problem, psi, backend):
    mdp, batch = PROBLEMS[problem]
    psi = evaluate(*psi, mdp)
    step, inputs = occ.FTRLStep(mdp, psi, backend=backend), step_inputs(mdp, batch, psi)
    costs = table(mdp, 3, seed=50)
    spent = (costs * step(inputs["loss"], inputs["t"]).unsqueeze(-3)).sum((-2, -1)).detach()
    least = torch.stack([occ.game.comparator(mdp, row) for row in costs])
    limits = least + torch.tensor([0.6, 0.9, 1.3], dtype=F64) * (spent - least)
    inputs |= {"costs": costs.requires_grad_(), "limits": limits.requires_grad_()}
    found = step.solve(inputs["loss"], inputs["t"], constraints=occ.Budgets(costs, limits))
    return parts(found) | {"price": found.multipliers} | derivatives([found.q], inputs)


def learning(backend):
    step = occ.FTRLStep(DENSE, occ.jin_luo(DENSE, beta=0.5), backend=backend)
    inputs = step_inputs(DENSE, (4,), step.regularizer)
    loss, t = inputs["loss"], inputs["t"]
    states, actions = torch.tensor([[0, 1, 4], [0, 3, 6]]), torch.tensor([[0, 1, 2], [2, 2, 0]])
    outputs = {
        "fenchel young": occ.fenchel_young_loss(step, loss, occ.interior_point(DENSE), t),
        "cost": occ.expected_cost(step, loss, table(DENSE, seed=8), t),
        "likelihood": occ.negative_log_likelihood(step, loss[:2], states, actions, t[:2]),
    }
    return outputs | derivatives(list(outputs.values()), inputs)


def steps():
    found = {
        f"{name}, {problem}": (solve, problem, ("own", name), "torch")
        for name in CASES["own"]
        for problem in ("dense", "masked", "batch", "mdps")
    }
    for backend in ("torch", "engine"):
        for problem in PROBLEMS:
            for name in CASES["regularizers"]:
                case = (solve, problem, ("regularizers", name), backend)
                found[f"{name}, {problem}, {backend}"] = case
        for name in ("jin_luo", "shannon", "long_sum"):
            for problem in ("dense", "masked", "mdps", "sparse")[: 4 if backend == "torch" else 3]:
                case = (solve, problem, ("regularizers", name), backend, True)
                found[f"{name}, {problem}, transitions, {backend}"] = case
            for problem in ("dense", "wide", "batch"):
                case = (with_budgets, problem, ("regularizers", name), backend)
                found[f"{name}, {problem}, budgets, {backend}"] = case
        for function in (batched_parameters, warm_and_failing, learning):
            found[f"{function.__name__}, {backend}"] = (function, backend)
    return found


# -- histories -----------------------------------------------------------------------------------

EPISODES, SEEDS, CHECKPOINTS = 300, (1, 2, 3, 5, 8, 13, 21, 34, 55), (1, 3, 10, 30, 100, 300)
CURVES = ("regret", "realised_regret", "comparator", "corruption", "newton_steps", "uncertified")
FIELDS = (*CURVES, "last_q", "cumulative_occupancy")
LEARNERS = {name: section for section in ("ftrl", "learners") for name in CASES[section]}
IN_ALL_WORLDS = ("ftrl", "exploration", "optimistic", "ucbvi", "unknown_practical")
FAMILIES = (  # one of each kind of learner
    *("ftrl", "optimistic", "thompson", "shifted", "ucbvi"),
    *("strong_euler", "psrl", "multilayer_ucbvi", "uob_reps", "unknown_practical"),
)


def games():
    found = {}
    for name in (x for x in LEARNERS if x != "budgets"):  # tests/game/test_learners.py
        found[f"{name}, dense"] = ("dense", name, "bernoulli")
        found[f"{name}, sparse"] = ("sparse", name, "front")
    for name in IN_ALL_WORLDS:
        found[f"{name}, masked"] = ("masked", name, "walk")
        found |= {f"{name}, {losses}": ("dense", name, losses) for losses in CASES["losses"]}
    return found | {
        f"{name}, torch": ("dense", name, "bernoulli", "torch") for name in CASES["ftrl"]
    }


def play(problem, name, losses, backend="engine", seeds=SEEDS):
    mdp, _ = PROBLEMS[problem]
    short = backend == "torch"
    checkpoints = [t for t in CHECKPOINTS if not short or t <= 30]
    history = occ.simulate(
        mdp,
        evaluate(LEARNERS[name], name, mdp),
        evaluate("losses", losses, mdp),
        checkpoints[-1],
        seeds[:2] if short else seeds,
        checkpoints=checkpoints,
        backend=backend,
    )
    assert history.backend == backend
    return {field: getattr(history, field) for field in FIELDS}


# -- other numbers, and messages -----------------------------------------------------------------


def number(name):
    """One number, or one table of numbers."""
    policy = table(DENSE, seed=5)
    more = {"policy": policy / policy.sum(-1, keepdim=True), "masked": MASKED}
    more |= {"small": occ.LayeredMDP.random(2, 2, 2, seed=4), "costs": uniform(2, 6, seed=6)}
    counts = [torch.floor(20 * uniform(*p.shape, seed=k)) for k, p in enumerate(DENSE.transitions)]
    more |= {"graph": graph(), "believed": occ.rivals.empirical_transitions(DENSE, counts)}
    return {name: evaluate("model", name, **more)}


def graph():
    return occ.LayeredMDP.from_graph([*map(tuple, EDGES)], "s", "t")


def forecasts(losses, estimator=None):
    psi = occ.jin_luo(DENSE, beta=0.5)
    found = occ.forecast(DENSE, psi, evaluate("losses", losses), 10_000, estimator=estimator)
    slopes = torch.autograd.grad(found.final, list(psi.parameters()))
    return found._asdict() | {f"slope {i}": slope for i, slope in enumerate(slopes)}


def leaps():
    psi, mean = occ.jin_luo(DENSE, beta=0.5), table(DENSE, seed=1)
    return occ.leap(DENSE, psi, mean, 1000, particles=16, seed=3)._asdict()


def tuning():
    world = occ.tuning.World("one", DENSE, table(DENSE, seed=1))
    objective = occ.tuning.ForecastObjective([world], 1000)
    found = occ.tune(objective, occ.jin_luo(DENSE, beta=20.0), steps=3, starts=2, rate=0.3, seed=1)
    return {"values": found.values, "path": found.path, "value": torch.tensor(found.value)}


def certificate():
    callback = occ.theory.Certificate()
    learner, losses = evaluate("ftrl", "default"), evaluate("losses", "bernoulli")
    occ.simulate(DENSE, learner, losses, 40, (1, 2), callbacks=[callback], checkpoints=(5, 20, 40))
    return callback.curves


def survey():
    found = statements.survey(DENSE, torch.Generator().manual_seed(1), count=3)
    sides = [(f"{i} {x.label}", x.left, x.right) for i, x in enumerate(found)]
    return {f"{name} {k}": x for name, *both in sides for k, x in enumerate(both)}


def numbers():
    return {name: (number, name) for name in CASES["model"]} | {
        "forecast": (forecasts, "bernoulli"),
        "forecast, phases": (forecasts, "constrained"),
        "forecast, baseline": (forecasts, "bernoulli", occ.ReducedVariance(occ.InverseSqrt(0.2))),
        "leap, engine": (leaps,),
        "tune": (tuning,),
        "certificate": (certificate,),
        "survey": (survey,),
    }


def put(x, index, value):
    x = x.clone()
    x[index] = value
    return x


class OwnLosses(occ.LossProcess):
    def means(self, mdp, state, t0, n, q):
        return table(mdp)[None, None], state


def contract(mdp=MASKED, losses=None, estimator=None, **methods):
    """Play a learner with these methods, or FTRL with this estimator."""
    learner = type("Mine", (occ.Learner,), methods)(mdp)
    if not methods:
        own = {} if estimator is None else {"__call__": estimator}
        learner = occ.FTRL(mdp, occ.Tsallis(), type("Own", (occ.ImportanceWeighted,), own)())
    losses = occ.BernoulliLosses(table(MASKED, seed=1)) if losses is None else losses
    return occ.simulate(MASKED, learner, losses, 5, (5, 9))


def late(good, bad):
    return lambda self, t: good if t < 4 else bad


def charges(bad):
    def means(self, mdp, state, t0, n, q):
        return (table(MASKED)[None, None], state) if t0 < 4 else bad

    return type("Charges", (occ.LossProcess,), {"stride": 3, "means": means})()


def message(name, backend="torch"):
    """The type and the words of the error."""
    lost = [torch.tensor([[[0.0, 1.0]] * 2] * 2, dtype=F64), torch.ones(2, 2, 1, dtype=F64)]
    leader, losses = occ.FollowTheLeader(DENSE), evaluate("losses", "bernoulli")
    good = {"losses": losses, "learner": leader, "episodes": 5}
    more = {"nan": torch.nan, "inf": torch.inf, "put": put, "lost": lost, "graph": graph()}
    more |= {"leader": leader, "play": lambda **bad: occ.simulate(DENSE, **good | bad)}
    more |= {"masked": MASKED, "loss": table(MASKED, seed=1), "costs": table(MASKED, 2, seed=2)}
    more |= {"ones": torch.ones(4, 2, dtype=F64), "caps": torch.ones(2, dtype=F64)}
    more |= {"P": [*DENSE.transitions], "rows": [*DENSE.to_sparse().transitions], "losses": losses}
    more |= {"every": torch.ones_like(DENSE.actions), "Decision": Decision, "End": End}
    last = Decision(1, "b", {"x": End(1.0), "y": End(0.0)})
    more |= {"game": lambda: occ.ExtensiveGame(Decision(0, "a", {"x": End(1.0), "y": last}))}
    more |= {"own": lambda **attributes: type("Process", (OwnLosses,), attributes)()}
    more |= {"q": occ.interior_point(MASKED)[None], "uniform": occ.uniform_policy(MASKED)[None]}
    more |= {"psi_of": lambda level, **functions: type("Wrong", (level,), functions)}
    slow = type("Slow", (occ.Schedule,), {"forward": lambda self, t: 1 / (1 + t.log())})()
    more |= {
        "slow": slow,
        "contract": contract,
        "late": late,
        "charges": charges,
        "steps": DIAGNOSTICS[:4],
    }
    step = occ.FTRLStep(MASKED, occ.jin_luo(MASKED, beta=0.5), backend=backend)
    more |= {"step": step, "shown": lambda *given, mdp=None: occ.negative_log_likelihood(
        step, more["loss"], *map(torch.as_tensor, given), 3, mdp=mdp)}  # fmt: skip
    try:
        evaluate("errors", name, **more)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["no error", ""]


# -- writing and reading -------------------------------------------------------------------------


def write(section, cases):
    """Put new numbers in the place of old ones: all in one row, and where each case lies in it."""
    index, row = {}, []
    for case, found in (record(section) | cases).items():
        for name, x in found.items():
            start = len(row)
            row += x.detach().double().reshape(-1).tolist()
            index.setdefault(case, {})[name] = [start, len(row)]
    places = np.array(json.dumps(index))
    np.savez_compressed(RECORD / f"{section}.npz", row=np.array(row), index=places)


def tolerance_of(name):
    """Zero, unless the numbers of this case are known to have changed."""
    return CHANGED.get(name, [0.0])[0]


@cache
def record(section):
    if not (RECORD / f"{section}.npz").exists():
        return {}
    with np.load(RECORD / f"{section}.npz") as file:
        row, index = torch.from_numpy(file["row"]), json.loads(str(file["index"]))
    return {
        case: {name: row[slice(*place)] for name, place in fields.items()}
        for case, fields in index.items()
        if tolerance_of(case) is not None
    }


def differences(found, expected, tolerance):
    """The fields that differ by more than the tolerance, and their largest relative difference.

    It is relative to each entry of q, and to the largest entry of all else.
    """
    assert expected.keys() <= found.keys()
    apart = {}
    for name, theirs in expected.items():
        mine = found[name].detach().double().reshape(-1)
        assert mine.shape == theirs.shape, name
        size = (theirs.abs() if name == "q" else theirs.abs().nan_to_num().max()).clamp(min=1e-300)
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        relative = torch.where(same, 0.0, ((mine - theirs).abs() / size).nan_to_num(torch.inf))
        limit = 0.0 if name == "status" else tolerance
        if name == "newton_steps" and tolerance > 0:  # rounding decides if one more is needed
            limit = 0.05
        if float(relative.max()) > limit:
            apart[name] = float(relative.max())
    return apart


# -- tests ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", record("steps"))
def test_steps_and_their_derivatives(name):
    function, *arguments = steps()[name]
    assert differences(function(*arguments), record("steps")[name], 1e-12) == {}


@pytest.mark.parametrize("name", record("numbers"))
def test_other_numbers(name):
    function, *arguments = numbers()[name]
    assert differences(function(*arguments), record("numbers")[name], 1e-9) == {}


def machine(backend):
    """What this processor and its libraries make of some functions: other bits, other histories."""
    x = uniform(64, 64, seed=5)
    parts = [x.exp(), x.log(), x.pow(0.3), x.sqrt(), x.softmax(-1), x.sum(-1)]
    if backend == "torch":
        positive = x @ x.mT + 64 * torch.eye(64, dtype=F64)
        parts += [x @ x, torch.linalg.inv(x), torch.linalg.cholesky(positive)]
    found = hashlib.sha256(b"".join(y.numpy().tobytes() for y in parts)).hexdigest()
    return found + os.environ.get("NUMBA_CPU_NAME", "")


def skip_elsewhere(name):
    """Bits belong to a kind of machine; tests/game/test_bits.py has what holds on every one."""
    backend = "torch" if name.endswith("torch") else "engine"
    if machine(backend) != json.loads((RECORD / "machine.json").read_text())[backend]:
        pytest.skip("recorded on another kind of machine")


@pytest.mark.bits
@pytest.mark.parametrize("name", [name for name in games() if name in record("games")])
def test_histories(name):
    skip_elsewhere(name)
    assert differences(play(*games()[name]), record("games")[name], tolerance_of(name)) == {}


@pytest.mark.bits
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_seed_has_its_history_among_any_number_of_seeds(name, count):
    skip_elsewhere(name)
    expected = {
        field: row.reshape(len(SEEDS), -1)[:count].reshape(-1)
        for field, row in record("games")[f"{name}, dense"].items()
    }
    found = play("dense", name, "bernoulli", seeds=SEEDS[:count])
    assert differences(found, expected, tolerance_of(f"{name}, dense")) == {}


class Stop(occ.Callback):
    """Interrupts a run when it can be saved for the first time."""

    def on_chunk(self, run):
        self.t = run.t
        raise KeyboardInterrupt


@pytest.mark.bits
@pytest.mark.parametrize(
    "name", [*FAMILIES, "budgets", "leader", "kl_ucb", "reduced_variance", "torch"]
)
def test_a_continued_run_is_the_uninterrupted_one(name, tmp_path):
    episodes, backend = (260, "torch") if name == "torch" else (8500, "engine")
    name = "ftrl" if name == "torch" else name

    def run(**options):
        learner = evaluate(LEARNERS[name], name, T=8500)
        losses = evaluate("losses", "walk" if name in IN_ALL_WORLDS else "bernoulli")
        return occ.simulate(DENSE, learner, losses, episodes, (1, 2, 3), backend=backend, **options)

    whole, stop = run(), Stop()
    with pytest.raises(KeyboardInterrupt):
        run(save_to=tmp_path / "run", callbacks=[stop])
    assert 0 < stop.t < episodes
    continued = run(save_to=tmp_path / "run")
    for field in (*FIELDS, "episodes"):
        assert torch.equal(getattr(continued, field), getattr(whole, field)), field


@pytest.mark.parametrize("name", CASES["errors"])
def test_messages(name):
    expected = json.loads((RECORD / "messages.json").read_text())[name]
    assert message(name) == expected
    if "step" in CASES["errors"][name]:
        assert message(name, "engine") == expected


def well_conditioned(cases):
    """Without fields on which backends, or two kinds of machines, disagree by more than 2e-13."""
    other = {"torch": "engine", "engine": "torch"}
    found = {}
    for name, case in cases.items():
        front, _, backend = name.rpartition(", ")
        twin = cases.get(f"{front}, {other.get(backend)}", case)
        flat = {k: x.detach().double().reshape(-1) for k, x in twin.items()}
        same = {k: x for k, x in flat.items() if x.numel() == case[k].numel()}
        apart = differences(case, same, 2e-13)
        found[name] = {k: x for k, x in case.items() if k not in apart}
    return found


def write_all(words):
    """Write the cases whose section or name has one of these words; all, if there is no word."""

    def chosen(section, cases):
        wanted = {x for x in cases if not words or any(w in f"{section}, {x}" for w in words)}
        return {name: case for name, case in cases.items() if name in wanted}

    def put(name, found):
        if not words or name in words:
            text = json.dumps(found(), indent=1, ensure_ascii=False)
            (RECORD / f"{name}.json").write_text(text)

    put("messages", lambda: {name: message(name) for name in CASES["errors"]})
    put("machine", lambda: {backend: machine(backend) for backend in ("engine", "torch")})
    for section, cases in (("steps", steps()), ("numbers", numbers())):
        found = {name: f(*given) for name, (f, *given) in chosen(section, cases).items()}
        write(section, well_conditioned(found))
    write("games", {name: play(*given) for name, given in chosen("games", games()).items()})


if __name__ == "__main__" and sys.argv[1:2] == ["--write"]:
    torch.set_num_threads(1)
    write_all(sys.argv[2:])
