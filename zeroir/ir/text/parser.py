"""Parsing a whole program: its lines, by the syntax of ``Program`` and of its records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from zeroir.ir.buffers import Buffer
from zeroir.ir.ops import Op
from zeroir.ir.options import WrittenOptions
from zeroir.ir.program import Program, Section, State
from zeroir.ir.segments.segment import Segment
from zeroir.ir.sizes import Dim
from zeroir.ir.text.lexical import VERSION
from zeroir.ir.text.names import TextReader, declared_outputs
from zeroir.ir.text.notation import slot_notation, value_notation
from zeroir.ir.text.op_lines import parse_numbered_op
from zeroir.ir.text.segments import parse_segment
from zeroir.ir.text.syntax import SyntaxLine, syntax_lines


def parse(text: str) -> Program:
    """Parse the text of a program.

    This checks the grammar, and that whole buffers and segments are declared above their use; the verifier checks
    whether the program is valid.

    Raises:
        ParseError: at the first error.
    """
    return _ProgramParser(text.replace("\r\n", "\n")).program()


class _ProgramParser:
    """Reads items in any order; each kind of item keeps its own order."""

    def __init__(self, text: str) -> None:
        self.reader = TextReader(text)
        self.scanner = self.reader.scanner
        self.lines = _FieldLines(_PROGRAM, self.reader)

    def program(self) -> Program:
        scan = self.scanner
        scan.skip_blank_lines()
        options = self._first_line()
        while not scan.is_at_end:
            self._item()
            scan.end_line()
        if "mesh" not in self.lines.values:
            scan.fail("expected a line 'mesh AXIS=SIZE …' somewhere in the program.")
        return Program(options=options, **self.lines.fields())

    def _first_line(self) -> WrittenOptions:
        scan = self.scanner
        start = scan.here()
        if not scan.accept_keyword("zeroir"):
            scan.fail(f"expected a program, which begins with 'zeroir {VERSION}'.")
        version_at = scan.here()
        version = scan.integer()
        if version != VERSION:
            newer = "upgrade zeroir to read it" if version > VERSION else "print it again"
            scan.fail(
                f"this text is version {version} and zeroir reads version {VERSION}: {newer}.",
                version_at if version_at > start else start,
            )
        options: list[tuple[str, str]] = []
        while not scan.is_at_line_end:
            key = scan.name("an option's name or the end of the line")
            scan.expect("=", f"expected '=' after the option '{key}'.")
            options.append((key, scan.word(f"the value of the option '{key}'")))
        scan.end_line()
        return WrittenOptions(tuple(options))

    def _item(self) -> None:
        scan = self.scanner
        start = scan.here()
        keyword = scan.name("an item such as 'buffer', 'segment' or 'section'")
        line = _PROGRAM.get(keyword)
        if line is None:
            scan.fail(f"expected one of {', '.join(_PROGRAM)}, but found '{keyword}'.", start)
        if not line.is_one_item and line.slot.field.name in self.lines.values:
            scan.fail(f"expected only one '{keyword}' line.", start)
        value = self.lines.read(line)
        match value:
            case Dim():
                self.scanner.dims[value.name] = value
            case Buffer():
                self.reader.numels[value.name] = value.numel
            case Segment():
                self.reader.inputs[value.name] = value.inputs
                self.reader.outputs[value.name] = declared_outputs(value)
            case _:
                pass


class _FieldLines:
    """The values of the fields of a program or a state, read line by line."""

    def __init__(self, lines: Mapping[str, SyntaxLine], reader: TextReader) -> None:
        self.reader = reader
        self.values: dict[str, Any] = {}
        self._read = {keyword: _line_reader(line) for keyword, line in lines.items()}
        self._items = [line.slot.field.name for line in lines.values() if line.is_one_item]

    def read(self, line: SyntaxLine) -> object:
        """Read the rest of a line after its keyword."""
        value = self._read[line.keyword](self.reader)
        name = line.slot.field.name
        if line.is_one_item:
            self.values.setdefault(name, []).append(value)
        else:
            self.values[name] = value
        return value

    def fields(self) -> dict[str, Any]:
        """Return the values by the names of their fields."""
        items = {name: tuple(self.values.get(name, ())) for name in self._items}
        return self.values | items


def _line_reader(line: SyntaxLine) -> Callable[[TextReader], object]:
    kind = line.slot.field.kind
    if kind is Segment:
        return lambda reader: parse_segment(reader.scanner)
    if kind is Section:
        return _section
    if line.is_one_item:
        return value_notation(line.slot.field).read
    return slot_notation(replace(line.slot, is_left_out=False)).read


# --------------------------------------------------------------------------------------------------------- sections


def _section(reader: TextReader) -> Section:
    """Read a section, after its keyword."""
    scan = reader.scanner
    name = scan.name("a section's name")
    scan.expect("{")
    scan.end_line()
    entry = _state(reader, "entry")
    body: list[Op] = []
    while not scan.accept("}"):
        if scan.accept_keyword("exit"):
            exit_state = _state(reader, "exit", is_keyword_read=True)
            scan.expect("}", "expected '}' or another 'exit' line.")
            return Section(name=name, entry=entry, body=tuple(body), exit=exit_state)
        body.append(parse_numbered_op(reader))
        scan.end_line()
    return Section(name=name, entry=entry, body=tuple(body), exit=State())


def _state(reader: TextReader, end: str, *, is_keyword_read: bool = False) -> State:
    scan = reader.scanner
    lines = _FieldLines(_STATE, reader)
    while is_keyword_read or scan.accept_keyword(end):
        is_keyword_read = False
        word = next((word for word in _STATE if word and scan.accept_keyword(word)), "")
        if not word and not scan.text.startswith("%", scan.here()):
            scan.fail("expected 'live', 'pending' or a region such as '%b[0:64]'.")
        lines.read(_STATE[word])
        scan.end_line()
    return State(**lines.fields())


_PROGRAM: Final = {line.keyword: line for line in syntax_lines(Program)}
_STATE: Final = {line.keyword: line for line in syntax_lines(State)}
