"""The declarations of every class of ops, and the enumerations of their attributes."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Mode(StrEnum):
    """The effect of a result on its destination: it replaces it, or is added to it."""

    WRITE = "write"
    ACCUMULATE = "accumulate"


class Reduction(StrEnum):
    """How a collective combines contributions. Sums are computed in FP32, in rank order, and rounded once."""

    SUM = "sum"
    MAX = "max"


class Refill(StrEnum):
    """When the hysteresis of loss scaling is restored.

    ``WINDOW``: when the scale grows. ``STEP``: after every step without overflow, so that only consecutive overflows
    count (DeepSpeed's ``consecutive_hysteresis``).
    """

    WINDOW = "window"
    STEP = "step"


class Operation:
    """The declarations of a class of ops in addition to its fields.

    * ``syntax`` is the op's line of text after its keyword: words, and the names of fields in braces. ``|`` starts the
      column of attributes. A part in square brackets is omitted if its field has the default. Every op has
      ``!event =`` before the keyword and ``stream=`` at the end, so ``syntax`` does not repeat them.
    * ``participle`` says what the op does to the regions that it writes, for the histories of buffers: ``copied``.
    * ``is_asynchronous`` says that other streams see its results only after a wait.
    * ``same_elements`` names fields whose regions correspond element by element.

    ``known_effects`` are an op's effects once ``zeroir.ir.analysis.effects`` has derived them.
    """

    __slots__ = ("known_effects",)

    known_effects: object
    syntax: ClassVar[str]
    participle: ClassVar[str] = "written"
    is_asynchronous: ClassVar[bool] = False
    same_elements: ClassVar[tuple[str, ...]] = ()
