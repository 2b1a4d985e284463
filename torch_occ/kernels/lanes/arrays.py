"""Arrays of vectors, and the plain arrays of a single lane."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

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

from torch_occ.kernels.lanes.vectors import LANES, Mask, Vector, called_by_kernels


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
    size = int(np.prod(shape)) * lanes
    memory = np.zeros(size + 8)
    skip = -memory.ctypes.data % 64 // 8
    return memory[skip : skip + size].reshape(*shape, lanes)


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


def in_lanes(x: Any, width: Any = None) -> Any:
    """The array in lanes that a plain array `(..., lanes)` holds.

    `width` is any tuple with as many entries as lanes, so that the number is part of its type; None
    for LANES.
    """
    return called_by_kernels(x, width)


@type_callable(in_lanes)
def _type_in_lanes(context: Any) -> Any:
    def typer(x: Any, width: Any = None) -> Any:
        if isinstance(x, types.Array) and x.dtype == types.float64 and x.layout == "C":
            lanes = len(width) if isinstance(width, types.BaseTuple) else LANES
            found = LaneArray(x.ndim - 1, lanes)
            return signature(found, x) if width is None else signature(found, x, width)
        return None

    return typer


@lower_builtin(in_lanes, types.Array)
@lower_builtin(in_lanes, types.Array, types.Any)
def _lower_in_lanes(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    plain = context.make_array(sig.args[0])(context, builder, arguments[0])
    found = cgutils.create_struct_proxy(sig.return_type)(context, builder)
    found.data = plain.data
    shape = types.UniTuple(types.intp, sig.return_type.ndim)
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

    A plain x is returned unchanged.
    """
    return called_by_kernels(x, n)


@type_callable(lane)
def _type_lane(context: Any) -> Any:
    def typer(x: Any, n: Any) -> Any:
        found = x
        if isinstance(x, Vector):
            found = types.float64
        elif isinstance(x, Mask):
            found = types.boolean
        elif isinstance(x, LaneArray):
            found = types.Array(types.float64, x.ndim, "A")
        return signature(found, x, types.intp)

    return typer


@lower_builtin(lane, types.Any, types.Integer)
def _lower_lane_plain(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    return arguments[0]


@lower_builtin(lane, Vector, types.Integer)
@lower_builtin(lane, Mask, types.Integer)
def _lower_lane(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    return builder.extract_element(*arguments)


@lower_builtin(lane, LaneArray, types.Integer)
def _lower_lane_array(context: Any, builder: Any, sig: Any, arguments: Any) -> Any:
    x = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=arguments[0])
    stride, strides = context.get_constant(types.intp, 8 * sig.args[0].width), []
    for size in reversed(cgutils.unpack_tuple(builder, x.shape)):
        strides.append(stride)
        stride = builder.mul(stride, size)
    found = context.make_array(sig.return_type)(context, builder)
    populate_array(
        found,
        data=builder.gep(x.data, [arguments[1]]),
        shape=x.shape,
        strides=strides[::-1],
        itemsize=context.get_constant(types.intp, 8),
        meminfo=None,
    )
    return found._getvalue()
