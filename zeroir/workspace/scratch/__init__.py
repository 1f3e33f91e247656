"""The bytes that torch's operators need at once in a call on a CPU, including results: a table of formulas.

Most operators only need their results. The others copy operands of another layout, convert operands to one dtype, or
have their own buffers; torch's allocator sees all of these. The formulas follow the events of the allocator of torch
2.13, and tests compare them. They are for one thread, which is the default of a rank in a job: some kernels need a
buffer per thread. An operator without a formula counts its results.

The scratch memory of libraries differs between CPUs and is not counted, nor is that of operators that were not
examined: ``allowance`` bounds both. An operator of a library or the model may declare its workspace.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Final

from zeroir.ir.dtypes import DType
from zeroir.ir.segments.allowlist import listed_ops
from zeroir.ir.segments.segment import Node, TensorType
from zeroir.ir.segments.views import shares_storage
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
"""The bytes that the op of a node needs in addition to its results."""


def made_bytes(node: Node, types: Types) -> list[int]:
    """Return the bytes of each result that the op of a node computes."""
    if node.op in _SHRUNK:
        shapes = (reversed(tensor_of(arg, types).shape) for arg in node.args[:2])
        numel = math.prod(map(max, itertools.zip_longest(*shapes, fillvalue=1)))
        return [numel * result_of(node).dtype.itemsize_bytes]
    return [0 if kind is None else kind.size_bytes for kind in node.results]


def call_bytes(node: Node, types: Types, *, is_filled: bool = False) -> int:
    """Return the most bytes that a node's op needs at once, from its call until it returns, including results.

    ``allowance.allowance_bytes`` bounds additional bytes. ``is_filled`` says that the result is computed in given
    memory.
    """
    if shares_storage(node.op):
        return 0
    made = 0 if is_filled else sum(made_bytes(node, types))
    if node.workspace_bytes is not None:
        return made + node.workspace_bytes
    return made + _inner_bytes(node, types, is_filled=is_filled)


def copy_bytes(source: TensorType, stride: tuple[int, ...]) -> int:
    """Return the scratch bytes of a copy of ``source`` to these strides: torch transposes matrices by tiles."""
    if len(source.shape) != 2 or source.numel < _TILE * _TILE:
        return 0
    rows, columns = source.shape
    side = 2 * _TILE if source.dtype is DType.U8 else _TILE
    is_transposed = source.stride == (1, rows) and stride == (columns, 1)
    return side * side * source.dtype.itemsize_bytes if is_transposed else 0


_TILE: Final = 60


def is_counted(op: str) -> bool:
    """Return whether all bytes of an op are counted, on any CPU: by a formula, or because it needs none."""
    return op in _FORMULAS or shares_storage(op) or op in listed_ops("counted_ops.txt")


def _inner_bytes(node: Node, types: Types, *, is_filled: bool) -> int:
    if is_filled and node.op == _EMBEDDING_GRADIENT:
        return embedding_gradient_bytes(node, types)
    formula = _FORMULAS.get(node.op)
    return 0 if formula is None else formula(node, types)


def _converted(first: int, last: int) -> Formula:
    """Return the formula of an op that converts these operands to the result's dtype."""

    def formula(node: Node, types: Types) -> int:
        operands = operands_of(node.args[first:last], types)
        return converted_bytes(operands, result_of(node).dtype)

    return formula


def _compared(node: Node, types: Types) -> int:
    operands = operands_of(node.args[:2], types)
    return converted_bytes(operands, common_dtype(operands))


def _dense(*places: int) -> Formula:
    """Return the formula of an op that copies these operands, if given, where they are not contiguous."""

    def formula(node: Node, types: Types) -> int:
        given = (node.args[place] for place in places)
        return sum(dense_bytes(arg, types) for arg in given if arg is not None)

    return formula


def _looked_up(node: Node, types: Types) -> int:
    """Return the bytes of copies of a loss's operands that are not contiguous, where it is reduced to one number."""
    is_reduced = node.args[3] != 0
    return _dense(0, 1, 2)(node, types) if is_reduced else 0


def _cloned(node: Node, types: Types) -> int:
    source, result = tensor_of(node.args[0], types), result_of(node)
    return copy_bytes(source, result.stride) if source.dtype is result.dtype else 0


def _hashed(node: Node, _: Types) -> int:
    """Return the bytes of two 64-bit integers for each element, while they are hashed, and of a mask."""
    return 12 * result_of(node).numel + 8


def _is_infinite(node: Node, types: Types) -> int:
    """Return the bytes of the absolute value and of the number with which it is compared, infinity."""
    source = tensor_of(node.args[0], types)
    number = converted_bytes([source, DType.F64], source.dtype)
    return source.size_bytes + number if source.dtype.is_floating else 0


def _as_bools(node: Node, types: Types) -> int:
    source = tensor_of(node.args[0], types)
    return 0 if source.dtype is DType.BOOL else source.numel


_SHRUNK: Final = frozenset(
    f"aten.{name}.default" for name in ("mse_loss", "smooth_l1_loss", "binary_cross_entropy")
)
"""Losses whose result, even one number, keeps the memory in which those of all elements were computed."""

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
"""Operators whose results are floats for any operand."""

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
