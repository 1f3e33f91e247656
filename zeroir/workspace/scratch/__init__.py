"""The bytes that torch's operators hold at once in a call on a CPU, results included: a table of formulas.

Most operators hold only their results. The others copy operands of another layout, convert operands to one dtype, or
keep buffers of their own; torch's allocator sees all of these. The formulas follow the events of the allocator of torch
2.13, and tests compare them. They hold for one thread, which is the default of a rank in a job: some kernels keep a
buffer per thread. An operator without a formula counts its results.

The scratch memory of libraries differs between CPUs and is not counted, nor is that of operators that nobody has
examined: ``allowance`` bounds both. An operator of a library or the model may declare what it takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Final

from zeroir.ir.dtypes import DType
from zeroir.ir.segments.allowlist import listed_ops
from zeroir.ir.segments.segment import Node, TensorType
from zeroir.ir.segments.views import is_view
from zeroir.workspace.promotion import common_dtype
from zeroir.workspace.scratch.arguments import (
    Types,
    converted_bytes,
    dense_bytes,
    operands_of,
    result_of,
    tensor_of,
)
from zeroir.workspace.scratch.attention import attention_backward_bytes, attention_bytes
from zeroir.workspace.scratch.norms import (
    batch_norm_backward_bytes,
    batch_norm_bytes,
    dropout_bytes,
    embedding_gradient_bytes,
    layer_norm_backward_bytes,
)
from zeroir.workspace.scratch.reductions import mean_bytes, sum_bytes

Formula = Callable[[Node, Types], int]
"""The bytes that the op of a node holds beside its results."""


def made_bytes(node: Node, types: Types) -> list[int]:
    """The bytes of each result that the op of a node makes."""
    if node.op in _SHRUNK:
        shapes = (reversed(tensor_of(arg, types).shape) for arg in node.args[:2])
        numel = math.prod(map(max, itertools.zip_longest(*shapes, fillvalue=1)))
        return [numel * result_of(node).dtype.itemsize_bytes]
    return [0 if kind is None else kind.size_bytes for kind in node.results]


def call_bytes(node: Node, types: Types, *, is_filled: bool = False) -> int:
    """The most bytes that a node's op holds at once, from its call until it returns, results included.

    What ``allowance.allowance_bytes`` bounds comes on top of it. ``is_filled`` says that the result is made in memory
    that is given.
    """
    if is_view(node.op):
        return 0
    made = 0 if is_filled else sum(made_bytes(node, types))
    if node.workspace_bytes is not None:
        return made + node.workspace_bytes
    return made + _inner_bytes(node, types, is_filled=is_filled)


def copy_bytes(source: TensorType, stride: tuple[int, ...]) -> int:
    """The bytes of a copy between two tensors of one dtype with these strides: torch transposes matrices by tiles."""
    if len(source.shape) != 2 or source.numel < _TILE * _TILE:
        return 0
    rows, columns = source.shape
    side = 2 * _TILE if source.dtype is DType.U8 else _TILE
    is_transposed = source.stride == (1, rows) and stride == (columns, 1)
    return side * side * source.dtype.itemsize_bytes if is_transposed else 0


_TILE: Final = 60


def is_counted(op: str) -> bool:
    """Whether all that an op takes is counted, on any CPU: a formula tells it, or none was found to be needed."""
    return op in _FORMULAS or is_view(op) or op in listed_ops("counted_ops.txt")


def _inner_bytes(node: Node, types: Types, *, is_filled: bool) -> int:
    if is_filled and node.op == _EMBEDDING_GRADIENT:
        return embedding_gradient_bytes(node, types)
    formula = _FORMULAS.get(node.op)
    return 0 if formula is None else formula(node, types)


def _converted(first: int, last: int) -> Formula:
    """These operands are converted to the result's dtype."""

    def formula(node: Node, types: Types) -> int:
        operands = operands_of(node.args[first:last], types)
        return converted_bytes(operands, result_of(node).dtype)

    return formula


def _compared(node: Node, types: Types) -> int:
    operands = operands_of(node.args[:2], types)
    return converted_bytes(operands, common_dtype(operands))


