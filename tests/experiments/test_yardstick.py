"""The C loop of the benchmark plays the engine's game, and its arithmetic is counted correctly."""

import itertools
import shutil

import pytest
import torch

from experiments import floor, loop, yardstick
from experiments.compiled import measure_batches, measure_long
from experiments.loop import Match, measure_loop, report_loop
from experiments.timing import in_turns
from experiments.yardstick import COMMON, OPTIONS, Build, build, compilers

needs_c = pytest.mark.skipif(not compilers(), reason="no C compiler")
needs_both = pytest.mark.skipif(
    not compilers() or shutil.which("c++") is None, reason="no C compiler or no C++ compiler"
)


@needs_c
@pytest.mark.parametrize("shape", [(3, 3, 3), (2, 5, 2)])
@pytest.mark.parametrize(
    "options", [("-O2", "-DHALF=1"), ("-O3", "-DPAD=4"), ("-O3", "-fassociative-math", "-DPAD=8")]
)
def test_the_c_loop_plays_the_games_of_the_engine(tmp_path, shape, options):
    library = build(shape, tmp_path / "yardstick.so", [compilers()[0], *COMMON, *options])
    match = Match(shape, 64.0 * shape[0], seeds=3, episodes=250)
    history, played = match.simulate(), match.yardstick.play(library)
    incurred = history.regret[:, -1] + history.comparator[:, -1]
    torch.testing.assert_close(torch.from_numpy(played.expected), incurred, rtol=1e-12, atol=0)
    steps = torch.from_numpy(played.newton_steps) / 250
    torch.testing.assert_close(steps, history.newton_steps[:, -1], rtol=0.02, atol=0)
    assert (played.factorizations < played.newton_steps).all()


def test_the_builds_differ_and_some_use_no_vector_instructions():
    assert len(set(OPTIONS)) == len(OPTIONS)
    scalar = [Build(" ".join(options), None).scalar for options in OPTIONS]
    assert any(scalar)
    assert not all(scalar)


@needs_c
def test_options_that_a_compiler_does_not_know_cost_their_build_only(tmp_path, monkeypatch):
    monkeypatch.setattr(yardstick, "OPTIONS", (("-O1",), ("--no-such-option",)))
    found = yardstick.builds((2, 2, 2), tmp_path)
    assert {x.name for x in found} == {f"{compiler} -O1" for compiler in compilers()}


@needs_both
def test_arithmetic_is_counted(tmp_path):
    shape, episodes = (3, 2, 3), 40
    states, pairs = 5, 15
    match = Match(shape, 1.0, seeds=2, episodes=episodes)
    library = floor.counting_library(shape, tmp_path)
    played = match.yardstick.play(library)
    found = floor.measure_floor(library, match.yardstick, floor.Throughput(1.0, 10.0, 100.0))
    steps = played.newton_steps.mean() / episodes
    factorizations = played.factorizations.mean() / episodes
    # Two roots per pair and step, and one of t.
    assert found.roots == pytest.approx(2 * pairs * steps + 1)
    # 1 / root; 1 / (d + w); two per state and one per pivot after the first layer; two per episode;
    # then up to one per layer for the estimates, and up to one per step for its length.
    divisions = 2 * pairs * steps + (pairs + 2 * states + 4) * factorizations + 2
    assert divisions < found.divisions < divisions + 3 + steps
    assert found.fused_us == pytest.approx(1e-3 * max(found.additions, found.products))
    assert found.divided_us == pytest.approx(1e-2 * found.divisions + 1e-1 * found.roots)
    assert found.us == found.divided_us


@needs_both
def test_counting_does_not_change_the_game(tmp_path):
    match = Match((3, 2, 3), 192.0, seeds=1, episodes=50)
    counting = floor.counting_library((3, 2, 3), tmp_path)
    plain = build((3, 2, 3), tmp_path / "plain.so", [compilers()[0], "-O1"])
    expected, counted = (match.yardstick.play(x).expected[0] for x in (plain, counting))
    assert counted == pytest.approx(expected, rel=1e-12)


@needs_c
def test_a_fused_instruction_is_faster_than_a_division(tmp_path):
    found = floor.measure_throughput(tmp_path, repeats=3, rounds=2_000)
    assert 0 < found.fused < min(found.division, found.root)


@needs_both
def test_the_loop_section(monkeypatch):
    monkeypatch.setattr(loop, "SHAPES", {(2, 2, 2): 64})
    monkeypatch.setattr(yardstick, "OPTIONS", (OPTIONS[0], OPTIONS[4]))
    rows, throughput = measure_loop(repeats=2, shapes=[(2, 2, 2)], seeds=2)
    assert [(row["beta"], row["seeds"]) for row in rows] == [(128, 2), (128, 1), (1, 2), (1, 1)]
    for row in rows:
        for other in ("C", "scalar C"):
            ratio = row["engine, us"] / row[f"{other}, us"]
            assert row[f"engine / {other}"] == pytest.approx(ratio)
        assert "-fno-tree-vectorize" in row["build of scalar C"]
        assert 0 < row["floor, us"] < row["scalar C, us"]
        assert row["expected loss, median difference"] < 1e-9
    text = report_loop(rows, throughput)
    assert rows[0]["build of C"] in text
    assert "nanoseconds per element" in text


def test_without_a_compiler_the_engine_is_timed_alone(monkeypatch):
    monkeypatch.setattr(loop, "SHAPES", {(2, 2, 2): 8})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    rows, throughput = measure_loop(repeats=1, shapes=[(2, 2, 2)], seeds=2)
    assert throughput is None
    assert all(row["engine, us"] > 0 and row["C, us"] is None for row in rows)
    assert "engine / C" not in report_loop(rows, throughput)


# -- turns ----------------------------------------------------------------------------------------


def test_contestants_take_turns_and_the_quickest_counts():
    calls, durations = [], {"a": [9.0, 3.0, 2.0, 4.0], "b": [9.0, 7.0, 8.0, 6.0]}
    now = [0.0]

    def contestant(name):
        def run():
            calls.append(name)
            now[0] += durations[name].pop(0)

        return run

    found = in_turns({x: contestant(x) for x in "ab"}, 3, clock=lambda: now[0])
    assert calls == list("abababab")
    assert found == {"a": 2.0, "b": 6.0}


def test_the_budget_leaves_two_turns():
    count = itertools.count()
    in_turns({"only": lambda: next(count)}, 100, budget=0.0)
    assert next(count) == 3  # one that does not count, and two turns


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
