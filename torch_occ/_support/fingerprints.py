"""Hashes of everything that decides the numbers of a run, to recognize a saved run.

Data counts by its bytes, an object by its class and what `pickle` would store of it, functions and
classes by their names: their code does not count. The result is the same in every process.

A class may list attributes that decide nothing, such as caches and counters, in
`fingerprint_ignores`. Cached properties are never hashed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from torch_occ._support.private import held_by
from torch_occ._support.version import VERSION

#: The version of the rules of hashing, and of what the state of a run holds.
RULES = 5

#: Values that their `repr` describes completely.
_PLAIN = (int, bool, float, complex, str, bytes, type(None), torch.dtype, torch.layout)

#: Attributes of `nn.Module` itself; its tables and hooks are hashed by name.
_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}


class UnhashableError(TypeError):
    """An object cannot be hashed, so a saved run that holds it could not be recognized."""


def fingerprints(**parts: Any) -> dict[str, str]:
    """The hash of each part and of the package's version, by the name of the part.

    Raises:
        UnhashableError: if an object cannot be hashed; it gives the path, as `learner.step.lock`.
    """
    known: dict[int, tuple[Any, bytes]] = {}
    found = {name: _digest(part, name, known) for name, part in parts.items()}
    return {name: _joined(f"{RULES} {VERSION} {name}", x).hex() for name, x in found.items()}


def _digest(part: Any, where: str, known: dict[int, tuple[Any, bytes]]) -> bytes:
    """The hash of the object at a path; `known` has objects by id, and their hashes."""
    kind = f"{type(part).__module__}.{type(part).__qualname__}"
    if type(part) in _PLAIN:
        data = part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass")
        return _joined(kind, data)
    if id(part) not in known:
        known[id(part)] = (part, b"cycle")
        # Sorted, so that neither insertion nor Python's hashes decide.
        held = sorted(_joined(way, _digest(x, where + way, known)) for way, x in _held(part, where))
        known[id(part)] = (part, _joined(kind, *held))
    return known[id(part)][1]


def _held(part: Any, where: str) -> Iterator[tuple[str, Any]]:
    """What an object holds, each with the way to it."""
    kind = type(part)
    if isinstance(part, Tensor) and part.layout == torch.strided and not part.is_meta:
        # A tensor with one entry counts as contiguous whatever its stride is, so it is copied.
        flat = torch.empty(part.numel(), dtype=part.dtype)
        flat.copy_(part.detach().resolve_conj().resolve_neg().reshape(-1))
        yield f"{part.dtype} {part.shape}", flat.view(torch.uint8).numpy().tobytes()
    elif kind in (list, tuple):
        yield from ((f"[{i}]", x) for i, x in enumerate(part))
    elif kind in (set, frozenset):
        yield from (("", x) for x in part)
    elif kind in (dict, MappingProxyType):
        yield from ((f"[{key!r}]", x) for key, x in part.items())
    elif isinstance(part, FunctionType | type | ModuleType):
        name = getattr(part, "__qualname__", part.__name__)
        yield "", f"{getattr(part, '__module__', '')}.{name}"
        if isinstance(part, FunctionType):
            closure = [cell.cell_contents for cell in part.__closure__ or ()]
            yield "'s values", [part.__defaults__, part.__kwdefaults__, closure]
    elif isinstance(part, nn.Module):
        own = {name: x for name, x in vars(part).items() if name not in _TORCHS_OWN}
        yield from _attributes(kind, dict(held_by(part)) | own)
    else:
        try:  # sparse tensors consist of others; gradients do not count
            reduced = (part.detach() if isinstance(part, Tensor) else part).__reduce_ex__(4)
        except Exception as error:
            raise UnhashableError(
                f"{where}: a {kind.__qualname__} cannot be hashed ({error}), so a saved run could "
                "not be told from another one. Make it of tensors, numbers and functions, list "
                "the attribute in `fingerprint_ignores` of its class if it decides nothing, or "
                "leave `save_to` out"
            ) from error
        if isinstance(reduced, str):  # a global name
            reduced = (f"{getattr(part, '__module__', None)} {reduced}", ())
        maker, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        yield "'s making", [maker, arguments, list(items or ()), dict(pairs or ())]
        # The state of an object with slots is a pair: its attributes and its slots.
        split = type(state) is tuple and len(state) == 2 and type(state[1]) is dict
        for held in state if split else [state]:
            if type(held) is dict:
                yield from _attributes(kind, held)
            elif held is not None:
                yield "'s state", held


def _attributes(kind: type, state: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Attributes without caches and without those that are ignored."""
    listed = (vars(base).get("fingerprint_ignores", ()) for base in kind.__mro__)
    ignored = {"fingerprint_ignores"}.union(*listed)
    for name, value in state.items():
        cache = isinstance(getattr(kind, str(name), None), functools.cached_property)
        if name not in ignored and not cache:
            yield f".{name}", value


def _joined(tag: str, *parts: bytes) -> bytes:
    """A hash of a tag and of byte strings, each with its length, so that they stay separate."""
    digest = hashlib.sha256()
    for part in (tag.encode(), *parts):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
