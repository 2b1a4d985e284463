"""A function over a grid of parameters, on processes or a cluster; one file per cell.

A cell is a dictionary that JSON can hold, and so is the result of the function. The driver writes
each finished cell at once to a file of its own, atomically. To continue an interrupted sweep, run
it again with the same directory. Only one driver at a time can use a directory. Workers write
nothing but their checkpoints, so a cluster needs no shared file system without them.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from torch_occ._support import files
from torch_occ._support.choices import extra, progress_bar, summary_writer
from torch_occ._support.fingerprints import fingerprint
from torch_occ._support.private import processes_of

Config = dict[str, Any]
Function = Callable[..., dict[str, Any]]

#: The name of a stored cell in messages.
_KIND = "a cell of a sweep"

#: How often a cell may lose its process before it becomes a Failure.
DEATHS = 2

#: Seconds within which a scheduler must answer, and between two looks at the running cells.
ANSWER_WITHIN, LOOK_EVERY = 10.0, 0.02


def grid(**axes: Iterable[Any]) -> list[Config]:
    """All combinations of the values, with the last axis fastest.

    `grid(gamma=[0.5, 1.0], seed=range(3))` has six cells. Join grids with `+`.

    Returns:
        One configuration, a dictionary, per cell.
    """
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


@dataclass(frozen=True)
class Failure:
    """A cell that raised an exception, or whose process died repeatedly."""

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


@dataclass(frozen=True)
class Cell:
    """A configuration, and the name of its files."""

    config: Config
    name: str


def sweep(
    function: Function,
    cells: Sequence[Config],
    directory: str | Path,
    *,
    processes: int = 2,
    cluster: str | None = None,
    executor: Any = None,
    progress: bool = True,
    tensorboard: bool = True,
) -> SweepResult:
    """Call `function(config)` for every cell that `directory` does not hold yet.

    The directory then holds `cells/<cell>.json` for every finished cell, `results.csv` with one
    line per cell, `failures.json` if cells failed (the next sweep tries them again),
    `tensorboard/<cell>/` with the hyperparameters of each, and `sweep.lock`. The name of a cell has
    its parameters, such as `gamma=0.5,seed=1`, and a hash.

    A function with two parameters (without defaults) is called as `function(config, checkpoint)`.
    The second one is the path of a directory, `checkpoints/<cell>`, that outlives a killed process:
    pass `save_to=checkpoint / "run"` to `simulate`, and a second attempt continues the first. It is
    removed when the cell is finished. On a cluster it must be on a file system that workers share.

    Args:
        function: a deterministic function of the configuration that workers can import. Use
            another directory when you change it: cells computed by other code are refused.
        cells: configurations that JSON can hold, for example from `grid`.
        processes: the number of local processes, without a cluster and an executor.
        cluster: the address of a Dask scheduler, `tcp://host:port`, whose workers have this package
            and the function installed.
        executor: runs the cells: any object whose `submit(function, *arguments)` returns one with
            `done()`, `result()` and `cancel()`. Pools of concurrent.futures, loky and mpi4py, a
            Dask client and submitit's executors are such objects. It is not closed.
        progress: show a progress bar.
        tensorboard: log the numbers and strings of every cell for the HParams dashboard.

    Returns:
        The finished and the failed cells. If the disk is full, there are warnings, and the
        results are still returned.

    Raises:
        RuntimeError: if another sweep uses this directory, or if the executor breaks down.
        ValueError: if an argument is wrong, or if a stored cell is damaged or was computed by
            other code or by another version of this package.
        ConnectionError: if no Dask scheduler answers, or it is lost.
        KeyboardInterrupt: after Ctrl-C; finished cells are stored.
    """
    if executor is not None and (cluster is not None or not hasattr(executor, "submit")):
        wrong = f"a cluster too, {cluster}" if cluster is not None else f"{executor!r}"
        raise ValueError(f"executor: expected an object with `submit` and no cluster, got {wrong}")
    directory = Path(directory).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    with _sole_user(directory):
        todo = _named_cells(_name_of_function(function), cells)
        store, checkpoints = directory / "cells", directory / "checkpoints"
        store.mkdir(exist_ok=True)
        code = fingerprint(function=function)
        known = {cell.name: _read_cell(store / f"{cell.name}.json", cell, code) for cell in todo}
        found = {name: result for name, result in known.items() if result is not None}
        missing = [cell for cell in todo if cell.name not in found]

        def log(cell: Cell) -> None:
            if tensorboard:
                log_hparams(directory / "tensorboard" / cell.name, cell.config, found[cell.name])

        for cell in todo:
            if cell.name in found:
                with _warning_if_full():
                    log(cell)
        failures: list[Failure] = []
        with (
            # Workers first, so that a wrong address fails before any work is done.
            _workers(executor, cluster if missing else None, processes) as workers,
            progress_bar(len(todo), len(found), "cell") if progress else nullcontext() as bar,
            closing(_outcomes(workers, function, missing, checkpoints)) as work,
        ):
            for cell, outcome in work:
                if isinstance(outcome, Failure):
                    failures.append(outcome)
                    if bar is not None:
                        bar.write(f"failed: {outcome}")
                else:
                    found[cell.name] = outcome
                    with _warning_if_full():
                        content = {"config": cell.config, "result": outcome, "code": code}
                        files.write_checked_json(store / f"{cell.name}.json", _KIND, content)
                        shutil.rmtree(checkpoints / cell.name, ignore_errors=True)
                        log(cell)
                if bar is not None:
                    bar.update()
        rows = [cell.config | found[cell.name] for cell in todo if cell.name in found]
        with _warning_if_full():
            columns = [name for cell in todo for name in cell.config]
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
        return Failure(config, f"{type(error).__name__}: {error}", traceback.format_exc())
    return found


def _outcomes(
    workers: Any, function: Function, cells: Sequence[Cell], checkpoints: Path
) -> Generator[tuple[Cell, dict[str, Any] | Failure], None, None]:
    """Submit all cells, and yield each of them with its outcome when it is finished."""
    token = uuid.uuid4().hex  # unique, so that Dask does not reuse results of an earlier sweep
    running = [
        (workers.submit(attempt, function, cell.config, str(checkpoints / cell.name), token), cell)
        for cell in cells
    ]
    try:
        while running:
            state = [future.done() for future, _ in running]
            finished = list(itertools.compress(running, state))
            running = [pair for pair, done in zip(running, state, strict=True) if not done]
            for i, (future, cell) in enumerate(finished):
                try:
                    outcome = future.result()
                except (futures.CancelledError, futures.BrokenExecutor) as error:
                    left = len(running) + len(finished) - i
                    rest = f"with {left} cells to go; the others are stored: run the sweep again"
                    if isinstance(error, futures.BrokenExecutor):
                        raise RuntimeError(
                            f"executor: it broke down {rest} with a new executor to continue"
                        ) from error
                    raise ConnectionError(
                        f"cluster: the scheduler was lost {rest} to continue"
                    ) from error
                except Exception as error:  # for example, the function cannot be unpickled there
                    outcome = Failure(cell.config, f"{type(error).__name__}: {error}")
                yield cell, outcome
            if not finished:
                time.sleep(LOOK_EVERY)
    finally:
        for future, _ in running:
            future.cancel()


@contextmanager
def _workers(executor: Any, cluster: str | None, processes: int) -> Iterator[Any]:
    """The given executor, a client of the cluster, or local processes; the last two are closed."""
    if executor is not None:
        yield executor
    elif cluster is None:
        with closing(LocalProcesses(processes)) as pool:
            yield pool
    else:
        with _connect(cluster, ANSWER_WITHIN) as client:
            if not client.scheduler_info()["workers"]:
                text = "torch_occ: the cluster has no workers yet; waiting for them ..."
                print(text, file=sys.stderr, flush=True)
            yield client


def _connect(address: str, seconds: float) -> Any:
    """A client of the scheduler at this address, or an error that says what to do."""
    with extra("dask", "cluster: a Dask cluster needs distributed"):
        from distributed import Client
    advice = (
        "start one with `dask scheduler`, check the address, or leave the cluster out to run on "
        "local processes"
    )
    try:
        return Client(address, timeout=seconds, set_as_default=False)
    except (OSError, TimeoutError) as error:
        raise ConnectionError(
            f"cluster: no Dask scheduler answers at {address} within {seconds:g} s; {advice}"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"cluster: {address!r} is not an address such as tcp://10.0.0.1:8786 ({error}); "
            f"{advice}"
        ) from error


class LocalProcesses:
    """Runs cells in local processes. One that dies is replaced, and its cell is run again.

    Each process is a pool of its own with a thread that waits for it, so that a process that dies
    takes no other cell along.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"processes: expected at least 1, got {count}")
        self.threads, self.lock, self.closed = (
            futures.ThreadPoolExecutor(count),
            threading.Lock(),
            False,
        )
        self.pools: dict[int, futures.ProcessPoolExecutor] = {}  # by the thread that waits for it

    def submit(self, *call: Any) -> Any:
        """Call `attempt` with its arguments when a process is free; return a future."""
        return self.threads.submit(self._call, *call)

    def _call(self, attempt: Any, function: Function, config: Config, *rest: Any) -> Any:
        thread = threading.get_ident()
        for _ in range(DEATHS):
            try:
                with self.lock:  # after `close`, no process starts any more
                    if self.closed:
                        raise futures.CancelledError
                    if thread not in self.pools:
                        self.pools[thread] = _process()
                    future = self.pools[thread].submit(attempt, function, config, *rest)
                return future.result()
            except futures.BrokenExecutor:
                with self.lock:
                    del self.pools[thread]
        error = "its process died while it ran, more than once; out of memory, or killed?"
        return Failure(config, error)

    def close(self) -> None:
        """End all processes at once."""
        with self.lock:
            self.closed, pools = True, list(self.pools.values())
        for pool in pools:
            for process in processes_of(pool):
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
        self.threads.shutdown(wait=True, cancel_futures=True)


