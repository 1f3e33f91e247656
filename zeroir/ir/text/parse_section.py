"""Parsing a section: its states, the contents that they describe, and its ops."""

from __future__ import annotations

from functools import partial

from zeroir.ir.contents import (
    Content,
    FlatContent,
    Micro,
    NamedContent,
    SnapshotContent,
    WeightContent,
    Zeros,
)
from zeroir.ir.ops import Op
from zeroir.ir.program import (
    Holding,
    Pending,
    Section,
    State,
)
from zeroir.ir.text.lexical import RESERVED_QUANTITIES
from zeroir.ir.text.parse_ops import EVENT, OpParser
from zeroir.ir.text.scanner import Scanner


def parse_section(parser: OpParser) -> Section:
    """A section, behind its keyword."""
    scan = parser.scanner
    name = scan.name("a section's name")
    scan.expect("{")
    scan.end_line()
    entry = _state(parser, "entry")
    body: list[Op] = []
    while not scan.accept("}"):
        if scan.accept_keyword("exit"):
            exit_state = _state(parser, "exit", is_keyword_read=True)
            scan.expect("}", "expected '}' or another 'exit' line.")
            return Section(name=name, entry=entry, body=tuple(body), exit=exit_state)
        body.append(parser.numbered_op())
        scan.end_line()
    return Section(name=name, entry=entry, body=tuple(body), exit=State())


def _state(parser: OpParser, end: str, *, is_keyword_read: bool = False) -> State:
    scan = parser.scanner
    live: list[str] = []
    holdings: list[Holding] = []
    pending: list[Pending] = []
    while is_keyword_read or scan.accept_keyword(end):
        is_keyword_read = False
        if scan.accept_keyword("live"):
            live.append(parser.buffer())
        elif scan.accept_keyword("pending"):
            event = scan.sigil_name("!", EVENT)
            pending.append(Pending(event=event, stream=scan.attribute("stream", scan.name)))
        else:
            holdings.append(_holding(parser))
        scan.end_line()
    return State(live=tuple(live), holdings=tuple(holdings), pending=tuple(pending))


def _holding(parser: OpParser) -> Holding:
    scan = parser.scanner
    region = parser.region("'live', 'pending' or a region such as '%b[0:64]'")
    scan.expect("=")
    content = parse_content(parser)
    after = None
    if scan.accept_keyword("after"):
        after = scan.sigil_name("!", EVENT)
    return Holding(region=region, content=content, after=after)


def parse_content(parser: OpParser) -> Content:
    """What a buffer rests with, or a region holds at a joint."""
    scan = parser.scanner
    position = scan.here()
    is_bare = scan.text[position : position + 1] != '"'
    quantity = scan.name("what the region holds, such as 'param FLAT', 'value NAME' or 'zeros'")
    if is_bare and quantity in RESERVED_QUANTITIES:
        if quantity == "zeros":
            return Zeros()
        if quantity == "weight":
            reduced = scan.several(scan.name) if scan.accept("reduced=") else ()
            return WeightContent(
                reduced=reduced, micro=scan.attribute("micro", partial(_micro, scan))
            )
        if quantity == "snapshot":
            return _snapshot(parser)
        name = scan.name("the name of a value")
        return NamedContent(name=name, version=scan.optional("version", scan.integer, 0))
    flat = scan.name("a flat's name")
    shard = scan.name("a mesh axis") if scan.accept("@") else None
    offset = scan.optional("offset", scan.integer, 0)
    stride = scan.integer() if scan.accept("stride=") else None
    version = scan.optional("version", scan.integer, 0)
    reduced = scan.several(scan.name) if scan.accept("reduced=") else ()
    micro = _micro(scan) if scan.accept("micro=") else None
    return FlatContent(
        quantity=quantity,
        flat=flat,
        offset=offset,
        shard=shard,
        version=version,
        reduced=reduced,
        micro=micro,
        stride=stride,
        guessed=scan.accept_keyword("guessed"),
    )


def _snapshot(parser: OpParser) -> SnapshotContent:
    scan = parser.scanner
    position = scan.here()
    region = parser.region("a region such as '%b[0:64]'")
    if region.part is not None:
        scan.fail("a snapshot is of a region or a slice, not of a part of it.", position)
    event = None
    if scan.accept("event="):
        event = scan.sigil_name("!", EVENT)
    return SnapshotContent(
        buffer=region.buffer,
        offset=region.offset,
        numel=region.numel,
        shard=region.shard,
        event=event,
    )


def _micro(scan: Scanner) -> Micro:
    return scan.member(Micro, "which micro-steps")
