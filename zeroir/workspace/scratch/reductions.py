"""Sums and means: 16-bit numbers are added up in FP32."""

from __future__ import annotations

from zeroir.ir.segments.segment import Node, TensorType
from zeroir.workspace.scratch.arguments import Types, numbers_of, result_of, tensor_of


def sum_bytes(node: Node, types: Types) -> int:
    """Return the bytes of the source in the dtype in which it is summed."""
    source, result = tensor_of(node.args[0], types), result_of(node)
    if source.dtype is not result.dtype:
        return source.numel * result.dtype.itemsize_bytes
    rank = len(source.shape)
    named = numbers_of(node.args[1]) if rank and len(node.args) > 1 else ()
    dims = {d % rank for d in named} or set(range(rank))
    if not result.dtype.is_low_precision or _runs(source, dims) < 2:
        return 0
    # Over several runs 16-bit numbers are added in FP32.
    return 4 * (source.numel + result.numel)


def _runs(kind: TensorType, dims: set[int]) -> int:
    """Return the number of runs of equal steps through memory that these dimensions form."""
    pairs = sorted((kind.stride[d], kind.shape[d]) for d in dims if kind.shape[d] != 1)
    runs, expected = 0, -1
    for step, size in pairs:
        runs += step != expected
        expected = step * size
    return runs


def mean_bytes(node: Node, types: Types) -> int:
    """Return the bytes of the number by which a sum is divided, and of FP32 copies for 16 bits."""
    source, result = tensor_of(node.args[0], types), result_of(node)
    count = 8 + max(result.dtype.itemsize_bytes, 4)
    if not result.dtype.is_low_precision:
        converted = source.numel * result.dtype.itemsize_bytes
        return count if source.dtype is result.dtype else max(count, converted)
    return 4 * result.numel + max(4 * source.numel, count)
