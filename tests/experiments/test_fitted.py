"""Fits to known transitions and the learner for all worlds, small."""

import csv

import pytest

from experiments import all_worlds, fitted


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_fitted(tmp_path, capsys):
    args = fitted.Args(
        shapes=("2x2x2",),
        episodes=300,
        train=2,
        validation=1,
        held_out=2,
        adversary_seeds=2,
        steps=2,
        penalties=(0.1,),
        particles=2,
        root=tmp_path,
    )
    directory = fitted.main(args)
    rows = rows_of(directory / "fitted.csv")
    names = [fitted.TSALLIS, fitted.PLAIN, fitted.SCALARS, fitted.STATES]
    assert [row["setting"] for row in rows] == [*names, fitted.OPTUNA, fitted.CMA]
    assert float(rows[0]["stochastic, relative"]) == 1
    assert all(int(row["evaluations"]) > 0 for row in rows[2:])
    assert (directory / "fitted.png").stat().st_size > 10_000
    assert "penalty 0.1: training" in capsys.readouterr().out


@pytest.mark.slow
def test_all_worlds(tmp_path, capsys):
    args = all_worlds.Args(
        shape=(2, 2, 2),
        validation=1,
        held_out=1,
        choose_episodes=200,
        episodes=300,
        particles=2,
        rates=(0.5, 1.0),
        root=tmp_path,
    )
    directory = all_worlds.main(args)
    rows = rows_of(directory / "frontier.csv")
    assert len(rows) == len(all_worlds.candidates(args))
    assert min(float(row["to the best"]) for row in rows) == 1
    assert len(rows_of(directory / "held_out.csv")) == 7 * len(all_worlds.WORLDS)
    assert (directory / "frontier.png").stat().st_size > 10_000
    assert "times the least regret" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="setting: expected one of the rates"):
        all_worlds.main(all_worlds.Args(setting=0.123, root=tmp_path))
