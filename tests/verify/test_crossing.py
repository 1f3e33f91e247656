"""Gathers, releases and writes that cross a boundary between two sections, and the host's reads and writes there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.edits import mapped, put, with_body, without_ops
from tests.support.lowering import codes
from tests.support.schedules import Case, is_same, run
from tests.verify.test_rejects import find
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import PARAM, FlatContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE, GATHER, HOST
from zeroir.ir.ops import Op, Pair
from zeroir.ir.program import (
    LAST_MICRO_STEP,
    MICRO_STEP,
    UPDATE,
    Holding,
    Pending,
    Program,
    Section,
    State,
)
from zeroir.verify import verify

FULL = "root.pre.full"
CROSSING = "crossing"
FULL = "root.pre.full"


def first_gather(section: Section) -> tuple[int, int, str]:
    """Lines of the alloc and the gather of the first unit, and the gather's event."""
    alloc = next(
        i for i, op in enumerate(section.body) if isinstance(op, ops.Alloc) and op.buffer == FULL
    )
    gather = next(i for i, op in enumerate(section.body) if isinstance(op, ops.AllGather))
    op = section.body[gather]
    assert isinstance(op, ops.AllGather)
    assert op.pairs[0].destination.buffer == FULL
    assert op.event is not None
    return alloc, gather, op.event


def issued(param: Buffer, full: Buffer) -> list[Op]:
    """The gather that crosses a boundary."""
    pair = Pair(source=whole(param), destination=whole(full))
    gather = ops.Prefetch(pairs=(pair,), comm="gather", stream=GATHER, event=CROSSING)
    return [ops.Alloc(buffer=FULL, stream=GATHER), gather]


def carried(program: Program, *, says_after: bool = True, gathers_early: bool = False) -> Program:
    """The program whose first gather is issued at the end of the section before."""
    full, param = program.buffer_by_name[FULL], program.buffer_by_name["root.pre.param"]
    between = State(
        live=(FULL,),
        holdings=(
            Holding(
                region=whole(full),
                content=FlatContent(quantity=PARAM, flat="root.pre"),
                after=CROSSING if says_after else None,
            ),
        ),
        pending=(Pending(event=CROSSING, stream=GATHER),),
    )

    def joined(state: State) -> State:
        return replace(between, holdings=(*between.holdings, *state.holdings))

    last, update = program.section_by_name[LAST_MICRO_STEP], program.section_by_name[UPDATE]
    alloc, gather, event = first_gather(last)
    body: list[Op] = [
        replace(op, waited=CROSSING) if isinstance(op, ops.Wait) and op.waited == event else op
        for i, op in enumerate(last.body)
        if i not in (alloc, gather)
    ]
    issue = issued(param, full)
    ending: list[Op] = list(update.body)
    cast = next(
        i
        for i, op in enumerate(ending)
        if isinstance(op, ops.Cast) and op.destination.buffer == param.name
    )
    if gathers_early:
        ending[cast:cast] = issue
    else:
        stepped = ending[cast]
        assert isinstance(stepped, ops.Cast)
        ending[cast] = replace(stepped, event="stepped")
        ending += [ops.Wait(waited="stepped", on=GATHER), *issue]
    changed = {
        LAST_MICRO_STEP: replace(last, entry=joined(last.entry), body=tuple(body)),
        UPDATE: replace(update, body=tuple(ending), exit=joined(update.exit)),
    }
    return replace(program, sections=tuple(changed[s.name] for s in program.sections))


CASE = Case(stage=3, precision="bf16")


def test_a_gather_may_cross_a_boundary() -> None:
    assert codes(carried(CASE.scheduled), CASE.logical) == set()


def test_what_a_pending_gather_fills_is_true_only_after_it() -> None:
    assert codes(carried(CASE.scheduled, says_after=False)) == {"Z103"}


