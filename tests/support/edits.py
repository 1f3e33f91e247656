"""What edits a program for the tests: find ops, replace one, change the ops of a section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random
from typing import TypeVar

from zeroir.ir.buffers import Buffer, Region, Role
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Compute, Op, Wait
from zeroir.ir.program import SAVE, Program, State
from zeroir.ir.reports import Quantity, with_report
from zeroir.passes.common.rewrite import map_regions

Mutation = Callable[[Program, Random], Program | None]
"""A damage done to a program, as chance has it; None where there is nothing of its kind to damage."""


OpKind = TypeVar("OpKind", bound=Op)


def the(
    program: Program,
    kind: type[OpKind],
    section: str | None = None,
    nth: int = 0,
    is_wanted: Callable[[OpKind], bool] | None = None,
) -> tuple[tuple[int, int], OpKind]:
    """The n-th op of a kind, in a section or in all of them, and its place."""
    found: list[tuple[tuple[int, int], OpKind]] = []
    for number, one in enumerate(program.sections):
        if section is None or one.name == section:
            for index, op in enumerate(one.body):
                if isinstance(op, kind) and (is_wanted is None or is_wanted(op)):
                    found.append(((number, index), op))
    return found[nth]


def places(program: Program, is_wanted: Callable[[Op], bool]) -> list[tuple[int, int]]:
    """Section and op numbers of the ops wanted."""
    return [
        (s, i)
        for s, section in enumerate(program.sections)
        for i, op in enumerate(section.body)
        if is_wanted(op)
    ]


def edit(program: Program, section: int, change: Callable[[list[Op]], None]) -> Program:
    """The program with one section's ops changed."""
    body = list(program.sections[section].body)
    change(body)
    sections = list(program.sections)
    sections[section] = replace(sections[section], body=tuple(body))
    return replace(program, sections=tuple(sections))


def put(program: Program, place: tuple[int, int], *new: Op) -> Program:
    """The program with one op replaced by others."""

    def change(body: list[Op]) -> None:
        body[place[1] : place[1] + 1] = new

    return edit(program, place[0], change)


def with_body(program: Program, name: str, body: Iterable[Op]) -> Program:
    """The program with other ops in one section."""
    new = tuple(body)
    sections = (replace(s, body=new) if s.name == name else s for s in program.sections)
    return replace(program, sections=tuple(sections))


def mapped(program: Program, change: Callable[[Op], Iterable[Op]], *names: str) -> Program:
    """The program with each op of these sections, or of all, replaced by others."""
    for section in program.sections:
        if not names or section.name in names:
            body = (new for op in section.body for new in change(op))
            program = with_body(program, section.name, body)
    return program


def without_ops(program: Program, is_unwanted: Callable[[Op], bool], *names: str) -> Program:
    """The program without some ops of these sections, or of all."""
    return mapped(program, lambda op: () if is_unwanted(op) else (op,), *names)


def without_each(
    program: Program, is_wanted: Callable[[Op], bool]
) -> Iterator[tuple[str, Program]]:
    """The program without each op that is wanted in turn, and where the op stood."""
    for place in places(program, is_wanted):
        name = f"{program.sections[place[0]].name}: {place[1]} {at(program, place)}"
        yield name, put(program, place)


def at(program: Program, place: tuple[int, int]) -> Op:
    return program.sections[place[0]].body[place[1]]


def pick(
    program: Program, chance: Random, is_wanted: Callable[[Op], bool]
) -> tuple[int, int] | None:
    found = places(program, is_wanted)
    return chance.choice(found) if found else None


def with_buffers(program: Program, *new: Buffer) -> Program:
    return replace(program, buffers=(*program.buffers, *new))


def redirected(program: Program, chance: Random, old: str, new: str) -> Program | None:
    """One op uses the new buffer where it used the old one."""

    def uses_old(op: Op) -> bool:
        found: set[str] = set()

        def note(region: Region) -> Region:
            found.add(region.buffer)
            return region

        map_regions(op, note)
        return old in found

    def renamed(region: Region) -> Region:
        return replace(region, buffer=new) if region.buffer == old else region

    place = pick(program, chance, uses_old)
    return None if place is None else put(program, place, map_regions(at(program, place), renamed))


def without_save(program: Program) -> Program:
    """The program without section ``save``, its snapshots, and the waits for its copies."""
    events = {op.event for op in program.section_by_name[SAVE].body if not isinstance(op, Wait)} - {
        None
    }

    def without_events(state: State) -> State:
        return replace(state, pending=tuple(p for p in state.pending if p.event not in events))

    return replace(
        program,
        buffers=tuple(b for b in program.buffers if b.role is not Role.SNAPSHOT),
        sections=tuple(
            replace(
                section,
                entry=without_events(section.entry),
                body=tuple(
                    op for op in section.body if not (isinstance(op, Wait) and op.waited in events)
                ),
                exit=without_events(section.exit),
            )
            for section in program.sections
            if section.name != SAVE
        ),
    )


def on_one(
    is_wanted: Callable[[Op], bool], change: Callable[[Op, Program, Random], tuple[Op, ...] | None]
) -> Mutation:
    """Replace one op of a kind."""

    def mutation(program: Program, chance: Random) -> Program | None:
        place = pick(program, chance, is_wanted)
        if place is None:
            return None
        old = at(program, place)
        new = change(old, program, chance)
        return None if new is None or new == (old,) else put(program, place, *new)

    return mutation


def is_of(*kinds: type) -> Callable[[Op], bool]:
    return lambda op: isinstance(op, kinds)


def with_report_of(program: Program, quantity: Quantity, buffer: str) -> Program:
    """The program, of which the engine reads a quantity from this buffer."""
    return replace(program, reports=with_report(program.reports, quantity, buffer))


def retyped(program: Program, name: str, dtype: DType) -> Program:
    """The program with another dtype of a buffer at rest, and of what segments read from it."""
    read: dict[str, set[int]] = {}
    for op in program.ops():
        if isinstance(op, Compute):
            for index, argument in enumerate(op.arguments):
                if argument.view.region.buffer == name:
                    read.setdefault(op.segment, set()).add(index)
    segments = (
        replace(
            segment,
            inputs=tuple(
                replace(kind, dtype=dtype) if index in read.get(segment.name, ()) else kind
                for index, kind in enumerate(segment.inputs)
            ),
        )
        for segment in program.segments
    )
    buffers = (replace(b, dtype=dtype) if b.name == name else b for b in program.buffers)
    inputs = (replace(b, dtype=dtype) if b.buffer == name else b for b in program.inputs)
    return replace(program, buffers=tuple(buffers), inputs=tuple(inputs), segments=tuple(segments))
