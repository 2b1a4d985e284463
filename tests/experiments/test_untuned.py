"""The comparison of untuned learners, in its smallest configuration."""

import csv

from scripts import PNG, only_directory, run


def test_untuned(tmp_path):
    size = ["--episodes", "30", "--draws", "2", "--seeds", "1", "--seed", "0"]
    printed = run("untuned", *size, "--shapes", "2", "2", "2", "--root", str(tmp_path))
    found = only_directory(tmp_path, "untuned")
    assert (found / "untuned.png").read_bytes().startswith(PNG)
    with (found / "untuned.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["world"] for row in rows] == ["stochastic", "adversary"]
    assert all(float(row["ratio"]) > 0 for row in rows)
    assert "2, 2, 2" in printed
