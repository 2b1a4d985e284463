"""Hashes of everything that decides the numbers of a run, to recognize a saved run.

Data is hashed by its bytes, and objects by what `pickle` would store of them. Functions and classes
count with their names. Those of users also count with their source text, if there is one, with
defaults, closures and bases; the global names that they read do not count. `id` and `hash` are
never used, so the result is the same in every process. An object that cannot be hashed is refused,
and the error gives the path to it.

A class may list attributes that decide nothing, such as caches and counters, in
`fingerprint_ignores`. Cached properties are never hashed.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from collections.abc import Iterable
from pathlib import PurePath
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torch_occ._support.private import held_by
from torch_occ._support.version import VERSION

#: The version of the rules of hashing, and of what the state of a run holds.
RULES = 4

#: Values that their `repr` describes completely.
_PLAIN = (int, bool, float, complex, str, bytes, bytearray, range, slice, type(None), type(...))
_NAMED = (np.generic, np.dtype, torch.dtype, torch.device, torch.layout, PurePath)


class UnhashableError(TypeError):
    """An object cannot be hashed, so a saved run that holds it could not be recognized."""


def fingerprint(**parts: Any) -> str:
    """One hash of all parts, their names and the package's version; raises as `fingerprints`."""
    return _joined("all", (text.encode() for text in fingerprints(**parts).values())).hex()


def fingerprints(**parts: Any) -> dict[str, str]:
    """The hash of each part and of the package's version, by the name of the part.

    Raises:
        UnhashableError: if an object cannot be hashed; it gives the path, as `learner.step.lock`.
    """
    hasher = _Hasher()
    found = {name: hasher.digest(part, name) for name, part in parts.items()}
    return {name: _joined(f"{RULES} {VERSION} {name}", [x]).hex() for name, x in found.items()}


def differences(saved: Any, now: dict[str, str]) -> list[str]:
    """The names of the parts whose hashes differ between two results of `fingerprints`."""
    known = saved if isinstance(saved, dict) else {}
    return [name for name in {**now, **known} if known.get(name) != now.get(name)]


