"""Attention by torch's flash kernel for CPUs, and what ``torch_ops.attention`` prepares for it."""

from __future__ import annotations

from collections.abc import Sequence

from zeroir.ir.buffers import contiguous_stride
from zeroir.ir.dtypes import DType
from zeroir.ir.scratch.arguments import Types, tensor_of
from zeroir.ir.scratch.products import widened_bytes
from zeroir.ir.segment import Node, NodeArg, Ref, TensorType


def attention_bytes(node: Node, types: Types) -> int:
    """Scores of a block of queries and keys, two numbers and the output of each query, in FP32."""
    q, k, _ = (tensor_of(arg, types) for arg in node.args[:3])
    rows, columns = _splits(q, k)
    buffers = 4 * rows * (columns + 2 + q.shape[3])
    if q.dtype.is_low_precision:
        buffers += q.dtype.itemsize_bytes * rows * columns
    made = sum(kind.size_bytes for kind in node.results if kind is not None)
    out = node.results[0]
    assert out is not None
    # The kernel lays its result out as q, and ours has it by length.
    again = 0 if _is_by_length(q) else out.size_bytes
    return _prepared_bytes(node.args[:4], types, made, max(buffers, again))


def _is_by_length(q: TensorType) -> bool:
    """Whether a tensor of the kernel's result's shape, laid out as q is when the kernel gets it, is by length."""
    stride = q.stride if q.stride[-1] == 1 else contiguous_stride(q.shape)
    order = sorted((d for d in range(4) if q.shape[d] != 1), key=lambda d: -stride[d])
    return order == [d for d in (0, 2, 1, 3) if q.shape[d] != 1]


def attention_backward_bytes(node: Node, types: Types) -> int:
    """Scores and their gradients, a block at a time, and one number a query."""
    q, k, _ = (tensor_of(arg, types) for arg in node.args[1:4])
    rows, columns = _splits(q, k)
    buffers = 4 * rows * (2 * columns + 1)
    if q.dtype.is_low_precision:
        buffers += q.dtype.itemsize_bytes * 2 * rows * columns
    if q.dtype is DType.BF16:
        dim = q.shape[3]
        buffers += max(
            widened_bytes(a, b) for a, b in ((rows, columns), (columns, dim), (rows, dim))
        )
        buffers += 64
    made = sum(kind.size_bytes for kind in node.results if kind is not None)
    return _prepared_bytes(node.args[1:5], types, made, buffers)


def _splits(q: TensorType, k: TensorType) -> tuple[int, int]:
    """How many queries and keys the kernel looks at together."""
    length = q.shape[2]
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    return min(rows, length), min(512, k.shape[2])


def _prepared_bytes(args: Sequence[NodeArg], types: Types, made: int, buffers: int) -> int:
    """What ``torch_ops.attention`` makes of q, k, v and a mask before the kernel makes its results with ``buffers``."""
    q, mask = tensor_of(args[0], types), args[3]
    packed = sum(
        kind.size_bytes for arg in args[:3] if (kind := tensor_of(arg, types)).stride[-1] != 1
    )
    if not isinstance(mask, Ref) or tensor_of(mask, types).dtype is not DType.BOOL:
        return packed + buffers
    numel = tensor_of(mask, types).numel
    added = numel * q.dtype.itemsize_bytes
    return max(added + numel - made, packed + added + buffers)
