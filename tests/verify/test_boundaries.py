"""Valid programs with two mesh axes, with data that leaves the device and returns, and with changed segments."""

from dataclasses import replace

import pytest

from tests.support.edits import mapped, with_body, with_buffers, without_ops
from tests.support.lowering import codes
from tests.support.schedules import Case
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import FlatContent, Micro
from zeroir.ir.mesh import COMPUTE, Axis, Communicator, Mesh
from zeroir.ir.ops import Op, Pair
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program, Section, State
from zeroir.ir.segments.segment import Segment

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
    assert codes(*hybrid(clip=clip)) == set()


def test_communicators_over_different_axes_need_an_order() -> None:
    case = Case(stage=3, precision="bf16")
    assert codes(on_two_axes(case.scheduled)) == {"Z202"}


def test_a_gradient_summed_over_one_of_two_axes_is_found() -> None:
    def is_dropped(op: Op) -> bool:
        return isinstance(op, ops.AllReduce) and op.pairs[0].source.buffer == "root.pre.grad"

    program = without_ops(hybrid()[0], is_dropped)
    signalled = {getattr(op, "event", None) for op in program.ops()}
    assert "Z404" in codes(
        without_ops(program, lambda op: isinstance(op, ops.Wait) and op.waited not in signalled)
    )


# ------------------------------------------------------------------------------------------------------ transfers


def offloaded(program: Program, *, comes_back: bool = True) -> Program:
    """The first activation is in host memory until the backward."""
    source = program.buffer_by_name["h.0"]
    host = Buffer(
        name="h.0.host", dtype=source.dtype, numel=source.numel, space=Space.HOST, role=Role.SAVED
    )
    body = list(program.section_by_name[LAST_MICRO_STEP].body)
    first, second, *_ = (
        i
        for i, op in enumerate(body)
        if isinstance(op, ops.Compute) and any(a.view.region.buffer == "h.0" for a in op.arguments)
    )
    there, here = whole(host), whole(source)
    back: list[Op] = [
        ops.Alloc(buffer="h.0", stream=COMPUTE),
        ops.ToDevice(source=there, destination=here, stream=COMPUTE),
        ops.Release(buffer="h.0.host", stream=COMPUTE),
    ]
    body[second:second] = back if comes_back else [back[0], back[2]]
    body[first + 1 : first + 1] = [
        ops.Alloc(buffer="h.0.host", stream=COMPUTE),
        ops.ToHost(source=here, destination=there, stream=COMPUTE),
        ops.Release(buffer="h.0", stream=COMPUTE),
    ]
    return with_body(with_buffers(program, host), LAST_MICRO_STEP, body)


def test_what_comes_back_from_the_host_is_what_went() -> None:
    assert codes(offloaded(CASE.scheduled), CASE.logical) == set()


def test_what_does_not_come_back_is_missed() -> None:
    assert codes(offloaded(CASE.scheduled, comes_back=False)) == {"Z103"}


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
        nodes=(replace(relu, args=(ref(0),)), replace(add, args=(ref(2), ref(1)))),
        outputs=(3, 2),
    )
    buffer = Buffer(
        name="handed", dtype=kind.dtype, numel=kind.numel, space=Space.DEVICE, role=Role.ACTIVATION
    )

    def cut(op: Op) -> tuple[Op, ...]:
        is_whole = isinstance(op, ops.Compute) and op.segment == "block.forward"
        if not (is_whole and isinstance(op, ops.Compute) and op.unit == "blocks.0"):
            return (op,)
        region = Region(buffer="handed", offset=0, numel=kind.numel)
        view = replace(op.arguments[0].view, region=region)
        to = (ops.Destination(view=view),)
        read = (ops.Argument(view=view), op.arguments[0])
        return (
            ops.Alloc(buffer="handed", stream=COMPUTE),
            replace(op, segment="block.first", destinations=to, event=None),
            replace(op, segment="block.second", arguments=read),
            ops.Release(buffer="handed", stream=COMPUTE),
        )

    program = replace(program, segments=(*program.segments, first, second))
    return mapped(with_buffers(program, buffer), cut)


def test_a_segment_cut_in_two_computes_the_same() -> None:
    assert codes(with_cut_segment(CASE.scheduled), CASE.logical) == set()
