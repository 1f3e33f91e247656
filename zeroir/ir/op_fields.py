"""Declarations on the fields of ops: their purposes, and functions that read them.

An op declares each of its fields with one of the aliases below: ``source: Read[Region]`` is a region that the op reads,
``event: Signalled[str] | None`` the event that it signals, ``root: Attribute[int]`` plain data. Effects, the rewriting
of regions, printing and parsing are derived from these declarations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, TypeVar

from zeroir.ir.buffers import Region, View
from zeroir.ir.fields import DeclaredField, FieldUse, declared_fields

T = TypeVar("T")

Read = Annotated[T, FieldUse.READ]
"""A region or view whose elements the op reads."""

Written = Annotated[T, FieldUse.WRITTEN]
"""A region or view of which the op replaces every element."""

Accumulated = Annotated[T, FieldUse.ACCUMULATED]
"""A region or view that the op reads and writes: the result depends on the previous elements."""

Result = Annotated[T, FieldUse.RESULT]
"""A region or view that the op replaces or adds to, as its field ``mode`` says."""

Begun = Annotated[T, FieldUse.BEGUN]
"""The name of the buffer that the op begins."""

Ended = Annotated[T, FieldUse.ENDED]
"""The name of the buffer that the op ends."""

Signalled = Annotated[T, FieldUse.SIGNALLED]
"""The name of the event that the op signals when it is done."""

Awaited = Annotated[T, FieldUse.AWAITED]
"""The name of the event that the op waits for."""

CommName = Annotated[T, FieldUse.COMM]
"""The name of the communicator that the op uses."""

StreamName = Annotated[T, FieldUse.STREAM]
"""The name of the stream that the op runs on, or that it orders."""

SegmentName = Annotated[T, FieldUse.SEGMENT]
"""The name of the segment that the op calls."""

Attribute = Annotated[T, FieldUse.ATTRIBUTE]
"""Plain data: a number, a name, an enumeration."""

_REGION_USES = frozenset({FieldUse.READ, FieldUse.WRITTEN, FieldUse.ACCUMULATED, FieldUse.RESULT})
_NAME_USES = frozenset(FieldUse) - _REGION_USES - {FieldUse.ATTRIBUTE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A place in an op with a region: in ``field``, at ``path`` of the value or of each item of it.

    ``path`` is a dotted path of attributes, empty if the value itself is the region.
    """

    field: DeclaredField
    use: FieldUse
    path: str


def op_fields(kind: type) -> tuple[DeclaredField, ...]:
    """Return the fields of an op class, or of a dataclass inside one, in their order.

    Raises:
        TypeError: if a field does not declare its use, or declares one that does not fit its type.
    """
    return _op_fields(kind)


@cache
def _op_fields(kind: type) -> tuple[DeclaredField, ...]:
    fields = declared_fields(kind)
    for field in fields:
        where = f"The field {kind.__name__}.{field.name}"
        is_region = field.kind in (Region, View)
        if field.use is None:
            if not dataclasses.is_dataclass(field.kind) or is_region:
                raise TypeError(f"{where} does not declare its use, such as Read or Attribute.")
        elif field.use in _REGION_USES:
            if not is_region:
                raise TypeError(f"{where} declares {field.use.name}, but is no region or view.")
        elif field.use in _NAME_USES:
            if field.kind is not str:
                raise TypeError(f"{where} declares {field.use.name}, but is no name.")
        elif is_region:
            raise TypeError(f"{where} holds a region: it must declare what the op does to it.")
    return fields


def op_field(kind: type, use: FieldUse) -> DeclaredField | None:
    """Return the field of an op class with that use, None if it has none; the use must not occur twice."""
    matching = [field for field in op_fields(kind) if field.use is use]
    if len(matching) > 1:
        raise TypeError(f"{kind.__name__} has more than one field with the use {use.name}.")
    return matching[0] if matching else None


def operands(kind: type) -> tuple[Operand, ...]:
    """Return every place in an op class with regions, in the order of its fields."""
    return tuple(_operands(kind))


def _operands(kind: type) -> Iterator[Operand]:
    for field in op_fields(kind):
        if field.use is None:
            for inner in op_fields(field.kind):
                if inner.use in _REGION_USES:
                    yield _operand(field, inner, f"{inner.name}.")
        elif field.use in _REGION_USES:
            yield _operand(field, field, "")


def _operand(outer: DeclaredField, inner: DeclaredField, prefix: str) -> Operand:
    assert inner.use is not None
    path = f"{prefix}region" if inner.kind is View else prefix.rstrip(".")
    return Operand(field=outer, use=inner.use, path=path)
