"""The names of a program: declared once, not too long, and declared where another record refers to them.

Classes mark the fields that declare names and refer to them (``zeroir.ir.fields``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from zeroir.ir import limits
from zeroir.ir.fields import (
    DeclaredField,
    Declares,
    NameKind,
    Refers,
    declared_fields,
    with_article,
)
from zeroir.ir.program import SECTION_NAMES, Program
from zeroir.verify.equivalence.provenance import Problems


def too_long_names(program: Program) -> Iterator[str]:
    """Yield a sentence for each kind of record with a name that is too long."""
    kinds: set[NameKind] = set()
    for field, name in _declared(program):
        kind = field.named
        if len(name) > limits.LONGEST_NAME and kind is not None and kind not in kinds:
            kinds.add(kind)
            what = f"the name of {with_article(kind)}"
            yield f"{what} has {len(name):,} characters, more than {limits.LONGEST_NAME:,}"


def name_problems(program: Program) -> Problems:
    """Yield codes and messages for names that are declared twice, or not at all."""
    names: dict[NameKind, Counter[str]] = {kind: Counter() for kind in NameKind}
    for field, name in _declared(program):
        if field.named is not None:
            names[field.named][name] += 1
    for kind, counts in names.items():
        for name, count in counts.items() if kind.is_unique else ():
            if count > 1:
                yield "Z002", f"{kind} {name} is declared twice"
    for section in program.sections:
        if section.name not in SECTION_NAMES:
            yield "Z001", f"section {section.name} is none of {', '.join(SECTION_NAMES)}"
    for record in (program, *_header(program)):
        yield from _undeclared(record, names)


def _undeclared(record: object, names: Mapping[NameKind, Counter[str]]) -> Problems:
    fields = declared_fields(type(record))
    for field in fields:
        refers = field.mark(Refers)
        if refers is None or not refers.who:
            continue
        for name in _values(record, field):
            if name not in names[refers.kind]:
                who = refers.who.format(**{f.name: getattr(record, f.name) for f in fields})
                yield "Z001", f"{who} the undeclared {refers.kind} {refers.kind.sigil}{name}"


def _header(program: Program) -> Iterator[object]:
    """Yield the records of a program that may refer to names."""
    for field in declared_fields(Program):
        if any(part.mark(Refers) for kind in field.records for part in declared_fields(kind)):
            yield from _values(program, field)


def _declared(record: object) -> Iterator[tuple[DeclaredField, str]]:
    """Yield every field of a record, or of a record in it, that declares names, and each name."""
    kind: type = type(record)
    for field in _declaring(kind):
        for value in _values(record, field):
            if field.mark(Declares) is None:
                yield from _declared(value)
            else:
                yield field, str(value)


@cache
def _declaring(kind: type) -> tuple[DeclaredField, ...]:
    """Return the fields of a class that declare a name, directly or in their records."""
    return tuple(
        field
        for field in declared_fields(kind)
        if field.mark(Declares) or any(map(_declaring, field.records))
    )


def _values(record: object, field: DeclaredField) -> Iterable[object]:
    value = getattr(record, field.name)
    return value if field.is_tuple else () if value is None else (value,)
