"""Conversion of frozen dataclasses to msgpack and back, by their annotations; msgspec reads, checks and writes it.

The set of classes is closed: it contains all classes that the annotations of :class:`~zeroir.ir.program.Program`
reach. A dataclass becomes a map of its fields without those at their default; where a union says which dataclasses may
stand there, ``type`` in the map names the class. A member of an enumeration becomes its value.

A change of these classes or of a default changes the schema; a test compares them with ``tests/data/schema_lock.json``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from types import GenericAlias, UnionType
from typing import Annotated, Any, Final, TypeVar

import msgspec

from zeroir.artifact.stored_sizes import SizeNumbers, StoredSizeError, stored_sizes
from zeroir.errors import InternalError, UserError
from zeroir.ir.analysis.instances import with_integers
from zeroir.ir.dtypes import DType
from zeroir.ir.limits import LONGEST_TEXT, obeyed_character
from zeroir.ir.options import Options, Pairs, WrittenOptions
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import NodeArg, Ref, Symbol
from zeroir.ir.segments.size_numbers import FUNCTIONS, SizeNumber

SCHEMA_VERSION: Final = (3, 8)
"""(major, minor). A minor version adds fields with defaults, or classes; a major one changes what files mean."""

_MAX_DEPTH: Final = 64
"""The largest depth of nested lists in a node's arguments."""

_NESTED: Final = f"its values nest more than {_MAX_DEPTH} deep"

T = TypeVar("T")


class SchemaError(Exception):
    """Bytes that do not fit this schema; ``place`` is where in the file, such as ``scheduled.sections[0].body[3]``."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.place = place.removeprefix(".")


class TextError(SchemaError):
    """A text that is too long, or that contains control characters of a terminal."""


def pack(value: object) -> bytes:
    """Return the msgpack bytes of a dataclass, the same for equal ones; :func:`unpack` checks that they fit the schema.

    Raises:
        UserError: if a text is no Unicode.
    """
    kind: type = type(value)
    try:
        return msgspec.msgpack.encode(_form(kind).written(value))
    except UnicodeEncodeError as error:
        raise UserError(
            f"The text {error.object!r:.60} cannot be stored: it is no Unicode; change this name in the model."
        ) from error
    except (AttributeError, KeyError, OverflowError, TypeError) as error:
        raise InternalError(f"Cannot store a {kind.__name__}: {error}.") from error


def unpack(kind: type[T], data: bytes) -> T:
    """Return the dataclass that bytes describe.

    Raises:
        SchemaError: if they describe something else.
    """
    kind_of_value: type = kind
    form, decoder = _decoder(kind_of_value)
    try:
        wire = decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _schema_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SchemaError("the body is not msgpack") from error
    except RecursionError as error:
        raise SchemaError(_NESTED) from error
    try:
        value = form.value(wire)
    except TextError as error:
        raise next(_text_errors(wire, ""), error) from None
    assert isinstance(value, kind)
    return value


_MESSAGE: Final = re.compile(r"(.*?)(?: - at `\$([^`]*)`)?", re.DOTALL)


def _schema_error(error: msgspec.ValidationError) -> SchemaError:
    """Return the error in words of ours; a name in it may be anything, and a terminal must not obey it."""
    found = _MESSAGE.fullmatch(str(error)[:500])
    assert found is not None
    message, place = found[1].replace("`", "'"), found[2] or ""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)
    return SchemaError(shown[:1].lower() + shown[1:], place)


def program_digest(program: Program) -> str:
    """SHA-256 of a program: ranks compare it before they start."""
    return hashlib.sha256(pack(program)).hexdigest()


# ------------------------------------------------------------------------------------------- forms of annotated types


@dataclass(frozen=True, slots=True)
class _StoredForm:
    """The type that msgspec checks in the place of an annotated one, and the conversions to it and back.

    A conversion is None where both have the same values.
    """

    wire: object
    write: Callable[[Any], object] | None = None
    read: Callable[[Any], Any] | None = None

    def written(self, value: object) -> object:
        """Return the wire's value."""
        return value if self.write is None else self.write(value)

    def value(self, wire: object) -> object:
        """Return the program's value."""
        return wire if self.read is None else self.read(wire)


@cache
def _decoder(kind: type) -> tuple[_StoredForm, msgspec.msgpack.Decoder[object]]:
    form = _form(kind)
    return form, msgspec.msgpack.Decoder(form.wire)


