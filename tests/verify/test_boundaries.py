"""Valid programs with data that leaves the device and returns, and with changed segments."""

from dataclasses import replace

from tests.support.edits import mapped, with_body, with_buffers
from tests.support.lowering import codes
from tests.support.schedules import Case
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, Program
from zeroir.ir.segments.segment import Segment

CASE = Case(stage=3, precision="bf16")


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
