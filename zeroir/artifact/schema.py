"""Conversion of frozen dataclasses to plain data and back, by their annotations.

The set of classes is closed: it contains all classes that the annotations of :class:`~zeroir.ir.program.Program`
reach. A dataclass becomes a map of its fields without those at their default. A member of a union of dataclasses
becomes a pair of its class's name and that map, and a member of an enumeration its value. Types are checked exactly in
both directions.

A change of these classes or of a default changes the schema; a test compares them with ``tests/data/schema_lock.json``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Final

import msgpack

from zeroir.errors import InternalError, UserError
from zeroir.ir.dtypes import DType
from zeroir.ir.limits import LONGEST_TEXT, obeyed_character
from zeroir.ir.program import Program
from zeroir.ir.segment import Ref, Symbol

SCHEMA_VERSION: Final = (2, 0)
"""(major, minor). A minor version adds fields with defaults, or classes; a major one changes what files mean."""

_MAX_DEPTH: Final = 64
"""The largest depth of nested lists in a node's arguments."""


class SchemaError(Exception):
    """Plain data that do not fit this schema; ``path`` is their place, from the inside out."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.path: list[str] = []

    @property
    def place(self) -> str:
        """The place in the file, such as ``scheduled.sections[0].body[3]``."""
        return "".join(reversed(self.path)).removeprefix(".")


class TextError(SchemaError):
    """A text that is too long, or that contains control characters of a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """The conversions of one annotated type in both directions."""

    encode: Callable[[object], object]
    decode: Callable[[object], object]


def encode(value: object) -> object:
    """The plain data of a dataclass of the closed set.

    Raises:
        UserError: if a name is too long, or contains control characters of a terminal.
        InternalError: if a field has the wrong type.
    """
    kind: type = type(value)
    try:
        return codec(kind).encode(value)
    except TextError as error:
        raise UserError(
            f"{error.place or 'A value'} cannot be stored: {error.message}; change this name in the model."
        ) from error
    except SchemaError as error:
        raise InternalError(f"Cannot store {error.place or 'a value'}: {error.message}.") from error


def decode(kind: type, data: object) -> object:
    """The dataclass that plain data describe.

    Raises:
        SchemaError: if the data describe something else.
    """
    return codec(kind).decode(data)


def pack(value: object) -> bytes:
    """The msgpack bytes of a dataclass, the same for equal values."""
    packed = msgpack.packb(encode(value), use_bin_type=True, unicode_errors="surrogatepass")
    if not isinstance(packed, bytes):
        raise InternalError("msgpack returned no bytes.")
    return packed


def program_digest(program: Program) -> str:
    """SHA-256 of a program: ranks compare it before they start."""
    return hashlib.sha256(pack(program)).hexdigest()


# ------------------------------------------------------------------------------------------ codecs


