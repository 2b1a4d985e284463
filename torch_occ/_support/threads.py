"""Kernels release the interpreter lock, so plain threads run them side by side.

Nothing is shared with torch's own threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from threading import Event

import torch


def for_each(function: Callable[[int], None], count: int) -> None:
    """function(0), ..., function(count - 1), in as many threads as torch would use.

    Nothing may depend on their order. After Ctrl-C no further one begins, and the interrupt is
    raised when those that run are done: nothing is written behind the caller's back.
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
