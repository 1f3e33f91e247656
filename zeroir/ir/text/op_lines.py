"""One line of text for each op, printed and parsed as the syntax of its class says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Final

from zeroir.ir import ops
from zeroir.ir.fields import FieldUse
from zeroir.ir.op_fields import op_field
from zeroir.ir.ops import Mode, Op
from zeroir.ir.segments.segment import TensorType
from zeroir.ir.text.lexical import BARE_NAME, STRING, name
from zeroir.ir.text.names import Names, TextReader
from zeroir.ir.text.notation import Notation, slot_notation
from zeroir.ir.text.syntax import SyntaxSlot, slots

_ATTRIBUTES_COLUMN: Final = 72
"""The column of ``stream=`` and other attributes, when the line is short enough."""

_NUMBER: Final = re.compile(r"[ \t]*[0-9]+[ \t]*:")
_PARAMETER: Final = re.compile(rf"[ \t]*(?:({BARE_NAME})|({STRING}))[ \t]*:")


def op_text(op: Op, names: Names) -> str:
    """Return the line of an op: ``!event = what``, then its attributes."""
    line = _LINES[type(op)]
    text = line.keyword + "".join([part(op, names) for part in line.head])
    if line.event is not None and (event := line.event(op)) is not None:
        text = f"!{name(event)} = {text}"
    # Every slot begins with a space, so there are two between the columns.
    attributes = "".join([part(op, names) for part in line.attributes])
    return f"{text:<{_ATTRIBUTES_COLUMN}} {attributes}"


def parse_numbered_op(reader: TextReader) -> Op:
    """Read an op with or without its number, which is derived and ignored."""
    scan = reader.scanner
    number = _NUMBER.match(scan.text, scan.position)
    if number is not None:
        scan.position = number.end()
    event = None
    if scan.text.startswith("!", scan.here()):
        event = scan.sigil_name("!", "an event such as '!0'")
        scan.expect("=")
    position = scan.here()
    keyword = scan.name("an op, an 'exit' line or '}'")
    line = _BY_KEYWORD.get(keyword)
    if line is None:
        keywords = ", ".join(_BY_KEYWORD)
        raise scan.error(f"expected one of {keywords}, but found '{keyword}'.", position)
    values: dict[str, Any] = {} if line.event is None else {"event": event}
    if line.event is None and event is not None:
        scan.fail(f"expected an op that can signal an event; '{keyword}' cannot.", position)
    for field, read in line.fields:
        values[field] = read(reader)
    return line.kind(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpLine:
    """The printers and readers of a class of ops; ``event`` returns the event that an op signals."""

    kind: type[Op]
    keyword: str
    event: Callable[[object], str | None] | None
    head: tuple[Callable[[object, Names], str], ...]
    attributes: tuple[Callable[[object, Names], str], ...]
    fields: tuple[tuple[str, Callable[[TextReader], object]], ...]


def _line(kind: type[Op]) -> _OpLine:
    parts = [(slot, _slot(kind, slot)) for slot in slots(kind, kind.syntax)]
    signals = op_field(kind, FieldUse.SIGNALLED) is not None
    return _OpLine(
        kind=kind,
        keyword=ops.op_name(kind),
        event=attrgetter("event") if signals else None,
        head=tuple(notation.text for slot, notation in parts if not slot.is_attribute),
        attributes=tuple(notation.text for slot, notation in parts if slot.is_attribute),
        fields=tuple((slot.field.name, notation.read) for slot, notation in parts),
    )


# -------------------------------------------------------------------------------------------------------- compute


def _slot(kind: type, slot: SyntaxSlot) -> Notation:
    """Return the notation of a slot; views of a call omit the shape that the segment declares."""
    field, words = slot.field, slot.words
    if field.use is FieldUse.SEGMENT:
        return Notation(slot_notation(slot).text, TextReader.called_segment)
    if field.kind is not ops.Argument and field.kind is not ops.Destination:
        return slot_notation(slot)
    segment_field = op_field(kind, FieldUse.SEGMENT)
    assert segment_field is not None
    segment, get = attrgetter(segment_field.name), attrgetter(field.name)
    if field.kind is ops.Argument:
        return Notation(
            lambda op, names: f"{words}({_arguments(get(op), names.inputs(segment(op)), names)})",
            lambda reader: _operands(reader, words, reader.inputs, _argument),
        )
    return Notation(
        lambda op, names: f"{words}({_destinations(get(op), names.outputs(segment(op)), names)})",
        lambda reader: _operands(reader, words, reader.outputs, _destination),
    )


_Types = tuple[TensorType | None, ...]


def _arguments(arguments: Iterable[ops.Argument], types: _Types, names: Names) -> str:
    declared = chain(types, repeat(None))
    return ", ".join(
        [
            names.view(argument.view, kind)
            if argument.parameter is None
            else f"{name(argument.parameter)}: {names.view(argument.view, kind)}"
            for argument, kind in zip(arguments, declared, strict=False)
        ]
    )


def _destinations(
    destinations: Iterable[ops.Destination | None], types: _Types, names: Names
) -> str:
    printed: list[str] = []
    declared = chain(types, repeat(None))
    for destination, kind in zip(destinations, declared, strict=False):
        if destination is None:
            printed.append("_")
            continue
        text = names.view(destination.view, kind)
        if destination.mode is Mode.ACCUMULATE:
            text = "+= " + text
        if destination.gradient is not None:
            text = f"grad {name(destination.gradient)}: {text}"
        printed.append(text)
    return ", ".join(printed)


def _operands(
    reader: TextReader,
    words: str,
    types: Mapping[str, _Types],
    read: Callable[[TextReader, TensorType | None], object],
) -> object:
    declared = iter(types.get(reader.called, ()))
    if words:
        reader.scanner.expect(words.strip())
    return reader.scanner.several(lambda: read(reader, next(declared, None)))


def _argument(reader: TextReader, declared: TensorType | None) -> ops.Argument:
    return ops.Argument(parameter=_parameter(reader), view=reader.view(declared))


def _destination(reader: TextReader, declared: TensorType | None) -> ops.Destination | None:
    scan = reader.scanner
    if scan.accept_keyword("_"):
        return None
    gradient = None
    if scan.accept_keyword("grad"):
        gradient = _parameter(reader)
        if gradient is None:
            scan.fail("expected a parameter's name and ':' after 'grad'.")
    mode = Mode.ACCUMULATE if scan.accept("+=") else Mode.WRITE
    return ops.Destination(view=reader.view(declared), mode=mode, gradient=gradient)


def _parameter(reader: TextReader) -> str | None:
    scan = reader.scanner
    match = _PARAMETER.match(scan.text, scan.position)
    if match is None:
        return None
    scan.position = match.end()
    return match[1] or scan.unquote(match[2], match.start(2))


_LINES: Final = {kind: _line(kind) for kind in ops.OP_CLASSES}
_BY_KEYWORD: Final = {line.keyword: line for line in _LINES.values()}
