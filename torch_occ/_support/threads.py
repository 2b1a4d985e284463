"""Kernels in plain threads. They run in parallel, because kernels release the interpreter lock.

The threads are separate from those of torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from threading import Event

import torch


def for_each(function: Callable[[int], None], count: int) -> None:
    """Call function(0), ..., function(count - 1), in as many threads as torch would use.

    The calls must not depend on their order. After Ctrl-C no further call begins, and the interrupt
    is raised once the running calls have returned, so nothing runs in the background.
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
