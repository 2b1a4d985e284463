"""Files: written atomically, checked when they are read; states of runs, and tables."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import pickle
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from torch_occ._support.version import VERSION

# A file is first written under another name in the same folder and then renamed. So a failure never
# destroys what was saved before. Files from which work continues also have a seal in a last line:
# the kind of file, the version of its format and of this package, and a checksum of these and of
# the content. NumPy and torch can still read such a file.

#: The version of the file format; files of another format are refused.
FORMAT = 1

_ADVICE = "It is left as it is: move it away to begin anew, or name another file"


def write_atomically(
    path: str | Path, write: Callable[[BinaryIO], object], *, rehearse: bool = False
) -> None:
    """Call `write` with an open binary file that is renamed to `path` once it is on disk.

    To rehearse is to do all this except the renaming, so that `path` is unchanged.

    Raises:
        OSError: if this fails; it names the path, and the old file is unchanged.
    """
    path = Path(path)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if not rehearse:
            os.replace(temporary, path)
        elif path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
    except OSError as error:
        reason = f"{error.strerror or error}; nothing that was saved before is lost"
        raise OSError(error.errno, reason, str(path)) from error
    finally:
        with suppress(OSError):  # there is none: it was renamed, or the folder does not exist
            temporary.unlink()


def write_checked(path: str | Path, kind: str, payload: bytes, *, rehearse: bool = False) -> None:
    """Write bytes and their seal atomically; `kind` names what they are, such as "a run"."""
    seal: dict[str, Any] = {"kind": f"torch_occ {kind}", "format": FORMAT, "version": VERSION}
    content = payload + _last_line(seal | {"sha256": _sha256(seal, payload)})
    write_atomically(path, lambda file: file.write(content), rehearse=rehearse)


def read_checked(path: str | Path, kind: str, *, any_version: bool = False) -> bytes:
    """Read the bytes that `write_checked` wrote, without the seal.

    Raises:
        ValueError: if the file is empty, damaged, of another kind, of another version (unless
            `any_version` in the same format), or not a file of this package; it names the path.
    """
    content = Path(path).read_bytes()
    payload, seal = _parted(content)
    own, version = str(seal.get("kind", "")), seal.get("version")
    if not content:
        trouble = "is empty"
    elif not own.startswith("torch_occ "):
        trouble = f"is not {kind} that torch_occ has saved, or it is damaged"
    elif seal.get("sha256") != _sha256(seal, payload):
        trouble = "is damaged: its checksum is wrong"
    elif own != f"torch_occ {kind}":
        trouble = f"is {own.removeprefix('torch_occ ')}, not {kind}"
    elif seal["format"] != FORMAT or (version != VERSION and not any_version):
        trouble = f"was saved by torch_occ {version}, and this is {VERSION}"
    else:
        return payload
    raise ValueError(f"{path}: {trouble}. {_ADVICE}")


def _parted(content: bytes) -> tuple[bytes, dict[str, Any]]:
    """The payload, and the seal from the last line; the seal is empty if it is not complete."""
    payload, _, line = content.removesuffix(b"\n").rpartition(b"\n")
    with suppress(ValueError, TypeError):
        seal = json.loads(line)
        if isinstance(seal, dict) and content == payload + _last_line(seal):
            return payload, seal
    return payload, {}


def _sha256(seal: dict[str, Any], payload: bytes) -> str:
    """The checksum of the payload and of the other entries of the seal."""
    named = {name: seal.get(name) for name in ("kind", "format", "version")}
    text = json.dumps(named, sort_keys=True).encode()
    return hashlib.sha256(text + b"\n" + payload).hexdigest()


def _last_line(seal: dict[str, Any]) -> bytes:
    return b"\n" + json.dumps(seal).encode() + b"\n"


#: The state of a run or a tuning: tensors, plain values, lists and dictionaries of them.
State = dict[str, Any]


class Kept:
    """Keeps the latest state of some work, a "run" or a "tuning", and saves it at intervals.

    The work is recognized by its fingerprints; `every` are the seconds between two saves.
    """

    def __init__(
        self, path: str | Path, kind: str, fingerprints: dict[str, str], every: float = 0.0
    ) -> None:
        self.path, self.kind, self.every = Path(path), kind, every
        self.fingerprints = fingerprints
        self.latest: State | None = None
        self.in_file = False  # whether the file holds a state of this work
        self.begun = time.monotonic()

    def load(self) -> State | None:
        """The state from the file, if any; a ValueError if it is damaged, or of other work."""
        if not self.path.is_file():
            return None
        payload = read_checked(self.path, f"a {self.kind}")
        try:
            state: State = torch.load(io.BytesIO(payload), weights_only=True)
        except pickle.UnpicklingError:
            raise ValueError(
                f"{self.path}: holds more than numbers, so it was not written by torch_occ, and is "
                "not read; name another file"
            ) from None
        saved, now = state.pop("fingerprints", {}), self.fingerprints
        other = [name for name in now | saved if saved.get(name) != now.get(name)]
        if other:
            lacks = f"which does not have the same {', '.join(other)}"
            raise ValueError(
                f"{self.path}: belongs to another {self.kind}, {lacks}; name another file"
            )
        self.in_file = True
        return state

    def begin(self, work: Any, resume: bool) -> None:
        """Continue the work from the file, if wanted; check that a state can be saved and read."""
        if resume and (state := self.load()) is not None:
            work.restore(state)
        if not self.in_file and self.path.is_file():
            body, seal = _parted(self.path.read_bytes())
            if seal.get("sha256") != _sha256(seal, body):
                found = "a damaged file, or something that torch_occ has not saved"
                raise ValueError(f"{self.path}: holds {found}. {_ADVICE}")
        payload = self._packed(work.state())
        try:
            torch.load(io.BytesIO(payload), weights_only=True)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(
                f"save_to: the state of the {self.kind} could not be read back ({reason}); the "
                "state of a learner and of a loss process may hold tensors and plain numbers only"
            ) from error
        try:
            write_checked(self.path, f"a {self.kind}", payload, rehearse=True)
        except OSError as error:
            reason = f"save_to: cannot be written ({error.strerror}); name another file"
            raise OSError(error.errno, reason, str(self.path)) from error

    def keep(self, state: State, *, last: bool = False) -> None:
        """Remember a state, which must not change any more; save it if it is due, or the last."""
        self.latest = state
        if last or time.monotonic() - self.begun > self.every:
            self.save()

    def save(self) -> Path | None:
        """Save what is not saved yet; return the file if it holds a state of this work.

        If this fails, warn and continue with the work.
        """
        if self.latest is not None:
            try:
                write_checked(self.path, f"a {self.kind}", self._packed(self.latest))
                self.latest, self.in_file = None, True
            except OSError as error:
                warnings.warn(f"save_to: the {self.kind} is not saved: {error}", stacklevel=4)
            self.begun = time.monotonic()
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


# -- Tables: as Markdown, as LaTeX, and as files ---------------------------------------------------


def markdown(
    header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> str:
    """A Markdown table with aligned columns; those in `left` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    sides = ["<-" if i in left else ">:" for i in range(len(widths))]
    parts = list(zip(sides, widths, strict=True))
    line = "| " + " | ".join(f"{{:{side[0]}{width}}}" for side, width in parts) + " |"
    rule = "|".join("-" * (width + 1) + side[1] for side, width in parts)
    return "\n".join([line.format(*header), f"|{rule}|", *(line.format(*row) for row in rows)])


def latex(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same table as a LaTeX `tabular` with the rules of the package booktabs."""
    columns = "l" + "r" * (len(header) - 1)
    table = [[text.translate(_WRITTEN) for text in row] for row in (header, *rows)]
    first, *others = (" & ".join(row) + r" \\" for row in table)
    top = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", first, r"\midrule"]
    return "\n".join([*top, *others, r"\bottomrule", r"\end{tabular}"])


#: How LaTeX writes characters that it reads as commands, and one that it does not know.
_WRITTEN = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash ", "~": r"\textasciitilde ", "^": r"\textasciicircum ", "±": r"$\pm$"}
)


def write_csv(path: str | Path, rows: Sequence[dict[str, Any]], first: Sequence[str] = ()) -> None:
    """Write one line per row, atomically; nothing if there is no column.

    There is a column for every key of any row, those of `first` first; missing values are empty.
    """
    columns = list(dict.fromkeys([*first, *(name for row in rows for name in row)]))
    if not columns:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))
