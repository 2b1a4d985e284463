"""Interrupts and threads."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from threading import Event
from typing import Any, NoReturn

import torch

# Ctrl-C raises KeyboardInterrupt, as usual. SIGTERM (from a batch system, or `kill`) raises
# SystemExit with code 143 while work with a file runs in the main thread, so that it can be saved
# too. The work saves its state and raises the same exception again. `error.result` is the result so
# far, and `error.saved_to` is the file from which the same call continues, or None.


@contextmanager
def sigterm_raises(wanted: bool = True) -> Iterator[Callable[[], None]]:
    """Let SIGTERM raise SystemExit(143) inside the block.

    Yields a function after which SIGTERM is ignored. Nothing changes outside the main thread, where
    signals cannot be handled, or if the program has a handler of its own.
    """
    own = threading.current_thread() is threading.main_thread()
    if not (wanted and own and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield lambda: None
        return

    def stop(*_: object) -> NoReturn:
        raise SystemExit(128 + signal.SIGTERM)  # the code that shells report

    signal.signal(signal.SIGTERM, stop)
    try:
        yield lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN), None)[1]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def stoppable(kept: Any, stopped: Callable[[], tuple[str, Any]]) -> Iterator[None]:
    """Save the work in the block if it fails; after an interruption, say how to continue.

    `kept` is a `Kept`, or None. `stopped` returns how far the work came, and its result so far.
    """
    with sigterm_raises(kept is not None) as silence:
        try:
            yield
        except BaseException as error:
            silence()
            saved = None if kept is None else kept.save()
            if isinstance(error, KeyboardInterrupt | SystemExit):  # Ctrl-C, or the program's exit
                progress, result = stopped()
                error.__dict__.update(result=result, saved_to=saved)
                how = f"saved to {saved}; the same call continues" if saved else "nothing is saved"
                message = f"torch_occ: stopped {progress}; {how}"
                if isinstance(error, SystemExit):
                    print(message, file=sys.stderr, flush=True)
                else:
                    error.add_note(message)
            raise


def for_each(function: Callable[[int], None], count: int) -> None:
    """Call function(0), ..., function(count - 1), in as many threads as torch would use.

    The threads are not those of torch; kernels in them run in parallel, because they release the
    interpreter lock. After Ctrl-C no further call begins, and the interrupt is raised once the
    running calls have returned.
    """
    if count == 1:
        function(0)
        return
    threads, stopped = min(torch.get_num_threads(), count), Event()

    def share(first: int) -> None:
        for i in range(first, count, threads):
            if stopped.is_set():
                return
            function(i)

    tasks = [_pool(threads).submit(share, first) for first in range(threads)]
    try:
        wait(tasks)
    except BaseException:  # Ctrl-C, SIGTERM
        stopped.set()
        wait(tasks)
        raise
    for task in tasks:
        task.result()  # an exception in a thread is raised here


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="torch_occ")


# A forked process has the pools but not their threads, and would wait for them for ever; it makes
# new ones.
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_pool.cache_clear)
