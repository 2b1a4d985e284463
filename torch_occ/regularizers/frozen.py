"""Modules whose structure is fixed: attributes that are set once, and lists of modules that never change.

A step works out much about its regularizer when it is made (which arguments it reads, how its weights follow from t and
the parameters), so a structure that changed later would be ignored. Values of parameters may change at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Never

from torch import nn


class Frozen(nn.Module):
    """Attributes named in `fixed` can be set once; `fixed` says what to do instead of setting them again."""

    fixed: ClassVar[dict[str, str]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.fixed and (
            name in self.__dict__ or name in self.__dict__.get("_modules", ())
        ):
            self._refuse(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.fixed:
            self._refuse(name)
        super().__delattr__(name)

    def _refuse(self, name: str) -> Never:
        raise AttributeError(f"{type(self).__name__}: {name} cannot be changed; {self.fixed[name]}")


class FrozenList(nn.ModuleList):
    """A list of modules that cannot be changed; `advice` says what to do instead."""

    def __init__(self, modules: Iterable[nn.Module], advice: str = "make a new list") -> None:
        super().__init__()
        self._advice = advice
        for i, module in enumerate(modules):
            nn.Module.add_module(self, str(i), module)

    def _refuse(self, *_: Any, **__: Any) -> Never:
        raise AttributeError(f"the modules in this list cannot be changed; {self._advice}")

    __setitem__ = __delitem__ = __iadd__ = append = extend = insert = pop = add_module = (
        register_module
    ) = _refuse

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._refuse()
        super().__setattr__(name, value)
