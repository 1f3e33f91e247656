"""Damages to pages: one is used too early, dropped before it is home, or one too many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random

from tests.support.edits import Mutation, edit, put, with_buffers
from zeroir.ir import ops
from zeroir.ir.bounds import BoundKind, LiveBound
from zeroir.ir.buffers import Region, Role
from zeroir.ir.contents import FlatContent
from zeroir.ir.mesh import COPY_IN
from zeroir.ir.ops import Op
from zeroir.ir.program import Program
from zeroir.passes.common.order import derive_waits
from zeroir.passes.common.rewrite import map_regions


def _pages(program: Program) -> frozenset[str]:
    return frozenset(buffer.name for buffer in program.buffers if buffer.role is Role.PAGE)


def _places(
    program: Program, is_wanted: Callable[[Op, frozenset[str]], bool]
) -> list[tuple[int, int]]:
    """Section and op numbers of the wanted ops; a wanted op is told which buffers are pages."""
    pages = _pages(program)
    return [
        (number, index)
        for number, section in enumerate(program.sections)
        for index, op in enumerate(section.body)
        if is_wanted(op, pages)
    ]


def _arrives(op: Op, pages: frozenset[str]) -> bool:
    return isinstance(op, ops.ToDevice) and op.destination.buffer in pages


def _departs(op: Op, pages: frozenset[str]) -> bool:
    return isinstance(op, ops.ToHost) and op.source.buffer in pages


def _without(is_wanted: Callable[[Op, frozenset[str]], bool]) -> Mutation:
    """Leave one of these ops out; the waits are those that the other ops need."""

    def mutation(program: Program, chance: Random) -> Program | None:
        places = _places(program, is_wanted)
        return derive_waits(put(program, chance.choice(places))) if places else None

    return mutation


def _waits(program: Program, is_signaller: Callable[[Op], bool]) -> Iterator[tuple[int, int]]:
    """The waits for events that such ops signal."""
    for number, section in enumerate(program.sections):
        events = {
            op.event for op in section.body if not isinstance(op, ops.Wait) and is_signaller(op)
        } - {None}
        for index, op in enumerate(section.body):
            if isinstance(op, ops.Wait) and op.waited in events:
                yield number, index


def _use_early(program: Program, chance: Random) -> Program | None:
    """The stream that uses a page does not wait for its arrival."""
    pages = _pages(program)
    places = list(_waits(program, lambda op: _arrives(op, pages)))
    return put(program, chance.choice(places)) if places else None


def _share_slot(program: Program, chance: Random) -> Program | None:
    """A page begins without a wait for the release of its slot."""
    pages = _pages(program)
    places = list(_waits(program, lambda op: isinstance(op, ops.Release) and op.buffer in pages))
    return put(program, chance.choice(places)) if places else None


def _release_early(program: Program, chance: Random) -> Program | None:
    """A slot is released on the stream of the arrivals, which waits for no write-back."""
    places = _places(program, lambda op, pages: isinstance(op, ops.Release) and op.buffer in pages)
    if not places:
        return None
    number, index = chance.choice(places)
    release = program.sections[number].body[index]
    assert isinstance(release, ops.Release)
    return put(program, (number, index), replace(release, stream=COPY_IN))


def _release_before(program: Program, chance: Random) -> Program | None:
    """A slot is released before the write-back of its page."""
    places = _places(program, lambda op, pages: isinstance(op, ops.Release) and op.buffer in pages)
    if not places:
        return None
    number, index = chance.choice(places)
    release = program.sections[number].body[index]
    assert isinstance(release, ops.Release)
    before = [
        at
        for at, op in enumerate(program.sections[number].body[:index])
        if isinstance(op, ops.ToHost) and op.source.buffer == release.buffer
    ]
    if not before:
        return None

    def change(body: list[Op]) -> None:
        body.insert(before[-1], body.pop(index))

    return edit(program, number, change)


def _one_page_more(program: Program, chance: Random) -> Program | None:
    """Another page lives between the arrival of a page and its departure."""
    bound = next((b for b in program.bounds if isinstance(b, LiveBound)), None)
    pages = _pages(program)
    if bound is None or not pages:
        return None
    like = program.buffer_by_name[min(pages)]
    extra = replace(like, name=f"{like.name}.more")
    full: list[tuple[int, int]] = []
    for number, section in enumerate(program.sections):
        live = 0
        for index, op in enumerate(section.body):
            if isinstance(op, ops.Alloc | ops.Release) and op.buffer in pages:
                live += 1 if isinstance(op, ops.Alloc) else -1
                if live == bound.live:
                    full.append((number, index))
    if not full:
        return None
    number, index = chance.choice(full)
    more = (
        ops.Alloc(buffer=extra.name, stream=COPY_IN),
        ops.Release(buffer=extra.name, stream=COPY_IN),
    )
    op = program.sections[number].body[index]
    return put(with_buffers(program, extra), (number, index), op, *more)


def _fewer_slots(program: Program, _chance: Random) -> Program | None:
    bounds = tuple(
        LiveBound(kind=bound.kind, live=bound.live - 1)
        if isinstance(bound, LiveBound) and bound.kind is BoundKind.PAGES and bound.live > 1
        else bound
        for bound in program.bounds
    )
    return None if bounds == program.bounds else replace(program, bounds=bounds)


def _other_part(program: Program, chance: Random) -> Program | None:
    """An op takes another part of a slice."""
    parts: list[tuple[int, int, Region]] = []
    for number, section in enumerate(program.sections):
        for index, op in enumerate(section.body):

            def note(region: Region, number: int = number, index: int = index) -> Region:
                if region.part is not None:
                    parts.append((number, index, region))
                return region

            map_regions(op, note)
    if not parts:
        return None
    number, index, chosen = chance.choice(parts)
    assert chosen.part is not None
    by = chance.choice([-256, -64, 64, 256])
    moved = replace(chosen, part=(chosen.part[0] + by, chosen.part[1] + by))
    op = program.sections[number].body[index]
    return put(program, (number, index), map_regions(op, lambda r: moved if r == chosen else r))


def _other_stride(program: Program, chance: Random) -> Program | None:
    """A buffer is said to rest with other parts of slices."""
    cut = [
        buffer
        for buffer in program.buffers
        if isinstance(buffer.holds, FlatContent) and buffer.holds.stride is not None
    ]
    if not cut:
        return None
    chosen = chance.choice(cut)
    holds = chosen.holds
    assert isinstance(holds, FlatContent)
    assert holds.stride is not None
    contents = [
        replace(holds, stride=None),
        replace(holds, stride=holds.stride + 256),
        replace(holds, offset=abs(holds.offset - 256)),
    ]
    changed = replace(chosen, holds=chance.choice(contents))
    buffers = (changed if buffer is chosen else buffer for buffer in program.buffers)
    return replace(program, buffers=tuple(buffers))


OF_CODE: Mapping[str, Mapping[str, Mutation]] = {
    "Z501": {
        "use-page-early": _use_early,
        "skip-page-in": _without(_arrives),
    },
    "Z502": {
        "drop-write-back": _without(_departs),
        "release-page-early": _release_early,
        "release-before-write-back": _release_before,
    },
    "Z503": {
        "share-slot": _share_slot,
        "one-page-more": _one_page_more,
        "fewer-slots": _fewer_slots,
    },
}
"""The damages by the law that each breaks."""

PAGE_MUTATIONS: Mapping[str, Mutation] = {
    **{kind: mutation for mutations in OF_CODE.values() for kind, mutation in mutations.items()},
    "other-part": _other_part,
    "other-stride": _other_stride,
}