def test_a_pending_gather_is_awaited_before_its_use() -> None:
    def awaits(op: Op) -> bool:
        return isinstance(op, ops.Wait) and op.waited == CROSSING

    report = verify(without_ops(carried(CASE.scheduled), awaits))
    assert report.findings[0].code == "Z103"


def test_a_gather_that_crosses_the_update_must_come_after_it() -> None:
    """Parameters that are gathered before the update are those of the step that ends."""
    report = verify(carried(CASE.scheduled, gathers_early=True))
    assert not report.is_valid
    assert codes(report) <= {"Z105", "Z103", "Z401"}


def test_a_pending_event_needs_a_signal() -> None:
    program = CASE.scheduled
    state = State(pending=(Pending(event=CROSSING, stream=GATHER),))
    sections = tuple(
        replace(
            s,
            entry=s.entry if s.name == UPDATE else state,
            exit=s.exit if s.name == LAST_MICRO_STEP else state,
        )
        for s in program.sections
    )
    assert "Z202" in codes(replace(program, sections=sections))


def crossing_micro_steps(program: Program) -> Program:
    """A program of several micro-steps in which every section gathers the first unit for the next section."""
    full, param = program.buffer_by_name[FULL], program.buffer_by_name["root.pre.param"]
    issue = issued(param, full)
    holding = Holding(
        region=whole(full), content=FlatContent(quantity=PARAM, flat="root.pre"), after=CROSSING
    )

    def joined(state: State) -> State:
        return replace(
            state,
            live=(*state.live, FULL),
            holdings=(*state.holdings, holding),
            pending=(Pending(event=CROSSING, stream=GATHER),),
        )

    sections: list[Section] = []
    for section in program.sections:
        body: list[Op] = list(section.body)
        if section.name == UPDATE:
            last = max(i for i, op in enumerate(body) if isinstance(op, ops.Cast))
            cast = body[last]
            assert isinstance(cast, ops.Cast)
            body[last] = replace(cast, event="stepped")
            sections.append(
                replace(
                    section,
                    body=(*body, ops.Wait(waited="stepped", on=GATHER), *issue),
                    exit=joined(section.exit),
                )
            )
            continue
        alloc, gather, event = first_gather(section)
        body = [
            replace(op, waited=CROSSING) if isinstance(op, ops.Wait) and op.waited == event else op
            for i, op in enumerate(body)
            if i not in (alloc, gather)
        ]
        if section.name == LAST_MICRO_STEP:
            sections.append(replace(section, entry=joined(section.entry), body=tuple(body)))
            continue
        release = next(
            i for i, op in enumerate(body) if isinstance(op, ops.Release) and op.buffer == FULL
        )
        released = body[release]
        assert isinstance(released, ops.Release)
        event = released.event or "released"
        body[release] = replace(released, event=event)
        body += [ops.Wait(waited=event, on=GATHER), *issue]
        sections.append(
            replace(
                section, entry=joined(section.entry), body=tuple(body), exit=joined(section.exit)
            )
        )
    # The gather at the end of a section waits for its own buffer alone, which is less than the bounds ask for.
    return replace(program, bounds=(), sections=tuple(sections))


def _one(name: str) -> Region:
    return Region(buffer=name, offset=0, numel=1)


MICRO = Case(stage=3, precision="bf16", micro_steps=2, clip=1.0)


@pytest.mark.slow
def test_a_gather_may_cross_every_boundary_of_a_step() -> None:
    """One event is pending at the entry and signalled again for the exit."""
    program = crossing_micro_steps(MICRO.scheduled)
    assert codes(program, MICRO.logical) == set()
    expected = run(MICRO.scheduled)
    for schedule_seed in range(6):
        assert is_same(run(program, schedule_seed=schedule_seed), expected)


@pytest.mark.parametrize("section", [MICRO_STEP, LAST_MICRO_STEP])
def test_what_crosses_every_boundary_is_awaited_behind_each(section: str) -> None:
    program = crossing_micro_steps(MICRO.scheduled)
    place = find(program, section, lambda op: isinstance(op, ops.Wait) and op.waited == CROSSING)
    assert verify(put(program, place)).findings[0].code in {"Z101", "Z103"}


