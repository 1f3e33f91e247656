"""Declarations on the fields of ops and of the records in a program's header, in addition to their types.

The text of ops and records, the effects of ops, and the checks of names are derived from these declarations.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import cache
from typing import Annotated, Final, TypeVar

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


class NameKind(StrEnum):
    """A kind of named thing, as messages call it."""

    AXIS = "axis"
    STREAM = "stream"
    COMMUNICATOR = "communicator"
    FLAT = "flat"
    BUFFER = "buffer"
    SEGMENT = "segment"
    SECTION = "section"
    GROUP = "group"
    BOUND = "bound on"
    PARAMETER = "parameter"
    UNIT = "unit"
    OPERATOR = "operator"
    MODULE = "module"
    INPUT = "input"
    OUTPUT = "output"
    CONSTANT = "constant"
    DIM = "dim"
    MODULE_BUFFER = "module buffer"
    EVENT = "event"
    VALUE = "value"

    @property
    def is_unique(self) -> bool:
        """Whether a name belongs to a single thing of the kind."""
        return self not in _SHARED

    @property
    def sigil(self) -> str:
        """The character before such a name in the text."""
        return {NameKind.BUFFER: "%", NameKind.EVENT: "!", NameKind.SEGMENT: "@"}.get(self, "")


_SHARED: Final = frozenset(
    {
        *(NameKind.UNIT, NameKind.OPERATOR, NameKind.MODULE, NameKind.INPUT, NameKind.OUTPUT),
        *(NameKind.CONSTANT, NameKind.MODULE_BUFFER),
    }
)

_NAMED: Final = {
    FieldUse.BEGUN: NameKind.BUFFER,
    FieldUse.ENDED: NameKind.BUFFER,
    FieldUse.AWAITED: NameKind.EVENT,
    FieldUse.SEGMENT: NameKind.SEGMENT,
    FieldUse.STREAM: NameKind.STREAM,
    FieldUse.COMM: NameKind.COMMUNICATOR,
}


def with_article(noun: str) -> str:
    """Return a noun with its article: ``an axis``, ``a stream``."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


@dataclass(frozen=True, slots=True)
class Declares:
    """The field is the name that its record declares."""

    kind: NameKind


@dataclass(frozen=True, slots=True)
class Refers:
    """The field is a name that another record declares.

    ``who`` begins the message about an undeclared name, ``input {path} is bound to``. Without it another check reports
    that.
    """

    kind: NameKind
    who: str = ""


@dataclass(frozen=True, slots=True)
class Flag:
    """The words for true and for false."""

    on: str
    off: str = ""


@dataclass(frozen=True, slots=True)
class Word:
    """The field is a text that needs quotes in fewer cases than a name does; ``what`` describes it."""

    what: str


class Form(Enum):
    """The text form of a value, where its type does not determine it.

    * ``QUOTED``: a text in quotes.
    * ``BRACKETED``: a number of elements, ``[64]``.
    * ``INTERVAL``: a flat and elements of it, ``blocks.0[0:64]``.
    * ``CONSTANT``: a constant of the batch.
    * ``QUANTITY``: a name, in quotes also where other contents begin with that word.
    * ``LINES``: records between braces, a line each.
    """

    QUOTED = auto()
    BRACKETED = auto()
    INTERVAL = auto()
    CONSTANT = auto()
    QUANTITY = auto()
    LINES = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredField:
    """One field of an op, of a record, or of a dataclass that is a value of such a field.

    ``kind`` is the type of the value, or of each item where ``is_tuple``; ``members`` are the classes of a union of
    dataclasses. ``marks`` are the declarations in addition to the type: ``use`` is what an op does with the field,
    ``named`` the kind of name that it declares or refers to. Where ``is_optional``, the value (or an item) may be None.
    ``default`` is ``dataclasses.MISSING`` where the field has none.
    """

    name: str
    kind: type
    members: tuple[type, ...]
    marks: tuple[object, ...]
    use: FieldUse | None
    named: NameKind | None
    is_tuple: bool
    is_optional: bool
    default: object

    def mark(self, kind: type[T]) -> T | None:
        """Return the declaration of that class, None if the field has none."""
        return next((mark for mark in self.marks if isinstance(mark, kind)), None)

    @property
    def records(self) -> tuple[type, ...]:
        """The dataclasses of a value, or of an item."""
        return self.members or ((self.kind,) if dataclasses.is_dataclass(self.kind) else ())


def declared_fields(kind: type) -> tuple[DeclaredField, ...]:
    """Return the fields of a class, in their order."""
    return _declared_fields(kind)


@cache
def _declared_fields(kind: type) -> tuple[DeclaredField, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return tuple(_field(field, hints[field.name]) for field in dataclasses.fields(kind))


def _field(field: dataclasses.Field[object], hint: object) -> DeclaredField:
    marks, hint = _without_marks(hint)
    is_optional, hint = _without_none(hint)
    arguments = typing.get_args(hint)
    is_tuple = typing.get_origin(hint) is tuple and arguments[-1] is Ellipsis
    if is_tuple:
        is_item_optional, hint = _without_none(arguments[0])
        is_optional = is_optional or is_item_optional
    inner_marks, hint = _without_marks(hint)
    members = tuple(
        member
        for member in typing.get_args(hint)
        if isinstance(member, type) and hasattr(member, "__dataclass_fields__")
    )
    marks += inner_marks
    use = next((mark for mark in marks if isinstance(mark, FieldUse)), None)
    names = [mark.kind for mark in marks if isinstance(mark, Declares | Refers)]
    return DeclaredField(
        name=field.name,
        kind=hint if isinstance(hint, type) else object,
        members=members,
        marks=marks,
        use=use,
        named=names[0] if names else None if use is None else _NAMED.get(use),
        is_tuple=is_tuple,
        is_optional=is_optional,
        default=field.default
        if field.default_factory is dataclasses.MISSING
        else field.default_factory(),
    )


def _without_marks(hint: object) -> tuple[tuple[object, ...], object]:
    if typing.get_origin(hint) is not Annotated:
        return (), hint
    bare, *marks = typing.get_args(hint)
    return tuple(marks), bare


def _without_none(hint: object) -> tuple[bool, object]:
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return False, hint
    members = [member for member in typing.get_args(hint) if member is not types.NoneType]
    if len(members) == len(typing.get_args(hint)):
        return False, hint
    union = members[0]
    for member in members[1:]:
        union = union | member
    return True, union
