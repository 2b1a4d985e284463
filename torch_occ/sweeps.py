"""A function over a grid of parameters, on processes or a cluster; one file per cell.

A cell is a dictionary that JSON can hold, and so is the result of the function. The driver writes
each finished cell at once to a file of its own, atomically. To continue an interrupted sweep, run
it again with the same directory. Workers write nothing but their checkpoints.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from torch_occ._support import files
from torch_occ._support.choices import extra, progress_bar, summary_writer, wants_bar
from torch_occ._support.private import processes_of
from torch_occ._support.processes import sigterm_raises
from torch_occ.mdp.checks import check_that, unexpected

Config = dict[str, Any]
Function = Callable[..., dict[str, Any]]

#: The name of a stored cell in messages.
_KIND = "a cell of a sweep"

#: Seconds between two looks at the running cells.
LOOK_EVERY = 0.02


def grid(**axes: Iterable[Any]) -> list[Config]:
    """All combinations of the values, with the last axis fastest.

    `grid(gamma=[0.5, 1.0], seed=range(3))` has six cells. Join grids with `+`.

    Returns:
        One configuration, a dictionary, per cell.
    """
    for name, values in axes.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise TypeError(f"{name}: expected a list, got {values!r}; write [{values!r}]")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


@dataclass(frozen=True)
class Failure:
    """A cell that raised an exception, or whose process died twice."""

    config: Config
    error: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{json.dumps(self.config)}: {self.error}"


@dataclass(frozen=True)
class SweepResult:
    """The finished cells in the order of the grid, and the failed ones.

    Each finished cell is a dictionary of the configuration and the function's result.
    """

    rows: list[dict[str, Any]]
    failures: list[Failure]


def sweep(
    function: Function,
    cells: Sequence[Config],
    directory: str | Path,
    *,
    processes: int = 2,
    executor: Any = None,
    progress: bool | None = None,
    tensorboard: bool = True,
) -> SweepResult:
    """Call `function(config)` for every cell that `directory` does not hold yet.

    The directory then holds `cells/<cell>.jsonl` for every finished cell, `results.csv` with one
    line per cell, `failures.json` if cells failed (the next sweep tries them again) and
    `tensorboard/<cell>/` with the hyperparameters of each. The name of a cell has its parameters,
    such as `gamma=0.5,seed=1`, and a hash.

    A function with two parameters (without defaults) is called as `function(config, checkpoint)`.
    The second one is the path of a directory, `checkpoints/<cell>`, that outlives a killed process:
    pass `save_to=checkpoint / "run"` to `simulate`, and a second attempt continues the first. It is
    removed when the cell is finished. On a cluster it must be on a file system that workers share.

    Args:
        function: a deterministic function of the configuration that workers can import. Use
            another directory when you change it: stored cells are not computed again.
        cells: configurations that JSON can hold, for example from `grid`.
        processes: the number of local processes, without an executor.
        executor: runs the cells: any object whose `submit(function, *arguments)` returns one with
            `done()`, `result()` and `cancel()`. Pools of concurrent.futures, loky and mpi4py, a
            Dask client and submitit's executors are such objects. It is not closed.
        progress: show a progress bar; by default on a terminal.
        tensorboard: log the numbers and strings of every cell for the HParams dashboard.

    Returns:
        The finished and the failed cells. If the disk is full, there are warnings, and the
        results are still returned.

    Raises:
        RuntimeError: if the executor breaks down.
        ValueError: if an argument is wrong, or if a stored cell is damaged or was computed by
            another version of this package.
        KeyboardInterrupt: after Ctrl-C; finished cells are stored, and unfinished ones save.
    """
    fine = executor is None or hasattr(executor, "submit")
    check_that(fine, "executor", "an object with `submit`", repr(executor))
    check_that(processes >= 1, "processes", "at least 1", processes)
    directory, shown = Path(directory).resolve(), wants_bar(progress)
    store, checkpoints = directory / "cells", directory / "checkpoints"
    store.mkdir(parents=True, exist_ok=True)
    configs = _named(function, cells)
    files_of = {name: store / f"{name}.jsonl" for name in configs}
    found = {name: _read_cell(x, configs[name]) for name, x in files_of.items() if x.exists()}
    failures = list[Failure]()
    token = uuid.uuid4().hex  # unique, so that Dask does not reuse results of an earlier sweep
    missing = [name for name in configs if name not in found]
    tasks = {x: (attempt, function, configs[x], str(checkpoints / x), token) for x in missing}

    def log(name: str) -> None:
        if tensorboard:
            log_hparams(directory / "tensorboard" / name, configs[name], found[name])

    for name in found:
        with _warning_if_full():
            log(name)
    with (
        sigterm_raises(),
        progress_bar(len(configs), len(found), "cell") if shown else nullcontext() as bar,
        closing(_run(executor, processes, tasks, bar)) as work,
    ):
        for name, outcome in work:
            if isinstance(outcome, Failure):
                failures.append(replace(outcome, config=configs[name]))
                if progress is not False:
                    (print if bar is None else bar.write)(f"failed: {failures[-1]}")
            else:
                found[name] = outcome
                with _warning_if_full():
                    content = json.dumps({"config": configs[name], "result": outcome}).encode()
                    files.write_checked(files_of[name], _KIND, content)
                    shutil.rmtree(checkpoints / name, ignore_errors=True)
                    log(name)
            if bar is not None:
                bar.update()
    rows = [configs[name] | found[name] for name in configs if name in found]
    with _warning_if_full():
        columns = [key for config in configs.values() for key in config]
        files.write_csv(directory / "results.csv", rows, first=columns)
        (directory / "failures.json").unlink(missing_ok=True)
        if failures:
            text = json.dumps([asdict(failure) for failure in failures], indent=1).encode()
            files.write_atomically(directory / "failures.json", lambda file: file.write(text))
    return SweepResult(rows, failures)


# -- workers ---------------------------------------------------------------------------------------


def attempt(
    function: Function, config: Config, checkpoint: str, _: str
) -> dict[str, Any] | Failure:
    """Run a cell in a worker; return its result, or a Failure that describes the exception."""
    # One thread per cell: cells run in parallel, and sums have a fixed order.
    torch.set_num_threads(1)
    try:
        parameters = inspect.signature(function).parameters.values()
        needed = [x.default is x.empty and x.kind <= x.POSITIONAL_OR_KEYWORD for x in parameters]
        if sum(needed) == 2:
            Path(checkpoint).mkdir(parents=True, exist_ok=True)
            result = function(config, Path(checkpoint))
        else:
            result = function(config)
        if not isinstance(result, dict) or set(result) & set(config):
            raise TypeError(
                "the function must return a dictionary with keys other than the configuration's, "
                f"got {result!r}"
            )
        # As it will be read from its file; floats keep every bit.
        found: dict[str, Any] = json.loads(json.dumps(result))
    except Exception as error:
        return Failure({}, f"{type(error).__name__}: {error}", traceback.format_exc())
    return found


def _run(
    executor: Any, processes: int, tasks: dict[str, tuple[Any, ...]], bar: Any
) -> Generator[tuple[str, dict[str, Any] | Failure], None, None]:
    """Yield the name of each cell with its outcome, from the executor or from local processes.

    Each local process is a pool of its own, because one that dies takes its pool along. Its cell is
    run once more. If this is left by an exception, cells get SIGTERM, upon which `simulate` saves.
    """
    waiting, died = [*tasks], set[str]()
    running: dict[str, tuple[Any, Any]] = {}  # the future, and who runs it
    local = executor is None
    pools = [_process() for _ in range(min(processes, len(tasks)) if local else 0)]
    idle = [*pools] if local else [executor] * len(tasks)
    try:
        while waiting or running:
            while waiting and idle:
                name, workers = waiting.pop(0), idle.pop()
                running[name] = workers.submit(*tasks[name]), workers
            broken, finished = None, [name for name in running if running[name][0].done()]
            for name in finished:
                future, workers = running[name]
                try:
                    outcome = future.result()
                except (futures.CancelledError, futures.BrokenExecutor) as error:
                    if not local:
                        broken = error
                        continue
                    pools.append(workers := _process())
                    if name not in died:
                        died.add(name)
                        waiting.append(name)
                    text = "its process died while it ran, twice; out of memory, or killed?"
                    outcome = Failure({}, text)
                except Exception as error:  # for example, the function cannot be unpickled there
                    outcome = Failure({}, f"{type(error).__name__}: {error}")
                del running[name]
                idle.append(workers)
                if name not in waiting:
                    yield name, outcome
            if broken is not None:
                raise RuntimeError(
                    f"executor: it broke down with {len(waiting) + len(running)} cells to go; the "
                    "others are stored: run the sweep again with a new executor to continue"
                ) from broken
            if not finished:
                if bar is not None:
                    bar.update(0)  # its clock goes on
                time.sleep(LOOK_EVERY)
    except BaseException:
        for process in (process for pool in pools for process in processes_of(pool)):
            process.terminate()
        raise
    finally:
        for future, _ in running.values():
            future.cancel()
        for pool in pools:
            pool.shutdown(wait=True, cancel_futures=True)


def _process() -> futures.ProcessPoolExecutor:
    """A process that is forked from a clean one: a fork of this would copy torch's locks."""
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["torch_occ.sweeps"])
    return futures.ProcessPoolExecutor(1, context, initializer=_prepare_worker)


