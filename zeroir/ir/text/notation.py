"""The text of fields and records, derived from their declarations: how each is printed, and how it is read.

The notation of a class is created once, because large programs have millions of lines.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Final, get_args

from zeroir.ir.bounds import BoundKind
from zeroir.ir.buffers import Region, Role, Space
from zeroir.ir.contents import Content, Micro, SnapshotContent
from zeroir.ir.dtypes import DType
from zeroir.ir.fields import DeclaredField, Flag, Form, NameKind, Word, with_article
from zeroir.ir.mesh import Executor
from zeroir.ir.ops import Algorithm, Mode, Reduction, Refill
from zeroir.ir.reports import Quantity, Storing
from zeroir.ir.text.lexical import name, number, quote, word
from zeroir.ir.text.names import Names, TextReader
from zeroir.ir.text.scanner import Scanner
from zeroir.ir.text.segments import argument_text, parse_constant, parse_dtype
from zeroir.ir.text.syntax import SyntaxSlot, own_syntax, slots


@dataclass(frozen=True, slots=True)
class Notation:
    """How a value is printed in a program with these names, and how it is read."""

    text: Callable[[Any, Names], str]
    read: Callable[[TextReader], Any]


@cache
def record_notation(kind: type) -> Notation:
    """Return the notation of a class of records; its keyword, if any, is read before."""
    if kind is SnapshotContent:
        return Notation(_snapshot_text, _snapshot)
    keyword, syntax = own_syntax(kind)
    parts = [(slot.field.name, slot_notation(slot)) for slot in slots(kind, syntax)]
    texts = [notation.text for _, notation in parts]
    start = 0 if keyword else 1  # each slot begins with a space
    return Notation(
        lambda record, names: keyword + "".join([text(record, names) for text in texts])[start:],
        lambda reader: kind(**{field: notation.read(reader) for field, notation in parts}),
    )


def slot_notation(slot: SyntaxSlot) -> Notation:
    """Return the notation of a slot with the words before it; it prints the field of an object."""
    words = slot.words.split()
    if len(words) > 1:
        raise TypeError(f"The parser reads one word before {slot.field.name}.")
    value = value_notation(slot.field)
    if slot.field.is_tuple and not slot.is_repeated:
        value = _items(slot, value)
    read = _read_behind(words[0], slot, value) if words else value.read
    if slot.is_repeated:
        read = _read_repeatedly(words[0] if words else "", value)
    return Notation(_slot_text(slot, value), read)


def _slot_text(slot: SyntaxSlot, value: Notation) -> Callable[[object, Names], str]:
    get, words, text = attrgetter(slot.field.name), slot.words, value.text
    if slot.is_repeated:
        return lambda of, names: "".join([words + text(item, names) for item in get(of)])
    if slot.is_left_out:
        default = slot.field.default

        def optional(of: object, names: Names) -> str:
            item = get(of)
            return "" if item is default or item == default else f"{words}{text(item, names)}"

        return optional
    if slot.field.kind is Region and not slot.field.is_tuple:  # the most frequent case by far
        return lambda of, names: words + names.region(get(of))
    if slot.field.mark(Flag) is not None:
        return lambda of, names: words + flag if (flag := text(get(of), names)) else ""
    return lambda of, names: f"{words}{text(get(of), names)}"


def _read_behind(word: str, slot: SyntaxSlot, value: Notation) -> Callable[[TextReader], object]:
    """Return the reader of a value after a word, or of its default where the word may be missing and is."""
    accept = Scanner.accept_keyword if word.isidentifier() else Scanner.accept
    expected = f"expected '{word}…'." if word[:-1].isidentifier() else f"expected '{word}'."
    is_left_out, default, read = slot.is_left_out, slot.field.default, value.read

    def behind(reader: TextReader) -> object:
        if accept(reader.scanner, word):
            return read(reader)
        return default if is_left_out else reader.scanner.fail(expected)

    return behind


def _read_repeatedly(word: str, value: Notation) -> Callable[[TextReader], object]:
    """Return the reader of consecutive items: each after a word, or up to the end of the line."""

    def repeated(reader: TextReader) -> object:
        items: list[object] = []
        scan = reader.scanner
        while scan.accept(word) if word else not scan.is_at_line_end:
            items.append(value.read(reader))
        return tuple(items)

    return repeated


def _items(slot: SyntaxSlot, item: Notation) -> Notation:
    """Return the notation of several values in brackets, separated by commas; without brackets at least one."""
    if slot.field.mark(Form) is Form.LINES:
        return Notation(
            lambda items, names: "".join(
                ["{\n", *[f"  {item.text(each, names)}\n" for each in items], "}"]
            ),
            lambda reader: reader.scanner.lines(lambda: item.read(reader)),
        )
    is_shape = slot.field.kind is int
    opening, closing = "[]" if is_shape else "()" if slot.is_bracketed else ("", "")
    comma = "," if is_shape else ", "

    def read(reader: TextReader) -> object:
        if opening:
            return reader.scanner.several(lambda: item.read(reader), opening, closing)
        return reader.scanner.separated(lambda: item.read(reader), "%")

    return Notation(
        lambda items, names: (
            f"{opening}{comma.join([item.text(each, names) for each in items])}{closing}"
        ),
        read,
    )


# ---------------------------------------------------------------------------------------------------------- values


def value_notation(field: DeclaredField) -> Notation:
    """Return the notation of a field's value, or of each item of it."""
    kind, form = field.kind, field.mark(Form)
    if (flag := field.mark(Flag)) is not None:
        return Notation(
            lambda value, _: flag.on if value else flag.off,
            lambda reader: _flag(reader.scanner, flag),
        )
    if (text := field.mark(Word)) is not None:
        return Notation(lambda value, _: word(value), lambda reader: reader.scanner.word(text.what))
    if form in _FORMS:
        return _FORMS[form]
    if field.members:
        return _union(field.members)
    if kind in _TYPES:
        return _TYPES[kind]
    if is_dataclass(kind):
        return record_notation(kind)
    if kind in _MEMBERS:
        return Notation(
            lambda value, _: str(value.value),
            lambda reader: reader.scanner.member(kind, _MEMBERS[kind]),
        )
    if kind is str:
        return _name(field.named)
    raise TypeError(f"The text has no form for {kind.__name__}, the type of {field.name}.")


