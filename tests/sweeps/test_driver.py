"""Sweeps on real processes and on a real cluster, some of which are killed."""

import csv
import functools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent import futures
from pathlib import Path

import cells
import pytest
import torch

import torch_occ as occ

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")]),
    "OMP_NUM_THREADS": "1",
}
QUIET = {"progress": False, "tensorboard": False}


def events(log: Path) -> Counter:
    """How often each thing happened to each cell."""
    return Counter(".".join(path.name.split(".")[:2]) for path in log.iterdir())


def wait_for(condition, seconds=180.0):
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
    return found


def driver_of(function: str, grid: list, directory: Path, **options) -> subprocess.Popen:
    """A sweep in a process of its own, to be killed; what runs in the background ignores Ctrl-C."""
    script = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"import cells, torch_occ as occ\n"
        f"occ.sweep(cells.{function}, {grid!r}, {str(directory)!r}, **{QUIET!r})"
    )
    return subprocess.Popen([sys.executable, "-c", script], env=ENVIRONMENT, text=True, **options)


def workers_of(log: Path) -> set[int]:
    return {int(path.name.rsplit(".", 1)[1]) for path in log.iterdir() if "." in path.name}


def alive(processes: set[int]) -> bool:
    return any(Path(f"/proc/{pid}").exists() for pid in processes)


@pytest.fixture
def log(tmp_path):
    found = tmp_path / "log"
    found.mkdir()
    return found


def table(directory: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((directory / "results.csv").read_text().splitlines()))


# -- local -------------------------------------------------------------------------------------


def test_grid():
    expected = [(1, "x"), (1, "y"), (2, "x"), (2, "y")]
    assert occ.grid(a=[1, 2], b=["x", "y"]) == [{"a": a, "b": b} for a, b in expected]
    assert occ.grid() == [{}]


def test_results_are_a_tidy_table_in_the_order_of_the_grid(tmp_path):
    grid = occ.grid(x=[3.0, 0.1, 2.0], name=["a", "b"])
    done = occ.sweep(cells.square, grid, tmp_path, progress=False)
    assert [{"x": row["x"], "name": row["name"]} for row in done.rows] == grid
    assert not done.failures
    assert [(row["x"], row["square"], row["third"]) for row in table(tmp_path)] == [
        (str(x), str(x**2), str(x / 3)) for x in (3.0, 0.1, 2.0) for _ in "ab"
    ]
    assert len(list((tmp_path / "cells").iterdir())) == 6
    assert not list(tmp_path.rglob(".*")), "a temporary file was left behind"
    # One run of TensorBoard a cell, with its configuration and its numbers.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    runs = sorted((tmp_path / "tensorboard").iterdir())
    assert len(runs) == 6
    events = EventAccumulator(str(runs[0])).Reload()
    assert set(events.Tags()["scalars"]) == {"square", "third"}
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_cells_need_not_have_the_same_parameters_and_are_named_by_them(tmp_path):
    occ.sweep(cells.square, [{"x": 1.0}, {"x": 2.0, "y": "b/c"}, {}], tmp_path, **QUIET)
    assert (tmp_path / "results.csv").read_text().splitlines()[0] == "x,y,square,third"
    assert [row["y"] for row in table(tmp_path)] == ["", "b/c"]
    names = sorted(path.name for path in (tmp_path / "cells").iterdir())
    assert [name.rpartition("-")[0] for name in names] == ["x=1.0", "x=2.0,y=b_c"]


def test_a_second_call_runs_nothing_and_a_larger_grid_only_what_is_new(tmp_path, log):
    grid = occ.grid(cell=[0, 1, 2], seconds=[0], log=[str(log)])
    done = occ.sweep(cells.slow, grid[:2], tmp_path, **QUIET)
    again = occ.sweep(cells.slow, grid, tmp_path, **QUIET)
    assert again.rows[:2] == done.rows
    assert [row["answer"] for row in again.rows] == [0, 7, 14]
    once = {f"{i}.{what}": 1 for i in range(3) for what in ("begun", "done")}
    assert events(log) == Counter(once)
    # Another function with the same cells is another sweep.
    assert not occ.sweep(cells.deadly, grid[:2], tmp_path, **QUIET).failures
    assert events(log)["0.begun"] == 2


def test_a_cell_that_raises_or_kills_its_process_does_not_stop_the_others(tmp_path, log, capfd):
    grid = occ.grid(cell=range(6), log=[str(log)])
    done = occ.sweep(cells.deadly, grid, tmp_path, tensorboard=False)
    assert [row["answer"] for row in done.rows] == [0, 1, 4, 5]
    by_cell = {failure.config["cell"]: failure for failure in done.failures}
    assert set(by_cell) == {2, 3}
    assert "process died while it ran, twice" in by_cell[2].error
    assert by_cell[3].error == "RuntimeError: cell three never works"
    assert "in deadly" in by_cell[3].traceback
    assert 'failed: {"cell": 3' in capfd.readouterr().out
    written = json.loads((tmp_path / "failures.json").read_text())
    assert {entry["config"]["cell"] for entry in written} == {2, 3}
    # The deadly cell is tried twice, and takes no other one along.
    assert events(log) == Counter(f"{i}.begun" for i in (0, 1, 2, 2, 3, 4, 5))
    assert len(list((tmp_path / "cells").iterdir())) == len(table(tmp_path)) == 4


