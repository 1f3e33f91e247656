"""The start and the end of an op of a step: one record for observed and for simulated steps."""

from __future__ import annotations

from dataclasses import dataclass

from zeroir.ir.program import OpPosition


@dataclass(frozen=True, slots=True)
class Span:
    """One op in time: its place in the program, and its nanoseconds on a clock that all spans share.

    A step of several micro-steps has a span for each time that an op runs.
    """

    section: str
    index: int
    start_ns: int
    end_ns: int

    @property
    def position(self) -> OpPosition:
        """The position of the op in the program."""
        return OpPosition(self.section, self.index)

    @property
    def duration_ns(self) -> int:
        """The duration of the op."""
        return self.end_ns - self.start_ns
