"""Another machine, as far as last digits are concerned.

A library adds in an order of its own choice: it depends on the processor, on the shapes of all
operands and on the number of threads. And its vectorized powers and logarithms end where the last
full vector ends; what is left over goes through another function. On the machine at hand two such
orders may agree by chance, so tests that compare bits pass here and fail elsewhere. `OtherMachine`
leaves nothing to chance: the last digits of everything that torch adds up change with the shapes
and with `threads`, and those of powers and logarithms in what is left over. What is computed in a
fixed order, entry by entry, stays as it is.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Correctly rounded entry by entry, in order by definition (running sums, `index_add`), or no
#: arithmetic at all.
_EXACT = """
_coalesced _coalesced_ _indices _local_scalar_dense _reshape_alias
_sparse_coo_tensor_with_dims_and_tensors _sparse_csr_tensor_unsafe _to_copy _to_dense _to_sparse
_unique2 _unsafe_view _values abs add add_ alias all amax amin any arange argmax argmin argsort
bincount bitwise_and bitwise_not bitwise_or bitwise_xor bucketize cat ceil clamp clamp_max
clamp_min clone coalesce col_indices constant_pad_nd constant_pad_nd_ copy copy_ count_nonzero
crow_indices cumsum detach detach_ diagonal diff div div_ empty empty_like empty_strided eq
expand expand_as eye eye_ fill fill_ flip floor fmod full full_like gather ge gt index index_add
index_put index_put_ index_select indices is_coalesced is_pinned is_same_size isfinite isinf
isnan item le lift_fresh lift_fresh_copy linspace logical_and logical_not logical_or logical_xor
lt masked_fill masked_fill_ max maximum min minimum mul mul_ ne neg new_empty new_empty_strided
new_full new_ones new_zeros nonzero ones ones_like permute rand reciprocal record_stream
remainder repeat repeat_interleave resize_ round rsub scalar_tensor scatter select
select_backward set_ sign slice slice_backward sort split split_with_sizes sqrt square squeeze
squeeze_ stack sub sub_ sym_size t topk transpose trunc unbind unfold unique_consecutive
unsqueeze values view where zero_ zeros zeros_like
"""
EXACT = frozenset(_EXACT.split())

#: One number at a time, but by different functions in the middle of an array and at its end.
BY_POSITION = {"pow", "log", "exp", "log1p", "expm1", "rsqrt", "log2", "log10", "sigmoid", "tanh"}

#: Numbers in a vector, or in several that are handled at once.
VECTOR = 16


class OtherMachine(TorchDispatchMode):
    """Inside, torch rounds as described above. Kernels and NumPy are left alone."""

    def __init__(self, threads: int = 1) -> None:
        super().__init__()
        self.threads = threads
        self.changed: set[str] = set()  # the operations that it changed

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in EXACT:
            return found
        shapes = [
            tuple(x.shape)
            for x in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(x, Tensor)
        ]
        parts = found if isinstance(found, tuple | list) else [found]
        if not any(
            isinstance(x, Tensor) and x.layout == torch.strided and x.is_floating_point()
            for x in parts
        ):
            return found
        assert not name.endswith("_"), (
            f"{name} changes its argument; say in tests/helpers/other_machine.py whether its bits "
            "depend on the batch"
        )
        self.changed.add(name)
        key = zlib.crc32(repr((name, shapes, self.threads)).encode())
        moved = [
            move(x, name, key) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in parts
        ]
        return type(found)(moved) if isinstance(found, tuple | list) else moved[0]


def move(x: Tensor, name: str, key: int) -> Tensor:
    """Change entries by -2 to 2 units in the last place; integers, which are exact, stay."""
    place = torch.arange(x.numel()).reshape(x.shape)
    if name in BY_POSITION:
        units = (place >= x.numel() - x.numel() % VECTOR).long()
    else:
        units = (place + key % 1_000_003) * 2_654_435_761 // 1024 % 5 - 2
    moved = x * (1 + units.to(x.dtype) * torch.finfo(x.dtype).eps)
    return torch.where((x == x.round()) | ~x.isfinite(), x, moved)
