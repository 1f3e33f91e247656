"""Floating-point operations of an op, by torch's formulae, also for zeroir's attention; 0 for ops without a formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_FORMULAE = cast("Mapping[object, Callable[..., int]]", flop_registry)
_FORWARD = cast("Callable[..., int]", sdpa_flop_count)
_BACKWARD = cast("Callable[..., int]", sdpa_backward_flop_count)


def flops(
    op: object, args: tuple[object, ...], kwargs: Mapping[str, object], result: object
) -> int:
    """The FLOPs of one call; a multiplication and an addition are two. ``args`` hold fake tensors."""
    if op is torch.ops.zeroir.attention.default:
        q, k, v = (cast("Tensor", x) for x in args[:3])
        return int(_FORWARD(q.shape, _grouped(q, k), _grouped(q, v)))
    if op is torch.ops.zeroir.attention_backward.default:
        grad, q, k, v = (cast("Tensor", x) for x in args[:4])
        return int(_BACKWARD(grad.shape, q.shape, _grouped(q, k), _grouped(q, v)))
    formula = _FORMULAE.get(getattr(op, "overloadpacket", None))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _grouped(q: Tensor, x: Tensor) -> tuple[int, ...]:
    """The shape of k or v with a head for every head of q."""
    return (x.shape[0], q.shape[1], *x.shape[2:])