def _name(named: NameKind | None) -> Notation:
    if named is None:
        return Notation(lambda value, _: name(value), lambda reader: reader.scanner.name())
    sigil = named.sigil
    if not sigil:
        what = f"the name of {with_article(named)}"
        return Notation(lambda value, _: name(value), lambda reader: reader.scanner.name(what))
    what = _EXAMPLES[named]
    return Notation(
        lambda value, _: sigil + name(value),
        lambda reader: reader.scanner.sigil_name(sigil, what),
    )


_EXAMPLES: Final = {
    NameKind.BUFFER: "a buffer such as '%b'",
    NameKind.EVENT: "an event such as '!0'",
    NameKind.SEGMENT: "a segment such as '@block.forward'",
}


def _flag(scan: Scanner, flag: Flag) -> bool:
    if scan.accept_keyword(flag.on):
        return True
    if flag.off and not scan.accept_keyword(flag.off):
        scan.fail(f"expected '{flag.on}' or '{flag.off}'.")
    return False


def _bytes(reader: TextReader) -> bytes:
    scan = reader.scanner
    start = scan.here()
    literal = scan.string("bytes in base64, in double quotes")
    try:
        return base64.b64decode(literal.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        scan.fail("expected bytes in base64.", start)


@cache
def _content_keywords() -> frozenset[str]:
    return frozenset(_by_keyword(get_args(Content)))


_MEMBERS: Final[Mapping[type, str]] = {
    Algorithm: "an optimizer",
    BoundKind: "what the bound is about",
    Executor: "what executes the stream",
    Micro: "which micro-steps",
    Quantity: "a value that the engine reads",
    Storing: "when code stores a tensor",
    Reduction: "a reduction",
    Refill: "a refill",
    Role: "the buffer's role",
    Space: "where the buffer lives",
}
"""The enumerations in the text, and the description of a member."""

_TYPES: Final[Mapping[type, Notation]] = {
    Region: Notation(lambda value, names: names.region(value), lambda reader: reader.region()),
    Mode: Notation(
        lambda value, _: "+= " if value is Mode.ACCUMULATE else "",
        lambda reader: Mode.ACCUMULATE if reader.scanner.accept("+=") else Mode.WRITE,
    ),
    DType: Notation(lambda value, _: str(value.value), lambda reader: parse_dtype(reader.scanner)),
    float: Notation(lambda value, _: number(value), lambda reader: reader.scanner.float()),
    int: Notation(lambda value, _: str(value), lambda reader: reader.scanner.size()),
    bytes: Notation(lambda value, _: f'"{base64.b64encode(value).decode()}"', _bytes),
}

_FORMS: Final[Mapping[Form | None, Notation]] = {
    Form.QUOTED: Notation(lambda value, _: quote(value), lambda reader: reader.scanner.string()),
    Form.BRACKETED: Notation(
        lambda value, _: f"[{value}]",
        lambda reader: reader.scanner.between("[", "]", reader.scanner.size),
    ),
    Form.INTERVAL: Notation(
        lambda value, _: f"{name(value[0])}[{value[1]}:{value[2]}]",
        lambda reader: (
            reader.scanner.name("the name of a flat"),
            *reader.scanner.between("[", "]", reader.scanner.range),
        ),
    ),
    Form.CONSTANT: Notation(
        lambda value, _: argument_text(value), lambda reader: parse_constant(reader.scanner)
    ),
    Form.QUANTITY: Notation(
        lambda value, _: quote(value) if value in _content_keywords() else name(value),
        lambda reader: reader.scanner.name(
            "what the region holds, such as 'param FLAT', 'value NAME' or 'zeros'"
        ),
    ),
}


# ---------------------------------------------------------------------------------------------------------- unions


def _union(members: tuple[type, ...]) -> Notation:
    """Return the notation of a union: the class that begins with the next word, or one that begins with a field."""
    by_keyword = _by_keyword(members)
    others = [kind for kind in members if kind not in by_keyword.values()]
    read_other = record_notation(others[0]).read if len(others) == 1 else _told_apart(others)

    def text(value: object, names: Names) -> str:
        kind: type = type(value)
        return record_notation(kind).text(value, names)

    def read(reader: TextReader) -> object:
        for keyword, kind in by_keyword.items():
            if reader.scanner.accept_keyword(keyword):
                return record_notation(kind).read(reader)
        return read_other(reader)

    return Notation(text, read)


def _told_apart(kinds: list[type]) -> Callable[[TextReader], object]:
    """Return the reader of classes with the same first field, distinguished by the word before the second."""
    lines = [(kind, slots(kind, own_syntax(kind)[1])) for kind in kinds]
    shared = lines[0][1][0].field
    last = {line[1].words.strip(): (kind, line[1].field) for kind, line in lines}
    quoted = [f"'{keyword}'" for keyword in last]

    def read(reader: TextReader) -> object:
        values = {shared.name: value_notation(shared).read(reader)}
        for keyword, (kind, field) in last.items():
            if reader.scanner.accept(keyword):
                values[field.name] = value_notation(field).read(reader)
                return kind(**values)
        raise reader.scanner.error(f"expected {', '.join(quoted[:-1])} or {quoted[-1]}.")

    return read


def _by_keyword(members: tuple[type, ...]) -> Mapping[str, type]:
    """Return the classes that begin with a keyword, by it."""
    return {keyword: kind for kind in members if (keyword := own_syntax(kind)[0])}


def _snapshot_text(content: SnapshotContent, _: Names) -> str:
    """Return the text of a snapshot, with the elements that it copies even where they are a whole buffer."""
    copied = f"%{name(content.buffer)}[{content.offset}:{content.offset + content.numel}]"
    shard = "" if content.shard is None else f"@{name(content.shard)}"
    event = "" if content.event is None else f" event=!{name(content.event)}"
    return f"snapshot {copied}{shard}{event}"


def _snapshot(reader: TextReader) -> SnapshotContent:
    scan = reader.scanner
    position = scan.here()
    region = reader.region("a region such as '%b[0:64]'")
    if region.part is not None:
        scan.fail("a snapshot is of a region or a slice, not of a part of it.", position)
    event = scan.sigil_name("!", _EXAMPLES[NameKind.EVENT]) if scan.accept("event=") else None
    return SnapshotContent(
        buffer=region.buffer,
        offset=region.offset,
        numel=region.numel,
        shard=region.shard,
        event=event,
    )
