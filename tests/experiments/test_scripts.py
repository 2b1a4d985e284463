"""The scripts from the command line, in their smallest configuration."""

import csv

import pytest
import torch
from scripts import PNG, only_directory, run

from experiments.benchmark import Args, Row, measure_cell, verdict
from experiments.common import run_directory, seconds, table, write_csv
from experiments.contestants import CONTESTANTS, Case, Contestant, TorchOcc


def check_gradients(printed: str) -> None:
    """The gradients that a script prints agree with the finite differences beside them."""
    for name in ("alpha", "beta", "gamma"):
        (line,) = [line for line in printed.splitlines() if line.startswith(f"| {name} ")]
        implicit, differences = (float(cell) for cell in line.split("|")[3:5])
        assert implicit == pytest.approx(differences, rel=1e-5)


def test_step(tmp_path):
    printed = run(
        "step",
        "--horizon",
        "2",
        "--width",
        "2",
        "--num-actions",
        "2",
        "--no-cross-check",
        "--root",
        str(tmp_path),
    )
    found = only_directory(tmp_path, "step")
    assert (found / "step.png").read_bytes().startswith(PNG)
    assert list(found.glob("events.out.tfevents.*"))
    assert "Newton steps" in printed
    assert str(found) in printed
    check_gradients(printed)


def test_demo(tmp_path):
    size = [
        "--horizon",
        "2",
        "--width",
        "2",
        "--actions",
        "2",
        "--episodes",
        "30",
        "--seeds",
        "2",
        "--budget",
        "10",
        "--seed",
        "0",
    ]
    printed = run("demo", *size, "--processes", "1", "--no-tensorboard", "--root", str(tmp_path))
    found = only_directory(tmp_path, "best_of_both_worlds")
    assert (found / "regret.png").read_bytes().startswith(PNG)
    assert "What this run shows" in printed
    assert "class Mine(occ.SeparableRegularizer)" in printed
    assert str(found / "regret.png") in printed
    check_gradients(printed)


def test_benchmark(tmp_path):
    sizes = ["--sizes", "2", "2", "2", "2", "2", "3", "--batches", "1", "2", "--repeats", "1"]
    printed = run(
        "benchmark",
        *sizes,
        "--rivals",
        "cvxpy",
        "--sections",
        "rivals",
        "profile",
        "--root",
        str(tmp_path),
    )
    found = only_directory(tmp_path, "benchmark")
    assert (found / "benchmark.png").read_bytes().startswith(PNG)
    with (found / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["actions"], row["batch"]) for row in rows if row["contestant"] == "torch_occ"] == [
        ("2", "1"),
        ("2", "2"),
        ("3", "1"),
        ("3", "2"),
    ]
    assert len(rows) == 8
    for row in rows:
        assert float(row["residual_q"]) < 1e-9
        assert float(row["forward"]) > 0
        assert (row["backward"] == "") == (row["contestant"] != "torch_occ")
    assert "derivatives (autograd)" in printed
    assert len((found / "profile.csv").read_text().splitlines()) == 5


# -- the benchmark's rules ------------------------------------------------------------------------


class Slow(TorchOcc):
    """Pretends to be slow, and counts what is asked of it."""

    label = "slow"
    seconds = 10.0
    whole = False
    runs: list[int]

    def prepare(self, case):
        run, self.runs = super().prepare(case), []

        def counted(count):
            self.runs.append(count)
            return run(count)

        return counted


class Absent(Contestant):
    label = "absent"
    package = "no_such_package"


def test_a_batch_beyond_the_budget_is_measured_in_part_and_says_so():
    ours, slow = TorchOcc(), Slow()
    rows = measure_cell(Args(budget=25.0, repeats=1), Case((2, 2, 2), 8, 0, 10.0), [ours, slow], {})
    assert slow.runs == [2]
    assert (rows[1].measured, rows[1].note) == (2, "2 of 8 measured")
    assert rows[1].cells()[3].startswith("~")
    assert rows[0].measured == 8


def test_who_is_too_slow_or_absent_is_skipped_with_the_reason():
    rows = measure_cell(
        Args(patience=5.0, repeats=1),
        Case((2, 2, 2), 1, 0, 10.0),
        [TorchOcc(), Slow(), Absent()],
        {},
    )
    assert rows[1].note.startswith("skipped: a step would take 10 s")
    assert rows[2].note == "no_such_package is not installed"
    assert rows[1].forward is rows[2].forward is None


def test_predictions_grow_with_the_problem():
    contestant = CONTESTANTS["scs"]()
    assert contestant.predict(84) == contestant.predict(10) == contestant.seconds
    assert contestant.predict(840) == pytest.approx(1000 * contestant.seconds)


def test_a_case_is_reproducible_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    a, b = Case((2, 3, 2), 4, 5, 10.0), Case((2, 3, 2), 4, 5, 10.0)
    assert torch.equal(a.losses, b.losses)
    assert a.loss.shape == a.next_loss.shape == (4, 4, 2)
    assert bool((a.next_loss >= a.loss).all())
    assert torch.equal(before, torch.get_rng_state())


def test_verdict_takes_the_faster_of_the_accurate_rivals():
    rows = [
        Row(5, 5, 4, 84, 1, name, name != "c", ratio_total=ratio)
        for name, ratio in (("a", 80.0), ("b", 60.0), ("c", 2.0))
    ]
    (line,) = verdict(rows)
    assert line == "(5, 5, 4), batch 1: 60 times as fast as accurate cvxpylayers; goal 50 reached"
    rows[1].ratio_total = 40.0
    assert verdict(rows)[0].endswith("MISSED")


# -- what they share ------------------------------------------------------------------------------


def test_run_directories_are_never_shared(tmp_path):
    assert len({run_directory(tmp_path, "x", 3) for _ in range(3)}) == 3
    assert all(path.name.startswith("x__3__") for path in tmp_path.iterdir())


def test_csv_and_table(tmp_path):
    write_csv(tmp_path / "nothing.csv", [])
    write_csv(tmp_path / "a.csv", [{"x": 1, "y": None}, {"x": 2.5, "y": "z"}])
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    assert (tmp_path / "a.csv").read_text() == "x,y\n1,\n2.5,z\n"
    assert (
        table(["", "n"], [["a", "10"], ["bc", "2"]])
        == "|    |  n |\n|----|---:|\n| a  | 10 |\n| bc |  2 |"
    )
    assert [seconds(x) for x in (9e5, 7200.0, 600.0, 240.0, 12.3456, 0.0123, 4.2e-6)] == [
        "10.4 days",
        "2 h",
        "10 min",
        "240 s",
        "12.3 s",
        "12.3 ms",
        "4.2 µs",
    ]
