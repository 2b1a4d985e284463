"""A function over a grid of parameters, on processes or a cluster; one file per cell."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
import uuid
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch

from torch_occ._support.choices import extra, progress_bar, summary_writer
from torch_occ._support.files import (
    read_checked_json,
    write_atomically,
    write_checked_json,
    write_csv,
)
from torch_occ._support.fingerprints import fingerprint
from torch_occ._support.private import processes_of

# -- Cells of a sweep, failures, and the code that a worker runs for a cell ------------------------


Config = dict[str, Any]
Function = Callable[[Config], dict[str, Any]]


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
class Cell:
    """A configuration and the name of its file."""

    config: Config
    key: str


Work = Generator[tuple[Cell, dict[str, Any] | Failure], None, None]


def attempt(function: Function, config: Config) -> dict[str, Any] | Failure:
    """Run a cell in a worker; return its result, or a Failure that describes the exception."""
    # One thread per cell: cells run in parallel, and sums have a fixed order.
    torch.set_num_threads(1)
    try:
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


# -- A lock that lets one process at a time use a directory ----------------------------------------
#
# The lock is a lock of the operating system on a file in the directory. It ends with the process
# that holds it, also after a crash, and nothing has to be removed. The file itself stays; it names
# the holder of the lock.


@contextmanager
def sole_user(directory: Path, purpose: str) -> Iterator[None]:
    """Hold the lock of a directory, `<purpose>.lock`, while the block runs.

    If the file system has no locks, or on Windows, there is a warning and no lock.

    Raises:
        RuntimeError: if another process holds the lock; it names the machine and the process.
    """
    path = directory / f"{purpose}.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if not _lock(handle, path):
            holder = path.read_text(errors="replace").strip() or "another process"
            advice = "wait until it ends, or use another directory"
            raise RuntimeError(f"{directory}: {holder} runs a {purpose} here; {advice}")
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        os.close(handle)


def _lock(handle: int, path: Path) -> bool:
    """Lock an open file; return False if another process holds the lock."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        warnings.warn(
            f"{path}: cannot be locked here ({error.strerror}); let no other process use it",
            stacklevel=4,
        )
    return True


# -- Workers that run the cells of a sweep: local processes, or a Dask cluster ---------------------
#
# Both yield (cell, result or Failure) once per cell, as cells finish. If a worker dies, its cell is
# run again. A cell whose workers die repeatedly becomes a Failure.


#: How often a cell may lose its process while it runs alone, before it becomes a Failure.
DEATHS = 2


# -- local processes ---------------------------------------------------------------------------


def on_processes(function: Function, cells: Sequence[Cell], processes: int) -> Work:
    """Run cells in a pool of processes; start a new pool when a process dies.

    Raises:
        ValueError: if `processes` is less than 1.
    """
    if processes < 1:
        raise ValueError(f"processes: expected at least 1, got {processes}")
    waiting, suspects, deaths = deque(cells), deque[Cell](), Counter[str]()
    while waiting or suspects:
        # When a process dies, any running cell may be the cause. These suspects are run again,
        # one at a time.
        queue, width = (suspects, 1) if suspects else (waiting, min(processes, len(waiting)))
        running: dict[Future[Any], Cell] = {}
        pool = ProcessPoolExecutor(width, _context(), initializer=_prepare_worker)
        try:
            lost: list[Cell] = []
            while (queue or running) and not lost:
                while queue and len(running) < width and not lost:
                    cell = queue.popleft()
                    try:
                        running[pool.submit(attempt, function, cell.config)] = cell
                    except BrokenProcessPool:
                        lost.append(cell)
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    cell = running.pop(future)
                    try:
                        outcome = future.result()
                    except BrokenProcessPool:
                        lost.append(cell)
                    else:
                        yield cell, outcome
            lost += running.values()
            for cell in lost:
                deaths[cell.key] += width == 1
                if deaths[cell.key] < DEATHS:
                    suspects.append(cell)
                else:
                    yield (
                        cell,
                        Failure(
                            cell.config,
                            "its process died while it ran, more than once; out of memory, or "
                            "killed?",
                        ),
                    )
        finally:
            for process in processes_of(pool):
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)


