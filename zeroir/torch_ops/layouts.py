"""Strides that affect the results of some of torch's kernels: of dimensions of size 1, padded tensors and operands.

Convolutions and norms choose among kernels by whether a tensor is channels-last, and the kernels sum in different
orders. A tensor with one channel, or with one element in each, fits either format. Then the strides of its dimensions
of size 1 decide, and these differ between eager PyTorch and the fake tensors of a trace. So such operands and results
get the strides that follow from their other dimensions, and the gradients of the results have them, too.

Padding keeps the order of a tensor's elements in memory where it adds none, and puts them in the order of dimensions
where it adds some. How many it adds may depend on the sizes of the batch, so the order is always that of dimensions.

A linear layer, and the product of a stack of matrices and a matrix, flatten their operand and their gradient. Where
these are not contiguous, that is a view if the stack has one matrix, and a copy if it has more. How many it has may
depend on the batch, too, so both are made contiguous first. The product of two stacks folds all dimensions but two of
each. If the first has size 1, that may be a view where it is a copy otherwise, so the stack is copied then, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

LAYOUT_SENSITIVE: Final[frozenset[object]] = frozenset(
    {
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        F.group_norm,
        torch.group_norm,
    }
)
"""Functions whose operands and results get canonical strides; batch norm sets its own."""

_PRODUCTS: Final[frozenset[object]] = frozenset({Tensor.__matmul__, Tensor.matmul, torch.matmul})


def called_with_settled(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Call a function with canonical strides of operands and results that are ambiguous."""
    operands, named = pytree.tree_map_only(Tensor, settled_operand, (tuple(args), dict(kwargs)))
    return settled_result(cast("Tensor", function(*operands, **named)))


def padded(
    function: Callable[..., object],
    input: Tensor,  # noqa: A002 - torch's name, which callers may use
    pad: Sequence[int],
    mode: str = "constant",
    value: float | None = None,
) -> Tensor:
    """Pad a tensor; the strides of the result, and of its gradient, depend on no amount."""
    if mode != "constant":
        return cast("Tensor", function(input, pad, mode, value))
    may_add_none = any(isinstance(n, torch.SymInt) for n in pad) or all(n <= 0 for n in pad)
    x = _in_order(input) if may_add_none else input
    return _with_gradient(function(x, pad, mode, value), _in_order)


def flattens(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether a function flattens its first operand, and multiplies it by a matrix or a vector."""
    if function is F.linear:
        return True
    if function not in _PRODUCTS:
        return False
    x, factor = (*args, *kwargs.values())[:2]
    return isinstance(x, Tensor) and x.dim() > 2 and isinstance(factor, Tensor) and factor.dim() < 3


def multiplied(
    function: Callable[..., object],
    input: Tensor,  # noqa: A002 - torch's name, which callers may use
    *args: object,
    **kwargs: object,
) -> Tensor:
    """Multiply a contiguous tensor; the gradient of the result is contiguous, too."""
    return _with_gradient(function(input.contiguous(), *args, **kwargs), Tensor.contiguous)


def stacks_of(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Return whether a function multiplies two stacks of matrices, and folds the dimensions of one."""
    if function not in _PRODUCTS:
        return False
    ranks = [x.dim() for x in (*args, *kwargs.values())[:2] if isinstance(x, Tensor)]
    return len(ranks) == 2 and min(ranks) > 2 and max(ranks) > 3


def multiplied_stacks(function: Callable[..., object], x: Tensor, other: Tensor) -> Tensor:
    """Multiply stacks of matrices; those of one row are copied where those of several rows would be."""
    rank = max(x.dim(), other.dim())
    rows: list[object] = [each.shape[0] for each in (x, other) if each.dim() == rank]
    if any(isinstance(size, torch.SymInt) or size != 1 for size in rows):
        return cast("Tensor", function(x, other))
    shape: Sequence[int] = torch.broadcast_shapes(x.shape[:-2], other.shape[:-2])  # type: ignore[no-untyped-call]
    operands = (_folded(each.expand(*shape, *each.shape[-2:])) for each in (x, other))
    return _with_gradient(function(*operands), _folded)


def _folded(x: Tensor) -> Tensor:
    """Return a stack of one row; make it contiguous if one of several rows with these strides would be copied."""
    if x.is_contiguous():
        return x
    _, *sizes = x.shape[:-2]
    expected, *strides = x.stride()[:-2]
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        # Where a dimension is repeated, the stride of the row may be 0, too, and says nothing.
        if stride == 0 or expected != size * stride:
            return x.contiguous()
        expected = stride
    return x


def _with_gradient(value: object, change: Callable[[Tensor], Tensor]) -> Tensor:
    result = cast("Tensor", value)
    if result.requires_grad:
        result.register_hook(change)  # type: ignore[no-untyped-call]
    return result


def _in_order(x: Tensor) -> Tensor:
    """Return the tensor with its elements in the order of dimensions, with channels first or last."""
    return x if _is_channels_last(x) else x.contiguous()


def _is_channels_last(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])


def settled_operand(x: Tensor) -> Tensor:
    """Return the tensor with canonical strides if its own are ambiguous."""
    return _settled(x) if _is_ambiguous(x) and x.stride() != _settled_stride(x) else x


def settled_result(x: Tensor) -> Tensor:
    """Return the tensor with canonical strides if its own are ambiguous; its gradient has them, too."""
    return _settled(x) if _is_ambiguous(x) else x


def _is_ambiguous(x: Tensor) -> bool:
    return x.dim() > 2 and 1 in x.shape[1:]


def _settled(x: Tensor) -> Tensor:
    ones = [dim for dim, size in enumerate(x.shape) if size == 1]
    x = x.squeeze(ones)
    for dim in ones:
        x = x.unsqueeze(dim)
    return x


def _settled_stride(x: Tensor) -> tuple[int, ...]:
    """Return the canonical strides."""
    strides = list(x.stride())
    following = 1
    for dim in reversed(range(x.dim())):
        if x.shape[dim] == 1:
            strides[dim] = following
        following = x.shape[dim] * strides[dim]
    return tuple(strides)
