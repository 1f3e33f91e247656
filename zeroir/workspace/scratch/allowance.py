"""An upper bound of the scratch memory of libraries, which differs between CPUs: a rule that is generous for each.

Libraries (oneDNN, MKL, OpenBLAS, the Compute Library) compute matrix products, convolutions and attention. They copy,
widen and pack their operands in a layout that suits the CPU. Operators of torch itself, such as losses over all
elements, look-ups and sorts, keep buffers that are not worth a formula each; some rare ones nobody has examined. The
allowance is:

* to each of them ``SLACK_BYTES``;
* every operand and result once more, with 32 bits an element at least, products in blocks of 64 by 64 and convolutions
  of 16 channels;
* to products and convolutions a row-major copy of every operand that lies otherwise;
* to convolutions whatever each output looks at, written out, and two gradients of the weights in FP32;
* to attention keys and values anew for every head of the queries, and four blocks of scores in FP32;
* to operators that neither ``counted_ops.txt`` nor ``measured_ops.txt`` names eight times as much, also to those that a
  library or the model registers and whose workspace nobody declares.
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
"""Products of groups of rows or columns, one after the other; their third argument says where each group ends."""
CONVOLUTIONS: Final = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})
ATTENTION: Final = frozenset({"zeroir.attention.default", "zeroir.attention_backward.default"})
SLACK_BYTES: Final = 1 << 16
"""More than a library takes for tables, tiles and padding, however little it computes."""

_MATRIX_BLOCK: Final = 64
_CHANNEL_BLOCK: Final = 16
_SCORES_BLOCK: Final = 512
"""An upper bound of the queries and keys that a fused kernel processes together."""


def allowance_bytes(node: Node, types: Types) -> int:
    """An upper bound of the bytes of a node's op beside the counted ones; 0 where all its bytes are counted."""
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
    """The same bound of a product of matrices of at most 32 bits that is added to a third one, stored in any order."""
    sizes = ((rows, inner), (inner, columns), (rows, columns), (rows, columns))
    copies = sum(math.prod(_blocked(shape, _MATRIX_BLOCK)) for shape in sizes)
    packed = sum(math.prod(shape) for shape in sizes)
    return DType.F32.itemsize_bytes * (copies + packed) + SLACK_BYTES


def copied_bytes(node: Node, types: Types) -> int:
    """Every operand and result once more, with 32 bits an element at least."""
    return sum(_wide_bytes(kind, kind.shape) for kind in _tensors(node, types))


def _tensors(node: Node, types: Types) -> list[TensorType]:
    """The operands and the results."""
    return [*_operands(node, types), *(kind for kind in node.results if kind is not None)]


def _operands(node: Node, types: Types) -> Iterator[TensorType]:
    for ref in node.refs():
        if (kind := types[ref.index]) is not None:
            yield kind


def _packed_bytes(node: Node, types: Types) -> int:
    return sum(kind.size_bytes for kind in _operands(node, types) if not is_contiguous(kind))


def _wide_bytes(kind: TensorType, shape: Iterable[int]) -> int:
    """A tensor of such a shape with 32 bits an element, or as many as ``kind`` has where these are more."""
    return math.prod(shape) * max(kind.dtype.itemsize_bytes, DType.F32.itemsize_bytes)


def _blocked(sizes: Iterable[int], block: int) -> tuple[int, ...]:
    return tuple(-(-size // block) * block for size in sizes)


def _products_bytes(node: Node, types: Types) -> int:
    """Everything in blocks, and operands row by row."""
    return _packed_bytes(node, types) + sum(
        _wide_bytes(kind, (*kind.shape[:-2], *_blocked(kind.shape[-2:], _MATRIX_BLOCK)))
        for kind in _tensors(node, types)
    )


def _channels_bytes(kind: TensorType) -> int:
    """Images or weights in blocks of channels."""
    return _wide_bytes(kind, (*_blocked(kind.shape[:2], _CHANNEL_BLOCK), *kind.shape[2:]))


def _convolution_bytes(node: Node, types: Types) -> int:
    """Everything in blocks of channels, a column of inputs for every output, and two gradients of the weights."""
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
    """Keys and values for every head of the queries, and scores: blocks of them, or all where no kernel fuses."""
    q, k, v = (tensor_of(arg, types) for arg in operands(node))
    batch, heads, length, _ = q.shape
    rows, columns = _blocked((length, k.shape[2]), _MATRIX_BLOCK)
    keys = _wide_bytes(q, (batch, heads, columns, k.shape[3] + v.shape[3]))
    copies = copied_bytes(node, types)
    if is_fused(node, types):
        blocks = (min(rows, _SCORES_BLOCK), min(columns, _SCORES_BLOCK))
        return copies + keys + 4 * _wide_bytes(q, blocks)
    return 2 * copies + 4 * keys + 8 * _wide_bytes(q, (batch, heads, rows, columns))
