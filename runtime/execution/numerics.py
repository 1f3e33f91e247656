"""The arithmetic of an update apart from the optimizer: norms, overflow, decisions, averages, the loss scale.

Everything stays on the device; the host does not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroir.ir.ops import Refill
from zeroir.workspace.op_scratch import (
    AVERAGED_CHUNK_NUMEL,
    CONVERTED_CHUNK_NUMEL,
    SQUARES_CHUNK_NUMEL,
)


def sum_of_squares(
    sources: Sequence[Tensor], destination: Tensor, *, is_added: bool = False
) -> None:
    """Write the FP32 sum of squares, chunk by chunk in order, to an f32[1], or with ``is_added`` add it there."""
    total = destination.clone() if is_added else torch.zeros_like(destination)
    for source in sources:
        for start in range(0, source.numel(), SQUARES_CHUNK_NUMEL):
            chunk = source[start : start + SQUARES_CHUNK_NUMEL]
            total.add_(chunk.to(torch.float32).square().sum())
    destination.copy_(total)


def add(source: Tensor, destination: Tensor) -> None:
    """Add a vector to one of the same length, in the destination's dtype."""
    if source.dtype is not destination.dtype and destination.device.type == "cpu":
        # torch would convert the whole source first; chunks stay in the cache.
        for start in range(0, source.numel(), CONVERTED_CHUNK_NUMEL):
            chunk = slice(start, start + CONVERTED_CHUNK_NUMEL)
            destination[chunk].add_(source[chunk].to(destination.dtype))
        return
    is_wider = source.dtype.itemsize > destination.dtype.itemsize
    destination.add_(source.to(destination.dtype) if is_wider else source)


def scale(region: Tensor, by: Tensor) -> None:
    """Multiply a floating-point vector by a vector of one element.

    Where that is 0, infinities and NaN also become 0.
    """
    region.mul_(by).masked_fill_(by == 0, 0.0)


def has_overflow(sources: Sequence[Tensor], destination: Tensor, *, is_added: bool = False) -> None:
    """Write 1 to an f32[1] where any element is infinite or NaN.

    Otherwise 0, or with ``is_added`` leave it unchanged.
    """
    # aminmax needs no scratch memory, and propagates NaN.
    extremes = [extreme for source in sources if source.numel() for extreme in source.aminmax()]
    if not is_added:
        destination.zero_()
    if not extremes:
        return
    is_finite = torch.stack([extreme.to(torch.float32) for extreme in extremes]).isfinite().all()
    destination.masked_fill_(is_finite.logical_not(), 1.0)


def guess(
    *,
    step: Tensor,
    next_step: Tensor,
    gradient_divisor: Tensor,
    divisor: int,
    loss_scale: Tensor | None,
    weight: Tensor | None,
) -> None:
    """Run ``ops.Guess``. Every tensor is f32[1]; of a longer ``loss_scale`` the first element is used."""
    gradient_divisor.copy_(_unclipped_divisor(gradient_divisor, divisor, weight, loss_scale))
    torch.add(step, 1.0, out=next_step)


def _unclipped_divisor(
    like: Tensor, divisor: int, weight: Tensor | None, loss_scale: Tensor | None
) -> Tensor:
    scale = torch.full_like(like, float(divisor))
    if weight is not None:
        scale.mul_(weight)
    if loss_scale is not None:
        scale.mul_(loss_scale[:1])
    return scale


def decide(
    *,
    steps: Sequence[Tensor],
    gradient_divisor: Tensor,
    divisor: int,
    overflow: Tensor | None,
    norm: Tensor | None,
    loss_scale: Tensor | None,
    skip: Tensor | None,
    max_norm: float | None,
    weight: Tensor | None = None,
    guess: Tensor | None = None,
    redo: Tensor | None = None,
) -> None:
    """Run ``ops.Decide``. Every tensor is f32[1]; of a longer ``loss_scale`` the first element is used."""
    scale = _unclipped_divisor(gradient_divisor, divisor, weight, loss_scale)
    if max_norm is not None and norm is not None:
        clip = max_norm / (norm.sqrt() / scale + 1e-6)
        gradient_divisor.copy_(scale / clip.clamp(max=1.0))
    else:
        gradient_divisor.copy_(scale)
    if redo is not None and guess is not None:
        # A divisor that is NaN differs from any guess.
        redo.copy_(gradient_divisor != guess)
    if skip is None:
        for step in steps:
            step.add_(1.0)
        return
    is_skipped = torch.zeros_like(skip, dtype=torch.bool)
    if overflow is not None:
        is_skipped |= overflow > 0
    if weight is not None:
        is_skipped |= weight == 0
    skip.copy_(is_skipped)
    if redo is not None:
        redo.masked_fill_(is_skipped, 1.0)
    for step in steps:
        step.add_(1.0 - skip)


def average(param: Tensor, mean: Tensor, decay: float, skip: Tensor | None) -> None:
    """Run ``ops.Average`` on flat f32 tensors of the same length, chunk by chunk."""
    scratch = mean.new_empty(min(mean.numel(), AVERAGED_CHUNK_NUMEL))
    moved = None if skip is None else torch.empty_like(scratch)
    is_skipped = None if skip is None else skip > 0
    for start in range(0, mean.numel(), AVERAGED_CHUNK_NUMEL):
        old = mean[start : start + AVERAGED_CHUNK_NUMEL]
        new = torch.mul(
            param[start : start + AVERAGED_CHUNK_NUMEL], 1 - decay, out=scratch[: old.numel()]
        )
        if moved is None or is_skipped is None:
            old.mul_(decay).add_(new)
            continue
        kept = torch.mul(old, decay, out=moved[: old.numel()]).add_(new)
        torch.where(is_skipped, old, kept, out=old)


def update_scale(
    state: Tensor,
    skip: Tensor,
    *,
    window: int,
    factor: float,
    hysteresis: int,
    minimum: float,
    refill: Refill = Refill.WINDOW,
    weight: Tensor | None = None,
) -> None:
    """Run ``ops.UpdateScale`` on f32[3] = (scale, steps since the last change, hysteresis left)."""
    scale, good_steps, left = state.unbind()
    is_skipped = skip[0] > 0
    is_spent = left <= 1
    is_grown = ~is_skipped & (good_steps + 1 >= window)
    is_refilled = ~is_skipped if refill is Refill.STEP else is_grown
    smaller = (scale / factor).clamp(min=minimum)
    changed = torch.stack(
        [
            torch.where(
                is_skipped,
                torch.where(is_spent, smaller, scale),
                torch.where(is_grown, scale * factor, scale),
            ),
            torch.where(is_skipped | is_grown, 0.0, good_steps + 1),
            torch.where(
                is_skipped,
                torch.where(is_spent, left, left - 1),
                torch.where(is_refilled, float(hysteresis), left),
            ),
        ]
    )
    if weight is not None:
        torch.where(weight == 0, state, changed, out=changed)
    state.copy_(changed)
