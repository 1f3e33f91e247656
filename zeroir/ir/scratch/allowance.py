"""What operators may take for scratch memory that nobody can count ahead: a rule that is generous for every CPU.

Libraries (oneDNN, MKL, OpenBLAS, the Compute Library) compute matrix products, convolutions and attention. They copy,
widen and pack what they read as each CPU likes it best. A few operators of torch itself, losses over all elements,
look-ups, sorts and resizing, keep buffers that are not worth a formula each. All of them are allowed:

* a row-major copy of every operand that lies otherwise;
* every operand and every result once more, with 32 bits an element at least, in blocks of 64 by 64 for products and of
  16 channels for convolutions;
* for convolutions, whatever each output looks at, written out, and two gradients of the weights in FP32;
* for attention, keys and values anew for every head of the queries, and four blocks of scores in FP32;
* for the operators of torch itself, everything twice with 64 bits an element;
* and ``SLACK_BYTES``.
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
        return _copied_bytes(node, types) + SLACK_BYTES
    if node.op in CONVOLUTIONS:
        return _copied_bytes(node, types) + _convolution_bytes(node, types) + SLACK_BYTES
    if node.op in ATTENTION:
        return _copied_bytes(node, types) + _attention_bytes(node, types) + SLACK_BYTES
    if node.op in OTHERS:
        return 2 * sum(8 * kind.numel for kind in _tensors(node, types)) + SLACK_BYTES
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


def _copied_bytes(node: Node, types: Types) -> int:
    """Operands row by row, and everything in blocks with 32 bits an element or more."""
    packed = sum(kind.size_bytes for kind in _operands(node, types) if not is_contiguous(kind))
    is_convolution = node.op in CONVOLUTIONS
    return packed + sum(_blocked_bytes(kind, is_convolution) for kind in _tensors(node, types))


def _blocked_bytes(kind: TensorType, is_convolution: bool) -> int:
    if is_convolution:
        sizes = [*_blocked(kind.shape[:2], _CHANNEL_BLOCK), *kind.shape[2:]]
    else:
        sizes = [*kind.shape[:-2], *_blocked(kind.shape[-2:], _MATRIX_BLOCK)]
    return math.prod(sizes) * _wide_itemsize_bytes(kind)


def _blocked(sizes: Iterable[int], block: int) -> Iterator[int]:
    return (-(-size // block) * block for size in sizes)


def _wide_itemsize_bytes(kind: TensorType) -> int:
    return max(kind.dtype.itemsize_bytes, DType.F32.itemsize_bytes)


def _convolution_bytes(node: Node, types: Types) -> int:
    """A column of inputs for every output, as kernels of torch's own make, and two gradients of the weights."""
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
    sums = 2 * _blocked_bytes(weight, is_convolution=True)
    return positions * window * x.dtype.itemsize_bytes + sums


def _attention_bytes(node: Node, types: Types) -> int:
    """Keys and values for every head of the queries, and scores: blocks of them, or all where no kernel fuses."""
    q, k, v = (tensor_of(arg, types) for arg in _attention_operands(node))
    batch, heads, length, _ = q.shape
    kv_length = k.shape[2]
    width = sum(_blocked((k.shape[3], v.shape[3]), _MATRIX_BLOCK))
    (rows, columns) = _blocked((length, kv_length), _MATRIX_BLOCK)
    repeated = batch * heads * columns * width
    scores = 4 * min(rows, _SCORES_BLOCK) * min(columns, _SCORES_BLOCK)
    if not is_fused(node, types):
        repeated, scores = 4 * repeated, 8 * batch * heads * rows * columns
    return (repeated + scores) * _wide_itemsize_bytes(q)


def _attention_operands(node: Node) -> tuple[NodeArg, ...]:
    """q, k and v, which follow the gradient in the backward."""
    first = 0 if node.op == "zeroir.attention.default" else 1
    return node.args[first : first + 3]
