"""Arrays of vectors, and the plain arrays of a single lane."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_type_hints

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.ir_utils import alias_func_extensions
from numba.core.typing.templates import signature
from numba.extending import (
    lower_builtin,
    overload,
    overload_attribute,
    register_model,
    type_callable,
)
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

from torch_occ.kernels.lanes.vectors import LANES, Mask, Vector, called_by_kernels

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


def gather(elements: Any, lanes: Sequence[int]) -> Any:
    """Memory for an array in lanes, with a copy of one element in each lane."""
    found = zeros(*elements[0].shape, lanes=len(lanes))
    for n, element in enumerate(lanes):
        found[..., n] = elements[element]
    return found


def scatter(x: Any, elements: Any, lanes: Sequence[int]) -> None:
    """Copy the first lanes back to their elements."""
    for n, element in enumerate(lanes):
        elements[element] = x[..., n]


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


@type_callable(in_lanes)
def _type_in_lanes(context: Any) -> Any:
    def typer(x: Any, width: Any) -> Any:
        if isinstance(width, types.NoneType):
            return signature(x, x, width)
        if isinstance(width, types.BaseTuple):
            return signature(_mapped(x, lambda part: _laned(part, len(width))), x, width)
        return None

    return typer


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


def in_lanes_or_shared(x: Any, width: Any) -> Any:
    """`in_lanes` of an array with three axes; one with two is shared by all lanes."""
    return called_by_kernels(x, width)


@overload(in_lanes_or_shared, inline="always", strict=False)
def _in_lanes_or_shared(x: Any, width: Any) -> Any:
    return (lambda x, width: in_lanes(x, width)) if x.ndim == 3 else (lambda x, width: x)


def _keep_writes(found: str, arguments: Any, aliases: Any, reachable: set[str]) -> None:
    """Tell Numba that an array shares memory with an argument; it would drop writes to others."""
    reachable.add(found)


for _name in ("in_lanes", "in_lanes_or_shared", "lane"):
    alias_func_extensions[_name, __name__] = _keep_writes


def _index_type(x: LaneArray, index: Any) -> Any:
    """The type of a valid index: one integer, or a tuple of them."""
    if x.ndim == 1 and isinstance(index, types.Integer):
        return types.intp
    if isinstance(index, types.BaseTuple) and len(index) == x.ndim:
        return types.UniTuple(types.intp, x.ndim)
    return None


@type_callable(operator.getitem)
def _type_getitem(context: Any) -> Any:
    def typer(x: Any, index: Any) -> Any:
        if isinstance(x, LaneArray) and x.ndim == 2 and isinstance(index, types.Integer):
            return signature(LaneArray(1, x.width), x, types.intp)  # a row
        kind = _index_type(x, index) if isinstance(x, LaneArray) else None
        return None if kind is None else signature(Vector(x.width), x, kind)

    return typer


@type_callable(operator.setitem)
def _type_setitem(context: Any) -> Any:
    def typer(x: Any, index: Any, value: Any) -> Any:
        kind = _index_type(x, index) if isinstance(x, LaneArray) else None
        return None if kind is None else signature(types.none, x, kind, Vector(x.width))

    return typer


def _place(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    """The address of an entry; as in the other kernels, indices are not checked."""
    x = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=arguments[0])
    index = arguments[1]
    if isinstance(sig.args[1], types.BaseTuple):
        index, *others = cgutils.unpack_tuple(builder, arguments[1])
        for size, other in zip(cgutils.unpack_tuple(builder, x.shape)[1:], others, strict=True):
            index = builder.add(builder.mul(index, size, flags=("nsw",)), other, flags=("nsw",))
    entries = ir.VectorType(ir.DoubleType(), sig.args[0].width)
    data = builder.bitcast(x.data, entries.as_pointer())
    return builder.gep(data, [index], inbounds=True)


@lower_builtin(operator.getitem, LaneArray, types.Any)
def _lower_getitem(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    if isinstance(sig.return_type, LaneArray):
        return _row(context, builder, sig, arguments)
    return builder.load(_place(context, builder, sig, arguments), align=8)


def _row(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    """A row of an array with two axes, which shares its memory."""
    x = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=arguments[0])
    found = cgutils.create_struct_proxy(sig.return_type)(context, builder)
    size = cgutils.unpack_tuple(builder, x.shape)[1]
    skipped = builder.mul(size, context.get_constant(types.intp, sig.args[0].width))
    found.data = builder.gep(x.data, [builder.mul(arguments[1], skipped)], inbounds=True)
    found.shape = context.make_tuple(builder, types.UniTuple(types.intp, 1), [size])
    return found._getvalue()


@lower_builtin(operator.setitem, LaneArray, types.Any, types.Any)
def _lower_setitem(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    builder.store(arguments[2], _place(context, builder, sig, arguments), align=8)
    return context.get_dummy_value()


def _shape(x: Any) -> Any:
    return called_by_kernels(x)


@type_callable(_shape)
def _type_shape(context: Any) -> Any:
    def typer(x: Any) -> Any:
        return signature(types.UniTuple(types.intp, x.ndim), x)

    return typer


@lower_builtin(_shape, LaneArray)
def _lower_shape(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    return cgutils.create_struct_proxy(sig.args[0])(context, builder, value=arguments[0]).shape


@overload_attribute(LaneArray, "shape", inline="always", strict=False)  # type: ignore[call-arg]
def _shape_attribute(x: Any) -> Any:
    return lambda x: _shape(x)


@overload(len, inline="always", strict=False)
def _len(x: Any) -> Any:
    return (lambda x: _shape(x)[0]) if isinstance(x, LaneArray) else None


# -- single lanes ----------------------------------------------------------------------------------


def lanes_of(x: Any) -> int:
    """The number of problems that an array holds; 1 for a plain array."""
    return int(called_by_kernels(x))


@overload(lanes_of, inline="always", strict=False)
def _lanes_of(x: Any) -> Any:
    width = x.width if isinstance(x, LaneArray) else 1
    return lambda x: width


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


@type_callable(lane)
def _type_lane(context: Any) -> Any:
    return lambda x, n: signature(_mapped(x, _single), x, types.intp)


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
        data=builder.gep(x.data, [n]),
        shape=x.shape,
        strides=strides[::-1],
        itemsize=context.get_constant(types.intp, 8),
        meminfo=None,
    )
    return found._getvalue()
