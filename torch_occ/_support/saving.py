"""The state of a run or a tuning in a file: saved from time to time, loaded to continue.

A state is a dictionary of tensors and plain values, and of lists and dictionaries of them.
"""

from __future__ import annotations

import io
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_occ._support.files import (
    check_replaceable,
    read_checked,
    sealed,
    try_to_write,
    write_checked,
)
from torch_occ._support.fingerprints import differences

State = dict[str, Any]


class Kept:
    """Keeps the latest state of some work in memory, and saves it to a file at intervals.

    Args:
        path: the file.
        kind: the kind of work, for messages: "run" or "tuning".
        fingerprints: hashes by which the work is recognized.
        every: seconds between two saves.
    """

    def __init__(
        self,
        path: str | Path,
        kind: str,
        fingerprints: dict[str, str],
        every: float = 0.0,
    ) -> None:
        self.path, self.kind, self.every = Path(path), kind, every
        self.fingerprints = fingerprints
        self.latest: State | None = None
        self.in_file = False  # whether the file holds a state of this work
        self.begun = time.monotonic()

    def load(self) -> State | None:
        """Read the state from the file.

        Returns:
            The state, or None if there is no file.

        Raises:
            ValueError: if the file is damaged, or belongs to other work.
        """
        if not self.path.is_file():
            return None
        payload = read_checked(self.path, f"a {self.kind}")
        state: State = torch.load(io.BytesIO(payload), weights_only=True)
        other = differences(state.pop("fingerprints", None), self.fingerprints)
        if other:
            lacks = f"which does not have the same {', '.join(other)}"
            raise ValueError(
                f"{self.path}: belongs to another {self.kind}, {lacks}; name another file"
            )
        self.in_file = True
        return state

    def try_first(self, state: State) -> None:
        """Check, before the work begins, that this state can be written and read back.

        Raises:
            OSError: if the file cannot be written.
            ValueError: if `path` holds something else, or the state cannot be read back.
        """
        if not self.in_file:
            check_replaceable(self.path)
        payload = self._packed(state)
        try:
            torch.load(io.BytesIO(payload), weights_only=True)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"save_to: the state of the {self.kind} could not be read back ({reason}); the "
                "state of a learner and of a loss process may hold tensors and plain numbers only"
            ) from error
        try:
            try_to_write(self.path, lambda file: file.write(sealed(f"a {self.kind}", payload)))
        except OSError as error:
            reason = f"save_to: cannot be written ({error.strerror}); name another file"
            raise OSError(error.errno, reason, str(self.path)) from error

    def keep(self, state: State, *, last: bool = False) -> None:
        """Remember a state, which must not change any more; save it if it is due, or the last."""
        self.latest = state
        if last or time.monotonic() - self.begun > self.every:
            self.save()

    def save(self) -> None:
        """Write the latest state. If this fails, warn and continue with the work."""
        if self.latest is None:
            return
        try:
            write_checked(self.path, f"a {self.kind}", self._packed(self.latest))
            self.latest, self.in_file = None, True
        except OSError as error:
            warnings.warn(f"save_to: the {self.kind} is not saved: {error}", stacklevel=4)
        self.begun = time.monotonic()

    def rescue(self) -> Path | None:
        """Save what is not saved yet; return the file if it holds a state of this work."""
        self.save()
        return self.path if self.in_file else None

    def _packed(self, state: State) -> bytes:
        buffer = io.BytesIO()
        torch.save(state | {"fingerprints": self.fingerprints}, buffer)
        return buffer.getvalue()


def copied(part: Any) -> Any:
    """A deep copy of a tree of tensors, dictionaries and lists; tensors are detached."""
    if isinstance(part, Tensor):
        return part.detach().clone()
    if isinstance(part, dict):
        return {name: copied(value) for name, value in part.items()}
    return [copied(value) for value in part] if isinstance(part, list) else part