def test_what_failed_is_tried_again(tmp_path):
    config = occ.grid(log=[str(tmp_path)])
    failures = occ.sweep(cells.mended, config, tmp_path, **QUIET).failures
    assert [failure.error for failure in failures] == ["OSError: broken today"]
    (tmp_path / "mended").touch()
    rows = occ.sweep(cells.mended, config, tmp_path, **QUIET).rows
    assert rows == [{"log": str(tmp_path), "answer": 1.0}]
    assert not (tmp_path / "failures.json").exists()


@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_driver_that_is_ended_leaves_no_process_and_loses_no_finished_cell(tmp_path, log, way):
    grid, out = occ.grid(cell=range(4), log=[str(log)]), tmp_path / "out"
    store = out / "cells"
    with driver_of("gated", grid, out, stderr=subprocess.PIPE) as driver:
        begun = {"2.begun", "3.begun"}
        wait_for(lambda: len([*store.glob("[!.]*")]) == 2 and begun <= set(events(log)))
        driver.send_signal(way)
        try:
            _, errors = driver.communicate(timeout=60)
        finally:
            driver.kill()
    assert ("KeyboardInterrupt" in errors) == (way == signal.SIGINT)
    assert driver.returncode == (143 if way == signal.SIGTERM else -way)
    workers = workers_of(log)
    wait_for(lambda: not alive(workers))
    before = {path: path.stat().st_mtime_ns for path in store.iterdir()}
    (log / "go").touch()
    done = occ.sweep(cells.gated, grid, out, **QUIET)
    assert [row["answer"] for row in done.rows] == list(range(4))
    # Stored cells are not run again.
    assert all(path.stat().st_mtime_ns == changed for path, changed in before.items())
    assert (len(before), len(list(store.iterdir()))) == (2, 4)


def test_a_cell_saves_when_the_driver_is_ended(tmp_path, log):
    grid = [{"cell": 0, "log": str(log)}]
    with driver_of("endless", grid, tmp_path, stderr=subprocess.PIPE) as driver:
        wait_for(lambda: events(log))
        driver.send_signal(signal.SIGTERM)
        driver.communicate(timeout=60)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    wait_for((checkpoint / "run").exists)  # the cell may end after its driver


def test_a_killed_cell_continues_from_its_checkpoint(tmp_path):
    done = occ.sweep(cells.counting, [{"x": 1}], tmp_path, **QUIET)
    assert done.rows == [{"x": 1, "begun": 2, "count": 4}]
    assert not list((tmp_path / "checkpoints").iterdir()), "a checkpoint was left behind"


class Inline:
    """The least that an executor must have; as those of submitit."""

    def submit(self, function, *arguments):
        return Finished(function(*arguments))


class Finished:
    def __init__(self, value):
        self.value = value

    def done(self):
        return True

    def result(self):
        return self.value


def test_any_executor_gives_the_same_bits_and_one_that_breaks_down_says_so(tmp_path, log):
    games, threads = occ.grid(gamma=[0.5], seed=[0, 1]), torch.get_num_threads()
    local = occ.sweep(cells.game, games, tmp_path / "local", **QUIET)
    assert len({row["regret"] for row in local.rows}) == 2
    with futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for name, executor in {"inline": Inline(), "pool": pool}.items():
            occ.sweep(cells.game, games, tmp_path / name, executor=executor, **QUIET)
            found = (tmp_path / name / "results.csv").read_bytes()
            assert found == (tmp_path / "local" / "results.csv").read_bytes()
        grid = occ.grid(cell=[0, 2, 4], log=[str(log)])
        with pytest.raises(RuntimeError, match="executor: it broke down with 2 cells to go; the"):
            occ.sweep(cells.deadly, grid, tmp_path, executor=pool, **QUIET)
    assert len(list((tmp_path / "cells").iterdir())) == 1
    torch.set_num_threads(threads)


def local_function():
    def inside(config):
        return {}

    return inside


IMPORTED = "function: expected a function at the top level of a module"


