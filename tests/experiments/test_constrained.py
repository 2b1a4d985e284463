"""The experiment with budgets, in its smallest configuration."""

import csv

from scripts import PNG, only_directory, run


def test_constrained(tmp_path):
    size = ["--horizon", "2", "--width", "2", "--actions", "2", "--episodes", "30", "--seeds", "2"]
    size += ["--seed", "0"]
    timed = ["--budgets", "1", "--sizes", "2", "2", "2"]
    printed = run("constrained", *size, *timed, "--no-tensorboard", "--root", str(tmp_path))
    found = only_directory(tmp_path, "constrained")
    assert (found / "constrained.png").read_bytes().startswith(PNG)
    with (found / "constrained.csv").open() as file:
        with_budget, without = csv.DictReader(file)
    assert float(with_budget["largest excess"]) < 1e-13
    assert float(with_budget["mean cost"]) <= float(with_budget["limit"]) + 1e-4
    assert without["largest excess"] == "-"
    assert "cvxpy / ours" in printed
