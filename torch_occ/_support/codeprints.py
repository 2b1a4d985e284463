"""The parts of a function or a class that decide what it does; `fingerprints` hashes them.

User code counts with its bytecode, constants, defaults, closures and the global names that it
reads. A user's class counts with everything that it defines and with its bases. Code of Python, of
installed packages and of torch_occ counts with its name and the version of its package.
"""

from __future__ import annotations

import enum
import functools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

#: Entries of a class that do not decide what it does.
_MADE_BY_PYTHON = frozenset({"__class_getitem__", "_abc_impl", "_backward_cls", "__annotate__"})
_HERE = __name__.partition(".")[0]
_STANDARD = tuple(Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib"))


class Parts(NamedTuple):
    """The parts of an object, each with its path from the object, such as `'s default`."""

    tag: str
    parts: list[tuple[str, Any]]


class Global(NamedTuple):
    """A global name that code reads. If its value cannot be hashed, its type is hashed."""

    name: str
    value: Any


def parts_of_code(part: Any) -> Parts | None:
    """The parts of a function, method, class, module or bytecode; None for anything else."""
    if isinstance(part, FunctionType):
        return _function(part)
    if isinstance(part, type):
        return _class(part)
    if isinstance(part, CodeType):
        return _bytecode(part)
    if isinstance(part, ModuleType):
        return Parts("python module", [("", part.__name__)])
    if isinstance(part, MethodType):
        return Parts("method", [("", part.__func__), ("'s self", part.__self__)])
    if isinstance(part, BuiltinFunctionType):
        owner = None if isinstance(part.__self__, ModuleType) else part.__self__
        return Parts("builtin", [("", name_of(part)), ("'s self", owner)])
    if isinstance(part, staticmethod | classmethod):
        return Parts(type(part).__name__, [("", part.__func__)])
    if isinstance(part, property):
        return Parts("property", [("", part.fget), ("'s setter", part.fset)])
    if isinstance(part, functools.cached_property):
        return Parts("cached property", [("", part.func)])
    if isinstance(part, type(_installed)):  # the type that `functools.cache` returns
        return Parts("cache", [("", part.__wrapped__)])
    if isinstance(part, MemberDescriptorType | GetSetDescriptorType):
        return Parts("slot", [("", part.__name__)])
    if type(part).__module__.startswith("numba.") and hasattr(part, "py_func"):
        return Parts("compiled", [("", part.py_func)])
    return None


def attributes(owner: type, state: dict[str, Any]) -> dict[str, Any]:
    """The entries of `state` that no class of the owner lists in `fingerprint_ignores`."""
    ignored = {"fingerprint_ignores"}
    for base in owner.__mro__:
        ignored.update(vars(base).get("fingerprint_ignores", ()))
    return {name: value for name, value in state.items() if name not in ignored}


def name_of(thing: Any) -> str:
    """Module and qualified name, and for an installed package also its version."""
    module = getattr(thing, "__module__", None) or ""
    root, version = module.partition(".")[0], ""
    if _installed(module) and root not in (_HERE, "torch", "numpy"):  # these only round otherwise
        version = str(getattr(sys.modules.get(root), "__version__", ""))
    return f"{module}.{getattr(thing, '__qualname__', thing)} {version}"


def _function(part: FunctionType) -> Parts:
    installed = _installed(part.__module__)
    found: list[tuple[str, Any]] = [("", name_of(part))]
    if installed and "<" not in part.__qualname__:  # <lambda>, <locals>
        return Parts("function", found)
    found += [("", part.__code__), ("'s defaults", [part.__defaults__, part.__kwdefaults__])]
    for name, cell in zip(part.__code__.co_freevars, part.__closure__ or (), strict=True):
        found.append((f"'s variable {name}", _content(cell)))
    found += [(f".{name}", [name, x]) for name, x in vars(part).items() if name != "__wrapped__"]
    if not installed:
        found += ((f"'s global {read.name}", read) for read in _globals(part))
    return Parts("function", found)


def _globals(part: FunctionType) -> Iterator[Global]:
    """The global names that the code reads, also through other modules of the user."""
    names, seen = sorted(_names(part.__code__)), set[str]()
    waiting = [(name, part.__globals__[name]) for name in names if name in part.__globals__]
    while waiting:
        name, value = waiting.pop()
        yield Global(name, value)
        if isinstance(value, ModuleType) and name not in seen and not _installed(value.__name__):
            seen.add(name)
            inner = vars(value)
            waiting += [(f"{name}.{entry}", inner[entry]) for entry in names if entry in inner]


def _names(code: CodeType) -> set[str]:
    """All names that the code reads, including nested code."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*(_names(constant) for constant in inner))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None


def _bytecode(part: CodeType) -> Parts:
    """Bytecode without file names and line numbers."""
    shape = (part.co_argcount, part.co_posonlyargcount, part.co_kwonlyargcount, part.co_flags)
    names = (part.co_names, part.co_varnames, part.co_freevars, part.co_cellvars)
    held = [part.co_code, part.co_exceptiontable, shape, names, part.co_consts]
    return Parts("code", [("'s code", x) for x in held])


def _class(part: type) -> Parts:
    found: list[tuple[str, Any]] = [("", name_of(part))]
    if _installed(part.__module__) and "<locals>" not in part.__qualname__:
        return Parts("class", found)
    kept = attributes(part, dict(vars(part)))
    for name in sorted(kept):
        value = kept[name]
        # Members of an enumeration are hashed with their values where they occur.
        wanted = not issubclass(part, enum.Enum) or isinstance(value, FunctionType)
        made = name in _MADE_BY_PYTHON or (name.startswith("__") and not callable(value))
        if wanted and not made:
            found.append((f".{name}", [name, value]))
    return Parts("class", found + [("'s base", base) for base in part.__bases__])


@functools.cache
def _installed(module: str | None) -> bool:
    """Whether a module belongs to Python, to an installed package or to torch_occ."""
    root = (module or "").partition(".")[0]
    if root == "__main__":
        return False
    if root == _HERE:
        return True
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if file is None:
        return root in sys.stdlib_module_names or root in sys.builtin_module_names
    path = Path(file)
    packages = {"site-packages", "dist-packages"} & {*path.parts}
    return bool(packages) or any(path.is_relative_to(place) for place in _STANDARD)
