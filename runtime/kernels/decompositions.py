"""Decompositions of zeroir's operators into torch's, so that a compiler fuses them or calls torch's kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from zeroir.torch_ops.random_numbers import draw_with
from zeroir.torch_ops.replaced.attention import attend, attend_backward
from zeroir.torch_ops.replaced.batch_norm import normalise, normalise_backward
from zeroir.torch_ops.replaced.dropout import drop_with
from zeroir.torch_ops.strided import scatter_by_index, strided_view_by_index


def decompositions(device: torch.device) -> Mapping[torch._ops.OpOverload, Callable[..., object]]:
    """Return the decompositions of zeroir's operators on a device; a compiler calls all other operators as they are.

    Strided views are decomposed on every device, because a compiler chooses strides itself; on the CPU all operators
    are. On CUDA the choice of an attention kernel needs real tensors, and a fused kernel cannot read a seed on the
    host.
    """
    ours = torch.ops.zeroir
    by_index: dict[torch._ops.OpOverload, Callable[..., object]] = {
        ours.strided.default: strided_view_by_index,
        ours.strided_scatter.default: scatter_by_index,
    }
    if device.type != "cpu":
        return by_index
    return {
        **by_index,
        ours.attention.default: attend,
        ours.attention_backward.default: attend_backward,
        ours.batch_norm.default: normalise,
        ours.batch_norm_backward.default: normalise_backward,
        ours.dropout.default: drop_with,
        ours.uniform.default: draw_with,
    }
