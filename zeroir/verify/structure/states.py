"""Checks of the states at the ends of sections: they describe what exists, once, and agree at boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zeroir.ir.buffers import Region, whole
from zeroir.ir.program import (
    Holding,
    Program,
    State,
)
from zeroir.verify.context import spell
from zeroir.verify.equivalence.provenance import Problems
from zeroir.verify.order.pending_events import SECTION_BOUNDARIES
from zeroir.verify.structure.regions import content_problem, region_problem


def state_problems(program: Program) -> Problems:
    """Yield codes and messages for states that name missing buffers, regions or events, or describe something twice."""
    for section in program.sections:
        for state in (section.entry, section.exit):
            yield from _state(program, f"a state of {section.name}", state)


def _state(program: Program, what: str, state: State) -> Problems:
    for name in state.live:
        buffer = program.buffer_by_name.get(name)
        if buffer is None:
            yield "Z001", f"{what} names the undeclared buffer %{name}"
        elif buffer.is_persistent:
            yield "Z008", f"{what} calls the persistent buffer %{name} live"
    streams = {stream.name for stream in program.streams}
    events = {pending.event for pending in state.pending}
    for pending in state.pending:
        if pending.stream not in streams:
            yield "Z001", f"!{pending.event} is pending on the undeclared stream {pending.stream}"
    regions: list[Region] = []
    for holding in state.holdings:
        region = holding.region
        problem = region_problem(program, region)
        if problem is not None:
            yield problem[0], f"in {what}: {problem[1]}"
            continue
        regions.append(region)
        where = spell(region, program)
        if region.part is not None:
            yield "Z008", f"{what} describes {where}: a state describes whole slices"
        sentence = content_problem(program, holding.content, region.local_numel(program.mesh))
        if sentence is not None:
            yield "Z008", f"in {what} {where} {sentence}"
        if holding.after is not None and holding.after not in events:
            yield "Z001", f"in {what} {where} waits for !{holding.after}, which is not pending"
        if (
            not program.buffer_by_name[region.buffer].is_persistent
            and region.buffer not in state.live
        ):
            yield "Z008", f"{what} says what {where} holds, but that buffer is not live"
    for region in _described_twice(regions):
        yield "Z008", f"{what} describes elements of {spell(region, program)} twice"


def _described_twice(regions: Sequence[Region]) -> Iterator[Region]:
    """Yield regions that overlap another.

    An own slice may follow the whole region, which then describes the rest of it.
    """
    stop, buffer = 0, None
    unsliced: Region | None = None
    for region in sorted(regions, key=lambda region: (region.buffer, region.offset, region.stop)):
        if region.buffer != buffer:
            stop, buffer, unsliced = region.offset, region.buffer, None
        if region.offset >= stop:
            unsliced = region if region.shard is None else None
        elif (
            unsliced is not None
            and region.shard is not None
            and (unsliced.offset, unsliced.stop) == (region.offset, region.stop)
        ):
            unsliced = None
        else:
            yield region
        stop = max(stop, region.stop)


def boundary_problems(program: Program) -> Problems:
    """Yield codes and messages for sections that do not start with the exit state of the previous one."""
    sections = program.section_by_name
    for first, second in SECTION_BOUNDARIES:
        if first in sections and second in sections:
            difference = _difference(program, sections[first].exit, sections[second].entry)
            if difference is not None:
                yield (
                    "Z009",
                    f"the exit state of {first} is not the entry state of {second}: {difference}",
                )


def _difference(program: Program, before: State, after: State) -> str | None:
    """Return the difference of two states, ignoring order and holdings that only repeat the header."""
    live = {*before.live} ^ {*after.live}
    if live:
        return f"%{min(live)} is live in one only"
    if before.pending != after.pending:
        return "their pending events differ"
    holdings = _changed(program, before) ^ _changed(program, after)
    if holdings:
        return f"what %{min(holding.region.buffer for holding in holdings)} holds differs"
    return None


def _changed(program: Program, state: State) -> set[Holding]:
    """Return the holdings of a state that differ from the buffer's resting content."""

    def is_resting(holding: Holding) -> bool:
        buffer = program.buffer_by_name.get(holding.region.buffer)
        return (
            buffer is not None
            and holding.after is None
            and holding.region == whole(buffer)
            and holding.content == buffer.holds
        )

    return {holding for holding in state.holdings if not is_resting(holding)}
