"""Files that are written atomically and checked for damage when they are read.

A file is first written under another name in the same folder and then renamed. So a failure never
destroys what was saved before. Files from which work continues also have a seal: the kind of file,
the version of its format and of this package, and a checksum of these and of the content. A binary
file has its seal in a last line, so that NumPy and torch can still read the file. A JSON file has
it in the entry "seal".
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from torch_occ._support.version import VERSION

#: The version of the file format; files of another format are refused.
FORMAT = 1

_ADVICE = "It is left as it is: move it away to begin anew, or name another file"


# -- atomic writing ----------------------------------------------------------------------------


def write_atomically(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Call `write` with an open binary file that is renamed to `path` once it is on disk.

    Raises:
        OSError: if this fails; it names the path, and the old file is unchanged.
    """
    path = Path(path)
    with _complete_file(path, write) as temporary:
        os.replace(temporary, path)


def try_to_write(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Do everything that `write_atomically` does except the renaming; `path` is unchanged.

    Raises:
        OSError: if nothing can be written there; it names the path.
    """
    path = Path(path)
    with _complete_file(path, write) as temporary:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        os.unlink(temporary)


@contextmanager
def _complete_file(path: Path, write: Callable[[BinaryIO], object]) -> Iterator[str]:
    """Write a temporary file beside `path`, yield its name, and remove it after an error."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        yield temporary
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            reason = f"{error.strerror or error}; nothing that was saved before is lost"
            raise OSError(error.errno, reason, str(path)) from error
        raise


# -- checksums ---------------------------------------------------------------------------------


def write_checked(path: str | Path, kind: str, payload: bytes) -> None:
    """Write bytes and their seal atomically; `kind` names what they are, such as "a run"."""
    write_atomically(path, lambda file: file.write(sealed(kind, payload)))


def sealed(kind: str, payload: bytes) -> bytes:
    """The bytes with their seal, as `write_checked` writes them."""
    return payload + _last_line(_seal(kind, payload))


def read_checked(path: str | Path, kind: str, *, any_version: bool = False) -> bytes:
    """Read the bytes that `write_checked` wrote.

    Args:
        kind: the kind that was given to `write_checked`.
        any_version: accept a file that another version of this package wrote in the same format.

    Returns:
        The bytes, without the seal.

    Raises:
        ValueError: if the file is empty, damaged, truncated, of another kind, of another version,
            or not a file of this package; it names the path.
    """
    content = Path(path).read_bytes()
    body, seal = _parted(content)
    trouble = _trouble(kind, body, seal, any_version) if content else "is empty"
    if trouble:
        raise ValueError(f"{path}: {trouble}. {_ADVICE}")
    return body


def write_checked_json(path: str | Path, kind: str, content: dict[str, Any]) -> None:
    """Write a dictionary as JSON, with its seal in the entry "seal", atomically."""
    whole = content | {"seal": _seal(kind, _canonical(content))}
    write_atomically(path, lambda file: file.write(json.dumps(whole, indent=1).encode()))


def read_checked_json(path: str | Path, kind: str) -> dict[str, Any]:
    """Read the dictionary that `write_checked_json` wrote; raises what `read_checked` raises."""
    text, content, seal = Path(path).read_bytes(), {}, None
    with suppress(ValueError):  # not JSON, so there is no seal
        found = json.loads(text)
        if isinstance(found, dict):
            content, seal = found, found.pop("seal", None)
    trouble = _trouble(kind, _canonical(content), seal, False) if text else "is empty"
    if trouble:
        raise ValueError(f"{path}: {trouble}. {_ADVICE}")
    return content


def check_replaceable(path: str | Path) -> None:
    """Raise a ValueError if `path` holds anything but a complete file of this package."""
    path = Path(path)
    if not path.is_file():
        return
    body, seal = _parted(path.read_bytes())
    if not isinstance(seal, dict) or seal.get("sha256") != _sha256(seal, body):
        found = "a damaged file, or something that torch_occ has not saved"
        raise ValueError(f"{path}: holds {found}. {_ADVICE}")


def _parted(content: bytes) -> tuple[bytes, Any]:
    """The payload, and the seal from the last line; the seal is None if missing or incomplete."""
    body, _, line = content.removesuffix(b"\n").rpartition(b"\n")
    with suppress(ValueError, TypeError):
        seal = json.loads(line)
        if content == body + _last_line(seal):
            return body, seal
    return body, None


def _seal(kind: str, payload: bytes) -> dict[str, Any]:
    seal = {"kind": f"torch_occ {kind}", "format": FORMAT, "version": VERSION}
    return seal | {"sha256": _sha256(seal, payload)}


def _sha256(seal: dict[str, Any], payload: bytes) -> str:
    """The checksum of the payload and of the other entries of the seal."""
    named = {name: seal.get(name) for name in ("kind", "format", "version")}
    return hashlib.sha256(_canonical(named) + b"\n" + payload).hexdigest()


def _canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _last_line(seal: dict[str, Any]) -> bytes:
    return b"\n" + json.dumps(seal).encode() + b"\n"


def _trouble(kind: str, payload: bytes, seal: Any, any_version: bool) -> str | None:
    """A description of what is wrong with a payload and its seal, or None."""
    found = seal if isinstance(seal, dict) else {}
    own, version = str(found.get("kind", "")), found.get("version")
    if not own.startswith("torch_occ "):
        return f"is not {kind} that torch_occ has saved, or it is damaged"
    if found.get("sha256") != _sha256(found, payload):
        return "is damaged: its checksum is wrong"
    if own != f"torch_occ {kind}":
        return f"is {own.removeprefix('torch_occ ')}, not {kind}"
    if found["format"] != FORMAT or (version != VERSION and not any_version):
        return f"was saved by torch_occ {version}, and this is {VERSION}"
    return None
