"""Lookups, norms and dropout."""

from __future__ import annotations

import math

from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import Node, TensorType
from zeroir.ir.segments.views import view_stride
from zeroir.workspace.scratch.arguments import (
    Types,
    converted_bytes,
    dense_bytes,
    is_contiguous,
    numbers_of,
    result_of,
    tensor_of,
)


def embedding_gradient_bytes(node: Node, types: Types) -> int:
    """Return the bytes of ``embedding_gradient`` of ``torch_ops``: flat indices, 32-bit ones for 16-bit gradients."""
    grad, indices = (tensor_of(arg, types) for arg in node.args[:2])
    is_flat = view_stride(indices, (indices.numel,)) is not None
    is_rows = view_stride(grad, (indices.numel, grad.shape[-1])) is not None
    flat, rows = 0 if is_flat else indices.size_bytes, 0 if is_rows else grad.size_bytes
    if result_of(node).dtype.itemsize_bytes != 2 or indices.dtype is DType.I32:
        return flat + rows
    short = 4 * indices.numel
    return short + max(flat, rows)


def layer_norm_backward_bytes(node: Node, types: Types) -> int:
    """Return the bytes of copies of operands that are not row-major, and then of two sums per parameter."""
    grad, x, _, _, _, weight, bias = node.args[:7]
    copies = sum(dense_bytes(arg, types) for arg in (grad, x, weight, bias) if arg is not None)
    has_parameters = any(kind is not None for kind in node.results[1:])
    numel = math.prod(numbers_of(node.args[2]))
    itemsize_bytes = tensor_of(x, types).dtype.itemsize_bytes
    return copies + (2 * numel * itemsize_bytes if has_parameters else 0)


def batch_norm_bytes(node: Node, types: Types) -> int:
    """Return the bytes of a scale and a shift per channel, and in training of a sum where channels are innermost.

    In evaluation the result is contiguous where x does not have a layout of images, and is then copied to that layout.
    """
    x, is_training = tensor_of(node.args[0], types), node.args[5]
    if not is_training and not is_contiguous(x) and not _is_of_images(x):
        return max(x.size_bytes, 3 * _channel_bytes(x))
    # Parameters of bf16 make the sum one of the results' buffers.
    has_sum = all(kind is None or kind.dtype is not DType.BF16 for kind in node.results[1:3])
    is_summed = is_training and has_sum and _is_channels_last(x)
    return (3 if is_summed else 2) * _channel_bytes(x)


def batch_norm_backward_bytes(node: Node, types: Types) -> int:
    """Return the bytes of another gradient of the input, before sums per channel exist."""
    grad, x, is_training = *(tensor_of(arg, types) for arg in node.args[:2]), node.args[7]
    own = _channel_bytes(x)
    if grad.stride != x.stride and not is_contiguous(x):
        narrow = x.shape[1] * x.dtype.itemsize_bytes
        return 2 * x.size_bytes + own + narrow if x.dtype.is_low_precision else own
    sums = 0
    if _is_channels_last(x):
        sums = 5 if x.dtype.is_low_precision else 2 if is_training else 3
    return max(x.size_bytes, sums * own)


def _is_of_images(x: TensorType) -> bool:
    """Return whether x has two or three spatial dimensions, with channels innermost."""
    return len(x.shape) in (4, 5) and x.stride[1] == 1


def _channel_bytes(x: TensorType) -> int:
    return x.shape[1] * max(x.dtype.itemsize_bytes, 4)


def _is_channels_last(x: TensorType) -> bool:
    return math.prod(x.shape[2:]) == 1 or not is_contiguous(x)


def dropout_bytes(node: Node, types: Types) -> int:
    """Return the bytes of ``torch_ops.replaced.dropout``: two i64 per element, then the product in three parts."""
    x = tensor_of(node.args[0], types)
    number = converted_bytes([DType.F64], x.dtype)
    most = max(16 * x.numel + 8, x.numel + 3 * x.size_bytes + number)
    return most - (x.size_bytes + x.numel)
