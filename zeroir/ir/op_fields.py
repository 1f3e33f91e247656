"""Declarations on the fields of ops: their purposes, and functions that read them.

An op declares each of its fields with one of the aliases below: ``source: Read[Region]`` is a region that the op
reads, ``event: Signalled[str] | None`` the event that it signals, ``root: Attribute[int]`` plain data. Effects, the
rewriting of regions, printing and parsing follow from these declarations.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Annotated, TypeVar

from zeroir.ir.buffers import Region, View

T = TypeVar("T")


class FieldUse(Enum):
    """The use of a field by its op."""

    READ = auto()
    WRITTEN = auto()
    ACCUMULATED = auto()
    RESULT = auto()
    BEGUN = auto()
    ENDED = auto()
    SIGNALLED = auto()
    AWAITED = auto()
    COMM = auto()
    STREAM = auto()
    SEGMENT = auto()
    ATTRIBUTE = auto()


Read = Annotated[T, FieldUse.READ]
"""A region or view whose elements the op reads."""

Written = Annotated[T, FieldUse.WRITTEN]
"""A region or view whose every element the op replaces."""

Accumulated = Annotated[T, FieldUse.ACCUMULATED]
"""A region or view that the op reads and writes: the result depends on the elements that were there."""

Result = Annotated[T, FieldUse.RESULT]
"""A region or view that the op replaces or adds to, as the field ``mode`` beside it says."""

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
class OpField:
    """One field of an op, or of a dataclass that an op's fields hold.

    ``kind`` is the type of the value, or of each item where ``is_tuple``. ``use`` is None where ``kind`` is a
    dataclass with declared fields of its own, such as the pairs of a collective. Where ``is_optional``, the value (or
    an item) may be None. ``default`` is ``dataclasses.MISSING`` where the field has none.
    """

    name: str
    kind: type
    use: FieldUse | None
    is_tuple: bool
    is_optional: bool
    default: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A place in an op where a region stands: in ``field``, at ``path`` of the value or of each item of it.

    ``path`` is a dotted path of attributes, empty where the region itself stands there.
    """

    field: OpField
    use: FieldUse
    path: str


def op_fields(kind: type) -> tuple[OpField, ...]:
    """The fields of an op class, or of a dataclass inside one, in their order.

    Raises:
        TypeError: where a field does not declare its use, or declares one that does not fit its type.
    """
    return _op_fields(kind)


@cache
def _op_fields(kind: type) -> tuple[OpField, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(_field(kind, field, hints[field.name]) for field in dataclasses.fields(kind))


def op_field(kind: type, use: FieldUse) -> OpField | None:
    """The field of an op class with that use, None where it has none; the use must not occur twice."""
    matching = [field for field in op_fields(kind) if field.use is use]
    if len(matching) > 1:
        raise TypeError(f"{kind.__name__} has more than one field with the use {use.name}.")
    return matching[0] if matching else None


def operands(kind: type) -> tuple[Operand, ...]:
    """Every place in an op class where regions stand, in the order of its fields."""
    return tuple(_operands(kind))


def _operands(kind: type) -> Iterator[Operand]:
    for field in op_fields(kind):
        if field.use is None:
            for inner in op_fields(field.kind):
                if inner.use in _REGION_USES:
                    yield _operand(field, inner, f"{inner.name}.")
        elif field.use in _REGION_USES:
            yield _operand(field, field, "")


def _operand(outer: OpField, inner: OpField, prefix: str) -> Operand:
    assert inner.use is not None
    path = f"{prefix}region" if inner.kind is View else prefix.rstrip(".")
    return Operand(field=outer, use=inner.use, path=path)


def _field(owner: type, field: dataclasses.Field[object], hint: object) -> OpField:
    is_optional, hint = _without_none(hint)
    is_tuple = typing.get_origin(hint) is tuple
    if is_tuple:
        hint = typing.get_args(hint)[0]
        has_empty_items, hint = _without_none(hint)
        is_optional = is_optional or has_empty_items
    use = None
    if typing.get_origin(hint) is Annotated:
        hint, use = typing.get_args(hint)
    where = f"The field {owner.__name__}.{field.name}"
    if not isinstance(hint, type):
        raise TypeError(f"{where} has the type {hint}, for which ops have no notation.")
    if use is None:
        if not dataclasses.is_dataclass(hint) or hint in (Region, View):
            raise TypeError(f"{where} does not declare its use, such as Read or Attribute.")
    elif use in _REGION_USES:
        if hint not in (Region, View):
            raise TypeError(f"{where} declares {use.name}, but is no region or view.")
    elif use in _NAME_USES:
        if hint is not str:
            raise TypeError(f"{where} declares {use.name}, but is no name.")
    elif hint in (Region, View):
        raise TypeError(f"{where} holds a region: it must declare what the op does to it.")
    return OpField(
        name=field.name,
        kind=hint,
        use=use,
        is_tuple=is_tuple,
        is_optional=is_optional,
        default=field.default,
    )


def _without_none(hint: object) -> tuple[bool, object]:
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return False, hint
    members = [member for member in typing.get_args(hint) if member is not types.NoneType]
    return True, members[0] if len(members) == 1 else hint
