"""Modules with a fixed structure: attributes that are set once, and lists that never change.

A step analyses its regularizer when it is made: which arguments it reads, and how its weights
depend on t and the parameters. It would ignore later changes of the structure, so they are errors.
The values of parameters may change at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Never

from torch import nn


class Frozen(nn.Module):
    """A module whose attributes named in `fixed` can be set only once.

    `fixed` maps each name to advice: what to do instead of setting the attribute again.

    Raises:
        AttributeError: if such an attribute is set again or deleted.
    """

    fixed: ClassVar[dict[str, str]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name in self.fixed and (name in own or name in own.get("_modules", ())):
            self._refuse(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.fixed:
            self._refuse(name)
        super().__delattr__(name)

    def _refuse(self, name: str) -> Never:
        raise AttributeError(f"{type(self).__name__}: {name} cannot be changed; {self.fixed[name]}")


class FrozenList(nn.ModuleList):
    """A list of modules that cannot be changed.

    Args:
        modules: the entries.
        advice: what to do instead of a change, for the error message.

    Raises:
        AttributeError: if the list is changed.
    """

    def __init__(self, modules: Iterable[nn.Module], advice: str = "make a new list") -> None:
        super().__init__()
        self._advice = advice
        for i, module in enumerate(modules):
            nn.Module.add_module(self, str(i), module)

    def _refuse(self, *_: Any, **__: Any) -> Never:
        raise AttributeError(f"the modules in this list cannot be changed; {self._advice}")

    __setitem__ = __delitem__ = __iadd__ = append = extend = insert = pop = _refuse
    add_module = register_module = _refuse

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._refuse()
        super().__setattr__(name, value)
