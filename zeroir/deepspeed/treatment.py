"""The treatment of a key of DeepSpeed's configuration: an annotation of its field.

A key that becomes one option, whatever the others say, declares it; ``translate.py`` has the rules of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pydantic.fields import FieldInfo

from zeroir.ir.limits import MOST_BYTES

_ALL_STAGES: Final = (0, 1, 2, 3)


def in_bytes(numel: int, itemsize_bytes: int) -> int:
    """Return the bytes of a number of elements."""
    return min(numel * itemsize_bytes, MOST_BYTES)


class Kind(StrEnum):
    """The kind of treatment; the value is a word of the documentation's table."""

    HONOURED = "honoured"
    WITHOUT_MEANING = "no meaning"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """A kind and its reason. ``asks`` tells whether a value of a refused key has any effect in DeepSpeed.

    The key has a meaning at ``stages``. Where it becomes one ``option`` by itself, ``convert`` makes the value, or None
    where it sets no option, of a number of elements from their bytes.
    """

    kind: Kind
    reason: str
    asks: Callable[[object], bool] = bool
    stages: tuple[int, ...] = _ALL_STAGES
    option: str | None = None
    convert: Callable[[float], object] | None = None
    is_of_elements: bool = False


def treatment_of(field: FieldInfo) -> Treatment:
    """Return the treatment in a field's annotation."""
    return next(item for item in field.metadata if isinstance(item, Treatment))


def honoured(reason: str, stages: tuple[int, ...] = _ALL_STAGES) -> Treatment:
    """Make the treatment of a key that sets an option; ``reason`` names it."""
    return Treatment(kind=Kind.HONOURED, reason=reason, stages=stages)


def becomes(
    option: str,
    how: str = "",
    convert: Callable[[float], object] | None = None,
    *,
    is_of_elements: bool = False,
    stages: tuple[int, ...] = _ALL_STAGES,
) -> Treatment:
    """Make the treatment of a key that becomes one option by itself; ``how`` goes on behind its name."""
    return Treatment(
        kind=Kind.HONOURED,
        reason=f"`{option}`{how}",
        stages=stages,
        option=option,
        convert=convert,
        is_of_elements=is_of_elements,
    )


def unless_zero(value: float) -> object:
    """Return a key's value; 0 sets no option."""
    return value or None


def meaningless(reason: str) -> Treatment:
    """Make the treatment of a key that is ignored; ``reason`` is printed after its name."""
    return Treatment(kind=Kind.WITHOUT_MEANING, reason=reason)


def refused(reason: str, asks: Callable[[object], bool] = bool) -> Treatment:
    """Make the treatment of a key that may only have values without effect; ``reason`` is the error for the others."""
    return Treatment(kind=Kind.REFUSED, reason=reason, asks=asks)


def is_enabled(value: object) -> bool:
    """Return whether a block is turned on by its key ``enabled``."""
    return isinstance(value, dict) and value.get("enabled") is True


def is_enabled_inside(value: object) -> bool:
    """Return whether a block, or one inside it, is turned on by its key ``enabled``."""
    return is_enabled(value) or (
        isinstance(value, dict) and any(is_enabled_inside(item) for item in value.values())
    )


def is_given(value: object) -> bool:
    """Return whether the value is not null."""
    return value is not None


def differs_from(*plain: object) -> Callable[[object], bool]:
    """Return a predicate that tells whether a value is none of these."""
    return lambda value: value is not None and value not in plain
