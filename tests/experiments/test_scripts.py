"""The scripts from the command line, in their smallest configuration."""

import csv
import json

import pytest
from documents import ROOT
from scripts import PNG, only_directory, run

import torch_occ as occ
from experiments import benchmark
from experiments.benchmark import measure_batches, measure_long, measure_loop
from experiments.common import seconds
from experiments.contestants import CONTESTANTS, Case, Limits, cells, measure_cell


def check_gradients(printed: str) -> None:
    """The gradients that a script prints agree with the finite differences beside them."""
    for name in ("alpha", "beta", "gamma"):
        (line,) = [line for line in printed.splitlines() if line.startswith(f"| {name} ")]
        implicit, differences = (float(cell) for cell in line.split("|")[3:5])
        assert implicit == pytest.approx(differences, rel=1e-5)


SMALL = ["--horizon", "2", "--width", "2"]
PLAYED = [
    *SMALL,
    *["--actions", "2", "--episodes", "30", "--seeds", "2", "--seed", "0", "--no-tensorboard"],
]


def test_step(tmp_path):
    printed = run("step", *SMALL, "--num-actions", "2", "--no-cross-check", "--root", str(tmp_path))
    found = only_directory(tmp_path, "step")
    assert (found / "step.png").read_bytes().startswith(PNG)
    assert "Newton steps" in printed
    assert str(found) in printed
    check_gradients(printed)


def test_demo(tmp_path):
    more = ["--budget", "10", "--processes", "1", "--root", str(tmp_path)]
    printed = run("demo", *PLAYED, *more)
    found = only_directory(tmp_path, "best_of_both_worlds")
    assert (found / "regret.png").read_bytes().startswith(PNG)
    assert "What this run shows" in printed
    assert "class Mine(occ.SeparableRegularizer)" in printed
    assert str(found / "regret.png") in printed
    check_gradients(printed)


def test_constrained(tmp_path):
    run("constrained", *PLAYED, "--root", str(tmp_path))
    found = only_directory(tmp_path, "constrained")
    assert (found / "constrained.png").read_bytes().startswith(PNG)
    with (found / "constrained.csv").open() as file:
        with_budget, without = csv.DictReader(file)
    assert float(with_budget["largest excess"]) < 1e-13
    assert float(with_budget["mean cost"]) <= float(with_budget["limit"]) + 1e-4
    assert without["largest excess"] == "-"


def test_benchmark(tmp_path):
    sizes = "--sizes 2 2 2 2 2 3 --batches 1 2 --repeats 1 --rivals cvxpy --sections rivals"
    run("benchmark", *sizes.split(), "--root", str(tmp_path))
    found = only_directory(tmp_path, "benchmark")
    assert (found / "benchmark.png").read_bytes().startswith(PNG)
    with (found / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    cells = [(row["actions"], row["batch"]) for row in rows if row["contestant"] == "torch_occ"]
    assert cells == [("2", "1"), ("2", "2"), ("3", "1"), ("3", "2")]
    assert len(rows) == 8
    for row in rows:
        assert float(row["residual_q"]) < 1e-9
        assert float(row["forward"]) > 0
        assert (row["backward"] == "") == (row["contestant"] != "torch_occ")


def test_a_release_is_recorded_and_drawn_with_the_earlier_ones(tmp_path, monkeypatch):
    for name in ("measure_calls", "measure_batches", "measure_loop", "measure_compiling"):
        monkeypatch.setattr(benchmark, name, lambda *_, **__: dict.fromkeys(benchmark.SHOWN, 1.234))
    (tmp_path / "0.0.9.json").write_text(
        json.dumps({"version": "0.0.9", "measured": dict.fromkeys(benchmark.SHOWN, 2.0)})
    )
    benchmark.main(benchmark.Args(record=tmp_path))
    written = json.loads((tmp_path / f"{occ.__version__}.json").read_text())
    assert written["measured"] == dict.fromkeys(benchmark.SHOWN, 1.23)
    assert (tmp_path / "releases.png").read_bytes().startswith(PNG)
    (axes,) = benchmark.draw_releases(tmp_path).axes
    assert [x.get_text() for x in axes.get_xticklabels()] == ["0.0.9", occ.__version__]
    assert {tuple(line.get_ydata()) for line in axes.lines} == {(1.0, 0.615)}


def test_this_release_is_recorded():
    assert benchmark.releases(ROOT / "docs" / "speed")[-1].stem == occ.__version__


# -- the benchmark's rules ------------------------------------------------------------------------


def slow(asked):
    """A contestant that is thought to be slow, and notes how many elements are asked of it."""
    ours = CONTESTANTS["torch_occ"]

    def prepare(case):
        run = ours.prepare(case)
        return lambda count: asked.append(count) or run(count)

    return ours._replace(label="slow", seconds=10.0, prepare=prepare)


def test_a_batch_beyond_the_budget_is_measured_in_part_and_says_so():
    asked = []
    contestants = [CONTESTANTS["torch_occ"], slow(asked)]
    rows = measure_cell(Limits(1, 25.0, 600.0), Case((2, 2, 2), 8, 0, 10.0), contestants, {})
    assert asked == [2]
    assert (rows[1]["measured"], rows[1]["note"]) == (2, "2 of 8 measured")
    assert cells(rows[1])[3].startswith("~")
    assert rows[0]["measured"] == 8


def test_who_is_too_slow_or_absent_is_skipped_with_the_reason():
    ours, scs = CONTESTANTS["torch_occ"], CONTESTANTS["scs"]
    absent = ours._replace(label="absent", package="no_such_package")
    case = Case((2, 2, 2), 1, 0, 10.0)
    known = {scs.label: (case.mdp.num_pairs, 10.0)}
    rows = measure_cell(Limits(1, 60.0, 5.0), case, [ours, scs, absent], known)
    assert rows[1]["note"].startswith("skipped: a step would take 10 s")
    assert rows[2]["note"] == "no_such_package is not installed"
    assert rows[1]["forward"] is rows[2]["forward"] is rows[1]["ratio_total"] is None
    # A guess grows with the problem.
    large = Case((3, 6, 4), 1, 0, 10.0)
    (row,) = measure_cell(Limits(1, 60.0, 5.0), large, [scs], known)
    expected = seconds(10 * (large.mdp.num_pairs / case.mdp.num_pairs) ** 3)
    assert row["note"] == f"skipped: a step would take {expected}"


# -- the section "engine" -------------------------------------------------------------------------


def test_the_engine_is_timed():
    batches = measure_batches(shapes=[(2, 2, 2)], batch=8, repeats=2)
    long = measure_long(episodes=300, seeds=2, shape=(2, 2, 2))
    loops = measure_loop(repeats=2, shapes={(2, 2, 2): 64}, seeds=2)
    assert [len(found) for found in (batches, loops)] == [4, 4]
    assert all(x > 0 for found in (batches, long, loops) for x in found.values())
    assert long["us per episode and seed"] == pytest.approx(1e6 * long["processor s"] / 600)