# -------------------------------------------------------------------------------------- other ops that cross a boundary


def crossing_op(
    program: Program,
    *,
    ending: Sequence[Op],
    beginning: Sequence[Op],
    pending: Sequence[Pending],
    live: Sequence[str] = (),
) -> Program:
    """A program whose update ends with some ops and whose next step begins with others, with events pending between."""
    state = State(live=tuple(live), pending=tuple(pending))
    last, update = program.section_by_name[LAST_MICRO_STEP], program.section_by_name[UPDATE]
    joined = replace(state, holdings=update.exit.holdings)
    return replace(
        program,
        buffers=(*program.buffers, *(_scratch(name) for name in ("one", "two"))),
        sections=(
            replace(last, entry=joined, body=(*beginning, *last.body)),
            replace(update, body=(*update.body, *ending), exit=joined),
        ),
    )


def _scratch(name: str) -> Buffer:
    return Buffer(name=name, dtype=DType.F32, numel=8, space=Space.DEVICE, role=Role.STAGING)


def _alloc(name: str, event: str | None = None) -> Op:
    return ops.Alloc(buffer=name, stream="copy_in", event=event)


def _release(name: str, stream: str = "copy_in", event: str | None = None) -> Op:
    return ops.Release(buffer=name, stream=stream, event=event)


def _fill(name: str, stream: str = "copy_in", event: str | None = None) -> Op:
    region = Region(buffer=name, offset=0, numel=8)
    return ops.Fill(destination=region, value=1.0, stream=stream, event=event)


@pytest.mark.parametrize("reads", ["lr", "gradient_divisor"])
def test_the_host_writes_settings_before_each_micro_step(reads: str) -> None:
    program = Case(stage=0, micro_steps=2).scheduled
    like = program.buffer_by_name[reads]
    seen = replace(like, name="seen", holds=None, role=Role.STAGING)
    source, copied = _one(reads), _one("seen")
    begin: list[Op] = [ops.Wait(waited="p", on="copy_in"), _release("seen")]
    cast = ops.Cast(source=source, destination=copied, stream="copy_in", event="p")
    fill = ops.Fill(destination=copied, value=1.0, stream="copy_in", event="p")
    joined = State(live=("seen",), pending=(Pending(event="p", stream="copy_in"),))
    named = program.section_by_name
    micro, last, update = (named[name] for name in (MICRO_STEP, LAST_MICRO_STEP, UPDATE))
    joined = replace(joined, holdings=micro.entry.holdings)
    copying = (*begin, *micro.body, _alloc("seen"), cast)
    program = replace(
        program,
        buffers=(*program.buffers, seen),
        sections=(
            replace(micro, entry=joined, body=copying, exit=joined),
            replace(last, entry=joined, body=(*begin, *last.body)),
            replace(update, body=(*update.body, _alloc("seen"), fill), exit=joined),
        ),
    )
    report = verify(program)
    found = [f for f in report.findings if "may change before the next micro-step" in f.sentence]
    assert [f.code for f in found] == (["Z105"] if reads == "lr" else [])


CROSSING_OPS = {
    "a release": (
        [_alloc("one"), _release("one", event="p")],
        [ops.Alloc(buffer="one", stream=COMPUTE), _release("one", COMPUTE)],
        [Pending(event="p", stream="copy_in")],
        [],
    ),
    "an alloc": (
        [_alloc("one", event="p")],
        [_fill("one", COMPUTE), _release("one", COMPUTE)],
        [Pending(event="p", stream="copy_in")],
        ["one"],
    ),
    "a write": (
        [_alloc("one"), _fill("one", event="p")],
        [_fill("one", COMPUTE), _release("one", COMPUTE)],
        [Pending(event="p", stream="copy_in")],
        ["one"],
    ),
    "two writes": (
        [_alloc("one"), _alloc("two"), _fill("one", event="p"), _fill("two", event="q")],
        [
            _fill("one", COMPUTE),
            _fill("two", COMPUTE),
            _release("one", COMPUTE),
            _release("two", COMPUTE),
        ],
        [Pending(event="p", stream="copy_in"), Pending(event="q", stream="copy_in")],
        ["one", "two"],
    ),
}


