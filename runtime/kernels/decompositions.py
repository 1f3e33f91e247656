"""Our own operators in terms of torch's, for a compiler that fuses them or calls torch's kernels without Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from zeroir.torch_ops.attention import attend, attend_backward
from zeroir.torch_ops.batch_norm import normalise, normalise_backward
from zeroir.torch_ops.dropout import drop_with


def decompositions(device: torch.device) -> Mapping[torch._ops.OpOverload, Callable[..., object]]:
    """The operators of ours that are decomposed on a device; the others are called as they are.

    On the CPU all are. On CUDA the choice between kernels of attention asks the device about real tensors, and the
    seed of a dropout lies on the host, where a fused kernel cannot read it.
    """
    ours = torch.ops.zeroir
    if device.type != "cpu":
        return {}
    return {
        ours.attention.default: attend,
        ours.attention_backward.default: attend_backward,
        ours.batch_norm.default: normalise,
        ours.batch_norm_backward.default: normalise_backward,
        ours.dropout.default: drop_with,
    }