@pytest.mark.parametrize(
    ("function", "grid", "options", "message"),
    [
        (cells.square, [{"x": 1}, {"y": 2}, {"x": 1}], {}, "cells: cells 0 and 2 are the same"),
        (cells.square, [{"x": {1, 2}}], {}, "cells: cell 0"),
        (cells.square, [{"x": float("nan")}], {}, "cells: cell 0"),
        (lambda config: {}, [{"x": 1.0}], {}, IMPORTED),
        (local_function(), [{"x": 1.0}], {}, IMPORTED),
        (functools.partial(cells.square), [{"x": 1.0}], {}, IMPORTED),
        (cells.square, [{"x": 1.0}], {"processes": 0}, "processes: expected at least 1, got 0"),
        (cells.square, [{"x": 1.0}], {"executor": "loky"}, "executor: expected an object with"),
    ],
)
def test_wrong_arguments_are_refused(function, grid, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        occ.sweep(function, grid, tmp_path, **QUIET, **options)


def test_wrong_results_are_failures_that_say_so(tmp_path):
    grid = occ.grid(returns=["x", "list", "set"], x=[0])
    done = occ.sweep(cells.careless, grid, tmp_path, processes=1, **QUIET)
    errors = [failure.error for failure in done.failures]
    assert "keys other than the configuration's, got {'x': 1}" in errors[0]
    assert "dictionary" in errors[1]
    assert "JSON serializable" in errors[2]


def test_a_damaged_cell_is_refused_and_left_alone(tmp_path):
    grid = [{"x": 1.0}, {"x": 2.0}]
    occ.sweep(cells.square, grid, tmp_path, **QUIET)
    path, other = sorted((tmp_path / "cells").iterdir())
    whole = path.read_bytes()
    for damaged, message in [
        (whole.replace(b".0", b".1", 1), "is damaged: its checksum is wrong"),
        (b"", "is empty"),
        (whole[:-10], "is not a cell of a sweep that torch_occ has saved, or it is damaged"),
        (b'{"config": {"x": 1.0}, "result": {"square": 7}}', "is not a cell of a sweep"),
        (other.read_bytes(), "holds another cell"),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
            occ.sweep(cells.square, grid, tmp_path, **QUIET)
        assert path.read_bytes() == damaged


def test_a_disk_that_fills_up_costs_no_result(tmp_path, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.warns(UserWarning, match="No space left .*the sweep goes on") as caught:
        done = occ.sweep(cells.square, [{"x": 1.0}, {"x": 2.0}], tmp_path, **QUIET)
    assert [row["square"] for row in done.rows] == [1.0, 4.0]
    assert len(caught) == 3  # two cells and the table
    assert not list((tmp_path / "cells").iterdir())


# -- a cluster ---------------------------------------------------------------------------------


def dask(role: str, directory: Path, *options: str) -> subprocess.Popen:
    """A scheduler or a worker on loopback, in its own process."""
    command = [sys.executable, "-m", "dask", role, "--no-dashboard", *options]
    with (directory / f"{role}.log").open("a") as log:
        return subprocess.Popen(command, env=ENVIRONMENT, cwd=directory, stdout=log, stderr=log)


@pytest.fixture
def cluster(tmp_path):
    """The client of a cluster, and one of its two workers."""
    distributed, file = pytest.importorskip("distributed"), tmp_path / "scheduler.json"
    there = ("--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
    processes = [dask("scheduler", tmp_path, *there)]
    wait_for(lambda: file.exists() and file.read_text())
    options = ("--nthreads", "1", "--nworkers", "1", "--no-nanny", "--scheduler-file", str(file))
    processes += [dask("worker", tmp_path, *options) for _ in range(2)]
    with distributed.Client(scheduler_file=str(file), set_as_default=False) as client:
        yield client, processes[1]
    for process in processes:
        process.kill()
        process.wait()


def test_a_cluster_gives_the_same_bits_survives_a_lost_worker_and_reports_failures(
    cluster, tmp_path, log
):
    client, victim = cluster
    games = occ.grid(gamma=[0.5, 2.0], seed=[0, 1])
    local = occ.sweep(cells.game, games, tmp_path / "local", **QUIET)
    remote = occ.sweep(cells.game, games, tmp_path / "remote", executor=client, **QUIET)
    assert len({row["regret"] for row in local.rows}) == 4
    assert local == remote

    # One of two workers is killed while it runs a cell: every cell is there, exactly once.
    grid = occ.grid(cell=range(8), seconds=[0.5], log=[str(log)])
    driver = futures.ThreadPoolExecutor(1).submit(
        occ.sweep, cells.slow, grid, tmp_path / "out", executor=client, **QUIET
    )

    def cells_of_victim():
        begun = log.glob(f"*.begun.{victim.pid}")
        return [x for x in begun if not (log / x.name.replace("begun", "done")).exists()]

    begun = wait_for(cells_of_victim)
    os.kill(victim.pid, signal.SIGKILL)
    assert not driver.result(timeout=180).failures
    assert sorted(row["cell"] for row in table(tmp_path / "out")) == list("01234567")
    assert events(log)[begun[-1].name.split(".")[0] + ".begun"] == 2
    assert all(count == 1 for event, count in events(log).items() if event.endswith("done"))

    # A cell that raises is reported, the others are there; on the worker that is left.
    grid = occ.grid(cell=[0, 3, 4], log=[str(log)])
    done = occ.sweep(cells.deadly, grid, tmp_path / "failing", executor=client, **QUIET)
    assert [row["answer"] for row in done.rows] == [0, 4]
    assert [(failure.config["cell"], failure.error) for failure in done.failures] == [
        (3, "RuntimeError: cell three never works")
    ]
