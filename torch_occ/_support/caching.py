"""Where compiled kernels are kept, and what they must have been compiled from to be used again.

Numba knows a kernel by its own file. But a kernel holds copies of the kernels that it calls and of
their constants, which stand in other files. So kernels are kept with a stamp: a hash of every
source that any of them is compiled from, and the versions that compiled them. Another stamp,
another kernel; the file of the old one is overwritten. Where nothing can be written, kernels are
compiled in every process.

Whatever of Numba's cache this needs, public or private, is used in this module only.
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

#: Every file that kernels are compiled from: their own package, and those from which it imports
#: constants and options.
SOURCES = (
    *sorted((_SUPPORT.parent / "kernels").glob("*.py")),
    *(_SUPPORT / name for name in ("caching.py", "private.py", "spacing.py")),
)


def stamp_of(sources: Sequence[Path]) -> str:
    """A hash of these files, of their names, and of the versions of this package, of Numba and of
    llvmlite.
    """
    digest = hashlib.sha256(f"{VERSION} {numba.__version__} {llvmlite.__version__}".encode())
    for source in sources:
        # a frozen program has no sources, and one version
        content = source.read_bytes() if source.exists() else b""
        digest.update(f"\n{source.parent.name}/{source.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def keep(dispatcher: Any) -> Any:
    """Give a compiled function its place on disk, if there is one to be had."""
    try:
        dispatcher._cache = _KernelCache(dispatcher.py_func)
    except RuntimeError:  # Numba found no place
        _nowhere("neither the package's own folder nor the user's cache folder can be written to")
    return dispatcher


@cache
def _nowhere(reason: str) -> None:
    warnings.warn(
        "torch_occ: compiled kernels cannot be kept, and every process compiles them anew, for "
        f"about half a minute: {reason}. "
        "Name a folder that can be written to in the environment variable NUMBA_CACHE_DIR.",
        stacklevel=2,
    )


#: Of the files as they are imported. A process that goes on after an edit keeps what it compiles
#: under the old stamp.
_STAMP = stamp_of(SOURCES)


class _Stamped:
    """The part of a locator that says what a kernel was compiled from."""

    def get_source_stamp(self) -> str:
        return _STAMP

    def get_disambiguator(self) -> str:
        # Numba takes the number of the line, and then each edit above a kernel leaves a file behind
        return "engine"


class _Provided(_Stamped, caching.UserProvidedCacheLocator):
    """In NUMBA_CACHE_DIR."""


class _InTree(_Stamped, caching.InTreeCacheLocator):
    """Beside the sources, in `__pycache__`."""


class _UserWide(_Stamped, caching.UserWideCacheLocator):
    """In the user's own cache folder."""


class _Implementation(caching.CompileResultCacheImpl):
    _locator_classes = [_Provided, _InTree, _UserWide]  # noqa: RUF012 - as Numba declares it


class _KernelCache(caching.FunctionCache):
    """Every file says which kernel it holds.

    Numba writes an index and a file for each kernel, one after the other. When two processes do so
    at once, an index may lead to another kernel; nothing without the right label is taken.
    """

    _impl_class = _Implementation

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        key = self._index_key(sig, target_context.codegen())
        try:
            label, payload = self._cache_file.load(key)
        except Exception:  # none, or one that cannot be read: whatever it is, it is compiled again
            return None
        return self._impl.rebuild(target_context, payload) if label == self._label(key) else None

    def _save_overload(self, sig: Any, data: Any) -> None:
        if self._impl.check_cachable(data):
            key = self._index_key(sig, data.codegen)
            try:
                self._impl.locator.ensure_cache_path()
                self._cache_file.save(key, (self._label(key), self._impl.reduce(data)))
            except OSError as error:  # the disk is full, or the folder is gone
                _nowhere(f"{self.cache_path}: {error.strerror}")

    def _label(self, key: Any) -> tuple[Any, ...]:
        """The stamp, the kernel, its signature and the processor."""
        return _STAMP, self._py_func.__module__, self._py_func.__qualname__, key
