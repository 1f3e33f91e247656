"""Matrix products and convolutions, which oneDNN carries out for some dtypes.

Its figures are bounds: they were taken on a CPU with AVX-512 that has no instructions for 16-bit numbers.
"""

from __future__ import annotations

import math
from typing import Final

from zeroir.ir.buffers import contiguous_stride
from zeroir.ir.dtypes import DType
from zeroir.ir.scratch.arguments import Types, is_contiguous, result_of, tensor_of
from zeroir.ir.segment import Node, TensorType


def product_bytes(node: Node, types: Types) -> int:
    """Copies of what cannot be read as it lies, and the sums of bf16 in FP32."""
    a, b = (tensor_of(arg, types) for arg in node.args[-2:])
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    count = math.prod(a.shape[:-2]) * rows * inner * columns
    if a.dtype is not DType.BF16 or count <= _FEWEST_ONEDNN_PRODUCTS:
        return sum(kind.size_bytes for kind in (a, b) if not _is_matrix(kind))
    copies = sum(kind.size_bytes for kind in (a, b) if not _is_packed(kind))
    # Sums in FP32, of one matrix at a time.
    return copies + widened_bytes(rows, columns)


_FEWEST_ONEDNN_PRODUCTS: Final = 16**3
_ONEDNN_BLOCK: Final = 16
_ONEDNN_EXTRA_BYTES: Final = 128


def widened_bytes(rows: int, columns: int) -> int:
    """A bound on a product of bf16 in FP32, which oneDNN makes in blocks."""
    return 4 * _blocked(rows) * _blocked(columns) + _ONEDNN_EXTRA_BYTES


def _blocked(size: int) -> int:
    return -(-size // _ONEDNN_BLOCK) * _ONEDNN_BLOCK


def _is_matrix(kind: TensorType) -> bool:
    """Whether a product can read the last two dimensions as they lie: rows or columns of neighbours."""
    (rows, columns), (down, right) = kind.shape[-2:], kind.stride[-2:]
    is_row_major = right == 1 and down >= max(1, columns)
    is_column_major = down == 1 and right >= max(1, rows)
    return is_row_major or is_column_major


def _is_packed(kind: TensorType) -> bool:
    """Whether matrices lie one behind the other, each by rows or by columns."""
    *batch, rows, columns = kind.shape
    by_columns = (*contiguous_stride((*batch, rows * columns))[:-1], 1, rows)
    return is_contiguous(kind) or kind.stride == by_columns


def convolution_bytes(node: Node, types: Types) -> int:
    """A bound: everything once more in blocks of channels, and buffers to gather sums and columns in."""
    is_forward = node.op == "aten.convolution.default"
    x, weight = (
        tensor_of(arg, types) for arg in node.args[slice(0, 2) if is_forward else slice(1, 3)]
    )
    y = result_of(node) if is_forward else tensor_of(node.args[0], types)
    outputs, inputs = _blocked(weight.shape[0]), _blocked(weight.shape[1])
    window = math.prod(weight.shape[2:])
    copies = outputs * inputs * window * weight.dtype.itemsize_bytes
    for kind in (x, y):
        batch, channels, *sizes = kind.shape
        copies += batch * _blocked(channels) * math.prod(sizes) * kind.dtype.itemsize_bytes
    if x.dtype is DType.F16:
        # torch's own kernel, which writes out what each output looks at.
        positions = math.prod(y.shape[2:]) * x.shape[0]
        per_position = math.prod(weight.shape[1:])
        return copies + 4 * y.numel + positions * per_position * x.dtype.itemsize_bytes
    sums = 0 if is_forward else 2 * 4 * outputs * inputs * window
    return copies + sums + _CONVOLUTION_EXTRA_BYTES


_CONVOLUTION_EXTRA_BYTES: Final = 1 << 16
