"""The C loop of the benchmark plays the engine's game; the section of the engine."""

import shutil

import pytest
import torch

from experiments import yardstick
from experiments.benchmark import measure_batches, measure_long
from experiments.yardstick import (
    COMMON,
    OPTIONS,
    Match,
    build,
    compilers,
    measure_loop,
    report_loop,
)

needs_c = pytest.mark.skipif(not compilers(), reason="no C compiler")


@needs_c
@pytest.mark.parametrize("shape", [(3, 3, 3), (2, 5, 2)])
@pytest.mark.parametrize(
    "options", [("-O2", "-DHALF=1"), ("-O3", "-DPAD=4"), ("-O3", "-fassociative-math", "-DPAD=8")]
)
def test_the_c_loop_plays_the_games_of_the_engine(tmp_path, shape, options):
    library = build(shape, tmp_path / "yardstick.so", [compilers()[0], *COMMON, *options])
    match = Match(shape, 64.0 * shape[0], seeds=3, episodes=250)
    history, played = match.simulate(), match.play(library)
    incurred = history.regret[:, -1] + history.comparator[:, -1]
    torch.testing.assert_close(torch.from_numpy(played.expected), incurred, rtol=1e-12, atol=0)
    steps = torch.from_numpy(played.newton_steps) / 250
    torch.testing.assert_close(steps, history.newton_steps[:, -1], rtol=0.02, atol=0)
    assert (played.factorizations < played.newton_steps).all()


@needs_c
def test_options_that_a_compiler_does_not_know_cost_their_build_only(tmp_path, monkeypatch):
    monkeypatch.setattr(yardstick, "OPTIONS", (("-O1",), ("--no-such-option",)))
    found = yardstick.builds((2, 2, 2), tmp_path)
    assert {x.name for x in found} == {f"{compiler} -O1" for compiler in compilers()}


@needs_c
def test_the_loop_section(monkeypatch):
    monkeypatch.setattr(yardstick, "SHAPES", {(2, 2, 2): 64})
    monkeypatch.setattr(yardstick, "OPTIONS", (OPTIONS[0], OPTIONS[4]))
    rows = measure_loop(repeats=2, shapes=[(2, 2, 2)], seeds=2)
    assert [(row["beta"], row["seeds"]) for row in rows] == [(128, 2), (128, 1), (1, 2), (1, 1)]
    for row in rows:
        for other in ("C", "scalar C"):
            ratio = row["engine, us"] / row[f"{other}, us"]
            assert row[f"engine / {other}"] == pytest.approx(ratio)
        assert "-fno-tree-vectorize" in row["build of scalar C"]
        assert row["expected loss, median difference"] < 1e-9
    assert rows[0]["build of C"] in report_loop(rows)


def test_without_a_compiler_the_engine_is_timed_alone(monkeypatch):
    monkeypatch.setattr(yardstick, "SHAPES", {(2, 2, 2): 8})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    rows = measure_loop(repeats=1, shapes=[(2, 2, 2)], seeds=2)
    assert all(row["engine, us"] > 0 and row["C, us"] is None for row in rows)
    assert "engine / C" not in report_loop(rows)


# -- the section "engine" -------------------------------------------------------------------------


def test_batches_are_timed_per_element():
    found = measure_batches(shapes=[(2, 2, 2)], batch=8, repeats=2)
    assert len(found) == 4
    forward, both = (
        found[f"(2, 2, 2), batch of 8, cold, {x}, us"] for x in ("forward", "forward and backward")
    )
    assert 0 < forward < both


def test_a_long_run_is_timed_per_episode_and_seed():
    found = measure_long(episodes=300, seeds=2, shape=(2, 2, 2))
    assert found["us per episode and seed"] == pytest.approx(1e6 * found["processor s"] / 600)
    assert found["Newton steps"] > 1
