"""Our own operators in terms of torch's, for a compiler that fuses them or calls torch's kernels without Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from zeroir.torch_ops.attention import attend, attend_backward
from zeroir.torch_ops.batch_norm import normalise, normalise_backward
from zeroir.torch_ops.dropout import drop_with
from zeroir.torch_ops.random_numbers import draw_with
from zeroir.torch_ops.strided import scatter_by_index, strided_view_by_index


def decompositions(device: torch.device) -> Mapping[torch._ops.OpOverload, Callable[..., object]]:
    """The operators of ours that are decomposed on a device; the others are called as they are.

    Strided views are everywhere, because a compiler lays tensors out as it likes, and on the CPU all others are. On
    CUDA the choice between kernels of attention asks the device about real tensors, and a seed lies on
    the host, where a fused kernel cannot read it.
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
