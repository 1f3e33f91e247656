"""One line of text for each op, as the syntax of its class says.

The printer of each class of ops is built once, since large programs have millions of lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Final

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.op_fields import FieldUse, OpField, op_field
from zeroir.ir.ops import Mode, Op
from zeroir.ir.segment import TensorType
from zeroir.ir.text.lexical import name, number
from zeroir.ir.text.names import Names
from zeroir.ir.text.syntax import SyntaxSlot, own_syntax, slots

_ATTRIBUTES_COLUMN: Final = 72
"""The column of ``stream=`` and other attributes, when the line is short enough."""

_SIGILS: Final = {
    FieldUse.BEGUN: "%",
    FieldUse.ENDED: "%",
    FieldUse.AWAITED: "!",
    FieldUse.SEGMENT: "@",
}
"""The sign before the name of a buffer, an event or a segment."""

_Print = Callable[[Any, Names], str]


def op_text(op: Op, names: Names) -> str:
    """One op as its line says it: ``!event = what``, then its attributes."""
    return _LINES[type(op)](op, names)


def _line(kind: type[Op]) -> _Print:
    """The printer of one class of ops."""
    keyword = ops.op_name(kind)
    line_slots = slots(kind, kind.syntax)
    head = [_slot(kind, slot) for slot in line_slots if not slot.is_attribute]
    attributes = [_slot(kind, slot) for slot in line_slots if slot.is_attribute]
    event_field = op_field(kind, FieldUse.SIGNALLED)
    event = None if event_field is None else attrgetter(event_field.name)

    def line(op: Op, names: Names) -> str:
        text = keyword + "".join([part(op, names) for part in head])
        if event is not None and (signalled := event(op)) is not None:
            text = f"!{name(signalled)} = {text}"
        # Every slot begins with a space, so that two stand between the columns.
        return f"{text:<{_ATTRIBUTES_COLUMN}} {''.join([part(op, names) for part in attributes])}"

    return line


def _slot(kind: type, slot: SyntaxSlot) -> _Print:
    """The printer of a slot and the words before it; it is given the op, or the dataclass inside one."""
    field, words = slot.field, slot.words
    read = attrgetter(field.name)
    if field.kind is ops.Argument or field.kind is ops.Destination:
        return _operands(kind, slot)
    printed = _value(field)
    if field.is_tuple:
        opening, closing = ("(", ")") if slot.is_bracketed else ("", "")
        default_items = field.default if slot.is_left_out else None

        def listed(op: object, names: Names) -> str:
            items = read(op)
            if items == default_items:
                return ""
            return f"{words}{opening}{', '.join([printed(item, names) for item in items])}{closing}"

        return listed
    if not slot.is_left_out:
        if field.kind is Region:  # the most frequent by far
            return lambda op, names: words + names.region(read(op))
        return lambda op, names: f"{words}{printed(read(op), names)}"
    default = field.default

    def optional(op: object, names: Names) -> str:
        value = read(op)
        return "" if value is default or value == default else f"{words}{printed(value, names)}"

    return optional


def _value(field: OpField) -> _Print:
    """The printer of a field's value, or of each item of it."""
    kind = field.kind
    if field.use is None:
        parts = [_slot(kind, slot) for slot in slots(kind, own_syntax(kind))]
        return lambda value, names: "".join([part(value, names) for part in parts])[1:]
    if kind is Region:
        return lambda value, names: names.region(value)
    if field.use in _SIGILS:
        sigil = _SIGILS[field.use]
        return lambda value, _: sigil + name(value)
    if kind is Mode:
        return lambda value, _: "+= " if value is Mode.ACCUMULATE else ""
    if issubclass(kind, Enum):
        return lambda value, _: str(value.value)
    if kind is float:
        return lambda value, _: number(value)
    if kind is int:
        return lambda value, _: str(value)
    if kind is str:
        return lambda value, _: name(value)
    raise TypeError(f"The text has no form for {kind.__name__}, the type of {field.name}.")


# -------------------------------------------------------------------------------------------------------- compute


def _operands(kind: type, slot: SyntaxSlot) -> _Print:
    """The printer of a call's arguments or destinations; views leave out the shape that the segment declares."""
    segment_field = op_field(kind, FieldUse.SEGMENT)
    assert segment_field is not None
    segment, read, words = attrgetter(segment_field.name), attrgetter(slot.field.name), slot.words

    if slot.field.kind is ops.Argument:
        return lambda op, names: (
            f"{words}({', '.join(_arguments(read(op), names.inputs(segment(op)), names))})"
        )
    return lambda op, names: (
        f"{words}({', '.join(_destinations(read(op), names.outputs(segment(op)), names))})"
    )


_Types = tuple[TensorType | None, ...]


def _arguments(arguments: Iterable[ops.Argument], types: _Types, names: Names) -> list[str]:
    declared = chain(types, repeat(None))
    return [
        names.view(argument.view, kind)
        if argument.parameter is None
        else f"{name(argument.parameter)}: {names.view(argument.view, kind)}"
        for argument, kind in zip(arguments, declared, strict=False)
    ]


def _destinations(
    destinations: Iterable[ops.Destination | None], types: _Types, names: Names
) -> list[str]:
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
    return printed


_LINES: Final = {kind: _line(kind) for kind in ops.OP_CLASSES}
