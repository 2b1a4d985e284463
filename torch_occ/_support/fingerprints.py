"""A hash of everything that decides the numbers of a run, so that a saved one is never continued by another."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torch_occ.mdp.layered import LayeredMDP


def fingerprint(*parts: Any) -> str:
    """Of trees of tensors, modules, plain objects and numbers."""
    digest = hashlib.sha256()
    _digest(digest, list(parts))
    return digest.hexdigest()


def _digest(digest: Any, part: Any) -> None:
    """Feed a tree of tensors, modules, plain objects and numbers to a hash, in a fixed order."""
    if isinstance(part, Tensor) and part.layout == torch.sparse_coo:
        _digest(digest, [tuple(part.shape), part.indices(), part.values()])
    elif isinstance(part, Tensor):
        digest.update(str((part.dtype, tuple(part.shape))).encode() + part.detach().cpu().contiguous().numpy().tobytes())
    elif isinstance(part, nn.Module):
        plain = {key: value for key, value in vars(part).items() if not key.startswith("_") and not _derived(part, key)}
        _digest(digest, [type(part).__qualname__, dict(part.named_parameters(recurse=False)), plain, dict(part.named_children())])
    elif isinstance(part, LayeredMDP):
        _digest(digest, [part.transitions, part.initial, part.actions])
    elif isinstance(part, dict):
        for key in sorted(part):
            _digest(digest, [key, part[key]])
    elif isinstance(part, set | frozenset):
        _digest(digest, sorted(map(repr, part)))
    elif isinstance(part, list | tuple):
        digest.update(f"{len(part)}:".encode())
        for item in part:
            _digest(digest, item)
    elif hasattr(part, "__dict__"):
        kept = {key: value for key, value in vars(part).items() if key != "state" and not _derived(part, key)}
        _digest(digest, [type(part).__qualname__, kept])
    else:
        digest.update(repr(part).encode() + b";")


def _derived(part: Any, name: str) -> bool:
    """Whether an attribute is only a cache, which may or may not be there."""
    return isinstance(getattr(type(part), name, None), cached_property)
