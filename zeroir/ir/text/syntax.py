"""The syntax that ops and records declare, split into slots for the printer and the parser.

``"{source} -> {destination}"`` is two slots: ``source`` after a space, ``destination`` after ``" -> "``.
:class:`~zeroir.ir.operation.Operation` explains the rest of the notation. A record of a program's header may begin with
its own keyword, ``"value {name}"``, and repeat items: ``{axes}...`` are consecutive items, and ``[alias={aliases}]...``
items with words before each.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from zeroir.ir.fields import DeclaredField, FieldUse, declared_fields

_SLOT: Final = re.compile(
    r"(?P<space> *)(?P<optional>\[)?(?P<words>[^][{}()|]*)(?P<open>\()?\{(?P<field>\w+)\}(?(open)\))(?(optional)\])"
    r"(?P<repeated>\.\.\.)?"
)
_KEYWORD: Final = re.compile(r"([a-z_]+)(?: |$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntaxSlot:
    """A field's place in a line: ``words`` before it, as printed, with the spaces around them.

    ``is_bracketed`` puts the items of a tuple in parentheses, ``is_repeated`` puts the words before each of them.
    ``is_left_out`` omits words and value where the field has its default. ``is_attribute`` says that it is in the
    column of attributes.
    """

    field: DeclaredField
    words: str
    is_bracketed: bool
    is_repeated: bool
    is_left_out: bool
    is_attribute: bool


def slots(kind: type, syntax: str) -> tuple[SyntaxSlot, ...]:
    """Return the slots of a class with that syntax, in the order of its line.

    Raises:
        TypeError: if the syntax cannot be parsed, or does not name every field once.
    """
    head, _, attributes = syntax.partition(" | ")
    fields = {field.name: field for field in declared_fields(kind)}
    parsed = [*_slots(kind, head, fields, False), *_slots(kind, attributes, fields, True)]
    names = [slot.field.name for slot in parsed]
    if len(set(names)) < len(names):
        raise TypeError(f"The syntax of {kind.__name__} names a field twice.")
    for name, field in fields.items():
        if name in names or field.use is FieldUse.SIGNALLED:
            continue
        if field.use is not FieldUse.STREAM:
            raise TypeError(f"The syntax of {kind.__name__} leaves out its field {name}.")
        parsed += _slots(kind, f"{name}={{{name}}}", fields, True)
    return tuple(parsed)


def _slots(
    kind: type, column: str, fields: dict[str, DeclaredField], is_attribute: bool
) -> Iterator[SyntaxSlot]:
    column = f" {column}" if column else ""
    position = 0
    while position < len(column):
        match = _SLOT.match(column, position)
        if match is None or match["field"] not in fields:
            where = f"`{column[position:].strip()}`"
            raise TypeError(f"The syntax of {kind.__name__} cannot be read at {where}.")
        field = fields[match["field"]]
        is_repeated = match["repeated"] is not None
        is_optional = match["optional"] is not None and not is_repeated
        if is_optional and field.default is dataclasses.MISSING:
            raise TypeError(f"{kind.__name__}.{field.name} has no default to be left out at.")
        yield SyntaxSlot(
            field=field,
            words=match["space"] + match["words"],
            is_bracketed=match["open"] is not None,
            is_repeated=is_repeated,
            is_left_out=is_optional,
            is_attribute=is_attribute,
        )
        position = match.end()


def own_syntax(kind: type) -> tuple[str, str]:
    """Return the keyword with which a record begins, empty if it has none, and the rest of its syntax."""
    syntax = getattr(kind, "syntax", None)
    if not isinstance(syntax, str):
        raise TypeError(f"{kind.__name__} stands in the text and has no syntax.")
    keyword = _KEYWORD.match(syntax)
    return ("", syntax) if keyword is None else (keyword[1], syntax[keyword.end() :])


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntaxLine:
    """A kind of lines of a program or a state: the ``keyword`` before them, and their field.

    A line is one item of the field's tuple if ``is_one_item``, otherwise the whole field.
    """

    keyword: str
    slot: SyntaxSlot
    is_one_item: bool


def syntax_lines(kind: type) -> tuple[SyntaxLine, ...]:
    """Return the kinds of lines of a class whose syntax has several, such as ``buffer {buffers}`` for each item."""
    fields = {field.name: field for field in declared_fields(kind)}
    lines: list[SyntaxLine] = []
    for line in own_syntax(kind)[1].split("\n"):
        if not line.strip():
            continue
        (slot,) = _slots(kind, line.strip(), fields, False)
        keyword = slot.words.strip()
        lines.append(
            SyntaxLine(
                keyword=keyword,
                slot=dataclasses.replace(slot, words=" "),
                is_one_item=slot.field.is_tuple and not slot.is_repeated,
            )
        )
    return tuple(lines)
