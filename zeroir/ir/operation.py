"""What every class of ops declares, and the enumerations of their attributes."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar


class Mode(StrEnum):
    """The effect of a result on its destination: it replaces it, or is added to it."""

    WRITE = "write"
    ACCUMULATE = "accumulate"


class Reduction(StrEnum):
    """The combination of contributions by a collective. Sums are taken in FP32, in rank order, and rounded once."""

    SUM = "sum"
    MAX = "max"


class Refill(StrEnum):
    """The moment at which the hysteresis of loss scaling is restored.

    ``WINDOW``: when the scale grows. ``STEP``: after every step without overflow, so that only consecutive overflows
    count (DeepSpeed's ``consecutive_hysteresis``).
    """

    WINDOW = "window"
    STEP = "step"


class Operation:
    """The declarations of a class of ops beside its fields.

    * ``syntax`` is the op's line of text after its keyword: words, and the names of fields in braces. ``|`` begins the
      column of attributes. A part in square brackets is left out where its field has the default. Every op has
      ``!event =`` before the keyword and ``stream=`` at the end, so that ``syntax`` does not repeat them.
    * ``participle`` says what the op does to the regions that it writes, for the histories of buffers: ``copied``.
    * ``is_asynchronous`` says that other streams see its results only after a wait.
    * ``same_elements`` names fields whose regions correspond element by element.
    """

    __slots__ = ()

    syntax: ClassVar[str]
    participle: ClassVar[str] = "written"
    is_asynchronous: ClassVar[bool] = False
    same_elements: ClassVar[tuple[str, ...]] = ()
