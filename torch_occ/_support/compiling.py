"""How kernels are compiled, and kept on disk with a stamp that decides whether they are valid.

A kernel is what Python calls; a routine is what only kernels call. Numba alone would optimize and
emit each routine by itself, and again inside of its callers, which took half of the time. Here a
routine stays as it was lowered, and is optimized with the kernel that it is linked into.

Numba validates a cached kernel by the file in which the kernel stands. But a kernel contains copies
of the kernels and constants that it uses from other files. So every entry here has a stamp: a hash
of all sources that any kernel is compiled from, and of the versions that compiled them. An entry
with another stamp is compiled again and overwritten. If no cache folder is writable, kernels are
compiled in every process.
"""

from __future__ import annotations

import gc
import hashlib
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numba
from numba import types

from torch_occ._support.private import (
    Compiler,
    JITCodeLibrary,
    caching,
    compile_result,
    parse_bitcode,
)
from torch_occ._support.version import VERSION

_SUPPORT = Path(__file__).parent

#: Every file that kernels are compiled from: the packages `engine` and `rivals`, and the modules
#: from which they import constants and options.
SOURCES = (
    *sorted((_SUPPORT.parent / "engine").rglob("*.py")),
    *sorted((_SUPPORT.parent / "rivals").rglob("*.py")),
    *(_SUPPORT / name for name in ("compiling.py", "private.py", "constants.py")),
)