def _context() -> BaseContext:
    """Fork workers from a clean process that has imported torch.

    A fork of this process would copy the locks of torch's threads.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch_occ.sweeps"])
    return context


def _prepare_worker() -> None:
    """Ignore Ctrl-C, which the driver handles, and exit when the driver is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = multiprocessing.parent_process()
    assert driver is not None

    def follow() -> None:
        driver.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


# -- a Dask cluster ----------------------------------------------------------------------------


def connect(address: str, seconds: float) -> Any:
    """A client of the scheduler at this address.

    Raises:
        ConnectionError: if no scheduler answers in time.
        ValueError: if the address is malformed.
    """
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


def on_cluster(function: Function, cells: Sequence[Cell], client: Any) -> Work:
    """Run cells on a cluster.

    The scheduler itself runs the cells of a lost worker again. It gives a cell up after
    `allowed-failures` (3) lost workers.
    """
    from concurrent.futures import CancelledError

    from distributed import as_completed
    from distributed.scheduler import KilledWorker

    token = uuid.uuid4().hex  # unique, so that results of an earlier sweep are not reused
    with client:
        if not client.scheduler_info()["workers"]:
            print(
                "torch_occ: the cluster has no workers yet; waiting for them ...",
                file=sys.stderr,
                flush=True,
            )
        futures = {
            client.submit(
                attempt, function, c.config, key=f"{c.key}-{token}", pure=False, retries=0
            ): c
            for c in cells
        }
        for future in as_completed(list(futures), loop=client.loop):
            cell = futures.pop(future)
            try:
                outcome = future.result()
            except KilledWorker as error:
                outcome = Failure(
                    cell.config, f"its workers died while it ran, again and again ({error})"
                )
            except CancelledError as error:
                left = len(futures) + 1
                raise ConnectionError(
                    f"cluster: the scheduler was lost with {left} cells to go; the others are "
                    "stored: run the sweep again to continue"
                ) from error
            except Exception as error:  # for example, the function cannot be unpickled there
                outcome = Failure(cell.config, f"{type(error).__name__}: {error}")
            yield cell, outcome
            future.release()


# -- Sweeps: call a function once for every cell of a grid, on local processes or a Dask cluste ----
#
# A cell is a dictionary that JSON can hold, and so is the result of the function. The driver writes
# each finished cell at once to a file of its own, atomically. To continue an interrupted sweep, run
# it again with the same directory. Only one driver at a time can use a directory. Workers write
# nothing, so a cluster needs no shared file system.


#: The name of a stored cell in messages.
_KIND = "a cell of a sweep"

#: Seconds within which a scheduler must answer.
ANSWER_WITHIN = 10.0


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
    cluster: str | None = None,
    progress: bool = True,
    tensorboard: bool = True,
) -> SweepResult:
    """Call `function(config)` for every cell that `directory` does not hold yet.

    The directory then holds `cells/<key>.json` for every finished cell, `results.csv` with one line
    per cell, `failures.json` if cells failed (the next sweep tries them again), `tensorboard/` with
    the hyperparameters of each, and `sweep.lock`.

    Args:
        function: a deterministic function of the configuration that workers can import. Use
            another directory when you change it: cells computed by other code are refused.
        cells: configurations that JSON can hold, for example from `grid`.
        processes: the number of local processes, without a cluster.
        cluster: the address of a Dask scheduler, `tcp://host:port`, whose workers have this package
            and the function installed.
        progress: show a progress bar.
        tensorboard: log the numbers and strings of every cell for the HParams dashboard.

    Returns:
        The finished and the failed cells. If the disk is full, there are warnings, and the
        results are still returned.

    Raises:
        RuntimeError: if another sweep uses this directory.
        ValueError: if an argument is wrong, or if a stored cell is damaged or was computed by
            other code or by another version of this package.
        ConnectionError: if no Dask scheduler answers, or it is lost.
        KeyboardInterrupt: after Ctrl-C; finished cells are stored.
    """
    Path(directory).mkdir(parents=True, exist_ok=True)
    with sole_user(Path(directory), "sweep"):
        return _run_cells(
            function, cells, Path(directory), processes, cluster, progress, tensorboard
        )


