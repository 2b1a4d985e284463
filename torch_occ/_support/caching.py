"""The cache of compiled kernels on disk, and the stamp that decides whether an entry is valid.

Numba validates a cached kernel by the file in which the kernel stands. But a kernel contains copies
of the kernels and constants that it uses from other files. So every entry here has a stamp: a hash
of all sources that any kernel is compiled from, and of the versions that compiled them. An entry
with another stamp is compiled again and overwritten. If no cache folder is writable, kernels are
compiled in every process.

No other module uses Numba's cache classes.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import caching

from torch_occ._support.version import VERSION

_SUPPORT = Path(__file__).parent

#: Every file that kernels are compiled from: the package `engine`, and the modules from which it
#: imports constants and options.
SOURCES = (
    *sorted((_SUPPORT.parent / "engine").rglob("*.py")),
    *(_SUPPORT / name for name in ("caching.py", "private.py", "constants.py")),
)


def stamp_of(sources: Sequence[Path]) -> str:
    """A hash of the files, their names, and the versions of torch_occ, Numba and llvmlite."""
    digest = hashlib.sha256(f"{VERSION} {numba.__version__} {llvmlite.__version__}".encode())
    for source in sources:
        # A frozen program has no source files; its version is enough.
        content = source.read_bytes() if source.exists() else b""
        digest.update(f"\n{source.parent.name}/{source.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def keep(dispatcher: Any) -> Any:
    """Cache a compiled function on disk if a folder is writable; return the function."""
    try:
        dispatcher._cache = _KernelCache(dispatcher.py_func)
    except RuntimeError:  # Numba found no writable folder
        _nowhere("neither the package's own folder nor the user's cache folder can be written to")
    return dispatcher


@cache
def _nowhere(reason: str) -> None:
    warnings.warn(
        "torch_occ: compiled kernels cannot be kept, and every process compiles them anew, for "
        f"about half a minute: {reason}. Name a folder that can be written to in the environment "
        "variable NUMBA_CACHE_DIR.",
        stacklevel=2,
    )


#: Computed at import. If a source is edited while a process runs, what this process compiles is
#: stored under the old stamp.
_STAMP = stamp_of(SOURCES)


class _Stamped:
    """The part of a cache locator that returns our stamp instead of Numba's."""

    def get_source_stamp(self) -> str:
        return _STAMP

    def get_disambiguator(self) -> str:
        # Numba would use the line number, so that each edit above a kernel leaves a stale file.
        return "engine"


class _Provided(_Stamped, caching.UserProvidedCacheLocator):
    """In NUMBA_CACHE_DIR."""


class _InTree(_Stamped, caching.InTreeCacheLocator):
    """Beside the sources, in `__pycache__`."""


class _UserWide(_Stamped, caching.UserWideCacheLocator):
    """In the user's own cache folder."""


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [_Provided, _InTree, _UserWide]  # noqa: RUF012 - declared like this in Numba


class _KernelCache(caching.FunctionCache):
    """A cache in which every file contains a label of the kernel that it holds.

    Numba writes an index and a data file for each kernel, one after the other. If two processes
    write at the same time, an index may point to another kernel. A file with the wrong label is
    ignored.
    """

    _impl_class = _Implementation

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        key = self._index_key(sig, target_context.codegen())
        try:
            label, payload = self._cache_file.load(key)
        except Exception:  # missing or unreadable, for any reason: compile again
            return None
        return self._impl.rebuild(target_context, payload) if label == self._label(key) else None

    def _save_overload(self, sig: Any, data: Any) -> None:
        if self._impl.check_cachable(data):
            key = self._index_key(sig, data.codegen)
            try:
                self._impl.locator.ensure_cache_path()
                self._drop_unreadable_index()
                self._cache_file.save(key, (self._label(key), self._impl.reduce(data)))
            except OSError as error:  # for example a full disk, or a deleted folder
                _nowhere(f"{self.cache_path}: {error.strerror}")

    def _drop_unreadable_index(self) -> None:
        """Start a new index if an earlier version left one with classes that no longer exist."""
        try:
            self._cache_file._load_index()
        except Exception:  # whatever it is, a new index replaces it
            self._cache_file.flush()

    def _label(self, key: Any) -> tuple[Any, ...]:
        """The stamp, the kernel's name, its signature and the processor."""
        return _STAMP, self._py_func.__module__, self._py_func.__qualname__, key