def stamp_of(sources: Sequence[Path]) -> str:
    """A hash of the files, their names, and the versions of torch_occ, Numba and llvmlite."""
    llvmlite = sys.modules["llvmlite"]
    digest = hashlib.sha256(f"{VERSION} {numba.__version__} {llvmlite.__version__}".encode())
    for source in sources:
        # A frozen program has no source files; its version is enough.
        content = source.read_bytes() if source.exists() else b""
        digest.update(f"\n{source.parent.name}/{source.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def keep_on_disk(dispatcher: Any) -> Any:
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


# -- compiling -------------------------------------------------------------------------------------


#: Passes of Numba for expressions of whole arrays, list comprehensions and closures.
_UNUSED = {"nopython_rewrites", "inline_closure_likes"}


class KernelCompiler(Compiler):
    """Numba's compiler, with less work: look-ups are remembered, garbage is kept, passes left out.

    So kernels have no expressions of whole arrays, list comprehensions or closures.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.state.typingctx = _Remembering(self.state.typingctx, self.state.flags)

    def define_pipelines(self) -> Any:
        pipelines = super().define_pipelines()
        for pipeline in pipelines:
            pipeline.passes = [x for x in pipeline.passes if x[0].name() not in _UNUSED]
            pipeline.finalize()
        return pipelines

    def compile_extra(self, function: Any) -> Any:
        with _compiling(function.__name__):
            found = super().compile_extra(function)
        if not isinstance(found.library, _RoutineLibrary):
            # Numba would do this for routines when it emits them.
            for environment in found._find_referenced_environments():
                found.codegen.set_env(environment.env_name, environment)
        return found


class RoutineCompiler(KernelCompiler):
    """The compiler of functions that only kernels call; they are never emitted by themselves."""

    def compile_extra(self, function: Any) -> Any:
        codegen = self.state.targetctx.codegen()
        self.state.library = _RoutineLibrary(codegen, function.__qualname__)
        self.state.library.enable_object_caching()
        return super().compile_extra(function)


class _RoutineLibrary(JITCodeLibrary):
    """The code of a routine and its callees, to be linked into kernels.

    It is neither optimized nor emitted, so it has no address, and no place for an environment.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> Any:
        return self

    def set_env(self, name: str, environment: Any) -> None:
        pass

    def serialize_using_object_code(self) -> Any:
        return self.serialize_using_bitcode()


class _Remembering:
    """Numba's typing context, which remembers what functions of given types return.

    Numba tries up to a hundred definitions for each of thousands of `+`. The type of a function
    contains its definitions, so nothing is out of date when another package adds one.
    """

    _found: dict[Any, dict[Any, Any]] = {}  # noqa: RUF012 - shared by all

    def __init__(self, context: Any, flags: Any) -> None:
        self._context, self._own = context, self._found.setdefault(flags.copy(), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_function_type(self, function: Any, arguments: Any, keywords: Any) -> Any:
        if keywords or not isinstance(function, types.Function | types.Dispatcher):
            return self._context.resolve_function_type(function, arguments, keywords)
        if isinstance(function, types.Dispatcher):  # one version of a routine for all constants
            arguments = tuple(map(types.unliteral, arguments))
        kinds: Any = (function, *arguments)
        key = tuple(kind._code for kind in kinds)
        if key not in self._own:
            found = self._context.resolve_function_type(function, arguments, keywords)
            if found is None:
                return None
            self._own[key] = found
        return self._own[key]


#: Seconds of compiling after which a message says so, and between two messages on a terminal.
PATIENCE = 1.0

_busy: list[str] = []  # what is being compiled; Numba compiles in one thread at a time


@contextmanager
def _compiling(name: str) -> Iterator[None]:
    """Switch the garbage collector off, and say what is compiled if that takes longer."""
    _busy.append(name)
    if len(_busy) > 1:  # a routine of a kernel
        yield
        return
    begun, collects, ended = time.perf_counter(), gc.isenabled(), Event()
    kept = "in every process" if _nowhere.cache_info().currsize else "once for this machine"

    def watch() -> None:
        """Say it once; on a terminal, also say how far it is, every second."""
        alive, said = sys.stderr.isatty(), False
        while not ended.wait(PATIENCE):
            if alive or not said:
                far = f" {len(_busy)} functions" if said else ""
                text = f"torch_occ: compiling {name}, {kept} ...{far}"
                print(text, end="\r" if alive else "\n", file=sys.stderr, flush=True)
            said = True
        if said:
            took = f"torch_occ: compiled {name} in {time.perf_counter() - begun:.0f} s"
            print(f"{took:<{70 * alive}}", file=sys.stderr, flush=True)

    watcher = Thread(target=watch, daemon=True)
    gc.disable()
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        _busy.clear()
        if collects:
            gc.enable()


# -- the cache -------------------------------------------------------------------------------------

#: Computed at import. If a source is edited while a process runs, what this process compiles is
#: stored under the old stamp.
_STAMP = stamp_of(SOURCES)


class _Implementation(caching.CompileResultCacheImpl):
    """How Numba stores a function; here a routine is stored, too, as bitcode."""

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        """A compiled function from what was stored: a kernel, or a routine."""
        (name, kind, code), description, environment, signature, *_, environments = payload
        if kind == "object":
            return super().rebuild(target_context, payload)
        library = _RoutineLibrary(target_context.codegen(), name)
        library._final_module = parse_bitcode(code)
        library._finalize_final_module()
        return compile_result(
            target_context=target_context,
            typing_context=target_context.typing_context,
            library=library,
            entry_point=target_context.get_executable(library, description, environment),
            fndesc=description,
            environment=environment,
            signature=signature,
            objectmode=False,
            lifted=(),
            reload_init=(),
            referenced_envs=environments,
        )


def _foreign(kind: Any) -> bool:
    """Whether a type has named tuples of another package, which other processes may not know."""
    own = getattr(kind, "instance_class", None)
    outside = own is not None and not own.__module__.startswith("torch_occ.")
    return outside or any(map(_foreign, getattr(kind, "types", ())))


class _KernelCache(caching.FunctionCache):
    """A cache with a file for each version of a kernel, which is ignored if its label is wrong.

    Numba would also write an index, which two processes at once can spoil.
    """

    _impl_class = _Implementation

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        name, label = self._place(sig, target_context.codegen())
        try:
            found, payload = self._cache_file._load_data(name)
            return self._impl.rebuild(target_context, payload) if found == label else None
        except Exception:  # missing or unreadable, for any reason: compile again
            return None

    def _save_overload(self, sig: Any, data: Any) -> None:
        if self._impl.check_cachable(data) and not any(map(_foreign, sig)):
            name, label = self._place(sig, data.codegen)
            try:
                self._impl.locator.ensure_cache_path()
                # The annotation is the text of the function with all types, for people.
                stored = self._impl.reduce(data._replace(type_annotation=None))
                self._cache_file._save_data(name, (label, stored))
            except OSError as error:  # for example a full disk, or a deleted folder
                _nowhere(f"{self.cache_path}: {error.strerror}")

    def _place(self, sig: Any, codegen: Any) -> tuple[str, tuple[Any, ...]]:
        """The name of the file, which stays when sources are edited, and the label in the file."""
        function, (sig, target, code) = self._py_func, self._index_key(sig, codegen)
        every = repr((function.__module__, function.__qualname__, sig, target))
        hashed = hashlib.sha256(every.encode()).hexdigest()[:16]
        name = f"{function.__name__}-{hashed}.{sys.implementation.cache_tag}.nbc"
        return name, (_STAMP, every, sig, code)
