"""The bindings of the outputs of a segment to their destinations: the memory that a kernel may write, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from zeroir.ir.ops import Compute, Mode
from zeroir.ir.segments.segment import Segment
from zeroir.ir.sizes import Size, exact_quotient


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The binding of one output of a segment to its destination.

    ``stride`` are the destination's strides. ``is_exclusive`` says that nothing else in the call accesses its memory,
    so that a kernel may write to it before it has read all its arguments. ``is_aligned`` says that the destination has
    several elements and begins at a multiple of ``ALIGNMENT_NUMEL`` elements of its buffer.
    """

    mode: Mode
    stride: tuple[int, ...]
    is_exclusive: bool
    is_aligned: bool = True


ALIGNMENT_NUMEL: Final = 16
"""With elements of any size, the 16 bytes to which compiled code for GPUs expects its tensors to be aligned."""

Bindings = Sequence[Binding | None]
"""One per output of a segment; None if the call drops the output."""


def bindings(op: Compute) -> list[Binding | None]:
    """Return the binding of each output of a call to its destination."""
    regions = [argument.view.region for argument in op.arguments]
    regions += [d.view.region for d in op.destinations if d is not None]
    # Plain pairs, because a large program has hundreds of thousands of them.
    intervals: dict[str, list[tuple[int, int]]] = {}
    for region in regions:
        intervals.setdefault(region.buffer, []).append((region.offset, region.stop))
    bound: list[Binding | None] = []
    for destination in op.destinations:
        if destination is None:
            bound.append(None)
            continue
        region = destination.view.region
        start, stop = region.offset, region.stop
        overlapping = [low for low, high in intervals[region.buffer] if start < high and low < stop]
        itself = 1 if start < stop else 0
        bound.append(
            Binding(
                mode=destination.mode,
                stride=destination.view.stride,
                is_exclusive=len(overlapping) == itself,
                # Destinations of one element, such as the losses of several micro-batches, share a kernel.
                is_aligned=region.numel != 1 and _is_aligned(start),
            )
        )
    return bound


def _is_aligned(offset: int) -> bool:
    """Return whether an offset is a multiple of the alignment, for all values of the dims on which it depends."""
    if isinstance(offset, Size):
        return exact_quotient(offset, ALIGNMENT_NUMEL) is not None
    return offset % ALIGNMENT_NUMEL == 0


def plain_bindings(segment: Segment) -> list[Binding | None]:
    """Return bindings that write every output to its own memory, with the strides that the segment produces."""
    return [
        Binding(mode=Mode.WRITE, stride=kind.stride, is_exclusive=True)
        for kind in segment.output_types()
    ]
