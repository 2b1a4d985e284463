"""Workers that run the cells of a sweep: local processes, or a Dask cluster.

Both yield (cell, result or Failure) once per cell, as cells finish. If a worker dies, its cell is
run again. A cell whose workers die repeatedly becomes a Failure.
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
    context.set_forkserver_preload(["torch_occ.sweeps.cells"])
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
