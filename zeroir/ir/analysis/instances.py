"""A program for batches of one shape, made from a program that has dims; and other changes of all integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Final, TypeVar, cast

from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Segment
from zeroir.ir.sizes import Dim, Size

_Data = TypeVar("_Data")

SIZED_FIELDS: Final = ("buffers", "inputs", "outputs", "segments", "sections")
"""The fields of a program that may hold sizes which depend on dims."""


def instance(program: Program, values: Mapping[str, int]) -> Program:
    """Return the program where each dim has this value: it has plain integers for sizes, and no dims.

    Places in memory stay as they are, so that buffers of all instances begin at the same bytes.
    """
    if not program.dims:
        return program
    return with_integers(
        program, lambda size: size.at(values) if isinstance(size, Size) else size, dims=()
    )


def narrowed(program: Program, maxima: Mapping[str, int]) -> Program:
    """Return the program for batches of at most these sizes, by dim; it has no dim that only one value is left of.

    What was computed at the bound, such as the workspaces that segments declare, stays as it is.
    """
    left = (narrowed_size(dim.size, maxima) for dim in program.dims)
    dims = tuple(dim for size in left if isinstance(size, Size) for dim in size.dims)
    return with_integers(program, lambda size: narrowed_size(size, maxima), dims=dims)


def narrowed_size(size: int, maxima: Mapping[str, int]) -> int:
    """Return a size where these dims are at most as large; a plain integer where only one value is left of its dims."""
    if not isinstance(size, Size):
        return size
    values: dict[Dim, int] = {}
    for dim in size.dims:
        maximum = min(dim.maximum, maxima.get(dim.name, dim.maximum))
        is_range = dim.minimum < maximum
        values[dim] = dataclasses.replace(dim, maximum=maximum).size if is_range else dim.minimum
    return size.replaced(values)


def at_largest(program: Program) -> Program:
    """Return the instance where each dim has its largest value, so that segments have the digests of plain sizes."""
    return instance(program, largest(program))


def smallest(program: Program) -> dict[str, int]:
    """Return the smallest value of each dim, by name."""
    return {dim.name: dim.minimum for dim in program.dims}


def largest(program: Program) -> dict[str, int]:
    """Return the largest value of each dim, by name."""
    return {dim.name: dim.maximum for dim in program.dims}


def values_of_dims(program: Program, given: Mapping[str, int]) -> dict[str, int]:
    """Return the value of each dim where some are given; the others have their largest.

    Raises:
        UserError: where the program has no such dim, or was not compiled for that value.
    """
    values = largest(program)
    if given and not values:
        raise UserError(
            "The program has no dims, so it is for batches of one shape: compile it with --shapes for others."
        )
    for name, value in given.items():
        if name not in values:
            dims = ", ".join(f"{d.name} from {d.minimum} to {d.maximum}" for d in program.dims)
            raise UserError(f"The program has no dim '{name}'; it has {dims}.")
        if type(value) is not int:
            raise UserError(f"{name} is {value!r:.80}, but should be a whole number.")
        values[name] = value
    for dim in program.dims:
        if not dim.minimum <= values[dim.name] <= dim.maximum:
            raise UserError(
                f"{dim.name} is {values[dim.name]}, but the program was compiled for {dim.minimum} to {dim.maximum}."
            )
    return values


def sizes_in(
    data: tuple[object, ...], *, without: tuple[type[object], str] | None = None
) -> Iterator[Size]:
    """Yield each size that depends on dims in these tuples, records and integers, once.

    ``without`` is a class of records and the field of it that is left out.
    """
    left_out, field = without or (None, "")
    found: set[Size] = set()
    seen: set[int] = set()
    rest: list[object] = [data]
    while rest:
        value = rest.pop()
        kind = type(value)
        if kind is Size:
            size = cast("Size", value)
            if size not in found:
                found.add(size)
                yield size
        elif kind is tuple:
            rest.extend(reversed(cast("tuple[object, ...]", value)))
        elif kind not in _WITHOUT_FIELDS and id(value) not in seen:
            seen.add(id(value))
            names = reversed(_field_names(kind))  # type: ignore[arg-type] # a class is hashable
            rest.extend(
                [getattr(value, name) for name in names if kind is not left_out or name != field]
            )


@cache
def sizes_in_segment(segment: Segment) -> tuple[Size, ...]:
    """Return each size of a segment that depends on dims."""
    return tuple(sizes_in((segment,)))


def segments_at_ends(program: Program) -> tuple[Segment, ...]:
    """Return the segments of a program where all dims have their largest values, and where they have their smallest."""
    if not program.dims:
        return program.segments
    ends = (largest(program), smallest(program))
    return tuple(segment for values in ends for segment in instance(program, values).segments)


def with_other_sizes(data: _Data, change: Callable[[Size], int]) -> _Data:
    """Return tuples and records with other integers for the sizes in them that depend on dims."""
    changed = _Integers(lambda size: change(size) if isinstance(size, Size) else size)
    return cast("_Data", changed.of(data))


def with_integers(program: Program, change: Callable[[int], int], **others: object) -> Program:
    """Return the program with other integers in the fields that may hold sizes, and other values of other fields."""
    changed = _Integers(change)
    fields = {name: changed.of(getattr(program, name)) for name in SIZED_FIELDS}
    return dataclasses.replace(program, **fields, **others)  # type: ignore[arg-type]


class _Integers:
    """Changes the integers in plain data; what has none that changes stays the same object."""

    def __init__(self, change: Callable[[int], int]) -> None:
        self._change = change
        self._done: dict[int, object] = {}
        # What the ids are of must not be freed meanwhile.
        self._kept: list[object] = []

    def of(self, value: object) -> object:
        kind = type(value)
        if kind is int or kind is Size:
            return self._change(value)  # type: ignore[arg-type]
        if kind is tuple:
            return self._of_items(value)  # type: ignore[arg-type]
        if not _field_names(kind):  # type: ignore[arg-type] # a class is hashable
            return value
        key = id(value)
        if key not in self._done:
            self._done[key] = self._of_record(value)
            self._kept.append(value)
        return self._done[key]

    def _of_items(self, items: tuple[object, ...]) -> tuple[object, ...]:
        changed = [self.of(item) for item in items]
        is_same = all(new is old for new, old in zip(changed, items, strict=True))
        return items if is_same else tuple(changed)

    def _of_record(self, record: object) -> object:
        changes: dict[str, object] = {}
        for name in _field_names(type(record)):  # type: ignore[arg-type]
            old = getattr(record, name)
            new = self.of(old)
            if new is not old:
                changes[name] = new
        return dataclasses.replace(record, **changes) if changes else record  # type: ignore[type-var]


_WITHOUT_FIELDS: Final = frozenset((int, str, bool, float, bytes, type(None)))


@cache
def _field_names(kind: type[object]) -> tuple[str, ...]:
    """Return the fields of a dataclass; none of another class."""
    return tuple(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()
