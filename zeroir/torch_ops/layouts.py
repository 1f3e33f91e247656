"""Canonical strides of dimensions of size 1, which affect the results of some of torch's kernels.

Convolutions and norms choose among kernels by whether a tensor is channels-last, and the kernels sum in different
orders. A tensor with one channel, or with one element in each, fits either format. Then the strides of its dimensions
of size 1 decide, and these differ between eager PyTorch and the fake tensors of a trace. So such operands and results
get the strides that follow from their other dimensions, and the gradients of the results have them, too.
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


def called_with_settled(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """Call a function with canonical strides of operands and results that are ambiguous."""
    operands, named = pytree.tree_map_only(Tensor, settled_operand, (tuple(args), dict(kwargs)))
    return settled_result(cast("Tensor", function(*operands, **named)))


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
