"""The syntax that an op declares, split into slots for the printer and the parser.

``"{source} -> {destination}"`` is two slots: ``source`` after a space, ``destination`` after ``" -> "``.
:class:`~zeroir.ir.operation.Operation` explains the rest of the notation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from zeroir.ir.op_fields import FieldUse, OpField, op_fields

_SLOT: Final = re.compile(
    r"(?P<space> *)(?P<optional>\[)?(?P<words>[^][{}()|]*)(?P<open>\()?\{(?P<field>\w+)\}(?(open)\))(?(optional)\])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntaxSlot:
    """A field's place in a line: ``words`` before it, as printed, with the spaces around them.

    ``is_bracketed`` puts the items of a tuple in round brackets. ``is_left_out`` leaves words and value out where the
    field has its default. ``is_attribute`` says that it stands in the column of attributes.
    """

    field: OpField
    words: str
    is_bracketed: bool
    is_left_out: bool
    is_attribute: bool


def slots(kind: type, syntax: str) -> tuple[SyntaxSlot, ...]:
    """The slots of a class with that syntax, in the order of its line.

    Raises:
        TypeError: where the syntax cannot be read, or does not name every field once.
    """
    head, _, attributes = syntax.partition(" | ")
    fields = {field.name: field for field in op_fields(kind)}
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
    kind: type, column: str, fields: dict[str, OpField], is_attribute: bool
) -> Iterator[SyntaxSlot]:
    column = f" {column}" if column else ""
    position = 0
    while position < len(column):
        match = _SLOT.match(column, position)
        if match is None or match["field"] not in fields:
            where = f"`{column[position:].strip()}`"
            raise TypeError(f"The syntax of {kind.__name__} cannot be read at {where}.")
        field = fields[match["field"]]
        if match["optional"] and field.default is dataclasses.MISSING:
            raise TypeError(f"{kind.__name__}.{field.name} has no default to be left out at.")
        yield SyntaxSlot(
            field=field,
            words=match["space"] + match["words"],
            is_bracketed=match["open"] is not None,
            is_left_out=match["optional"] is not None,
            is_attribute=is_attribute,
        )
        position = match.end()


def own_syntax(kind: type) -> str:
    """The syntax of a dataclass that stands in ops, such as the pairs of collectives; TypeError where it has none."""
    syntax = getattr(kind, "syntax", None)
    if not isinstance(syntax, str):
        raise TypeError(f"{kind.__name__} stands in ops and has no syntax.")
    return syntax
