"""The message that is shown while kernels compile.

Kernels compile at the first call on a machine; later calls load them from disk.
"""

from __future__ import annotations

import sys
import threading


class _CompileMessage:
    """A context manager that prints a message on standard error after three seconds.

    Only the first block in a process can print, because later ones find the kernels compiled.
    """

    def __init__(self) -> None:
        self.timer: threading.Timer | None = None
        self.first = True

    def __enter__(self) -> None:
        if self.first:
            message = (
                "torch_occ: compiling the engine, once for this machine; this takes about half a "
                "minute ..."
            )
            self.timer = threading.Timer(3.0, lambda: print(message, file=sys.stderr))
            self.timer.daemon = True
            self.timer.start()
            self.first = False

    def __exit__(self, *_: object) -> None:
        if self.timer:
            self.timer.cancel()
            self.timer = None


compile_message = _CompileMessage()
