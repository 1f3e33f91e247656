"""The waits that passes leave: enough, and none too many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.passes import happens
from tests.passes.strategies import Case, cases
from tests.support.examples import examples
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.contents import NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE, GATHER, REDUCE, Axis, Mesh
from zeroir.ir.ops import Op
from zeroir.ir.program import Holding, Pending, Program, Section, State
from zeroir.memory.lifetimes import Lifetimes
from zeroir.memory.most_live import most_live
from zeroir.passes.common.conflicts import touches
from zeroir.passes.common.order import derive_waits, without_waits


@examples(25)
@given(cases())
def test_what_must_be_ordered_is(case: Case) -> None:
    program = case.scheduled()
    for section in program.sections:
        assert happens.unordered(section.body, program) == []


@examples(10)
@given(cases())
def test_without_any_one_wait_something_breaks(case: Case) -> None:
    """Order, or the bound on how many units are gathered, or have full gradients, at once."""
    program = case.scheduled()
    for section in program.sections:
        live = happens.most_live(section.body, program)
        for index, op in enumerate(section.body):
            if isinstance(op, ops.Wait):
                body = section.body[:index] + section.body[index + 1 :]
                assert (
                    happens.unordered(body, program) or happens.most_live(body, program) > live
                ), f"{section.name}: wait {index} does nothing"


@examples(25)
@given(cases())
def test_waits_and_events_are_canonical(case: Case) -> None:
    program = case.scheduled()
    assert derive_waits(program) == program
    assert derive_waits(without_waits(program)) == program


@given(cases(), st.randoms(use_true_random=False))
@examples(15)
def test_where_the_allocs_stood_makes_no_difference(case: Case, choice: Random) -> None:
    """As far up as their buffers' last lives allow: they come back to behind what their first users wait for."""
    program = case.scheduled()
    sections = tuple(
        replace(section, body=_raised(section.body, program, choice))
        for section in program.sections
    )
    after = derive_waits(replace(program, sections=sections))
    for section, expected in zip(after.sections, program.sections, strict=True):
        assert _with_allocs_sorted(section.body) == _with_allocs_sorted(expected.body)


def _raised(body: Sequence[Op], program: Program, choice: Random) -> tuple[Op, ...]:
    """The ops with some of the allocs that signal nothing further up."""
    found: list[Op] = []
    last: dict[str, int] = {}
    for op in body:
        touched = [] if isinstance(op, ops.Wait) else touches(effects(op), program)
        if isinstance(op, ops.Alloc) and op.event is None and choice.random() < 0.7:
            at = choice.randint(last.get(op.buffer, 0), len(found))
            found.insert(at, op)
            last = {name: place + (place > at) for name, place in last.items()}
        else:
            found.append(op)
            at = len(found) - 1
        last.update((buffer, at + 1) for buffer, _, _, _ in touched)
    return tuple(found)


def _with_allocs_sorted(body: Sequence[Op]) -> list[Op]:
    found: list[Op] = []
    for is_alloc, run in groupby(body, lambda op: isinstance(op, ops.Alloc)):
        neighbours = list(run)
        found += sorted(neighbours, key=str) if is_alloc else neighbours
    return found


def test_a_shard_of_merged_gradients_meets_nothing_of_the_backward() -> None:
    """It begins only when all is reduced, however early the gradient that it is a shard of was to be reduced."""
    program = applied(
        mlp(blocks=4, dim=8, batch=256, micro_steps=2), for_stage(2, 3, bucket=1 << 20)
    )
    shards = {b.name: b.size_bytes for b in program.buffers if b.name.endswith(".grad")}
    found = Lifetimes.of(program)
    sizes = [program.buffer_by_name[name].size_bytes for name in found.buffers]
    at_most = most_live(found, range(len(sizes)), sizes)
    assert at_most.is_exact
    assert shards
    assert not {found.buffers[life] for life in at_most.lives} & shards.keys()


def _program(*body: Op, entry: State | None = None) -> Program:
    def buffer(name: str) -> Buffer:
        holds = NamedContent(name=name)
        return Buffer(
            name=name, dtype=DType.F32, numel=8, space=Space.DEVICE, role=Role.SCALAR, holds=holds
        )

    section = Section(name="evaluate", body=body, entry=entry or State())
    return Program(
        mesh=Mesh(axes=(Axis(name="dp", size=1),)),
        buffers=(buffer("a"), buffer("b")),
        sections=(section,),
    )


def _fill(name: str, stream: str, *, event: str | None = None, numel: int = 8, at: int = 0) -> Op:
    region = Region(buffer=name, offset=at, numel=numel)
    return ops.Fill(destination=region, value=0.0, stream=stream, event=event)


def _copy(source: str, destination: str, stream: str) -> Op:
    return ops.Cast(
        source=Region(buffer=source, offset=0, numel=8),
        destination=Region(buffer=destination, offset=0, numel=8),
        stream=stream,
    )


