"""Parsing the ops of a section, a line each, as the syntax of their classes says."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar

from zeroir.ir import ops
from zeroir.ir.buffers import Region, View
from zeroir.ir.dtypes import DType
from zeroir.ir.op_fields import FieldUse, OpField, op_field
from zeroir.ir.ops import Mode, Op
from zeroir.ir.segment import TensorType
from zeroir.ir.text.lexical import BARE_NAME, STRING
from zeroir.ir.text.parse_segment import parse_dtype, parse_strided
from zeroir.ir.text.scanner import Scanner
from zeroir.ir.text.syntax import SyntaxSlot, own_syntax, slots

T = TypeVar("T")

Types = Mapping[str, tuple[tuple[TensorType | None, ...], tuple[TensorType | None, ...]]]
"""The types of every segment's inputs and outputs."""

_NUMBER: Final = re.compile(r"[ \t]*[0-9]+[ \t]*:")
_REGION: Final = re.compile(
    rf"[ \t]*%(?:({BARE_NAME})|({STRING}))"
    rf"(?:\[(-?[0-9]{{1,30}}):(-?[0-9]{{1,30}})\](?:@(?:({BARE_NAME})|({STRING})))?"
    rf"(?:\[(-?[0-9]{{1,30}}):(-?[0-9]{{1,30}})\])?)?"
)
_PARAMETER: Final = re.compile(rf"[ \t]*(?:({BARE_NAME})|({STRING}))[ \t]*:")
EVENT: Final = "an event such as '!0'"
SEGMENT: Final = "a segment such as '@block.forward'"


class OpParser:
    """Reads ops; ``numels`` and ``types`` are what has been declared so far."""

    def __init__(self, scanner: Scanner, numels: Mapping[str, int], types: Types) -> None:
        self.scanner = scanner
        self.numels = numels
        self.types = types

    def numbered_op(self) -> Op:
        """An op with or without its number, which is derived and not looked at."""
        scan = self.scanner
        number = _NUMBER.match(scan.text, scan.position)
        if number is not None:
            scan.position = number.end()
        return self.op()

    def op(self) -> Op:
        """An op."""
        scan = self.scanner
        event = None
        if scan.text.startswith("!", scan.here()):
            event = scan.sigil_name("!", EVENT)
            scan.expect("=")
        position = scan.here()
        keyword = scan.name("an op, an 'exit' line or '}'")
        line = _LINES.get(keyword)
        if line is None:
            keywords = ", ".join(_LINES)
            raise scan.error(f"expected one of {keywords}, but found '{keyword}'.", position)
        values: dict[str, Any] = {}
        if line.event is not None:
            values[line.event] = event
        elif event is not None:
            scan.fail(f"expected an op that can signal an event; '{keyword}' cannot.", position)
        for name, read in line.slots:
            values[name] = read(self, values)
        return line.kind(**values)

    # -------------------------------------------------------------------------------------- regions

    def buffer(self) -> str:
        """``%b``."""
        return self.scanner.sigil_name("%", "a buffer such as '%b'")

    def region(self, what: str = "a region such as '%b' or '%b[0:64]'") -> Region:
        """``%b``, ``%b[0:64]``, ``%b[0:64]@dp`` or ``%b[0:64]@dp[8:16]``."""
        scan = self.scanner
        match = _REGION.match(scan.text, scan.position)
        if match is None:
            scan.fail(f"expected {what}.")
        buffer = match[1] or scan.unquote(match[2], match.start(2))
        position = scan.here()
        scan.position = match.end()
        if match[3] is not None:
            shard = match[5] or (scan.unquote(match[6], match.start(6)) if match[6] else None)
            if shard is None and scan.text.startswith("@", match.end()):
                scan.fail("expected a mesh axis right after '@'.", match.end() + 1)
            start = int(match[3])
            part = None if match[7] is None else (int(match[7]), int(match[8]))
            numel = int(match[4]) - start
            return Region(buffer=buffer, offset=start, numel=numel, shard=shard, part=part)
        if scan.text.startswith("[", match.end()):
            scan.fail("expected a range such as '[0:64]', without spaces.", match.end())
        if buffer not in self.numels:
            scan.fail(
                f"expected a 'buffer %{buffer}' line above, since the whole of it is named here.",
                position,
            )
        return Region(buffer=buffer, offset=0, numel=self.numels[buffer])

    def _view(self, declared: TensorType | None, why: str) -> View:
        region = self.region()
        scan = self.scanner
        if scan.text.startswith("{", scan.position):
            shape, stride = parse_strided(scan, "{", "}")
        elif declared is not None:
            shape, stride = declared.shape, declared.stride
        else:
            scan.fail(f"expected a shape such as '{{2,3}}', since {why}.")
        return View(region=region, shape=shape, stride=stride)

    # -------------------------------------------------------------------------------------- compute

    def arguments(self, segment: str) -> tuple[ops.Argument, ...]:
        """The arguments of a call of the segment, in round brackets."""
        inputs, _, why = self._declared(segment)
        return self._operands(inputs, lambda declared: self._argument(declared, why))

    def destinations(self, segment: str) -> tuple[ops.Destination | None, ...]:
        """The destinations of a call of the segment, in round brackets."""
        _, outputs, why = self._declared(segment)
        return self._operands(outputs, lambda declared: self._destination(declared, why))

    def _declared(
        self, segment: str
    ) -> tuple[tuple[TensorType | None, ...], tuple[TensorType | None, ...], str]:
        """The types of a segment's inputs and outputs, and why a type may be missing."""
        if segment in self.types:
            return *self.types[segment], f"@{segment} declares no such operand"
        return (), (), f"no segment @{segment} is declared above"

    def _operands(
        self,
        declared: tuple[TensorType | None, ...],
        read: Callable[[TensorType | None], T],
    ) -> tuple[T, ...]:
        remaining = iter(declared)
        return self.scanner.several(lambda: read(next(remaining, None)))

    def _argument(self, declared: TensorType | None, why: str) -> ops.Argument:
        return ops.Argument(parameter=self._parameter(), view=self._view(declared, why))

    def _destination(self, declared: TensorType | None, why: str) -> ops.Destination | None:
        scan = self.scanner
        if scan.accept_keyword("_"):
            return None
        gradient = None
        if scan.accept_keyword("grad"):
            gradient = self._parameter()
            if gradient is None:
                scan.fail("expected a parameter's name and ':' after 'grad'.")
        mode = Mode.ACCUMULATE if scan.accept("+=") else Mode.WRITE
        return ops.Destination(view=self._view(declared, why), mode=mode, gradient=gradient)

    def _parameter(self) -> str | None:
        scan = self.scanner
        match = _PARAMETER.match(scan.text, scan.position)
        if match is None:
            return None
        scan.position = match.end()
        return match[1] or scan.unquote(match[2], match.start(2))


