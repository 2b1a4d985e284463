"""Kernels release the interpreter lock, so plain threads run them side by side; nothing is shared with torch's own threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch


def for_each(function: Callable[[int], None], count: int) -> None:
    """function(0), ..., function(count - 1), in as many threads as torch would use. Nothing may depend on their order.

    Ctrl-C is heard when all of them are done, so that what they write is never half written.
    """
    if count == 1:
        function(0)
        return
    threads = min(torch.get_num_threads(), count)

    def share(first: int) -> None:
        for i in range(first, count, threads):
            function(i)

    tasks = [_pool(threads).submit(share, first) for first in range(threads)]
    try:
        wait(tasks)
    except KeyboardInterrupt:
        wait(tasks)
        raise
    for task in tasks:
        task.result()  # an exception in a thread is raised here


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="torch_occ")


# A forked process has the pools but not their threads, and would wait for them for ever; it makes new ones.
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_pool.cache_clear)
