"""The waits that passes leave: enough, and none too many."""

from __future__ import annotations

from hypothesis import given

from tests.passes import happens
from tests.passes.strategies import Case, cases
from tests.support.examples import examples
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.contents import NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE, GATHER, REDUCE, Axis, Mesh
from zeroir.ir.ops import Op
from zeroir.ir.program import Holding, Pending, Program, Section, State
from zeroir.passes.order import synchronise, unordered


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
    assert synchronise(program) == program
    if case.stage < 2:  # Only bounds put in waits that data alone do not ask for.
        assert synchronise(unordered(program)) == program


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
    (section,) = synchronise(program).sections
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


def test_a_wait_put_in_on_purpose_stays_and_an_idle_one_goes() -> None:
    on_purpose = ops.Wait(waited="mine", on=GATHER)
    idle = ops.Wait(waited="mine", on=REDUCE)
    program = _program(_fill("a", COMPUTE, event="mine"), on_purpose, idle, _fill("b", GATHER))
    assert _ordered(program) == ["0 compute", "wait !0 gather", "None gather"]


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