class _Hasher:
    """Hashes trees of objects; each object is hashed once."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Any, bytes]] = {}  # by id; holds the object, so the id is kept
        self.open: dict[int, str] = {}  # the paths of objects that are being hashed

    def digest(self, part: Any, where: str) -> bytes:
        """The hash of one object; `where` is the path to it."""
        if type(part) in _PLAIN or isinstance(part, _NAMED):
            return _joined(type(part).__qualname__, [repr(part).encode("utf-8", "surrogatepass")])
        if id(part) in self.open:  # a cycle
            return _joined("cycle", [self.open[id(part)].encode()])
        if id(part) not in self.known:
            self.open[id(part)] = where
            try:
                found = self._compound(part, where)
            finally:
                del self.open[id(part)]
            self.known[id(part)] = (part, found)
        return self.known[id(part)][1]

    def _list(self, tag: str, parts: Iterable[tuple[str, Any]]) -> bytes:
        return _joined(tag, [self.digest(part, where) for where, part in parts])

    def _mapping(self, part: Any, where: str, way: str = "{}[{!r}]") -> bytes:
        """Hash a mapping in an order that does not depend on insertion."""
        pairs = [
            self.digest(key, f"a key of {where}") + self.digest(value, way.format(where, key))
            for key, value in part.items()
        ]
        return _joined("mapping", sorted(pairs))

    def _compound(self, part: Any, where: str) -> bytes:
        kind = type(part)
        if kind in (list, tuple):
            return self._list(kind.__name__, ((f"{where}[{i}]", x) for i, x in enumerate(part)))
        if kind in (set, frozenset):
            found = (self.digest(item, f"an element of {where}") for item in part)
            return _joined(kind.__name__, sorted(found))
        if kind in (dict, MappingProxyType):
            return self._mapping(part, where)
        if isinstance(part, Tensor) and part.layout == torch.strided and not part.is_meta:
            # A tensor with one entry counts as contiguous whatever its stride is, so it is copied.
            flat = torch.empty(part.numel(), dtype=part.dtype)
            flat.copy_(part.detach().resolve_conj().resolve_neg().reshape(-1))
            label = f"tensor {part.dtype} {tuple(part.shape)}"
            return _joined(label, [flat.view(torch.uint8).numpy().tobytes()])
        if isinstance(part, Tensor):  # sparse; gradients do not count
            part = part.detach()
        if kind is np.ndarray and not part.dtype.hasobject:
            label = f"array {part.dtype.descr} {part.shape}"
            return _joined(label, [np.ascontiguousarray(part).tobytes()])
        if isinstance(part, nn.Module):
            return self._module(part, where)
        if isinstance(part, FunctionType | type | ModuleType):
            return self._code(part, where)
        return self._pickled(part, where)

    def _code(self, part: Any, where: str) -> bytes:
        """Hash a function, a class or a module of Python."""
        held: list[tuple[str, Any]] = [(where, _name_of(part))]
        if isinstance(part, FunctionType) and (_is_users(part) or "<" in part.__qualname__):
            held += [(where, _source(part))]
            held += [(f"{where}'s defaults", [part.__defaults__, part.__kwdefaults__])]
            closure = inspect.getclosurevars(part).nonlocals
            held += [(f"{where}'s variable {name}", x) for name, x in closure.items()]
        elif isinstance(part, type) and _is_users(part):
            held += [(where, _source(part))]
            held += [(f"{where}'s base", base) for base in part.__bases__]
        return self._list("code", held)

    def _module(self, part: nn.Module, where: str) -> bytes:
        """Parameters, buffers, children, hooks and everything else that a module holds."""
        held: list[tuple[str, Any]] = [(f"the class of {where}", type(part))]
        held += [(f"{where}.{name}", [name, value]) for name, value in held_by(part)]
        own = {name: value for name, value in vars(part).items() if name not in _TORCHS_OWN}
        return _joined("module", [self._list("held", held), self._state(part, own, where)])

    def _pickled(self, part: Any, where: str) -> bytes:
        """Hash the class of an object, its constructor's arguments, and its attributes."""
        try:
            reduced = part.__reduce_ex__(4)
        except Exception as error:
            raise UnhashableError(
                f"{where}: a {type(part).__qualname__} cannot be hashed ({error}), so a saved run "
                "could not be told from another one. Make it of tensors, numbers and functions, "
                "list the attribute in `fingerprint_ignores` of its class if it decides nothing, "
                "or leave `save_to` out"
            ) from error
        if isinstance(reduced, str):  # a global name
            module = getattr(part, "__module__", None)
            return _joined("global", [f"{_name_of(type(part))} {module} {reduced}".encode()])
        maker, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        # The state of an object with slots is a pair: its attributes and its slots.
        split = type(state) is tuple and len(state) == 2 and type(state[1]) is dict
        found = [
            self._list("class", [(f"the class of {where}", x) for x in (type(part), maker)]),
            self._list("arguments", [(where, argument) for argument in arguments]),
            *(self._state(part, x, where) for x in (state if split else [state])),
            self._list("items", [(f"{where}[{i}]", x) for i, x in enumerate(items or ())]),
            self._mapping(dict(pairs or ()), where),
        ]
        return _joined("object", found)

    def _state(self, part: Any, state: Any, where: str) -> bytes:
        """Hash attributes, without caches; None is an object without attributes."""
        state = {} if state is None else state
        if type(state) is not dict:
            return self.digest(state, where)
        kind = type(part)
        ignored = {"fingerprint_ignores"}
        for base in kind.__mro__:
            ignored.update(vars(base).get("fingerprint_ignores", ()))
        kept = {
            name: value
            for name, value in state.items()
            if name not in ignored
            and not isinstance(getattr(kind, str(name), None), functools.cached_property)
        }
        return self._mapping(kept, where, "{}.{}")


#: Attributes of `nn.Module` itself; its tables and hooks are hashed by name.
_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}


def _name_of(part: Any) -> str:
    """Module and qualified name."""
    module = getattr(part, "__module__", None) or ""
    return f"{module}.{getattr(part, '__qualname__', part.__name__)}"


def _is_users(part: Any) -> bool:
    """Whether code belongs neither to Python nor to an installed package nor to torch_occ."""
    module = part.__module__ or ""
    path = PurePath(getattr(sys.modules.get(module), "__file__", None) or "")
    own = {__name__.partition(".")[0], *sys.stdlib_module_names}
    installed = {"site-packages", "dist-packages"} & {*path.parts}
    return module.partition(".")[0] not in own and not installed


def _source(part: Any) -> str | None:
    try:
        return inspect.getsource(part)
    except (OSError, TypeError):
        return None


def _joined(tag: str, parts: Iterable[bytes]) -> bytes:
    """A hash of a tag and of byte strings, each with its length, so that they stay separate."""
    digest = hashlib.sha256()
    for part in (tag.encode(), *parts):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
