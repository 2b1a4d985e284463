"""Work that is told to stop saves what it has, and tells its caller.

Ctrl-C is a KeyboardInterrupt, as always. While work with a file runs in the main thread, SIGTERM
(from a batch system, or `kill`) is a SystemExit with code 143, so that it can be saved too. The
work saves and raises the same exception again, with `error.result`, what there is so far, and
`error.saved_to`, the file from which the same call continues, or None.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

#: The exit code of a process that SIGTERM ends, as shells report it.
TERMINATED = 128 + signal.SIGTERM


@contextmanager
def sigterm_raises(wanted: bool = True) -> Iterator[Callable[[], None]]:
    """Let SIGTERM raise SystemExit(143) inside the block; yields a function that makes it deaf.

    Nothing changes outside the main thread, where signals cannot be handled, or if the program
    handles SIGTERM by itself.
    """
    own = threading.current_thread() is threading.main_thread()
    if not (wanted and own and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield lambda: None
        return

    def stop(*_: object) -> NoReturn:
        raise SystemExit(TERMINATED)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield lambda: (signal.signal(signal.SIGTERM, signal.SIG_IGN), None)[1]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def asked_to_stop(error: BaseException) -> bool:
    """Whether an exception is Ctrl-C or the end of the program, and not a mistake."""
    return isinstance(error, KeyboardInterrupt | SystemExit)


def explain(error: BaseException, progress: str, result: Any, saved_to: Path | None) -> None:
    """Give the exception `result` and `saved_to`, and say how to continue."""
    error.__dict__.update(result=result, saved_to=saved_to)
    how = f"saved to {saved_to}; the same call continues" if saved_to else "nothing is saved"
    message = f"torch_occ: stopped {progress}; {how}"
    if isinstance(error, SystemExit):
        print(message, file=sys.stderr, flush=True)
    else:
        error.add_note(message)