@pytest.mark.parametrize("name", CROSSING_OPS)
def test_whatever_crosses_a_boundary_is_awaited(name: str) -> None:
    ending, beginning, pending, live = CROSSING_OPS[name]

    def crossing(waits: Sequence[Op], listed: Sequence[Pending] = pending) -> Program:
        return crossing_op(
            CASE.scheduled, ending=ending, beginning=[*waits, *beginning], pending=listed, live=live
        )

    awaited = crossing([ops.Wait(waited=pending[-1].event, on=COMPUTE)])
    assert verify(awaited).is_valid, verify(awaited).render()
    assert verify(crossing([ops.Wait(waited=pending[-1].event, on=HOST)])).is_valid
    assert codes(crossing([])) <= {"Z101", "Z105"}
    assert not verify(crossing([])).is_valid
    if len(pending) > 1:
        # The first one's event says nothing of the second, however the state lists them.
        first = [ops.Wait(waited=pending[0].event, on=COMPUTE)]
        assert codes(crossing(first)) == {"Z105"}
        assert codes(crossing(first, pending[::-1])) == {"Z009"} or "Z202" in codes(
            verify(crossing(first, pending[::-1]))
        )


def test_the_host_reads_scalars_at_a_boundary() -> None:
    """No op may write the loss while the engine reads it, or read a batch while the next one is written."""
    program = CASE.scheduled
    fill = ops.Fill(destination=_one("gradient_divisor"), value=1.0, stream="copy_in", event="p")
    waits: list[Op] = [ops.Wait(waited="p", on=COMPUTE)]
    pending = [Pending(event="p", stream="copy_in")]
    report = verify(
        crossing_op(program, ending=[*_behind_compute(), fill], beginning=waits, pending=pending)
    )
    assert "Z105" in codes(report)
    assert any("the host reads" in finding.sentence for finding in report.findings)
    source = Region(buffer="input.x", offset=0, numel=8)
    copy = ops.Cast(
        source=source, destination=replace(source, buffer="one"), stream="copy_in", event="p"
    )
    report = verify(
        crossing_op(
            program,
            ending=[_alloc("one"), copy],
            beginning=[*waits, _release("one", COMPUTE)],
            pending=pending,
            live=["one"],
        )
    )
    assert codes(report) == {"Z105"}
    assert "the host fills again" in report.findings[0].sentence


def _behind_compute() -> list[Op]:
    fill = ops.Fill(destination=_one("gradient_divisor"), value=1.0, stream=COMPUTE, event="done")
    return [fill, ops.Wait(waited="done", on="copy_in")]


# ------------------------------------------------------------------------------------------------ waits of the host


def test_the_host_may_wait_instead_of_a_stream() -> None:
    """Every op that is issued later, on any stream, runs after it."""
    program = CASE.scheduled

    def on_the_host(op: Op) -> tuple[Op, ...]:
        return (replace(op, on=HOST) if isinstance(op, ops.Wait) else op,)

    assert codes(mapped(program, on_the_host), CASE.logical) == set()


def test_the_host_orders_nothing_that_was_issued_before_its_wait() -> None:
    program = CASE.scheduled
    place = find(program, LAST_MICRO_STEP, lambda op: isinstance(op, ops.Compute))
    section, line = place
    body = list(program.sections[section].body)
    wait = next(i for i in reversed(range(line)) if isinstance(body[i], ops.Wait))
    late = body[wait]
    assert isinstance(late, ops.Wait)
    body[wait : line + 1] = [*body[wait + 1 : line + 1], replace(late, on=HOST)]
    mutant = with_body(program, LAST_MICRO_STEP, body)
    assert verify(mutant).findings[0].code == "Z103"
