"""The interface of kernel backends; the program does not depend on the choice of backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from zeroir.ir.segments.bindings import Binding
from zeroir.ir.segments.segment import Segment


class Kernel(Protocol):
    """One segment, ready to run with one binding of its outputs."""

    def __call__(self, arguments: Sequence[Tensor], destinations: Sequence[Tensor | None]) -> None:
        """Read the arguments and fill the destinations, in the order of the segment's inputs and outputs."""


class Kernels(Protocol):
    """A kernel backend."""

    @property
    def compiles_dims(self) -> bool:
        """Whether ``compile`` takes segments whose sizes depend on dims, and compiles each for all their values."""

    def compile(self, segment: Segment, bindings: Sequence[Binding | None]) -> Kernel:
        """Return the kernel of a segment; segments with equal digests and bindings are compiled once."""

    def at(self, values: Mapping[str, int]) -> Kernels:
        """Return the kernels of the same program's instance where dims have these values, by name.

        With ``compiles_dims`` the program's own segments have been compiled before.
        """

    def finish(self) -> None:
        """Make all kernels ready to run; call it once after the last ``compile``, before the first step."""
