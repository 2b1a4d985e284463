"""A lock that lets one process at a time use a directory.

The lock is a lock of the operating system on a file in the directory. It ends with the process that
holds it, also after a crash, and nothing has to be removed. The file itself stays; it names the
holder of the lock.
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
