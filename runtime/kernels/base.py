"""What runs a segment, behind one Protocol; the program is the same whichever it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from zeroir.ir.ops import Mode
from zeroir.ir.segment import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """How one output of a segment meets its destination.

    ``stride`` are the destination's strides. ``is_exclusive`` says that nothing else in the call touches its memory,
    so that a kernel may write to it before it has read all its arguments.
    """

    mode: Mode
    stride: tuple[int, ...]
    is_exclusive: bool


class Kernel(Protocol):
    """One segment, ready to run for one way of binding its outputs."""

    def __call__(self, arguments: Sequence[Tensor], destinations: Sequence[Tensor | None]) -> None:
        """Read the arguments and fill the destinations, in the order of the segment's inputs and outputs."""


class Kernels(Protocol):
    """A kernel backend."""

    def compile(self, segment: Segment, bindings: Sequence[Binding | None]) -> Kernel:
        """The kernel of a segment; equal structures with equal bindings are compiled once."""

    def finish(self) -> None:
        """Make all kernels ready to run; call it once after the last ``compile``, before the first step."""