@cache
def codec(hint: object) -> Codec:
    """The codec of an annotated type."""
    if hint is float:
        return Codec(encode=_float, decode=_float)
    if hint is int:
        return Codec(encode=_int64, decode=_int64)
    if hint is str:
        return Codec(encode=_encode_text, decode=_decode_text)
    if hint in (bool, bytes, types.NoneType):
        assert isinstance(hint, type)
        return _plain(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if Ref in arguments:
            return Codec(encode=_encode_arg, decode=_decode_arg)
        return _union(arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return _list(codec(arguments[0]))
        return _fixed([codec(argument) for argument in arguments])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass(hint)
    raise InternalError(f"The schema has no form for {hint!r}.")


def _mismatch(expected: str, value: object) -> SchemaError:
    return SchemaError(f"expected {expected} but found {type(value).__name__} {value!r:.60}")


def _plain(kind: type) -> Codec:
    def check(value: object) -> object:
        if type(value) is not kind:
            raise _mismatch(kind.__name__, value)
        return value

    return Codec(encode=check, decode=check)


def _encode_text(value: object) -> object:
    # The version of torch is a subclass of str and is accepted; a member of a StrEnum is not a text.
    if not isinstance(value, str) or isinstance(value, Enum):
        raise _mismatch("str", value)
    _check_text(value)
    return str(value)


def _decode_text(value: object) -> object:
    if type(value) is not str:
        raise _mismatch("str", value)
    _check_text(value)
    return value


def _check_text(value: str) -> None:
    """Reject control characters: commands print these texts, and a terminal would obey them."""
    if len(value) > LONGEST_TEXT:
        raise TextError(f"a text has {len(value):,} characters, more than {LONGEST_TEXT:,}")
    character = obeyed_character(value)
    if character is not None:
        raise TextError(f"the text {value!r:.60} holds the control character {character}")


def _float(value: object) -> object:
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    raise _mismatch("float", value)


def _int64(value: object) -> object:
    if type(value) is not int:
        raise _mismatch("int", value)
    if not -(2**63) <= value < 2**63:
        raise SchemaError(f"expected an integer of 64 bits but found {value}")
    return value


def _list(item: Codec) -> Codec:
    def through(
        convert: Callable[[object], object], value: list[object] | tuple[object, ...]
    ) -> list[object]:
        converted: list[object] = []
        try:
            for element in value:
                converted.append(convert(element))  # noqa: PERF401  its length is the place of an error
        except SchemaError as error:
            error.path.append(f"[{len(converted)}]")
            raise
        return converted

    def encode_list(value: object) -> object:
        if type(value) is not tuple:
            raise _mismatch("tuple", value)
        return through(item.encode, value)

    def decode_list(value: object) -> object:
        if type(value) is not list:
            raise _mismatch("list", value)
        return tuple(through(item.decode, value))

    return Codec(encode=encode_list, decode=decode_list)


def _fixed(items: list[Codec]) -> Codec:
    def encode_fixed(value: object) -> object:
        if type(value) is not tuple or len(value) != len(items):
            raise _mismatch(f"tuple of {len(items)}", value)
        return [item.encode(element) for item, element in zip(items, value, strict=True)]

    def decode_fixed(value: object) -> object:
        if type(value) is not list or len(value) != len(items):
            raise _mismatch(f"list of {len(items)}", value)
        return tuple(item.decode(element) for item, element in zip(items, value, strict=True))

    return Codec(encode=encode_fixed, decode=decode_fixed)


def _enum(kind: type[Enum]) -> Codec:
    members = {member.value: member for member in kind}

    def encode_enum(value: object) -> object:
        if not isinstance(value, kind):
            raise _mismatch(kind.__name__, value)
        return value.value

    def decode_enum(value: object) -> object:
        if type(value) is not str or value not in members:
            raise SchemaError(
                f"unknown {kind.__name__} {value!r:.60}, expected one of {', '.join(members)}"
            )
        return members[value]

    return Codec(encode=encode_enum, decode=decode_enum)


def _union(arguments: tuple[object, ...]) -> Codec:
    """``X | None`` is X or nil; a union of dataclasses is a pair of the class's name and its fields."""
    is_optional = types.NoneType in arguments
    members = [argument for argument in arguments if argument is not types.NoneType]
    if len(members) == 1:
        (inner,) = (codec(member) for member in members)
    else:
        inner = _tagged(members)
    if not is_optional:
        return inner
    return Codec(
        encode=lambda value: None if value is None else inner.encode(value),
        decode=lambda value: None if value is None else inner.decode(value),
    )


def _tagged(members: list[object]) -> Codec:
    kinds = {member.__name__: member for member in members if isinstance(member, type)}
    if len(kinds) != len(members):
        raise InternalError(f"The schema cannot tell the members of a union apart: {members!r}.")
    codecs = {name: codec(kind) for name, kind in kinds.items()}
    names = {kind: name for name, kind in kinds.items()}

    def encode_tagged(value: object) -> object:
        name = names.get(type(value))
        if name is None:
            raise _mismatch(f"one of {', '.join(kinds)}", value)
        return [name, codecs[name].encode(value)]

    def decode_tagged(value: object) -> object:
        if type(value) is not list or len(value) != 2 or type(value[0]) is not str:
            raise _mismatch("a pair of a kind and its fields", value)
        if value[0] not in codecs:
            raise SchemaError(f"unknown kind {value[0]!r:.60}")
        return codecs[value[0]].decode(value[1])

    return Codec(encode=encode_tagged, decode=decode_tagged)


_REQUIRED: Final = object()
"""In the place of the default of a field that has none."""


def _dataclass(kind: type) -> Codec:
    fields: list[tuple[str, Codec, object]] = []

    def ready() -> list[tuple[str, Codec, object]]:
        # Fields are computed at first use, so that classes may refer to each other.
        if not fields:
            fields.extend(_fields(kind))
        return fields

    def encode_dataclass(value: object) -> object:
        if type(value) is not kind:
            raise _mismatch(kind.__name__, value)
        encoded: dict[str, object] = {}
        for name, form, default in ready():
            item = getattr(value, name)
            if type(item) is type(default) and item == default:
                continue
            try:
                encoded[name] = form.encode(item)
            except SchemaError as error:
                error.path.append(f".{name}")
                raise
        return encoded

    def decode_dataclass(value: object) -> object:
        if type(value) is not dict:
            raise _mismatch(f"the fields of {kind.__name__}", value)
        arguments: dict[str, object] = {}
        for name, form, default in ready():
            if name in value:
                try:
                    arguments[name] = form.decode(value[name])
                except SchemaError as error:
                    error.path.append(f".{name}")
                    raise
            elif default is _REQUIRED:
                raise SchemaError(f"{kind.__name__} lacks its field '{name}'")
        if len(arguments) < len(value):
            name = next(name for name in value if name not in arguments)
            raise SchemaError(f"unknown field {name!r:.60} of {kind.__name__}")
        return kind(**arguments)

    return Codec(encode=encode_dataclass, decode=decode_dataclass)


def _fields(kind: type) -> Iterator[tuple[str, Codec, object]]:
    """Name, codec and default of each field."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        default: object = _REQUIRED
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield field.name, codec(hints[field.name]), default


# ---------------------------------------------------------------------------------- node arguments


def _encode_arg(value: object, depth: int = 0) -> object:
    """Numbers, strings, booleans and None unchanged; other values as a list that begins with their kind."""
    match value:
        case Ref():
            return ["ref", _int64(value.index)]
        case Symbol():
            return ["symbol", _encode_text(value.name)]
        case DType():
            return ["dtype", value.value]
        case None | bool() | float():
            return value
        case str():
            return _encode_text(value)
        case int():
            return value if -(2**63) <= value < 2**63 else ["int", hex(value)]
        case tuple():
            if depth == _MAX_DEPTH:
                raise SchemaError(f"lists nest more than {_MAX_DEPTH} deep")
            return ["list", *[_encode_arg(item, depth + 1) for item in value]]
        case _:
            raise _mismatch("an argument of a node", value)


def _decode_arg(value: object, depth: int = 0) -> object:
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            return _decode_text(value)
        case ["ref", int(index)] if type(index) is int:
            return Ref(index)
        case ["symbol", str(name)]:
            _check_text(name)
            return Symbol(name)
        case ["dtype", str(name)]:
            return codec(DType).decode(name)
        case ["int", str(digits)] if len(digits) < 1000:
            try:
                return int(digits, 16)
            except ValueError:
                raise _mismatch("a hexadecimal integer", digits) from None
        case ["list", *items]:
            if depth == _MAX_DEPTH:
                raise SchemaError(f"lists nest more than {_MAX_DEPTH} deep")
            return tuple(_decode_arg(item, depth + 1) for item in items)
        case _:
            raise _mismatch("an argument of a node", value)
