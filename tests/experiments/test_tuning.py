"""The experiments about tuning, in their smallest configuration."""

import csv

import pytest

from experiments import all_worlds, meta_gradients, meta_tune

pytestmark = pytest.mark.slow


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_meta_gradients(tmp_path, capsys):
    args = meta_gradients.Args(
        horizon=2, width=2, actions=2, episodes=(6, 12), betas=(3.0,), budget=96, root=tmp_path
    )
    found = meta_gradients.main(args)
    assert (found / "gradients.png").stat().st_size > 10_000
    assert "beta = 3, T = 12: 8 seeds" in capsys.readouterr().out
    rows = rows_of(found / "gradients.csv")
    assert len(rows) == 2 * 4
    assert [row["in gamma"] for row in rows[::4]] == ["the reference"] * 2


def test_meta_tune(tmp_path, capsys):
    args = meta_tune.Args(
        size=(2, 2, 2), episodes=60, train=1, test=1, seeds=3, betas=(10.0,), gammas=(1.0,),
        particles=4, steps=2, points=3, budget=0.1, root=tmp_path,
    )  # fmt: skip
    found = meta_tune.main(args)
    assert (found / "accuracy.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "by the rule: " in printed
    assert "search of 3 points: 3 points" in printed
    rows = {row["setting"]: row for row in rows_of(found / "rivals.csv")}
    assert set(rows) >= {"paper", "paper's appendix", "tuned", "random search", "Optuna"}
    assert rows["tuned"]["more"] == "0 ± 0"
    for row in list(rows.values())[3:]:
        for name, (low, high) in meta_tune.BOX.items():
            assert 0.99 * low <= float(row[name]) <= 1.01 * high


def test_all_worlds(tmp_path, capsys):
    args = all_worlds.Args(
        shapes=((2, 2, 2), (1, 1, 2)), episodes=200, seeds=2, processes=1, root=tmp_path
    )
    directory = all_worlds.main(args)
    rows = rows_of(directory / "all_worlds.csv")
    assert len(rows) == 2 * len(all_worlds.WORLDS) * len(all_worlds.LEARNERS)
    assert all(float(row["X"]) < 30 for row in rows if row["learner"] == all_worlds.SHIFTED)
    assert (directory / "frontier.png").stat().st_size > 10_000
    assert "regret over the least with a guarantee" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"worlds: expected some of stochastic, .* got 'moon'"):
        all_worlds.main(all_worlds.Args(worlds=("moon",), root=tmp_path))


def test_a_world_with_t_in_its_definition_is_played_apart_for_a_tenth():
    late, early = (
        all_worlds.play(all_worlds.Args(episodes=T, seeds=2), (1, 1, 2), 1, "switching", "Tsallis")
        for T in (400, 40)
    )
    assert late["early"] == early["regret"]
