"""What `zeroir plan` chooses an option from."""

from __future__ import annotations

from dataclasses import dataclass

Value = int | bool | str | tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The values of an option that `zeroir plan` tries unless the option is given.

    ``values`` are empty where they follow from the program or the machine, and those of units are none to all. ``fast``
    and ``lean`` are the indices of the fastest and of the leanest in memory, and the usual one is the default. ``axis``
    is the place among the axes of the search, which varies the last ones first; None where the option is no axis from
    the beginning: ``is_last_resort`` ones are chosen only if memory is the limit.

    A choice in words leaves out the value ``off`` and says others by ``words``, in which ``{value}`` and ``{bytes}``
    are the value, or else by the name of the option.
    """

    values: tuple[Value, ...] = ()
    fast: int = 0
    lean: int = -1
    axis: int | None = None
    is_last_resort: bool = False
    off: Value = None
    words: str | None = None
