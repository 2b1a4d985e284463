"""Vectors and masks: one number or bool per lane, with the operators of plain ones.

Vectors are LLVM vectors. Where registers are narrower, LLVM splits them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.typeconv.castgraph import Conversion
from numba.core.typing.templates import signature
from numba.extending import lower_builtin, lower_cast, register_model, type_callable

#: The number of lanes of a batch, and of one or two problems. Both give the same bits, because the
#: same operations are done in every lane.
LANES, FEW_LANES = 8, 2


def lanes_for(count: int, few: int = FEW_LANES) -> int:
    """The number of lanes for some problems, `few` for one or two."""
    return LANES if count > 2 else few


#: Products and sums may be fused, as in all kernels. Sums are never reordered.
_FUSED = ("contract",)


class _LaneType(types.Type):
    """A type with one value per lane; a plain value converts to it by repetition."""

    plain: type[types.Type]

    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__(name=f"{type(self).__name__}({width})")

    def unify(self, typingctx: Any, other: types.Type) -> types.Type | None:
        return self if isinstance(other, self.plain) else None

    def can_convert_from(self, typingctx: Any, other: types.Type) -> Any:
        return Conversion.safe if isinstance(other, self.plain) else None

    @classmethod
    def among(cls, *kinds: Any) -> _LaneType | None:
        """The one type of this class among some, if the others convert to it; else None."""
        found = {kind for kind in kinds if isinstance(kind, cls)}
        others = all(isinstance(kind, cls.plain) for kind in kinds if kind not in found)
        return found.pop() if len(found) == 1 and others else None


class Vector(_LaneType):
    """One float per lane."""

    plain = types.Number


class Mask(_LaneType):
    """One bool per lane."""

    plain = types.Boolean


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Vector) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(ir.DoubleType(), fe_type.width))


@register_model(Mask)
class _MaskModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Mask) -> None:
        super().__init__(dmm, fe_type, ir.VectorType(ir.IntType(1), fe_type.width))


def _repeat(builder: Any, value: Any, width: int) -> Any:
    """A vector with the same value in every lane."""
    undefined = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), width), [0] * width)
    return builder.shuffle_vector(one, undefined, zeros)


@lower_cast(types.Number, Vector)
def _number_to_vector(context: Any, builder: Any, kind: Any, to: Vector, value: Any) -> Any:
    return _repeat(builder, context.cast(builder, value, kind, types.float64), to.width)


@lower_cast(types.Boolean, Mask)
def _bool_to_mask(context: Any, builder: Any, kind: Any, to: Mask, value: Any) -> Any:
    return _repeat(builder, value, to.width)


# -- operators -------------------------------------------------------------------------------------


def _define(
    functions: Any, takes: type[_LaneType], gives: type[_LaneType], build: Callable[..., Any]
) -> None:
    """Define functions of vectors or masks by the instruction that they become."""
    arity = build.__code__.co_argcount - 1
    for function in functions:

        @type_callable(function)
        def type_it(context: Any) -> Any:
            def typer(a: Any, b: Any = None) -> Any:
                kind = takes.among(a) if b is None else takes.among(a, b)
                return None if kind is None else signature(gives(kind.width), *[kind] * arity)

            # Numba passes as many arguments as the function has parameters.
            return (lambda a: typer(a)) if arity == 1 else (lambda a, b: typer(a, b))

        @lower_builtin(function, *[takes] * arity)
        def lower_it(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
            return build(builder, *arguments)


def _intrinsic(builder: Any, name: str, *arguments: Any) -> Any:
    """Call one of LLVM's functions that exist for numbers and vectors."""
    kind = arguments[0].type
    suffix = f"v{kind.count}f64" if isinstance(kind, ir.VectorType) else "f64"
    own = ir.FunctionType(kind, [kind] * len(arguments))
    function = cgutils.get_or_insert_function(builder.module, own, f"{name}.{suffix}")
    return builder.call(function, arguments)


def _larger(sign: str) -> Callable[[Any, Any, Any], Any]:
    return lambda builder, x, y: builder.select(builder.fcmp_ordered(sign, x, y), x, y)


