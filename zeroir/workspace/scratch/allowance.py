"""An upper bound of the scratch memory of libraries, which differs between CPUs: a generous rule for all of them.

Libraries (oneDNN, MKL, OpenBLAS, the Compute Library) compute matrix products, convolutions and attention. They copy,
widen and pack their operands in a layout for the CPU. Operators of torch itself, such as losses over all elements,
look-ups and sorts, have buffers that are not worth a formula each; some rare ones were not examined. The allowance is:

* for each of them ``SLACK_BYTES``;
* every operand and result once more, with at least 32 bits an element, products in blocks of 64 by 64 and convolutions
  of 16 channels;
* for products and convolutions a row-major copy of every operand with another layout;
* for convolutions the input window of each output, written out, and two gradients of the weights in FP32;
* for attention copies of keys and values for every head of the queries, and four blocks of scores in FP32;
* for operators that neither ``counted_ops.txt`` nor ``measured_ops.txt`` names eight times as much, also for those that
  a library or the model registers without a declared workspace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from zeroir.ir.dtypes import DType
from zeroir.ir.segments.allowlist import listed_ops
from zeroir.ir.segments.segment import Node, TensorType
from zeroir.workspace.scratch import is_counted
from zeroir.workspace.scratch.arguments import Types, is_contiguous, tensor_of
from zeroir.workspace.scratch.attention import is_fused, operands

PRODUCTS: Final = frozenset(
    f"aten.{name}.default"
    for name in ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot")
)
GROUPED_PRODUCTS: Final = frozenset(
    {
        "aten._grouped_mm.default",
        "transformers.grouped_mm_fallback.default",
        "transformers.grouped_mm_fallback_backward.default",
        "zeroir.grouped_mm.default",
    }
)
"""Products of groups of rows or columns, one after the other; their third argument has the end of each group."""
CONVOLUTIONS: Final = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})
ATTENTION: Final = frozenset({"zeroir.attention.default", "zeroir.attention_backward.default"})
SLACK_BYTES: Final = 1 << 16
"""More than a library needs for tables, tiles and padding, however little it computes."""

_MATRIX_BLOCK: Final = 64
_CHANNEL_BLOCK: Final = 16
_SCORES_BLOCK: Final = 512
"""An upper bound of the queries and keys that a fused kernel processes together."""


def allowance_bytes(node: Node, types: Types) -> int:
    """Return an upper bound of the bytes of a node's op besides the counted ones; 0 if all its bytes are counted."""
    if node.workspace_bytes is not None:
        return 0
    if node.op in PRODUCTS or node.op in GROUPED_PRODUCTS:
        return _products_bytes(node, types) + SLACK_BYTES
    if node.op in CONVOLUTIONS:
        return _convolution_bytes(node, types) + SLACK_BYTES
    if node.op in ATTENTION:
        return _attention_bytes(node, types) + SLACK_BYTES
    if is_counted(node.op):
        return 0
    copies = 1 if node.op in listed_ops("measured_ops.txt") else 8
    return copies * copied_bytes(node, types) + SLACK_BYTES


def product_allowance_bytes(rows: int, inner: int, columns: int) -> int:
    """Return this bound for a matrix product of at most 32 bits that is added to a third matrix, in any layout."""
    sizes = ((rows, inner), (inner, columns), (rows, columns), (rows, columns))
    copies = sum(math.prod(_blocked(shape, _MATRIX_BLOCK)) for shape in sizes)
    packed = sum(math.prod(shape) for shape in sizes)
    return DType.F32.itemsize_bytes * (copies + packed) + SLACK_BYTES


def copied_bytes(node: Node, types: Types) -> int:
    """Return the bytes of every operand and result once more, with at least 32 bits per element."""
    return sum(_wide_bytes(kind, kind.shape) for kind in _tensors(node, types))


def _tensors(node: Node, types: Types) -> list[TensorType]:
    """Return the operands and the results."""
    return [*_operands(node, types), *(kind for kind in node.results if kind is not None)]


def _operands(node: Node, types: Types) -> Iterator[TensorType]:
    for ref in node.refs():
        if (kind := types[ref.index]) is not None:
            yield kind


def _packed_bytes(node: Node, types: Types) -> int:
    return sum(kind.size_bytes for kind in _operands(node, types) if not is_contiguous(kind))


def _wide_bytes(kind: TensorType, shape: Iterable[int]) -> int:
    """Return the bytes of a tensor of this shape with 32 bits per element, or those of ``kind`` if these are more."""
    return math.prod(shape) * max(kind.dtype.itemsize_bytes, DType.F32.itemsize_bytes)


def _blocked(sizes: Iterable[int], block: int) -> tuple[int, ...]:
    return tuple(-(-size // block) * block for size in sizes)


def _products_bytes(node: Node, types: Types) -> int:
    """Return the bytes of all tensors in blocks, and of operands row by row."""
    return _packed_bytes(node, types) + sum(
        _wide_bytes(kind, (*kind.shape[:-2], *_blocked(kind.shape[-2:], _MATRIX_BLOCK)))
        for kind in _tensors(node, types)
    )


def _channels_bytes(kind: TensorType) -> int:
    """Return the bytes of images or weights in blocks of channels."""
    return _wide_bytes(kind, (*_blocked(kind.shape[:2], _CHANNEL_BLOCK), *kind.shape[2:]))


def _convolution_bytes(node: Node, types: Types) -> int:
    """Return the bytes of all tensors in channel blocks, an input column per output, and two weight gradients."""
    if node.op == "aten.convolution.default":
        (x, weight), (y,) = (tensor_of(arg, types) for arg in node.args[:2]), node.results
        is_transposed = node.args[6] is True
    else:
        y, x, weight = (tensor_of(arg, types) for arg in node.args[:3])
        is_transposed = node.args[7] is True
    assert y is not None
    looking, seen = (x, y) if is_transposed else (y, x)
    positions = looking.shape[0] * math.prod(looking.shape[2:])
    window = seen.shape[1] * math.prod(weight.shape[2:])
    columns = positions * window * x.dtype.itemsize_bytes
    copies = sum(map(_channels_bytes, _tensors(node, types)))
    return columns + copies + _packed_bytes(node, types) + 2 * _channels_bytes(weight)


def _attention_bytes(node: Node, types: Types) -> int:
    """Return the bytes of keys and values for every query head, and of scores: blocks, or all without fusion."""
    q, k, v = (tensor_of(arg, types) for arg in operands(node))
    batch, heads, length, _ = q.shape
    rows, columns = _blocked((length, k.shape[2]), _MATRIX_BLOCK)
    keys = _wide_bytes(q, (batch, heads, columns, k.shape[3] + v.shape[3]))
    copies = copied_bytes(node, types)
    if is_fused(node, types):
        blocks = (min(rows, _SCORES_BLOCK), min(columns, _SCORES_BLOCK))
        return copies + keys + 4 * _wide_bytes(q, blocks)
    return 2 * copies + 4 * keys + 8 * _wide_bytes(q, (batch, heads, rows, columns))