def _run_cells(
    function: Function,
    cells: Sequence[Config],
    directory: Path,
    processes: int,
    cluster: str | None,
    progress: bool,
    tensorboard: bool,
) -> SweepResult:
    name = _name_of_function(function)
    todo = [Cell(config, _key_of_cell(name, config)) for config in _check_cells(cells)]
    store, board = directory / "cells", directory / "tensorboard"
    store.mkdir(parents=True, exist_ok=True)
    code = fingerprint(function=function)
    found = {
        cell.key: stored for cell in todo if (stored := _read_cell(store, cell, code)) is not None
    }
    missing = [cell for cell in todo if cell.key not in found]
    for cell in todo:
        if tensorboard and cell.key in found:
            with _warning_if_full():
                log_hparams(board / cell.key, cell.config, found[cell.key])
    failures: list[Failure] = []
    # Connect first, so that a wrong address fails before any work is done.
    client = connect(cluster, ANSWER_WITHIN) if cluster is not None and missing else None
    work = (
        on_processes(function, missing, processes)
        if client is None
        else on_cluster(function, missing, client)
    )
    with (
        progress_bar(len(todo), len(found), "cell") if progress else _Silent() as bar,
        closing(work),
    ):
        for cell, outcome in work:
            if isinstance(outcome, Failure):
                failures.append(outcome)
                bar.write(f"failed: {outcome}")
            else:
                found[cell.key] = outcome
                with _warning_if_full():
                    _write_cell(store, cell, code, outcome)
                    if tensorboard:
                        log_hparams(board / cell.key, cell.config, outcome)
            bar.update()
    rows = [cell.config | found[cell.key] for cell in todo if cell.key in found]
    columns = [name for cell in todo for name in cell.config]
    with _warning_if_full():
        write_csv(directory / "results.csv", rows, first=columns)
        _write_failures(directory / "failures.json", failures)
    return SweepResult(rows, failures)


# -- files -------------------------------------------------------------------------------------


def _check_cells(cells: Sequence[Config]) -> Sequence[Config]:
    seen: dict[str, int] = {}
    for i, config in enumerate(cells):
        try:
            text = json.dumps(config, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"cells: cell {i}, {config!r}, is not what JSON can hold: {error}"
            ) from error
        if text in seen:
            raise ValueError(f"cells: cells {seen[text]} and {i} are the same, {text}")
        seen[text] = i
    return cells


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


def _key_of_cell(name: str, config: Config) -> str:
    return hashlib.sha256(f"{name}:{json.dumps(config, sort_keys=True)}".encode()).hexdigest()[:20]


def _read_cell(store: Path, cell: Cell, code: str) -> dict[str, Any] | None:
    """The stored result of a cell, or None; a ValueError if the file belongs to another cell."""
    path = store / f"{cell.key}.json"
    if not path.exists():
        return None
    stored = read_checked_json(path, _KIND)
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


def _write_cell(store: Path, cell: Cell, code: str, result: dict[str, Any]) -> None:
    content = {"config": cell.config, "result": result, "code": code}
    write_checked_json(store / f"{cell.key}.json", _KIND, content)


@contextmanager
def _warning_if_full() -> Iterator[None]:
    """Turn an OSError into a warning, so that the results that were computed are not lost."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"sweep: {error}; the sweep goes on, and returns its results", stacklevel=4)


def _write_failures(path: Path, failures: Sequence[Failure]) -> None:
    if failures:
        text = json.dumps([asdict(failure) for failure in failures], indent=1)
        write_atomically(path, lambda file: file.write(text.encode()))
    else:
        path.unlink(missing_ok=True)


def log_hparams(directory: Path, config: Config, result: dict[str, Any]) -> None:
    """Write one run for TensorBoard's HParams dashboard, atomically; do nothing if it exists."""
    if directory.exists():
        return
    with extra("experiments", "hparams need tensorboard, or tensorboard=False"):
        from torch.utils.tensorboard.summary import hparams
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".", dir=directory.parent))
    try:
        metrics = {name: value for name, value in result.items() if isinstance(value, int | float)}
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
            for name, value in metrics.items():
                writer.add_scalar(name, value, 0)
        temporary.chmod(0o755)
        temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


# -- progress ----------------------------------------------------------------------------------


class _Silent:
    """A progress bar that shows nothing."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update(self) -> None: ...

    def write(self, text: str) -> None: ...