# --------------------------------------------------------------------------------------------------------- lines

_Read = Callable[[OpParser, Mapping[str, Any]], Any]
"""Reads a slot, given the fields that were read before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The readers of a class of ops: the field for the event, and a reader for each other field, in order."""

    kind: type[Op]
    event: str | None
    slots: tuple[tuple[str, _Read], ...]


def _line(kind: type[Op]) -> _Line:
    event = op_field(kind, FieldUse.SIGNALLED)
    return _Line(
        kind=kind,
        event=None if event is None else event.name,
        slots=_slots(kind, kind.syntax),
    )


def _slots(kind: type, syntax: str) -> tuple[tuple[str, _Read], ...]:
    return tuple((slot.field.name, _slot(kind, slot)) for slot in slots(kind, syntax))


def _slot(kind: type, slot: SyntaxSlot) -> _Read:
    """The reader of the words before a field, and of the field."""
    words = slot.words.split()
    read = _items(kind, slot)
    if not words:
        return read
    if len(words) > 1:
        raise TypeError(f"The parser reads one word before {kind.__name__}.{slot.field.name}.")
    (word,) = words
    if slot.is_left_out:
        default = slot.field.default
        return lambda parser, before: (
            read(parser, before) if parser.scanner.accept(word) else default
        )
    if word.isidentifier():

        def after_keyword(parser: OpParser, before: Mapping[str, Any]) -> object:
            if not parser.scanner.accept_keyword(word):
                parser.scanner.fail(f"expected '{word}'.")
            return read(parser, before)

        return after_keyword
    expected = f"expected '{word}…'." if word[:-1].isidentifier() else f"expected '{word}'."

    def after_word(parser: OpParser, before: Mapping[str, Any]) -> object:
        parser.scanner.expect(word, expected)
        return read(parser, before)

    return after_word


def _items(kind: type, slot: SyntaxSlot) -> _Read:
    """The reader of a field without the words before it: of one value, or of several."""
    field = slot.field
    if field.kind is ops.Argument or field.kind is ops.Destination:
        segment = op_field(kind, FieldUse.SEGMENT)
        assert segment is not None
        called, is_read = segment.name, field.kind is ops.Argument
        return lambda parser, before: (
            parser.arguments(before[called]) if is_read else parser.destinations(before[called])
        )
    read = _value(field)
    if not field.is_tuple:
        return read
    if slot.is_bracketed:
        return lambda parser, before: parser.scanner.several(lambda: read(parser, before))

    def listed(parser: OpParser, before: Mapping[str, Any]) -> object:
        scan = parser.scanner
        if not scan.text.startswith("%", scan.here()):
            return ()
        items = [read(parser, before)]
        while scan.accept(","):
            items.append(read(parser, before))
        return tuple(items)

    return listed


def _value(field: OpField) -> _Read:
    """The reader of a field's value, or of each item of it."""
    kind = field.kind
    if field.use is None:
        inner = _slots(kind, own_syntax(kind))
        return lambda parser, before: kind(**{name: read(parser, before) for name, read in inner})
    if kind is Region:
        return lambda parser, _: parser.region()
    match field.use:
        case FieldUse.BEGUN | FieldUse.ENDED:
            return lambda parser, _: parser.buffer()
        case FieldUse.AWAITED:
            return lambda parser, _: parser.scanner.sigil_name("!", EVENT)
        case FieldUse.SEGMENT:
            return lambda parser, _: parser.scanner.sigil_name("@", SEGMENT)
    if kind is Mode:
        return lambda parser, _: Mode.ACCUMULATE if parser.scanner.accept("+=") else Mode.WRITE
    if kind is DType:
        return lambda parser, _: parse_dtype(parser.scanner)
    if issubclass(kind, Enum):
        word = kind.__name__.lower()
        what = f"an {word}" if word[0] in "aeiou" else f"a {word}"
        return lambda parser, _: parser.scanner.member(kind, what)
    readers: dict[type, _Read] = {
        float: lambda parser, _: parser.scanner.float(),
        int: lambda parser, _: parser.scanner.integer(),
        str: lambda parser, _: parser.scanner.name(),
    }
    return readers[kind]


_LINES: Final = {ops.op_name(kind): _line(kind) for kind in ops.OP_CLASSES}