def _prepare_worker() -> None:
    """Ignore Ctrl-C, which the driver handles, and end when the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = multiprocessing.parent_process()
    assert driver is not None

    def follow() -> None:
        driver.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)  # to save; without a handler, the signal has ended the process
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


# -- files -----------------------------------------------------------------------------------------


def _named(function: Function, cells: Sequence[Config]) -> dict[str, Config]:
    """The cells by the names of their files, which depend on the function, too."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or name is None or "<" in name:  # <lambda>, <locals>
        expected = "a function at the top level of a module, which workers can import by its name"
        raise unexpected("function", expected, repr(function))
    if module == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(
            f"function: {name} was defined interactively; put it into a module, so that workers "
            "can import it"
        )
    seen, found = dict[str, int](), dict[str, Config]()
    for i, config in enumerate(cells):
        try:
            shown = ",".join(f"{key}={config[key]}" for key in sorted(config))
            text = json.dumps(config, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            reason = f"cell {i}, {config!r}, is no dictionary that JSON can hold: {error}"
            raise ValueError(f"cells: {reason}") from error
        if text in seen:
            raise ValueError(f"cells: cells {seen[text]} and {i} are the same, {text}")
        seen[text] = i
        shown = re.sub(r"[^\w.,=+-]+", "_", shown).lstrip("._-")[:100]
        key = hashlib.sha256(f"{module}.{name}:{text}".encode()).hexdigest()[:12]
        found[f"{shown}-{key}"] = config
    return found


def _read_cell(path: Path, config: Config) -> dict[str, Any]:
    """The stored result of a cell; a ValueError if the file belongs to another cell."""
    stored: dict[str, dict[str, Any]] = json.loads(files.read_checked(path, _KIND))
    if stored["config"] != json.loads(json.dumps(config)):
        other = json.dumps(stored["config"])
        raise ValueError(f"{path}: holds another cell, {other}; move it away")
    return stored["result"]


@contextmanager
def _warning_if_full() -> Iterator[None]:
    """Turn an OSError into a warning, so that the results that were computed are not lost."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"sweep: {error}; the sweep goes on, and returns its results", stacklevel=4)


def log_hparams(directory: Path, config: Config, result: dict[str, Any]) -> None:
    """Write one run for TensorBoard's HParams dashboard; do nothing if it exists."""
    if directory.exists():
        return
    with extra("experiments", "hparams need tensorboard, or tensorboard=False"):
        from torch.utils.tensorboard.summary import hparams
    plain = bool | int | float | str
    values = {k: v if isinstance(v, plain) else json.dumps(v) for k, v in config.items()}
    with summary_writer(directory) as writer:
        # Leave out the first summary, a list of columns. TensorBoard then collects the columns of
        # all runs, which may differ.
        for summary in hparams(values, {})[1:]:
            writer.file_writer.add_summary(summary, 0)
        for name, value in result.items():
            if isinstance(value, int | float):
                writer.add_scalar(name, value, 0)
