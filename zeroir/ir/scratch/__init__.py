"""How many bytes torch's operators hold at once in a call on a CPU, results included: a table of formulas.

Most take their results and no more. The rest copy what they cannot read as it lies, convert operands to one dtype, or
keep buffers of their own, all of which torch's allocator sees. The formulas were found by the events of the allocator
of torch 2.13, with which tests compare them. They are for one thread, which a job gives each rank unless it is told
otherwise: some kernels keep a buffer per thread. What the table does not name counts its results.

The scratch memory of libraries differs from CPU to CPU and is not counted: ``allowance`` bounds it.
"""

from __future__ import annotations

import itertools
import math
from typing import Final

from zeroir.ir.dtypes import DType
from zeroir.ir.promotion import common_dtype
from zeroir.ir.scratch.arguments import (
    Types,
    converted_bytes,
    dense_bytes,
    operands_of,
    result_of,
    tensor_of,
)
from zeroir.ir.scratch.attention import attention_backward_bytes, attention_bytes
from zeroir.ir.scratch.norms import (
    batch_norm_backward_bytes,
    batch_norm_bytes,
    dropout_bytes,
    embedding_gradient_bytes,
    layer_norm_backward_bytes,
)
from zeroir.ir.scratch.reductions import mean_bytes, sum_bytes
from zeroir.ir.segment import Node, TensorType
from zeroir.ir.views import is_view

_BINARY: Final = frozenset(
    f"aten.{name}"
    for name in (
        *(
            f"{op}.{kind}"
            for op in ("add", "sub", "rsub", "mul", "div")
            for kind in ("Tensor", "Scalar")
        ),
        *(f"{op}.default" for op in ("maximum", "minimum")),
    )
)
_COMPARISONS: Final = frozenset(
    f"aten.{name}.{kind}"
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for kind in ("Tensor", "Scalar")
)
_UNARY: Final = frozenset(
    f"aten.{name}.default"
    for name in (
        *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "exp", "expm1", "log", "log10"),
        *("log1p", "log2", "reciprocal", "rsqrt", "sigmoid", "sin", "sinh", "sqrt", "tan", "tanh"),
    )
)
"""Functions whose results are floats whatever they are of."""


_SHRUNK: Final = frozenset(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy")
)
"""Losses whose result, also where it is one number, keeps the memory in which those of all elements were made."""


def made_bytes(node: Node, types: Types) -> list[int]:
    """What the memory of each result takes that a node's op makes."""
    if node.op in _SHRUNK:
        shapes = (reversed(tensor_of(arg, types).shape) for arg in node.args[:2])
        numel = math.prod(map(max, itertools.zip_longest(*shapes, fillvalue=1)))
        return [numel * result_of(node).dtype.itemsize_bytes]
    return [0 if kind is None else kind.size_bytes for kind in node.results]


def call_bytes(node: Node, types: Types, *, is_filled: bool = False) -> int:
    """The most bytes that a node's op holds at once, from its call until it returns, results included.

    Not what ``allowance.allowance_bytes`` bounds.

    ``is_filled`` says that the result is made in memory that is given.
    """
    if is_view(node.op):
        return 0
    made = 0 if is_filled else sum(made_bytes(node, types))
    return made + _inner_bytes(node, types, is_filled=is_filled)


def copy_bytes(source: TensorType, stride: tuple[int, ...]) -> int:
    """What copying a tensor to others of its dtype with these strides takes: torch transposes matrices by tiles."""
    if len(source.shape) != 2 or source.numel < _TILE * _TILE:
        return 0
    rows, columns = source.shape
    side = 2 * _TILE if source.dtype is DType.U8 else _TILE
    is_transposed = source.stride == (1, rows) and stride == (columns, 1)
    return side * side * source.dtype.itemsize_bytes if is_transposed else 0


_TILE: Final = 60


def _inner_bytes(node: Node, types: Types, *, is_filled: bool) -> int:
    """What a node's op holds beside its results."""
    if node.op in _BINARY:
        return converted_bytes(operands_of(node.args[:2], types), result_of(node).dtype)
    if node.op in _UNARY:
        return converted_bytes(operands_of(node.args[:1], types), result_of(node).dtype)
    if node.op in _COMPARISONS:
        operands = operands_of(node.args[:2], types)
        return converted_bytes(operands, common_dtype(operands))
    match node.op:
        case "aten.where.self":
            return converted_bytes(operands_of(node.args[1:3], types), result_of(node).dtype)
        case "aten.clamp.Tensor":
            return converted_bytes(operands_of(node.args[:3], types), result_of(node).dtype)
        case "aten.clone.default" | "aten._to_copy.default":
            source, result = tensor_of(node.args[0], types), result_of(node)
            return copy_bytes(source, result.stride) if source.dtype is result.dtype else 0
        case "aten.isinf.default":
            # Its absolute value against infinity, a number.
            source = tensor_of(node.args[0], types)
            number = converted_bytes([source, DType.F64], source.dtype)
            return source.size_bytes + number if source.dtype.is_floating else 0
        case "aten.sum.dim_IntList" | "aten.sum.default":
            return sum_bytes(node, types)
        case "aten.mean.dim" | "aten.mean.default":
            return mean_bytes(node, types)
        case "aten.embedding.default":
            return dense_bytes(node.args[1], types)
        case "aten.embedding_dense_backward.default":
            if is_filled:
                return embedding_gradient_bytes(node, types)
            return dense_bytes(node.args[0], types) + dense_bytes(node.args[1], types)
        case (
            "aten.native_layer_norm.default"
            | "aten._softmax.default"
            | "aten._log_softmax.default"
            | "aten.tril.default"
            | "aten.triu.default"
        ):
            return dense_bytes(node.args[0], types)
        case "aten._softmax_backward_data.default" | "aten._log_softmax_backward_data.default":
            return dense_bytes(node.args[0], types) + dense_bytes(node.args[1], types)
        case "aten.any.default" | "aten.all.default":
            source = tensor_of(node.args[0], types)
            return 0 if source.dtype is DType.BOOL else source.numel
        case "aten.native_layer_norm_backward.default":
            return layer_norm_backward_bytes(node, types)
        case "zeroir.dropout.default":
            return dropout_bytes(node, types)
        case "zeroir.uniform.default":
            return 12 * result_of(node).numel + 8  # two 64-bit integers an element while hashing
        case "zeroir.batch_norm.default":
            return batch_norm_bytes(node, types)
        case "zeroir.batch_norm_backward.default":
            return batch_norm_backward_bytes(node, types)
        case "zeroir.attention.default":
            return attention_bytes(node, types)
        case "zeroir.attention_backward.default":
            return attention_backward_bytes(node, types)
        case _:
            return 0
