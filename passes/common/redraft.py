"""Programs with redrafted sections, for `select-saved` and `recompute`.

Equal bodies are drafted once and equal pairs of segments cut once, and the resulting segments are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain, count
from typing import Final

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.ir.segments.segment import Segment
from zeroir.passes.common.min_cut import RecutPair, choose
from zeroir.passes.common.section_draft import SectionDraft
from zeroir.passes.common.storages import SegmentPair

RECOMPUTE: Final = ".recompute"
"""The suffix of the names of segments that recompute values before a backward."""


class RecutChoices:
    """Choices for pairs of segments; equal pairs are cut once."""

    def __init__(self) -> None:
        self._recut: dict[tuple[object, ...], RecutPair | None] = {}
        self._digests: dict[int, tuple[Segment, str]] = {}

    def digest(self, segment: Segment) -> str:
        """Return the segment's digest; the segment is kept alive, so that its id identifies it."""
        if id(segment) not in self._digests:
            self._digests[id(segment)] = (segment, segment.digest())
        return self._digests[id(segment)][1]

    def choose(self, pair: SegmentPair) -> RecutPair | None:
        """Return the best choice for a pair; None if it should not change."""
        rest = (pair.leaves, pair.is_parameter, pair.uses, pair.needs, pair.computes_all)
        key = (self.digest(pair.forward), self.digest(pair.backward), *rest)
        if key not in self._recut:
            self._recut[key] = choose(pair)
        return self._recut[key]


def redraft(program: Program, change: Callable[[SectionDraft, RecutChoices], None]) -> Program:
    """Return the program with its sections changed; those of equal bodies are changed once."""
    choices = RecutChoices()
    drafts: dict[tuple[Op, ...], SectionDraft] = {}
    for section in program.sections:
        if section.body not in drafts:
            drafts[section.body] = SectionDraft(program, section)
            change(drafts[section.body], choices)
    segments = _named(program, drafts.values(), choices)
    bodies = {
        body: tuple(draft.ops(lambda segment: segments[_key(segment, choices)].name))
        for body, draft in drafts.items()
    }
    sections = [replace(section, body=bodies[section.body]) for section in program.sections]
    filled: dict[str, Buffer] = {}
    for draft in drafts.values():
        filled |= draft.roles()
    gone = _begun(program.sections) - _begun(sections)
    buffers = [filled.get(b.name, b) for b in program.buffers if b.name not in gone]
    buffers += [buffer for name, buffer in filled.items() if name not in program.buffer_by_name]
    weighing = program.weighing_segment
    return replace(
        program,
        buffers=tuple(buffers),
        segments=(*segments.values(), *(() if weighing is None else (weighing,))),
        sections=tuple(sections),
    )


def _key(segment: Segment, choices: RecutChoices) -> tuple[bool, str]:
    """Return the key that distinguishes segments: whether they recompute values, and their digest."""
    return RECOMPUTE in segment.name, choices.digest(segment)


def _named(
    program: Program, drafts: Iterable[SectionDraft], choices: RecutChoices
) -> Mapping[tuple[bool, str], Segment]:
    """Return the segments that are called, in the order of their first calls, each with its own name."""
    called: dict[tuple[bool, str], Segment] = {}
    for draft in drafts:
        for _, call in sorted(draft.calls.items(), key=lambda item: item[0]):
            called.setdefault(_key(call.segment, choices), call.segment)
    taken = {
        segment.name
        for segment in called.values()
        if program.segment_by_name.get(segment.name) is segment
    }
    named: dict[tuple[bool, str], Segment] = {}
    for key, segment in called.items():
        name = segment.name
        if program.segment_by_name.get(name) is not segment:
            names = chain((name,), (f"{name}.{i}" for i in count(1)))
            name = next(free for free in names if free not in taken)
            taken.add(name)
        named[key] = replace(segment, name=name)
    return named


def _begun(sections: Iterable[Section]) -> set[str]:
    """Return the buffers that sections allocate."""
    return {op.buffer for section in sections for op in section.body if isinstance(op, ops.Alloc)}