def _process() -> futures.ProcessPoolExecutor:
    """A pool of one process, forked from a clean process that has imported torch.

    A fork of this process would copy the locks of torch's threads.
    """
    forks = "forkserver" in multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["torch_occ.sweeps"])
    return futures.ProcessPoolExecutor(1, context, initializer=_prepare_worker)


def _prepare_worker() -> None:
    """Ignore Ctrl-C, which the driver handles, and exit when the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = multiprocessing.parent_process()
    assert driver is not None

    def follow() -> None:
        driver.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


# -- files -----------------------------------------------------------------------------------------


@contextmanager
def _sole_user(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory while the block runs.

    It is a lock of the operating system on a file that names its holder. It ends with the process
    that holds it, also after a crash; the file stays. If the file system has no locks there is a
    warning, and Windows has no such lock.
    """
    path = directory / "sweep.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    holder = path.read_text(errors="replace").strip() or "another process"
                    raise RuntimeError(
                        f"{directory}: {holder} runs a sweep here; wait until it ends, or use "
                        "another directory"
                    ) from None
                warnings.warn(
                    f"{path}: cannot be locked here ({error.strerror}); let no other process use "
                    "it",
                    stacklevel=4,
                )
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        os.close(handle)


def _named_cells(name: str, configs: Sequence[Config]) -> list[Cell]:
    """The cells with their names, for the function of this name."""
    seen: dict[str, int] = {}
    found = []
    for i, config in enumerate(configs):
        try:
            text = json.dumps(config, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"cells: cell {i}, {config!r}, is not what JSON can hold: {error}"
            ) from error
        if text in seen:
            raise ValueError(f"cells: cells {seen[text]} and {i} are the same, {text}")
        seen[text] = i
        shown = ",".join(f"{key}={config[key]}" for key in sorted(config))
        shown = re.sub(r"[^\w.,=+-]+", "_", shown).lstrip("._-")[:100]
        key = hashlib.sha256(f"{name}:{text}".encode()).hexdigest()[:12]
        found.append(Cell(config, f"{shown}-{key}"))
    return found


