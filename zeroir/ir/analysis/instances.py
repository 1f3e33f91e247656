"""A program for batches of one shape, made from a program that has dims; and other changes of all integers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from typing import Final, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from zeroir.errors import UserError
from zeroir.ir.buffers import Region
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Segment
from zeroir.ir.segments.size_numbers import SizeNumber
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
    return _with_other_sizes(program, partial(Size.at, values=values), dims=())


def narrowed(program: Program, maxima: Mapping[str, int]) -> Program:
    """Return the program for batches of at most these sizes, by dim; it has no dim that only one value is left of.

    What was computed at the bound, such as the workspaces that segments declare, stays as it is.
    """
    left = (narrowed_size(dim.size, maxima) for dim in program.dims)
    dims = tuple(dim for size in left if isinstance(size, Size) for dim in size.dims)
    return _with_other_sizes(program, lambda size: narrowed_size(size, maxima), dims=dims)


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
    if given and not program.dims:
        raise UserError(
            "The program has no dims, so it is for batches of one shape: compile it with --shapes for others."
        )
    return values_within(program.dims, given)


def values_within(dims: Sequence[Dim], given: Mapping[str, int]) -> dict[str, int]:
    """Return the value of each of these dims where some are given; the others have their largest.

    Raises:
        UserError: where there is no such dim, or its range does not have that value.
    """
    values = {dim.name: dim.maximum for dim in dims}
    for name, value in given.items():
        if name not in values:
            known = ", ".join(f"{dim.name} from {dim.minimum} to {dim.maximum}" for dim in dims)
            raise UserError(f"There is no dim '{name}'; there is {known}.")
        if type(value) is not int:
            raise UserError(f"{name} is {value!r:.80}, but should be a whole number.")
        values[name] = value
    for dim in dims:
        if not dim.minimum <= values[dim.name] <= dim.maximum:
            raise UserError(
                f"{dim.name} is {values[dim.name]}, but should be from {dim.minimum} to {dim.maximum}."
            )
    return values


def sizes_in(data: object) -> tuple[Size, ...]:
    """Return each size that depends on dims in these tuples, records and integers."""
    sizes, offsets = sizes_and_offsets_in(data)
    return tuple(dict.fromkeys((*sizes, *offsets)))


def sizes_and_offsets_in(data: object) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """Return each size that depends on dims, and each such offset of a region, in tuples, records and integers."""
    sizes: dict[Size, None] = {}
    offsets: dict[Size, None] = {}
    rest: list[object] = [data]
    while rest:
        value = rest.pop()
        if isinstance(value, Size):
            sizes[value] = None
        elif isinstance(value, SizeNumber):
            sizes.update(dict.fromkeys(value.sizes))
        elif isinstance(value, Region):
            if isinstance(value.offset, Size):
                offsets[value.offset] = None
            if isinstance(value.numel, Size):
                sizes[value.numel] = None
            if value.part is not None:
                rest.append(value.part)
        elif isinstance(value, tuple):
            rest += [item for item in value if type(item) not in _WITHOUT_SIZES]
        else:
            kind = type(value)
            for name in _field_names(kind):  # type: ignore[arg-type] # a class is hashable
                part = getattr(value, name)
                if type(part) not in _WITHOUT_SIZES:
                    rest.append(part)
    return tuple(sizes), tuple(offsets)


@cache
def sizes_in_segment(segment: Segment) -> tuple[Size, ...]:
    """Return each size of a segment that depends on dims."""
    return sizes_in(segment)


@cache
def sizes_of_values(segment: Segment) -> tuple[Size, ...]:
    """Return each size of a segment that depends on dims, without those of arguments of operators."""
    of_nodes = tuple((node.results, node.flops) for node in segment.nodes)
    return sizes_in((segment.inputs, segment.workspace_bytes, of_nodes))


def segments_at_ends(program: Program) -> tuple[Segment, ...]:
    """Return the segments of a program where all dims have their largest values, and where they have their smallest."""
    if not program.dims:
        return program.segments
    return tuple(
        segment
        for values in (largest(program), smallest(program))
        for segment in with_other_sizes(program.segments, partial(Size.at, values=values))
    )


def with_other_sizes(data: _Data, change: Callable[[Size], int]) -> _Data:
    """Return tuples and records with other integers for the sizes in them that depend on dims."""
    return cast("_Data", _Integers(cache(change)).of(data))


def with_other_integers(data: _Data, change: Callable[[int], int]) -> _Data:
    """Return tuples and records with other integers in them."""
    return cast("_Data", _Integers(change, change).of(data))


def with_integers(program: Program, change: Callable[[int], int]) -> Program:
    """Return the program with other integers in the fields that may hold sizes."""
    return dataclasses.replace(program, **_changed_fields(program, _Integers(change, change)))  # type: ignore[arg-type]


def _with_other_sizes(
    program: Program, change: Callable[[Size], int], *, dims: tuple[Dim, ...]
) -> Program:
    """Return the program with these dims, and with other integers for the sizes that depend on dims."""
    fields = _changed_fields(program, _Integers(cache(change)))
    return dataclasses.replace(program, **fields, dims=dims)  # type: ignore[arg-type]


def _changed_fields(program: Program, changed: _Integers) -> dict[str, object]:
    return {name: changed.of(getattr(program, name)) for name in SIZED_FIELDS}


class _Integers:
    """Changes the integers in plain data; what has none that changes stays the same object.

    Integers that depend on no dim change only by a function of their own.
    """

    def __init__(
        self, change: Callable[[Size], int], change_plain: Callable[[int], int] | None = None
    ) -> None:
        self._change = change
        self._change_plain = change_plain
        self._unchanged = _WITHOUT_FIELDS if change_plain else _WITHOUT_FIELDS | {int}
        self._done: dict[int, object] = {}
        # What the ids are of must not be freed meanwhile.
        self._kept: list[object] = []

    def of(self, value: object) -> object:
        kind = type(value)
        if kind in self._unchanged:
            return value
        if kind is Size:
            return self._change(cast("Size", value))
        if kind is SizeNumber:
            return self._of_number(cast("SizeNumber", value))
        if kind is tuple:
            return self._of_items(cast("tuple[object, ...]", value))
        if kind is int and self._change_plain:
            return self._change_plain(cast("int", value))
        key = id(value)
        if key not in self._done:
            self._done[key] = self._of_record(value)
            self._kept.append(value)
        return self._done[key]

    def _of_number(self, number: SizeNumber) -> float:
        changed = number.changed(lambda operand: cast("float", self.of(operand)))
        is_plain = self._change_plain is None and next(changed.sizes, None) is None
        return changed.plain if is_plain else changed

    def _of_items(self, items: tuple[object, ...]) -> tuple[object, ...]:
        changed = [self.of(item) for item in items]
        is_same = all(new is old for new, old in zip(changed, items, strict=True))
        return items if is_same else tuple(changed)

    def _of_record(self, record: object) -> object:
        changes: dict[str, object] = {}
        for name in _field_names(type(record)):  # type: ignore[arg-type] # a class is hashable
            old = getattr(record, name)
            if type(old) not in self._unchanged:
                new = self.of(old)
                if new is not old:
                    changes[name] = new
        return dataclasses.replace(record, **changes) if changes else record  # type: ignore[type-var]


_WITHOUT_FIELDS: Final = frozenset((str, bool, float, bytes, type(None)))
_WITHOUT_SIZES: Final = _WITHOUT_FIELDS | {int}


@cache
def _field_names(kind: type[object]) -> tuple[str, ...]:
    """Return the fields of a dataclass that may hold integers, or records with them; none of another class."""
    if not dataclasses.is_dataclass(kind):
        return ()
    hints = get_type_hints(kind)
    return tuple(f.name for f in dataclasses.fields(kind) if _may_hold_sizes(hints[f.name]))


def _may_hold_sizes(hint: object) -> bool:
    if get_origin(hint) is Literal:
        return False
    arguments = get_args(hint)
    if arguments:
        return any(map(_may_hold_sizes, arguments))
    return not isinstance(hint, type) or not (
        hint in _WITHOUT_FIELDS or issubclass(hint, str | Enum)
    )
