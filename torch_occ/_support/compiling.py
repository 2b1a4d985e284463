"""A word to whoever waits while the engine compiles: the first call on a machine, after which the
result is on disk.
"""

from __future__ import annotations

import sys
import threading


class _Patiently:
    """Says something on standard error if the first thing that it surrounds in this process takes
    longer than a few seconds.
    """

    def __init__(self) -> None:
        self.timer: threading.Timer | None = None
        self.first = True

    def __enter__(self) -> None:
        if self.first:
            message = (
                "torch_occ: compiling the engine, once for this machine; this takes about "
                "half a minute ..."
            )
            self.timer = threading.Timer(3.0, lambda: print(message, file=sys.stderr))
            self.timer.daemon = True
            self.timer.start()
            self.first = False

    def __exit__(self, *_: object) -> None:
        if self.timer:
            self.timer.cancel()
            self.timer = None


patiently = _Patiently()