_define((operator.add, operator.iadd), Vector, Vector, lambda b, x, y: b.fadd(x, y, flags=_FUSED))
_define((operator.sub, operator.isub), Vector, Vector, lambda b, x, y: b.fsub(x, y, flags=_FUSED))
_define((operator.mul, operator.imul), Vector, Vector, lambda b, x, y: b.fmul(x, y, flags=_FUSED))
_define((operator.truediv, operator.itruediv), Vector, Vector, lambda b, x, y: b.fdiv(x, y))
_define((operator.neg,), Vector, Vector, lambda b, x: b.fneg(x))
_define((abs,), Vector, Vector, lambda b, x: _intrinsic(b, "llvm.fabs", x))
_define((max,), Vector, Vector, _larger(">"))
_define((min,), Vector, Vector, _larger("<"))
_define((operator.lt,), Vector, Mask, lambda b, x, y: b.fcmp_ordered("<", x, y))
_define((operator.le,), Vector, Mask, lambda b, x, y: b.fcmp_ordered("<=", x, y))
_define((operator.gt,), Vector, Mask, lambda b, x, y: b.fcmp_ordered(">", x, y))
_define((operator.ge,), Vector, Mask, lambda b, x, y: b.fcmp_ordered(">=", x, y))
_define((operator.eq,), Vector, Mask, lambda b, x, y: b.fcmp_ordered("==", x, y))
_define((operator.ne,), Vector, Mask, lambda b, x, y: b.fcmp_unordered("!=", x, y))
_define((operator.and_, operator.iand), Mask, Mask, lambda b, x, y: b.and_(x, y))
_define((operator.or_, operator.ior), Mask, Mask, lambda b, x, y: b.or_(x, y))
_define((operator.not_,), Mask, Mask, lambda b, x: b.not_(x))


# -- functions of numbers and vectors --------------------------------------------------------------


def called_by_kernels(*_: Any) -> Any:
    """The body of a function that only kernels call; Numba replaces it."""
    raise TypeError("called by kernels only")


def _elementary(name: str, arity: int) -> Callable[..., Any]:
    """A function of numbers or vectors."""

    def function(*x: Any) -> Any:
        return getattr(math, name)(*x)

    function.__name__ = name

    def result(*kinds: Any) -> Any:
        found = Vector.among(*kinds)
        if found is not None:
            return signature(found, *[found] * arity)
        if all(isinstance(kind, types.Number) for kind in kinds):
            return signature(types.float64, *[types.float64] * arity)
        return None

    @type_callable(function)
    def type_it(context: Any) -> Any:
        return (lambda x: result(x)) if arity == 1 else (lambda x, y: result(x, y))

    @lower_builtin(function, *[types.Any] * arity)
    def lower_it(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
        return _intrinsic(builder, f"llvm.{name}", *arguments)

    return function


sqrt = _elementary("sqrt", 1)
log = _elementary("log", 1)
exp = _elementary("exp", 1)
power = _elementary("pow", 2)


def where(condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, y elsewhere; both are computed."""
    return x if condition else y


@type_callable(where)
def _type_where(context: Any) -> Any:
    def typer(condition: Any, x: Any, y: Any) -> Any:
        if isinstance(condition, Mask):
            kind = Mask.among(condition, x, y) or Vector(condition.width)
            return signature(kind, condition, kind, kind)
        if isinstance(condition, types.Boolean):
            kind = context.unify_types(x, y)
            return signature(kind, types.boolean, kind, kind)
        return None

    return typer


@lower_builtin(where, types.Any, types.Any, types.Any)
def _lower_where(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    return builder.select(*arguments)


def anywhere(condition: Any) -> bool:
    """Whether a condition holds in any lane."""
    return bool(condition)


@type_callable(anywhere)
def _type_anywhere(context: Any) -> Any:
    def typer(condition: Any) -> Any:
        if isinstance(condition, (Mask, types.Boolean)):
            return signature(types.boolean, condition)
        return None

    return typer


@lower_builtin(anywhere, types.Boolean)
def _lower_anywhere(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    return arguments[0]


@lower_builtin(anywhere, Mask)
def _lower_anywhere_mask(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    bits = ir.IntType(sig.args[0].width)
    return builder.icmp_unsigned("!=", builder.bitcast(arguments[0], bits), ir.Constant(bits, 0))
