"""The temporary tensors of ``torch_ops.replaced.attention`` around the attention kernel."""

from __future__ import annotations

from collections.abc import Sequence

from zeroir.ir.buffers import contiguous_stride
from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import Node, NodeArg, Ref, TensorType
from zeroir.workspace.scratch.arguments import Types, tensor_of


def operands(node: Node) -> tuple[NodeArg, ...]:
    """Return q, k and v, which follow the gradient in the backward."""
    first = 0 if node.op == "zeroir.attention.default" else 1
    return node.args[first : first + 3]


def is_fused(node: Node, types: Types) -> bool:
    """Return whether one kernel computes attention on a CPU, as it does where all heads have the same size."""
    q, _, v = (tensor_of(arg, types) for arg in operands(node))
    return q.shape[3] == v.shape[3]


def attention_bytes(node: Node, types: Types) -> int:
    """Return the bytes of operands and a mask in the kernel's layout, and of a copy of the output by length."""
    if not is_fused(node, types):
        return 0
    q, made, out = tensor_of(node.args[0], types), _made_bytes(node), node.results[0]
    assert out is not None
    # The kernel returns its result in the layout of q, and ours is by length.
    again = 0 if _is_by_length(q) else out.size_bytes
    return _prepared_bytes(node.args[:4], types, made, again)


def attention_backward_bytes(node: Node, types: Types) -> int:
    """Return the bytes of operands and a mask in the kernel's layout; its gradients are by length."""
    if not is_fused(node, types):
        return 0
    return _prepared_bytes(node.args[1:5], types, _made_bytes(node), 0)


def _made_bytes(node: Node) -> int:
    return sum(kind.size_bytes for kind in node.results if kind is not None)


def _is_by_length(q: TensorType) -> bool:
    """Return whether a tensor of the result's shape, in the layout in which the kernel gets q, is by length."""
    stride = q.stride if q.stride[-1] == 1 else contiguous_stride(q.shape)
    order = sorted((d for d in range(4) if q.shape[d] != 1), key=lambda d: -stride[d])
    return order == [d for d in (0, 2, 1, 3) if q.shape[d] != 1]


def _prepared_bytes(args: Sequence[NodeArg], types: Types, made: int, again: int) -> int:
    """Return the bytes of copies of q, k, v and a mask before the kernel's results exist, and ``again`` after that."""
    q, mask = tensor_of(args[0], types), args[3]
    packed = sum(
        kind.size_bytes for arg in args[:3] if (kind := tensor_of(arg, types)).stride[-1] != 1
    )
    if not isinstance(mask, Ref) or tensor_of(mask, types).dtype is not DType.BOOL:
        return packed + again
    numel = tensor_of(mask, types).numel
    added = numel * q.dtype.itemsize_bytes
    return max(added + numel - made, packed + added + again)
