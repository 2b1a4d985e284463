"""The experiment on wide MDPs, in its smallest configuration; and the models that it is about."""

import csv

import pytest
import torch

from experiments import wide


def test_the_grid_slips_and_stops_at_its_edge():
    mdp = wide.grid(3, 2, slip=0.5)
    assert (mdp.layer_sizes, mdp.num_actions, mdp.is_sparse) == ((9, 9), 5, True)
    P = mdp.to_dense().transitions[0]
    torch.testing.assert_close(P.sum(-1), torch.ones(9, 5, dtype=torch.float64))
    down, into_the_wall = P[4, 1].tolist(), P[0, 2].tolist()  # from the middle, from a corner
    assert down == pytest.approx([0, 0.1, 0, 0.1, 0.1, 0.1, 0, 0.6, 0])
    assert into_the_wall == pytest.approx([0.8, 0.1, 0, 0.1, 0, 0, 0, 0, 0])
    assert int((P > 0).sum(-1).max()) == 5


def test_the_experiment_leaves_a_table_and_a_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wide, "in_new_process", lambda function, *arguments: function(*arguments))
    args = wide.Args(sides=(2, 3), horizon=3, episodes=2, patience=0.0, seeds=4, root=tmp_path)
    directory = wide.main(args)
    assert (directory / "wide.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with (directory / "wide.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["pairs"], row["clarabel"]) for row in rows] == [("60", ""), ("135", "")]
    assert all(float(row["dual_residual"]) < 1e-10 for row in rows)
    printed = capsys.readouterr().out
    assert printed.count("| taxi ") == 1
    assert printed.count("| grid 3 x 3 ") == 3  # of the growth, and of both values of beta
