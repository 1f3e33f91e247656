"""Valid programs with two mesh axes, with data that leaves the device and returns, and with changed segments."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.schedules import Case
from tests.verify.test_rejects import codes
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import FlatContent, Micro
from zeroir.ir.mesh import COMPUTE, Axis, Communicator, Mesh
from zeroir.ir.ops import Op, Pair
from zeroir.ir.program import (
    LAST_MICRO_STEP,
    UPDATE,
    Program,
    Section,
    State,
)
from zeroir.ir.segments.segment import Segment
from zeroir.verify import verify

CASE = Case(stage=3, precision="bf16")


# ------------------------------------------------------------------------------------------------- two mesh axes


def on_two_axes(program: Program) -> Program:
    """Stage 3 within a group of ``dp`` ranks, replicated over ``replicate``: hybrid sharding."""
    sections: list[Section] = []
    for section in program.sections:
        body: list[Op] = []
        for op in section.body:
            match op:
                case ops.ReduceScatter():
                    to = tuple(
                        Pair(source=p.destination, destination=p.destination) for p in op.pairs
                    )
                    body += [op, ops.AllReduce(pairs=to, comm="replicas", stream=op.stream)]
                case ops.AllReduce() if section.name == UPDATE:
                    loss = tuple(p for p in op.pairs if p.source.buffer == "loss")
                    body.append(op)
                    if loss:
                        body.append(replace(op, pairs=loss, comm="replicas", event=None))
                case ops.Decide():
                    body.append(replace(op, divisor=op.divisor * 2))
                case _:
                    body.append(op)
        sections.append(
            replace(
                section,
                entry=_reduced_twice(section.entry),
                body=tuple(body),
                exit=_reduced_twice(section.exit),
            )
        )
    return replace(
        program,
        mesh=Mesh(axes=(Axis(name="replicate", size=2), *program.mesh.axes)),
        comms=(*program.comms, Communicator(name="replicas", axis="replicate")),
        sections=tuple(sections),
    )


def _reduced_twice(state: State) -> State:
    return replace(
        state,
        holdings=tuple(
            replace(h, content=replace(h.content, reduced=("replicate", "dp")))
            if isinstance(h.content, FlatContent) and h.content.micro is Micro.ALL
            else h
            for h in state.holdings
        ),
    )


def hybrid(**options: object) -> tuple[Program, Program]:
    """Gathers wait for reductions, so that communicators over different axes have an order."""
    case = replace(Case(stage=3, precision="bf16"), **options)  # type: ignore[arg-type]
    program = on_two_axes(case.scheduled)
    sections: list[Section] = []
    for section in program.sections:
        body: list[Op] = []
        last: dict[str, str] = {}
        for i, op in enumerate(section.body):
            if isinstance(op, ops.AllGather | ops.Prefetch | ops.ReduceScatter | ops.AllReduce):
                body += [
                    ops.Wait(waited=e, on=op.stream) for s, e in last.items() if s != op.stream
                ]
                event = op.event or f"c{i}"
                last[op.stream] = event
                body.append(replace(op, event=event))
            else:
                body.append(op)
        sections.append(replace(section, body=tuple(body)))
    return replace(program, sections=tuple(sections)), case.logical


@pytest.mark.parametrize("clip", [None, 1.0])
def test_hybrid_sharding_is_proved(clip: float | None) -> None:
    program, logical = hybrid(clip=clip)
    report = verify(program, logical)
    assert report.is_valid, report.render()


def test_communicators_over_different_axes_need_an_order() -> None:
    case = Case(stage=3, precision="bf16")
    assert codes(verify(on_two_axes(case.scheduled))) == {"Z202"}


def test_a_gradient_summed_over_one_of_two_axes_is_found() -> None:
    program, _ = hybrid()
    sections = tuple(
        replace(
            s,
            body=tuple(
                op
                for op in s.body
                if not (
                    isinstance(op, ops.AllReduce) and op.pairs[0].source.buffer == "root.pre.grad"
                )
            ),
        )
        for s in program.sections
    )
    assert "Z404" in codes(verify(_without_dangling_waits(replace(program, sections=sections))))


def _without_dangling_waits(program: Program) -> Program:
    sections: list[Section] = []
    for section in program.sections:
        signalled = {getattr(op, "event", None) for op in section.body}
        body = tuple(
            op
            for op in section.body
            if not (isinstance(op, ops.Wait) and op.waited not in signalled)
        )
        sections.append(replace(section, body=body))
    return replace(program, sections=tuple(sections))


# ------------------------------------------------------------------------------------------------------ transfers


def offloaded(program: Program, *, comes_back: bool = True) -> Program:
    """The first activation is in host memory until the backward."""
    source = program.buffer_by_name["h.0"]
    host = Buffer(
        name="h.0.host", dtype=source.dtype, numel=source.numel, space=Space.HOST, role=Role.SAVED
    )
    sections: list[Section] = []
    for section in program.sections:
        body: list[Op] = list(section.body)
        if section.name == LAST_MICRO_STEP:
            uses = [
                i
                for i, op in enumerate(body)
                if isinstance(op, ops.Compute)
                and any(a.view.region.buffer == "h.0" for a in op.arguments)
            ]
            back: list[Op] = [ops.Alloc(buffer="h.0", stream=COMPUTE)]
            if comes_back:
                back.append(
                    ops.ToDevice(source=whole(host), destination=whole(source), stream=COMPUTE)
                )
            back.append(ops.Release(buffer="h.0.host", stream=COMPUTE))
            out: Sequence[Op] = (
                ops.Alloc(buffer="h.0.host", stream=COMPUTE),
                ops.ToHost(source=whole(source), destination=whole(host), stream=COMPUTE),
                ops.Release(buffer="h.0", stream=COMPUTE),
            )
            body[uses[1] : uses[1]] = back
            body[uses[0] + 1 : uses[0] + 1] = out
        sections.append(replace(section, body=tuple(body)))
    return replace(program, buffers=(*program.buffers, host), sections=tuple(sections))


def test_what_comes_back_from_the_host_is_what_went() -> None:
    report = verify(offloaded(CASE.scheduled), CASE.logical)
    assert report.is_valid, report.render()


def test_what_does_not_come_back_is_missed() -> None:
    assert codes(verify(offloaded(CASE.scheduled, comes_back=False))) == {"Z103"}


# ------------------------------------------------------------------------------------- segments that were cut anew


def with_cut_segment(program: Program) -> Program:
    """The first block's forward in two segments, the second of which reads an intermediate value of the first."""
    old = program.segment_by_name["block.forward"]
    types = old.types()
    middle = len(old.inputs) + 1  # after the transposed weight: the result of addmm
    kind = types[middle]
    assert kind is not None
    first = replace(old, name="block.first", nodes=old.nodes[:2], outputs=(middle,))
    # The second part: relu of the handed value, and the sum with the input.
    relu, add = old.nodes[2], old.nodes[3]
    ref = type(next(relu.refs()))
    second = Segment(
        name="block.second",
        inputs=(kind, old.inputs[0]),
        nodes=(
            replace(relu, args=(ref(0),)),
            replace(add, args=(ref(2), ref(1))),
        ),
        outputs=(3, 2),
    )
    buffer = Buffer(
        name="handed", dtype=kind.dtype, numel=kind.numel, space=Space.DEVICE, role=Role.ACTIVATION
    )
    sections: list[Section] = []
    for section in program.sections:
        body: list[Op] = []
        for op in section.body:
            if (
                isinstance(op, ops.Compute)
                and op.segment == "block.forward"
                and op.unit == "blocks.0"
            ):
                view = replace(
                    op.arguments[0].view, region=Region(buffer="handed", offset=0, numel=kind.numel)
                )
                body += [
                    ops.Alloc(buffer="handed", stream=COMPUTE),
                    replace(
                        op,
                        segment="block.first",
                        destinations=(ops.Destination(view=view),),
                        event=None,
                    ),
                    replace(
                        op,
                        segment="block.second",
                        arguments=(ops.Argument(view=view), op.arguments[0]),
                    ),
                    ops.Release(buffer="handed", stream=COMPUTE),
                ]
            else:
                body.append(op)
        sections.append(replace(section, body=tuple(body)))
    return replace(
        program,
        buffers=(*program.buffers, buffer),
        segments=(*program.segments, first, second),
        sections=tuple(sections),
    )


def test_a_segment_cut_in_two_computes_the_same() -> None:
    report = verify(with_cut_segment(CASE.scheduled), CASE.logical)
    assert report.is_valid, report.render()