def _name_of_function(function: Function) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or name is None or "<" in name:  # <lambda>, <locals>
        raise ValueError(
            "function: expected a function at the top level of a module, which workers can import "
            f"by its name, got {function!r}"
        )
    if module == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise ValueError(
            f"function: {name} was defined interactively; put it into a module, so that workers "
            "can import it"
        )
    return f"{module}.{name}"


def _read_cell(path: Path, cell: Cell, code: str) -> dict[str, Any] | None:
    """The stored result of a cell, or None; a ValueError if the file belongs to another cell."""
    if not path.exists():
        return None
    stored = files.read_checked_json(path, _KIND)
    if stored["config"] != json.loads(json.dumps(cell.config)):
        other = json.dumps(stored["config"])
        raise ValueError(f"{path}: holds another cell, {other}; move it away")
    if stored["code"] != code:
        raise ValueError(
            f"{path}: was computed when the code of the function, or code that it calls, was not "
            "what it is now; use another directory, or move the cells away to compute them again"
        )
    result: dict[str, Any] = stored["result"]
    return result


@contextmanager
def _warning_if_full() -> Iterator[None]:
    """Turn an OSError into a warning, so that the results that were computed are not lost."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"sweep: {error}; the sweep goes on, and returns its results", stacklevel=4)


def log_hparams(directory: Path, config: Config, result: dict[str, Any]) -> None:
    """Write one run for TensorBoard's HParams dashboard, atomically; do nothing if it exists."""
    if directory.exists():
        return
    with extra("experiments", "hparams need tensorboard, or tensorboard=False"):
        from torch.utils.tensorboard.summary import hparams
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".", dir=directory.parent))
    try:
        with summary_writer(temporary) as writer:
            values = {
                name: value if isinstance(value, bool | int | float | str) else json.dumps(value)
                for name, value in config.items()
            }
            _, start, end = hparams(values, {})
            # Leave out the first summary, a list of columns. TensorBoard then collects the columns
            # of all runs, which may differ.
            for summary in (start, end):
                writer.file_writer.add_summary(summary, 0)
            for name, value in result.items():
                if isinstance(value, int | float):
                    writer.add_scalar(name, value, 0)
        temporary.chmod(0o755)
        temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
