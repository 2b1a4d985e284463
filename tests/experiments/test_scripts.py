"""The scripts from the command line, in their smallest configuration."""

import csv
import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
from documents import ROOT
from scripts import PNG, only_directory, run

import torch_occ as occ
from experiments import benchmark
from experiments.benchmark import measure_batches, measure_long, measure_loop
from experiments.contestants import CONTESTANTS, ENTROPY, PAPER, Case, measure_case


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
    assert "Newton steps" in printed
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
    more = (
        "--batch 2 --repeats 1 --sizes 2 2 2 --sections rivals --rivals engine soft-DP POUNCE JAX"
    )
    printed = run("benchmark", *more.split(), "--root", str(tmp_path))
    assert "| engine " in printed
    with (only_directory(tmp_path, "benchmark") / "benchmark.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["measured"])]
    counts = Counter(row["contestant"] for row in rows)
    assert (counts["engine"], counts["soft-DP"]) == (9, 4)  # soft-DP knows the entropy only
    for row in rows:  # packages that are not installed are left out
        assert float(row["of_q"]) < 1e-9
        if (row["scales"], row["weight"]) != (ENTROPY, "0.05"):  # there gradients nearly vanish
            assert float(row["of_gradient"]) < (1e-5 if row["contestant"] == "POUNCE" else 1e-9)
        assert float(row["seconds"]) > 0


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


def test_a_batch_beyond_the_budget_is_measured_in_part():
    case = Case((2, 2, 2), 8, ENTROPY, 1.0, 1.0)
    ticks = itertools.count()
    slow = replace(case, clock=lambda: float(next(ticks)))  # every run takes a second
    (row,) = measure_case(slow, {"engine": CONTESTANTS["engine"]}, 1, budget=2.5)
    assert row.measured == 2
    assert row.seconds == 0.5


def test_who_is_absent_or_knows_another_regularizer_has_the_reason():
    absent = CONTESTANTS["engine"]._replace(package="no_such_package")
    given = {"absent": absent, "soft-DP": CONTESTANTS["soft-DP"]}
    rows = measure_case(Case((2, 2, 2), 1, PAPER, 0.0, 10.0), given, 1, 1.0)
    notes = [(row.measured, row.note) for row in rows]
    assert notes == [(0, "no_such_package is not installed"), (0, "another regularizer")]


# -- the section "engine" -------------------------------------------------------------------------


def test_the_engine_is_timed():
    batches = measure_batches(shapes=[(2, 2, 2)], batch=8, repeats=2)
    long = measure_long(episodes=300, seeds=2, shape=(2, 2, 2))
    loops = measure_loop(repeats=2, shapes={(2, 2, 2): 64}, seeds=2)
    assert [len(found) for found in (batches, loops)] == [4, 4]
    assert all(x > 0 for found in (batches, long, loops) for x in found.values())
    assert long["us per episode and seed"] == pytest.approx(1e6 * long["processor s"] / 600)
