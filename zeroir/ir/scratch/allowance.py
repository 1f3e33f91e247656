"""What operators may take for scratch memory that nobody can count ahead: a rule that is generous for every CPU.

Libraries (oneDNN, MKL, OpenBLAS, the Compute Library) compute matrix products, convolutions and attention. They copy,
widen and pack what they read as each CPU likes it best. A few operators of torch itself, losses over all elements,
look-ups, sorts and resizing, keep buffers that are not worth a formula each. What they are allowed:

* all of them ``SLACK_BYTES``;
* libraries every operand and every result once more, with 32 bits an element at least, products in blocks of 64 by 64
  and convolutions of 16 channels, and both a row-major copy of every operand that lies otherwise;
* convolutions whatever each output looks at, written out, and two gradients of the weights in FP32;
* attention keys and values anew for every head of the queries, and four blocks of scores in FP32;
* the operators of torch itself everything once more, with 64 bits an element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

from zeroir.ir.dtypes import DType
from zeroir.ir.scratch.arguments import Types, is_contiguous, tensor_of
from zeroir.ir.segment import Node, NodeArg, Ref, TensorType

PRODUCTS: Final = frozenset(
    f"aten.{name}.default"
    for name in ("mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot")
)
CONVOLUTIONS: Final = frozenset({"aten.convolution.default", "aten.convolution_backward.default"})
ATTENTION: Final = frozenset({"zeroir.attention.default", "zeroir.attention_backward.default"})
OTHERS: Final = frozenset(
    f"aten.{name}"
    for name in (
        *("mse_loss.default", "smooth_l1_loss.default", "huber_loss.default"),
        *("binary_cross_entropy.default", "binary_cross_entropy_backward.default"),
        *("binary_cross_entropy_with_logits.default", "logsumexp.default"),
        *("gather.default", "scatter_add.default", "scatter.src", "scatter.value"),
        *("sort.default", "sort.stable", "topk.default"),
        *(
            f"upsample_{way}{kind}"
            for way in (
                *("nearest1d", "nearest2d", "nearest3d"),
                *("bilinear2d", "bicubic2d", "trilinear3d"),
            )
            for kind in (".vec", ".default")
        ),
    )
)

SLACK_BYTES: Final = 1 << 16
"""More than a library takes for tables, tiles and padding, however little it computes."""

_MATRIX_BLOCK: Final = 64
_CHANNEL_BLOCK: Final = 16
_SCORES_BLOCK: Final = 512
"""More queries and keys than a fused kernel looks at together."""


def allowance_bytes(node: Node, types: Types) -> int:
    """The most that a node's op may take beside what is counted; 0 where all that it takes is counted."""
    if node.op in PRODUCTS:
        return _products_bytes(node, types) + SLACK_BYTES
    if node.op in CONVOLUTIONS:
        return _convolution_bytes(node, types) + SLACK_BYTES
    if node.op in ATTENTION:
        return _attention_bytes(node, types) + SLACK_BYTES
    if node.op in OTHERS:
        return sum(8 * kind.numel for kind in _tensors(node, types)) + SLACK_BYTES
    return 0


def is_fused(node: Node, types: Types) -> bool:
    """Whether attention is one kernel on a CPU, which has all heads of one size, and not products of matrices."""
    q, _, v = (tensor_of(arg, types) for arg in _attention_operands(node))
    return q.shape[3] == v.shape[3]


def _tensors(node: Node, types: Types) -> list[TensorType]:
    """The operands and the results."""
    return [*_operands(node, types), *(kind for kind in node.results if kind is not None)]


def _operands(node: Node, types: Types) -> Iterator[TensorType]:
    for arg in node.args:
        if isinstance(arg, Ref) and (kind := types[arg.index]) is not None:
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
    q, k, v = (tensor_of(arg, types) for arg in _attention_operands(node))
    batch, heads, length, _ = q.shape
    rows, columns = _blocked((length, k.shape[2]), _MATRIX_BLOCK)
    keys = _wide_bytes(q, (batch, heads, columns, k.shape[3] + v.shape[3]))
    copies = sum(_wide_bytes(kind, kind.shape) for kind in _tensors(node, types))
    if is_fused(node, types):
        blocks = (min(rows, _SCORES_BLOCK), min(columns, _SCORES_BLOCK))
        return copies + keys + 4 * _wide_bytes(q, blocks)
    return 2 * copies + 4 * keys + 8 * _wide_bytes(q, (batch, heads, rows, columns))


def _attention_operands(node: Node) -> tuple[NodeArg, ...]:
    """q, k and v, which follow the gradient in the backward."""
    first = 0 if node.op == "zeroir.attention.default" else 1
    return node.args[first : first + 3]
