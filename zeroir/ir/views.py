"""Which ops only look at a value's storage in another way, where in it their results begin, and with which strides."""

from __future__ import annotations

from typing import Final

from zeroir.ir.buffers import contiguous_stride
from zeroir.ir.segment import Node, NodeArg, TensorType

_FROM_THE_START: Final = frozenset(
    {
        "aten._unsafe_view.default",
        "aten.alias.default",
        "aten.detach.default",
        "aten.expand.default",
        "aten.permute.default",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.t.default",
        "aten.transpose.int",
        "aten.unfold.default",
        "aten.unsqueeze.default",
        "aten.view.default",
    }
)
"""Views whose first element is that of what they look at."""

_FURTHER_ON: Final = frozenset(
    {
        "aten.diagonal.default",
        "aten.select.int",
        "aten.slice.Tensor",
        "aten.split.Tensor",
        "aten.split_with_sizes.default",
        "aten.unbind.int",
    }
)
"""Views that begin somewhere in what they look at."""

_ELSEWHERE: Final = frozenset(
    {
        "aten._conj.default",
        "aten._neg_view.default",
        "aten._reshape_alias.default",
        "aten.as_strided.default",
        "aten.imag.default",
        "aten.lift_fresh.default",
        "aten.real.default",
        "aten.view_as_complex.default",
        "aten.view_as_real.default",
    }
)
"""Views that are told by more than a place in a storage of elements of one dtype."""


def is_view(op: str) -> bool:
    """Whether the op's results always share the storage of its first argument."""
    return op in _FROM_THE_START or op in _FURTHER_ON or op in _ELSEWHERE


def view_offset(node: Node, source: TensorType, result: int) -> int | None:
    """How many elements after the first of ``source``, what the node looks at, the first of a result stands.

    With its type that says all about a view. None for ops that are no views, or are not told by that.
    """
    if node.kwargs or not node.args:
        return None
    if node.op in _FROM_THE_START:
        return 0
    if node.op not in _FURTHER_ON:
        return None
    numbers = [_number(arg) for arg in node.args[1:]]
    if node.op == "aten.diagonal.default":
        offset, one, other = [*numbers, *(0, 0, 1)[len(numbers) :]]
        axis = other if offset >= 0 else one
        return abs(offset) * source.stride[axis]
    if node.op == "aten.unbind.int":
        return result * source.stride[numbers[0] if numbers else 0]
    if node.op == "aten.split.Tensor":
        size, axis = [*numbers, *(1, 0)[len(numbers) :]]
        return result * size * source.stride[axis]
    if node.op == "aten.split_with_sizes.default":
        sizes = node.args[1]
        before = sizes[:result] if isinstance(sizes, tuple) else ()
        return sum(map(_number, before)) * source.stride[numbers[1] if len(numbers) > 1 else 0]
    axis, start = [*numbers, *(0, 0)[len(numbers) :]][:2]
    length = source.shape[axis]
    start = min(max(start + length, 0) if start < 0 else start, length)
    return start * source.stride[axis]


def view_stride(kind: TensorType, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of a tensor seen in another shape, as ``torch.Tensor.view`` has them; None where it refuses."""
    if kind.numel == 0:
        return kind.stride if kind.shape == shape else contiguous_stride(shape)
    if not kind.shape:
        return (1,) * len(shape)
    stride = [0] * len(shape)
    at = len(shape) - 1
    # Dimensions that lie behind one another in memory are one run, which the new ones must cut up evenly.
    base, run, used = kind.stride[-1], 1, 1
    for d in range(len(kind.shape) - 1, -1, -1):
        run *= kind.shape[d]
        is_end = d == 0 or (kind.shape[d - 1] != 1 and kind.stride[d - 1] != run * base)
        if not is_end:
            continue
        while at >= 0 and (used < run or shape[at] == 1):
            stride[at] = used * base
            used *= shape[at]
            at -= 1
        if used != run:
            return None
        if d > 0:
            base, run, used = kind.stride[d - 1], 1, 1
    return tuple(stride) if at < 0 else None


def _number(arg: NodeArg) -> int:
    return arg if isinstance(arg, int) else 0
