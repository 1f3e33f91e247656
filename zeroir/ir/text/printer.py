"""Canonical printing: one program has one text, one op one line.

Derived information appears only in ``//`` comments.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Final

from zeroir.ir.buffers import Buffer
from zeroir.ir.contents import FlatContent
from zeroir.ir.ops import Op
from zeroir.ir.program import Flat, Program, Section, State
from zeroir.ir.segments.segment import Segment
from zeroir.ir.text.lexical import VERSION, name, word
from zeroir.ir.text.names import Names
from zeroir.ir.text.notation import record_notation, slot_notation, value_notation
from zeroir.ir.text.op_lines import op_text
from zeroir.ir.text.segments import segment_lines
from zeroir.ir.text.syntax import SyntaxLine, syntax_lines


def print_program(program: Program) -> str:
    """Return the canonical text, ending with a newline."""
    return "\n".join(program_lines(program)) + "\n"


def print_op(op: Op, program: Program) -> str:
    """Return one op in the program's text, without its number."""
    return op_text(op, Names(program=program))


def print_record(record: object, program: Program) -> str:
    """Return a record of a program's header, such as a bound or a content, in the program's text."""
    kind: type = type(record)
    return record_notation(kind).text(record, Names(program=program))


def print_segment(segment: Segment) -> str:
    """Return one segment in a program's text, ending with a newline."""
    return "\n".join(segment_lines(segment)) + "\n"


def print_section(section: Section, program: Program) -> str:
    """Return one section in the program's text, ending with a newline."""
    return "\n".join(section_lines(section, Names(program=program))) + "\n"


def program_lines(program: Program) -> Iterator[str]:
    """Yield the lines of the canonical text."""
    yield from header_lines(program)
    for segment in program.segments:
        yield ""
        yield from segment_lines(segment)
    names = Names(program=program)
    for section in program.sections:
        yield ""
        yield from section_lines(section, names)


# ------------------------------------------------------------------------------------------- header


def header_lines(program: Program) -> Iterator[str]:
    """Yield everything before the segments: options, passes, mesh, flats, buffers, bindings."""
    options = " ".join(f"{name(key)}={word(value)}" for key, value in program.options.pairs)
    yield f"zeroir {VERSION}  {options}".rstrip()
    names = Names(program=program)
    for line in _LINES:
        if line.slot.field.kind not in (Segment, Section):
            yield from _item_lines(line, program, names)


def _item_lines(line: SyntaxLine, record: object, names: Names) -> Iterator[str]:
    """Yield the lines of that kind of a program or a state."""
    field = line.slot.field
    if not line.is_one_item:
        text = slot_notation(line.slot).text(record, names)
        if text or not line.slot.is_left_out:
            yield f"{line.keyword}{text}".rstrip()
        return
    printed, start = value_notation(field).text, f"{line.keyword} ".lstrip()
    for item in attrgetter(field.name)(record):
        text, newline, others = printed(item, names).partition("\n")
        yield f"{start}{text}{_comment(item, names.program)}"
        if newline:
            yield from others.split("\n")


def _comment(item: object, program: Program) -> str:
    """Return derived information that a reader may want."""
    match item:
        case Flat():
            return f"  // {item.numel} in parameters"
        case Buffer(holds=FlatContent(shard=str(), flat=flat)) if flat in program.flat_by_name:
            return f"  // shard of {program.flat_by_name[flat].padded_numel}"
        case _:
            return ""


# ----------------------------------------------------------------------------------------- sections


def section_lines(section: Section, names: Names) -> Iterator[str]:
    """Yield a section: its entry state, its ops with their numbers, its exit state."""
    yield f"section {name(section.name)} {{"
    yield from state_lines("entry", section.entry, names)
    for i, op in enumerate(section.body):
        yield f"{i:>4}: {op_text(op, names)}"
    yield from state_lines("exit", section.exit, names)
    yield "}"


def state_lines(end: str, state: State, names: Names) -> Iterator[str]:
    """Yield the lines of an entry or exit state, none where everything is at rest."""
    for line in _STATE_LINES:
        yield from (f"  {end} {text}" for text in _item_lines(line, state, names))


_LINES: Final = syntax_lines(Program)
_STATE_LINES: Final = syntax_lines(State)
