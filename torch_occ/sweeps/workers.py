"""Where the cells of a sweep run: on processes of this machine, or on the workers of a Dask
cluster.

Both yield (cell, result or Failure) as cells finish, each exactly once, and survive the death of a
worker: its cell is run again, and only a cell whose workers keep dying is given up.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import BaseContext
from typing import Any

from torch_occ._support.extras import extra
from torch_occ._support.private import processes_of
from torch_occ.sweeps.cells import Cell, Failure, Function, Work, attempt

#: How often a cell may lose its process while it runs alone, before it is taken for the cause.
DEATHS = 2


# -- local processes ---------------------------------------------------------------------------


def on_processes(function: Function, cells: Sequence[Cell], processes: int) -> Work:
    """A pool of processes that is replaced when one of them dies."""
    if processes < 1:
        raise ValueError(f"processes: expected at least 1, got {processes}")
    waiting, suspects, deaths = deque(cells), deque[Cell](), Counter[str]()
    while waiting or suspects:
        # When a process dies, every cell that was running is a suspect, and suspects are tried
        # again one at a time.
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
    """Processes forked from a clean one that has imported torch once; to fork this one would copy
    the locks of torch's threads.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch_occ.sweeps.cells"])
    return context


def _prepare_worker() -> None:
    """Ctrl-C is the driver's business; and when the driver is gone, so is the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    driver = multiprocessing.parent_process()
    assert driver is not None

    def follow() -> None:
        driver.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


# -- a Dask cluster ----------------------------------------------------------------------------


def connect(address: str, seconds: float) -> Any:
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


def on_cluster(function: Function, cells: Sequence[Cell], client: Any) -> Work:
    """The scheduler runs the cells of a lost worker again by itself; it gives a cell up after
    `allowed-failures` (3) workers.
    """
    from concurrent.futures import CancelledError

    from distributed import as_completed
    from distributed.scheduler import KilledWorker

    token = uuid.uuid4().hex  # not the result of an earlier sweep that the scheduler may still hold
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
            except Exception as error:  # the function cannot be unpickled there, for example
                outcome = Failure(cell.config, f"{type(error).__name__}: {error}")
            yield cell, outcome
            future.release()
