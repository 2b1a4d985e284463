"""Vectors and masks: one number or bool per lane, with the operators of plain ones.

Vectors are LLVM vectors. Where registers are narrower, LLVM splits them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import numpy as np
from numba import types
from numba.extending import (
    lower_builtin,
    lower_cast,
    make_attribute_wrapper,
    register_model,
    type_callable,
)
from numpy.typing import NDArray

from torch_occ._support.private import (
    Conversion,
    alias_func_extensions,
    cgutils,
    ir,
    models,
    populate_array,
    signature,
)

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


def _typed(function: Any) -> Callable[[Any], Any]:
    """A decorator: what a function of the same parameters returns is the function's signature."""

    def register(typer: Any) -> Any:
        type_callable(function)(lambda context: typer)
        return typer

    return register


def _define(
    functions: Any, takes: type[_LaneType], gives: type[_LaneType], build: Callable[..., Any]
) -> None:
    """Define functions of vectors or masks by the instruction that they become."""
    arity = build.__code__.co_argcount - 1
    for function in functions:

        def typer(*kinds: Any) -> Any:
            kind = takes.among(*kinds)
            return None if kind is None else signature(gives(kind.width), *[kind] * arity)

        # Numba passes as many arguments as the function has parameters.
        _typed(function)((lambda a: typer(a)) if arity == 1 else (lambda a, b: typer(a, b)))

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

    _typed(function)((lambda x: result(x)) if arity == 1 else (lambda x, y: result(x, y)))

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


@_typed(anywhere)
def _type_anywhere(condition: Any) -> Any:
    known = isinstance(condition, Mask | types.Boolean)
    return signature(types.boolean, condition) if known else None