@cache
def _form(hint: object) -> _StoredForm:
    """Return the form of an annotated type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is str:
        return _StoredForm(str, _write_text, _read_text)
    if hint is int:
        return _StoredForm(_Int64)
    if hint is float:
        return _StoredForm(float, float)
    if hint is Program:
        return _program()
    if hint is Options:
        return _options()
    if Ref in arguments:
        return _StoredForm(_StoredArg, _write_arg, _read_arg)
    if origin in (UnionType, typing.Union):
        return _union(arguments)
    if origin is tuple:
        return _tuple(arguments)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass(hint, None)
    return _StoredForm(hint)


@cache
def _options() -> _StoredForm:
    pairs = _form(Pairs)
    read = pairs.read
    assert read is not None
    return _StoredForm(
        pairs.wire,
        lambda options: pairs.written(options.pairs),
        lambda wire: WrittenOptions(read(wire)),
    )


_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


def _write_text(value: object) -> object:
    # The version of torch is a subclass of str; msgspec takes str alone.
    return str.__str__(value) if isinstance(value, str) else value


def _read_text(value: str) -> str:
    """Return the text, one object for all equal names; TextError where a command could not print it."""
    if len(value) > LONGEST_TEXT:
        raise TextError(f"a text has {len(value):,} characters, more than {LONGEST_TEXT:,}")
    character = obeyed_character(value)
    if character is not None:
        raise TextError(f"the text {value!r:.60} holds the control character {character}")
    return sys.intern(value)


def _text_errors(wire: object, place: str) -> Iterator[TextError]:
    """Yield what is wrong with each text, and its place."""
    match wire:
        case str() if type(wire) is str:  # and no member of an enumeration
            try:
                _read_text(wire)
            except TextError as error:
                yield TextError(error.message, place)
        case tuple():
            for index, item in enumerate(wire):
                yield from _text_errors(item, f"{place}[{index}]")
        case msgspec.Struct():
            for name in wire.__struct_fields__:
                yield from _text_errors(getattr(wire, name), f"{place}.{name}")


def _tuple(arguments: tuple[object, ...]) -> _StoredForm:
    if arguments[-1] is Ellipsis:
        item = _form(arguments[0])
        write, read = item.write, item.read
        return _StoredForm(
            GenericAlias(tuple, (item.wire, ...)),
            None if write is None else lambda value: [write(item) for item in value],
            None if read is None else lambda value: tuple([read(item) for item in value]),
        )
    forms = [_form(argument) for argument in arguments]
    return _StoredForm(
        GenericAlias(tuple, tuple(form.wire for form in forms)),
        lambda value: [form.written(item) for form, item in zip(forms, value, strict=True)],
        lambda value: tuple(form.value(item) for form, item in zip(forms, value, strict=True)),
    )


def _union(arguments: tuple[object, ...]) -> _StoredForm:
    """Return the form of a union, which converts a value by its class."""
    classes: list[type] = [
        kind for kind in arguments if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    ]
    forms: dict[object, _StoredForm] = {
        kind: _dataclass(kind, kind.__name__ if len(classes) > 1 else None) for kind in classes
    }
    forms |= {kind: _form(kind) for kind in arguments if kind not in forms}
    writes: dict[object, Callable[[Any], object]] = {}
    reads: dict[object, Callable[[Any], Any]] = {}
    for kind, form in forms.items():
        there = typing.get_origin(kind) or kind
        if form.write is not None:
            writes[there] = form.write
        if form.read is not None:
            reads[form.wire if kind in classes else there] = form.read
    return _StoredForm(
        reduce(or_, [form.wire for form in forms.values()]),
        lambda value: value if (write := writes.get(type(value))) is None else write(value),
        lambda value: value if (read := reads.get(type(value))) is None else read(value),
    )


_REQUIRED: Final = object()
"""In the place of the default of a field that has none."""


@cache
def _dataclass(kind: type, tag: str | None) -> _StoredForm:
    hints = typing.get_type_hints(kind)
    fields: list[tuple[str, _StoredForm, object]] = []
    for field in dataclasses.fields(kind):
        default: object = _REQUIRED
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        fields.append((field.name, _form(hints[field.name]), default))
    wire = msgspec.defstruct(
        kind.__name__,
        [
            (name, form.wire) if default is _REQUIRED else (name, form.wire, default)
            for name, form, default in fields
        ],
        tag=tag,
        kw_only=True,
        frozen=True,
        forbid_unknown_fields=True,
        gc=False,
    )
    converted = [(name, form.read, default) for name, form, default in fields if form.read]
    names = wire.__struct_fields__

    def write(value: object) -> dict[str, object]:
        written: dict[str, object] = {} if tag is None else {"type": tag}
        for name, form, default in fields:
            item = getattr(value, name)
            if type(item) is not type(default) or item != default:
                written[name] = item if form.write is None else form.write(item)
        return written

    def read(value: object) -> object:
        items = {name: getattr(value, name) for name in names}
        for name, convert, default in converted:
            item = items[name]
            if item is not default:
                items[name] = convert(item)
        return kind(**items)

    return _StoredForm(wire, write, read)


# ------------------------------------------------------------------------------------------- sizes


@dataclass(frozen=True, kw_only=True, repr=False)
class _StoredProgram(Program):
    """A program in which numbers of ``sizes`` stand for sizes that depend on dims."""

    sizes: tuple[str, ...] = ()


@cache
def _program() -> _StoredForm:
    form = _dataclass(_StoredProgram, None)
    write, read = form.write, form.read
    assert write is not None
    assert read is not None
    return _StoredForm(
        form.wire,
        lambda program: write(_with_numbered_sizes(program)),
        lambda wire: _with_sizes(read(wire)),
    )


def _with_numbered_sizes(program: Program) -> _StoredProgram:
    fields = {field.name: getattr(program, field.name) for field in dataclasses.fields(Program)}
    stored = _StoredProgram(**fields)
    if not program.dims:
        return stored
    numbers = SizeNumbers()
    numbered = with_integers(stored, numbers.number)
    fields = {field.name: getattr(numbered, field.name) for field in dataclasses.fields(Program)}
    return _StoredProgram(**fields, sizes=numbers.texts)


def _with_sizes(stored: _StoredProgram) -> Program:
    try:
        sized = stored_sizes(stored.sizes, stored.dims)
    except StoredSizeError as error:
        raise SchemaError(str(error), f".sizes[{error.index}]") from None
    fields = {field.name: getattr(stored, field.name) for field in dataclasses.fields(Program)}
    program = Program(**fields)
    return with_integers(program, sized) if stored.sizes else program


# ---------------------------------------------------------------------------------- node arguments


class _TaggedList(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """What msgpack has no type for: a list that begins with its kind."""


class _StoredRef(_TaggedList, tag="ref"):
    index: _Int64


class _StoredSymbol(_TaggedList, tag="symbol"):
    name: str


class _StoredDType(_TaggedList, tag="dtype"):
    dtype: DType


class _StoredInteger(_TaggedList, tag="int"):
    digits: Annotated[str, msgspec.Meta(pattern=r"^-?0x[0-9a-f]{1,1000}$")]


class _StoredList(_TaggedList, tag="list"):
    items: tuple[_StoredArg, ...]


class _StoredNumber(_TaggedList, tag="number"):
    function: str
    operands: tuple[_StoredArg, ...]


_StoredArg = (
    _StoredRef | _StoredSymbol | _StoredDType | _StoredInteger | _StoredList | _StoredNumber
) | (_Int64 | float | str | bool | None)


def _write_arg(value: NodeArg) -> _StoredArg:
    match value:
        case Ref():
            return _StoredRef(value.index)
        case Symbol():
            return _StoredSymbol(value.name)
        case DType():
            return _StoredDType(value)
        case int() if not -(2**63) <= value < 2**63:
            return _StoredInteger(hex(value))
        case SizeNumber():
            return _StoredNumber(value.function, tuple(map(_write_arg, value.operands)))
        case tuple():
            return _StoredList(tuple(map(_write_arg, value)))
        case _:
            return value


def _read_arg(value: _StoredArg, depth: int = 0) -> NodeArg:
    match value:
        case _StoredRef():
            return Ref(value.index)
        case _StoredSymbol():
            return Symbol(_read_text(value.name))
        case _StoredDType():
            return value.dtype
        case _StoredInteger():
            return int(value.digits, 16)
        case _StoredList():
            if depth == _MAX_DEPTH:
                raise SchemaError(_NESTED)
            return tuple(_read_arg(item, depth + 1) for item in value.items)
        case _StoredNumber():
            return _read_number(value, depth)
        case str():
            return _read_text(value)
        case _:
            return value


def _read_number(value: _StoredNumber, depth: int) -> SizeNumber:
    if depth == _MAX_DEPTH:
        raise SchemaError(_NESTED)
    count, _ = FUNCTIONS.get(value.function, (-1, None))
    operands = tuple(_read_arg(item, depth + 1) for item in value.operands)
    numbers = tuple(
        each for each in operands if isinstance(each, int | float) and not isinstance(each, bool)
    )
    if not len(numbers) == len(operands) == count:
        raise SchemaError(f"'{value.function:.40}' is no function of {len(operands)} numbers")
    return SizeNumber(value.function, numbers)