def _ordered(program: Program) -> list[str]:
    (section,) = derive_waits(program).sections
    return [
        f"wait !{op.waited} {op.on}" if isinstance(op, ops.Wait) else f"{op.event} {op.stream}"
        for op in section.body
    ]


def test_a_reader_waits_for_the_writer_on_another_stream() -> None:
    program = _program(_fill("a", COMPUTE), _copy("a", "b", GATHER))
    assert _ordered(program) == ["0 compute", "wait !0 gather", "None gather"]


def test_disjoint_parts_and_two_readers_need_no_wait() -> None:
    program = _program(_fill("a", COMPUTE, numel=4), _fill("a", GATHER, numel=4, at=4))
    assert _ordered(program) == ["None compute", "None gather"]


def test_one_wait_orders_all_that_came_before_on_that_stream() -> None:
    program = _program(_fill("a", COMPUTE), _fill("b", COMPUTE), _copy("a", "b", GATHER))
    assert _ordered(program) == ["None compute", "0 compute", "wait !0 gather", "None gather"]


def test_order_is_carried_on_through_a_third_stream() -> None:
    program = _program(_fill("a", COMPUTE), _copy("a", "b", GATHER), _copy("b", "a", REDUCE))
    assert _ordered(program) == [
        "0 compute",
        "wait !0 gather",
        "1 gather",
        "wait !1 reduce",
        "None reduce",
    ]


def test_a_wait_that_neither_data_nor_a_bound_asks_for_goes() -> None:
    needless = ops.Wait(waited="mine", on=GATHER)
    program = _program(_fill("a", COMPUTE, event="mine"), needless, _fill("b", GATHER))
    assert _ordered(program) == ["None compute", "None gather"]


def test_a_wait_for_a_pending_event_stays_until_an_op_of_its_stream_needs_it() -> None:
    """Only the section before knows what the pending op touches."""
    entry = State(pending=(Pending(event="p", stream=GATHER),))
    wait = ops.Wait(waited="p", on=COMPUTE)
    idle = ops.Wait(waited="p", on=REDUCE)
    program = _program(wait, idle, _fill("a", GATHER), _fill("b", COMPUTE), entry=entry)
    assert _ordered(program) == ["None gather", "wait !p compute", "None compute"]


def test_what_a_pending_event_brings_is_waited_for() -> None:
    whole = Region(buffer="a", offset=0, numel=8)
    entry = State(
        holdings=(Holding(region=whole, content=NamedContent(name="a", version=1), after="0"),),
        pending=(Pending(event="0", stream=GATHER),),
    )
    program = _program(
        _fill("b", COMPUTE), _copy("a", "b", COMPUTE), _copy("b", "a", REDUCE), entry=entry
    )
    assert _ordered(program) == [
        "None compute",
        "wait !0 compute",
        "1 compute",
        "wait !1 reduce",
        "None reduce",
    ]


def _alloc(name: str) -> Op:
    return ops.Alloc(buffer=name, stream=COMPUTE)


def _placed(*body: Op) -> list[str]:
    """What the ops allocate, fill and wait for when they are ordered."""
    found = []
    for op in derive_waits(_program(*body)).sections[0].body:
        match op:
            case ops.Alloc():
                found.append(f"alloc {op.buffer}")
            case ops.Release():
                found.append(f"release {op.buffer}")
            case ops.Fill():
                found.append(f"fill {op.destination.buffer}")
            case ops.Wait():
                found.append("wait")
            case _:
                pass
    return found


def test_a_buffer_begins_behind_what_its_first_user_waits_for() -> None:
    other, use = _fill("b", REDUCE), _fill("a", COMPUTE)
    # Behind a wait that data ask for, and ops of its own stream that do not touch it.
    both = _copy("b", "a", COMPUTE)
    assert _placed(_alloc("a"), other, both) == ["fill b", "wait", "alloc a"]
    assert _placed(_alloc("a"), _fill("b", COMPUTE), use) == ["fill b", "alloc a", "fill a"]
    # Not where another stream touches its buffer first.
    assert _placed(_alloc("a"), other, _fill("a", REDUCE)) == [
        *("alloc a", "fill b", "wait", "fill a")
    ]
    # Not past the end of a life that nobody uses, and not out of a section that leaves it live.
    release = ops.Release(buffer="a", stream=COMPUTE)
    assert _placed(_alloc("a"), other, release) == ["fill b", "alloc a", "release a"]
    assert _placed(_alloc("a"), other) == ["alloc a", "fill b"]
    # Of several the order stays, each behind what its own life must wait for.
    assert _placed(_alloc("b"), _alloc("a"), other, both) == [
        *("alloc b", "wait", "fill b", "wait", "alloc a")
    ]