def _dense(*places: int) -> Formula:
    """These operands, as far as there are any, are copied where they do not lie in row-major order."""

    def formula(node: Node, types: Types) -> int:
        given = (node.args[place] for place in places)
        return sum(dense_bytes(arg, types) for arg in given if arg is not None)

    return formula


def _looked_up(node: Node, types: Types) -> int:
    """A loss that is one number reads all that it is of in row-major order."""
    is_reduced = node.args[3] != 0
    return _dense(0, 1, 2)(node, types) if is_reduced else 0


def _cloned(node: Node, types: Types) -> int:
    source, result = tensor_of(node.args[0], types), result_of(node)
    return copy_bytes(source, result.stride) if source.dtype is result.dtype else 0


def _hashed(node: Node, _: Types) -> int:
    """Two 64-bit integers for each element, while they are hashed, and a mask."""
    return 12 * result_of(node).numel + 8


def _is_infinite(node: Node, types: Types) -> int:
    """The absolute value against infinity, a number."""
    source = tensor_of(node.args[0], types)
    number = converted_bytes([source, DType.F64], source.dtype)
    return source.size_bytes + number if source.dtype.is_floating else 0


def _as_bools(node: Node, types: Types) -> int:
    source = tensor_of(node.args[0], types)
    return 0 if source.dtype is DType.BOOL else source.numel


_SHRUNK: Final = frozenset(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy")
)
"""Losses whose result, even one number, keeps the memory in which those of all elements were made."""

_EMBEDDING_GRADIENT: Final = "aten.embedding_dense_backward.default"

_ARITHMETIC: Final = (
    *(
        f"{op}.{kind}"
        for op in ("add", "sub", "rsub", "mul", "div")
        for kind in ("Tensor", "Scalar")
    ),
    *("maximum.default", "minimum.default", "atan2.default", "copysign.Tensor", "xlogy.Tensor"),
)
_COMPARISONS: Final = tuple(
    f"{op}.{kind}" for op in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("Tensor", "Scalar")
)
_FUNCTIONS: Final = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "digamma", "erf", "erfc"),
    *("erfinv", "exp", "exp2", "expm1", "i0", "lgamma", "log", "log10", "log1p", "log2"),
    *("reciprocal", "rsqrt", "sigmoid", "sin", "sinc", "sinh", "sqrt", "tan", "tanh"),
)
"""Their results are floats whatever they are of."""

_FORMULAS: Final[Mapping[str, Formula]] = {
    **{f"aten.{name}": _converted(0, 2) for name in _ARITHMETIC},
    **{f"aten.{name}.default": _converted(0, 1) for name in _FUNCTIONS},
    **{f"aten.{name}": _compared for name in _COMPARISONS},
    "aten.where.self": _converted(1, 3),
    "aten.clamp.Tensor": _converted(0, 3),
    "aten.clone.default": _cloned,
    "aten._to_copy.default": _cloned,
    "aten.isinf.default": _is_infinite,
    "aten.any.default": _as_bools,
    "aten.all.default": _as_bools,
    "aten.sum.dim_IntList": sum_bytes,
    "aten.sum.default": sum_bytes,
    "aten.mean.dim": mean_bytes,
    "aten.mean.default": mean_bytes,
    "aten.nll_loss_forward.default": _looked_up,
    "aten.embedding.default": _dense(1),
    _EMBEDDING_GRADIENT: _dense(0, 1),
    "aten._softmax.default": _dense(0),
    "aten._log_softmax.default": _dense(0),
    "aten._softmax_backward_data.default": _dense(0, 1),
    "aten._log_softmax_backward_data.default": _dense(0, 1),
    "aten.tril.default": _dense(0),
    "aten.triu.default": _dense(0),
    "aten.native_layer_norm.default": _dense(0, 2, 3),
    "aten.native_layer_norm_backward.default": layer_norm_backward_bytes,
    "zeroir.uniform.default": _hashed,
    "zeroir.dropout.default": dropout_bytes,
    "zeroir.batch_norm.default": batch_norm_bytes,
    "zeroir.batch_norm_backward.default": batch_norm_backward_bytes,
    "zeroir.attention.default": attention_bytes,
    "zeroir.attention_backward.default": attention_backward_bytes,
}