@lower_builtin(anywhere, types.Boolean)
def _lower_anywhere(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    return arguments[0]


@lower_builtin(anywhere, Mask)
def _lower_anywhere_mask(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    bits = ir.IntType(sig.args[0].width)
    return builder.icmp_unsigned("!=", builder.bitcast(arguments[0], bits), ir.Constant(bits, 0))


# -- Arrays of vectors, and the plain arrays of a single lane --------------------------------------


#: A field of a named tuple: a plain array that all lanes share.
Shared = Annotated[NDArray[np.float64], "shared"]


class LaneArray(types.Type):
    """An array whose entries are vectors; in memory its last axis has the lanes."""

    def __init__(self, ndim: int, width: int) -> None:
        self.ndim, self.width = ndim, width
        super().__init__(name=f"LaneArray({ndim}, {width})")


@register_model(LaneArray)
class _LaneArrayModel(models.StructModel):
    def __init__(self, dmm: Any, fe_type: LaneArray) -> None:
        shape = types.UniTuple(types.intp, fe_type.ndim)
        data = types.CPointer(types.float64)
        super().__init__(dmm, fe_type, [("data", data), ("shape", shape)])


def zeros(*shape: int, lanes: int = LANES) -> Any:
    """Memory for an array in lanes, `(*shape, lanes)`, aligned to the widest registers."""
    size = math.prod(shape) * lanes
    memory = np.zeros(size + 8)
    skip = -memory.ctypes.data % 64 // 8
    return memory[skip : skip + size].reshape(*shape, lanes)


def allocator(lanes: int | None) -> Callable[..., Any]:
    """A function that allocates zeros of a shape: in lanes, or a plain array if that is None."""
    if lanes is None:
        return lambda *shape: np.zeros(shape)
    return lambda *shape: zeros(*shape, lanes=lanes)


def width_of(lanes: int | None) -> tuple[int, ...] | None:
    """The `width` of `in_lanes`; None for plain arrays."""
    return None if lanes is None else (0,) * lanes


def pack(x: Any, lanes: int | None) -> Any:
    """The elements of an array `(N, ...)` in groups of lanes, `(groups, ..., lanes)`.

    The last element fills the last group. Without lanes, x itself: each element is a group.
    """
    if lanes is None:
        return x
    groups, event = -(-len(x) // lanes), x.shape[1:]
    every = x[np.minimum(np.arange(groups * lanes), len(x) - 1)].reshape(groups, lanes, *event)
    found = zeros(groups, *event, lanes=lanes)
    found[...] = np.moveaxis(every, 1, -1)
    return found


def unpack(groups: Any, x: Any) -> None:
    """Copy what `pack` has made of x back to x."""
    if groups is not x:
        every = np.moveaxis(groups, -1, 1).reshape(len(groups) * groups.shape[-1], *x.shape[1:])
        x[...] = every[: len(x)]


def in_lanes(x: Any, width: Any) -> Any:
    """The array in lanes that a plain array `(..., lanes)` of floats holds.

    `width` is any tuple with as many entries as lanes, so that the number is part of its type. If
    it is None, x is returned unchanged. If x is a named tuple, this is done to all its arrays of
    floats, except those that its class declares as `Shared`.
    """
    return called_by_kernels(x, width)


def _laned(x: Any, lanes: int) -> Any:
    """The type of `in_lanes`."""
    if isinstance(x, types.Array) and x.dtype == types.float64 and x.layout == "C":
        return LaneArray(x.ndim - 1, lanes)
    return x


def _mapped(x: Any, function: Any) -> Any:
    """The type of a value, or of a named tuple whose fields are replaced."""
    if not hasattr(x, "instance_class"):
        return function(x)
    hints = get_type_hints(x.instance_class, include_extras=True)
    parts = [
        part if hints[name] is Shared else _mapped(part, function)
        for name, part in zip(x.fields, x.types, strict=True)
    ]
    return types.BaseTuple.from_types(parts, x.instance_class)


@_typed(in_lanes)
def _type_in_lanes(x: Any, width: Any) -> Any:
    if isinstance(width, types.NoneType):
        return signature(x, x, width)
    return signature(_mapped(x, lambda part: _laned(part, len(width))), x, width)


@lower_builtin(in_lanes, types.Any, types.Any)
def _lower_in_lanes(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    return _convert(context, builder, sig.args[0], sig.return_type, arguments[0], _lane_array)


def _convert(context: Any, builder: Any, kind: Any, to: Any, value: Any, convert: Any) -> Any:
    """Convert a value, or every field of a named tuple whose type changes."""
    if kind == to:
        return value
    if hasattr(kind, "instance_class"):
        parts = zip(kind.types, to.types, cgutils.unpack_tuple(builder, value), strict=True)
        found = [_convert(context, builder, *part, convert) for part in parts]
        return context.make_tuple(builder, to, found)
    return convert(context, builder, kind, to, value)


def _lane_array(context: Any, builder: Any, kind: Any, to: Any, value: Any) -> Any:
    plain = context.make_array(kind)(context, builder, value)
    found = cgutils.create_struct_proxy(to)(context, builder)
    found.data = plain.data
    shape = types.UniTuple(types.intp, to.ndim)
    found.shape = context.make_tuple(
        builder, shape, cgutils.unpack_tuple(builder, plain.shape)[:-1]
    )
    return found._getvalue()


def _keep_writes(found: str, arguments: Any, aliases: Any, reachable: set[str]) -> None:
    """Tell Numba that an array shares memory with an argument; it would drop writes to others."""
    reachable.add(found)


for _name in ("in_lanes", "lane"):
    alias_func_extensions[_name, __name__] = _keep_writes


def _index_type(x: Any, index: Any) -> Any:
    """The type of a valid index of an array in lanes: one integer, or a tuple of them."""
    if not isinstance(x, LaneArray):
        return None
    if x.ndim == 1 and isinstance(index, types.Integer):
        return types.intp
    if isinstance(index, types.BaseTuple) and len(index) == x.ndim:
        return types.UniTuple(types.intp, x.ndim)
    return None


@_typed(operator.getitem)
def _type_getitem(x: Any, index: Any) -> Any:
    if isinstance(x, LaneArray) and x.ndim == 2 and isinstance(index, types.Integer):
        return signature(LaneArray(1, x.width), x, types.intp)  # a row
    kind = _index_type(x, index)
    return None if kind is None else signature(Vector(x.width), x, kind)


@_typed(operator.setitem)
def _type_setitem(x: Any, index: Any, value: Any) -> Any:
    kind = _index_type(x, index)
    return None if kind is None else signature(types.none, x, kind, Vector(x.width))


def _place(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    """The address of an entry; as in the other kernels, indices are not checked."""
    x = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=arguments[0])
    index = arguments[1]
    if isinstance(sig.args[1], types.BaseTuple):
        index, *others = cgutils.unpack_tuple(builder, arguments[1])
        for size, other in zip(cgutils.unpack_tuple(builder, x.shape)[1:], others, strict=True):
            index = builder.add(builder.mul(index, size, flags=("nsw",)), other, flags=("nsw",))
    kind = ir.VectorType(ir.DoubleType(), sig.args[0].width)
    data = builder.bitcast(x.data, kind.as_pointer())
    return builder.gep(data, [index], inbounds=True, source_etype=kind)


@lower_builtin(operator.getitem, LaneArray, types.Any)
def _lower_getitem(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    if isinstance(sig.return_type, LaneArray):
        return _row(context, builder, sig, arguments)
    kind = ir.VectorType(ir.DoubleType(), sig.args[0].width)
    return builder.load(_place(context, builder, sig, arguments), align=8, typ=kind)


def _row(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    """A row of an array with two axes, which shares its memory."""
    x = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=arguments[0])
    found = cgutils.create_struct_proxy(sig.return_type)(context, builder)
    size = cgutils.unpack_tuple(builder, x.shape)[1]
    skipped = builder.mul(size, context.get_constant(types.intp, sig.args[0].width))
    first = [builder.mul(arguments[1], skipped)]
    found.data = builder.gep(x.data, first, inbounds=True, source_etype=ir.DoubleType())
    found.shape = context.make_tuple(builder, types.UniTuple(types.intp, 1), [size])
    return found._getvalue()


@lower_builtin(operator.setitem, LaneArray, types.Any, types.Any)
def _lower_setitem(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    builder.store(arguments[2], _place(context, builder, sig, arguments), align=8)
    return context.get_dummy_value()


make_attribute_wrapper(LaneArray, "shape", "shape")


@_typed(len)
def _type_len(x: Any) -> Any:
    return signature(types.intp, x) if isinstance(x, LaneArray) else None


@lower_builtin(len, LaneArray)
def _lower_len(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    x = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=arguments[0])
    return cgutils.unpack_tuple(builder, x.shape)[0]


# -- single lanes ----------------------------------------------------------------------------------


def lanes_of(x: Any) -> int:
    """The number of problems that an array holds; 1 for a plain array."""
    return int(called_by_kernels(x))


@_typed(lanes_of)
def _type_lanes_of(x: Any) -> Any:
    return signature(types.intp, x)


@lower_builtin(lanes_of, types.Any)
def _lower_lanes_of(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    return context.get_constant(types.intp, getattr(sig.args[0], "width", 1))


def lane(x: Any, n: int) -> Any:
    """What lane n holds: a number, a bool, or a plain array that shares memory with x.

    A plain x is returned unchanged. If x is a named tuple, this is done to all its fields.
    """
    return called_by_kernels(x, n)


def _single(x: Any) -> Any:
    """The type of `lane`."""
    if isinstance(x, Vector):
        return types.float64
    if isinstance(x, Mask):
        return types.boolean
    return types.Array(types.float64, x.ndim, "A") if isinstance(x, LaneArray) else x


@_typed(lane)
def _type_lane(x: Any, n: Any) -> Any:
    return signature(_mapped(x, _single), x, types.intp)


@lower_builtin(lane, types.Any, types.Integer)
def _lower_lane(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    def convert(context: Any, builder: Any, kind: Any, to: Any, value: Any) -> Any:
        if isinstance(kind, LaneArray):
            return _strided(context, builder, kind, to, value, arguments[1])
        return builder.extract_element(value, arguments[1])

    return _convert(context, builder, sig.args[0], sig.return_type, arguments[0], convert)


def _strided(context: Any, builder: Any, kind: Any, to: Any, value: Any, n: Any) -> Any:
    """The plain array of lane n."""
    x = cgutils.create_struct_proxy(kind)(context, builder, value=value)
    stride, strides = context.get_constant(types.intp, 8 * kind.width), []
    for size in reversed(cgutils.unpack_tuple(builder, x.shape)):
        strides.append(stride)
        stride = builder.mul(stride, size)
    found = context.make_array(to)(context, builder)
    populate_array(
        found,
        data=builder.gep(x.data, [n], source_etype=ir.DoubleType()),
        shape=x.shape,
        strides=strides[::-1],
        itemsize=context.get_constant(types.intp, 8),
        meminfo=None,
    )
    return found._getvalue()
