"""One process at a time in a directory.

The lock is the operating system's, on a file in the directory, so it ends with the process that
holds it, however that ends; nothing has to be removed after a crash. The file itself stays and
says who holds the lock.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def sole_user(directory: Path, purpose: str) -> Iterator[None]:
    """Hold the lock of a directory, `<purpose>.lock`, while the block runs.

    Where a file system has no locks, or on Windows, a warning says so, and there is no lock.

    Raises:
        RuntimeError: if another process holds it, with its machine and number.
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
    """Lock an open file; False if somebody else has."""
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
