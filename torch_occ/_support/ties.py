"""When two numbers count as equal where a choice depends on their order."""

from __future__ import annotations

#: Where a choice depends on the order of two numbers, they are tied if they differ by less than this
#: share of them, and the action with the lowest index wins. Symmetric problems have ties that rounding
#: breaks in another way on every backend and machine; real differences are hardly ever so small.
TIE = 1e-9
