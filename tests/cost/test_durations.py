"""The durations of ops, compared with figures computed by hand."""

from __future__ import annotations

import pytest

from tests.cost.support import host_machine, machine
from tests.support.lowering import applied
from tests.support.pieces import SegmentBuilder, tensor
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.cost.durations import Durations, node_bytes, segment_cost
from zeroir.cost.wires import Wire, host_rates
from zeroir.ir import ops
from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import Node, Ref, Segment, TensorType
from zeroir.passes.manager import apply
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer


def product() -> Segment:
    """A view, a matrix product of 2·8·16·4 operations, and a cast of its 8 × 4 results."""
    builder = SegmentBuilder("s", [tensor(DType.F32, 8, 16), tensor(DType.F32, 4, 16)])
    made = builder.mm(Ref(0), builder.t(Ref(1)))
    return builder.build(builder.cast(made, DType.BF16))


def test_a_node_takes_the_longer_of_arithmetic_and_traffic_and_its_launch() -> None:
    flops, traffic, cast = 2 * 8 * 16 * 4, 4 * (8 * 16 + 16 * 4 + 8 * 4), (4 + 2) * 8 * 4
    slow = machine(flops_per_s=1e3, memory_bytes_per_s=1e6, launch_s=0.25)
    assert segment_cost(product(), slow).seconds == pytest.approx(
        flops / 1e3 + cast / 1e6 + 2 * 0.25
    )
    fast = machine(flops_per_s=1e9, memory_bytes_per_s=1e3, launch_s=0.25)
    assert segment_cost(product(), fast).seconds == pytest.approx(
        traffic / 1e3 + cast / 1e3 + 2 * 0.25
    )
    assert segment_cost(product(), fast).flops == {DType.F32: flops}


def test_a_measured_segment_takes_its_measured_time() -> None:
    measured = {product().digest(): {"seconds": 7.5, "source": "made up"}}
    cost = segment_cost(product(), machine(segments=measured))
    assert cost.seconds == 7.5
    assert cost.flops == segment_cost(product(), machine()).flops
    without_it = machine(segments={"another": {"seconds": 7.5, "source": "made up"}})
    assert segment_cost(product(), without_it) == segment_cost(product(), machine())


def test_an_expanded_operand_is_read_once_and_an_embedding_reads_its_rows() -> None:
    expanded = TensorType(dtype=DType.F32, shape=(100, 8), stride=(0, 1))
    out = tensor(DType.F32, 100, 8)
    add = Node(op="aten.add.Tensor", args=(Ref(0), Ref(0)), results=(out,))
    assert node_bytes(add, (expanded, out)) == 4 * (8 + 800)
    table, rows = tensor(DType.F32, 5000, 8), tensor(DType.I64, 2)
    picked = tensor(DType.F32, 2, 8)
    pick = Node(op="aten.embedding.default", args=(Ref(0), Ref(1)), results=(picked,))
    assert node_bytes(pick, (table, rows, picked)) == 64 + 16 + 64


def test_an_op_that_moves_elements_takes_the_time_of_their_bytes() -> None:
    """Adam reads and writes the gradient, which it divides, the parameter and two moments, each of 4 × 256 bytes."""
    program = mlp(blocks=1, dim=8, precision="fp32", optimizer="adam")
    of = machine(memory_bytes_per_s=1e6, launch_s=1.0)
    durations = Durations(program, of)
    step = next(op for op in program.ops() if isinstance(op, ops.OptimizerStep))
    scalars = 4 + 8 + 32 + 4  # step, lr, hyper, gradient divisor
    assert durations.seconds(step) == pytest.approx(1.0 + (8 * 1024 + scalars) / 1e6)


def test_states_of_8_bits_are_widened_and_rounded_by_kernels_of_their_own() -> None:
    """They are fewer bytes at rest, but take longer: 84 bytes an element of each, and 16 launches."""
    of = machine(memory_bytes_per_s=1e6, launch_s=1.0)
    seconds = {}
    for has_codes in (False, True):
        program = mlp(blocks=1, dim=8, optimizer="lion", has_codes=has_codes)
        step = next(op for op in program.ops() if isinstance(op, ops.OptimizerStep))
        seconds[has_codes] = Durations(program, of).seconds(step)
        scalars = 4 + 8 + 24 + 4  # step, lr, hyper, gradient divisor
        at_rest = 256 * (1 if has_codes else 4) + (4 if has_codes else 0)
        moved = 2 * (2 * 1024 + at_rest) + scalars
        extra = 84 * 256 / 1e6 + 16 if has_codes else 0.0
        assert seconds[has_codes] == pytest.approx(1.0 + moved / 1e6 + extra)


def test_a_hosts_compiled_code_rounds_states_of_8_bits_in_its_caches() -> None:
    """42 bytes an element of each state, where torch's operators read and write 84; in memory there are 2."""
    of = host_machine({"memory": 1e6, "core": 1e6})
    program = apply(OffloadOptimizer(), mlp(blocks=1, dim=8, optimizer="lion", has_codes=True))
    step = next(op for op in program.ops() if isinstance(op, ops.OptimizerStep))
    cost, rates = Durations(program, of).flow(step), host_rates(of, 1).bytes_per_s
    assert cost is not None
    in_memory, in_cores = (
        cost.demand_by_wire[wire] * cost.transfer_s * rates[wire]
        for wire in (Wire.HOST_MEMORY, Wire.CORES)
    )
    numel = step.param.local_numel(program.mesh)
    assert in_cores - in_memory == pytest.approx(42 * numel)
    at_rest = numel + 4 * (numel // 256)
    assert in_memory == pytest.approx(2 * (2 * 4 * numel + at_rest) + 4 + 8 + 24 + 4)


def test_accumulating_adds_a_kernel() -> None:
    """The second gradient of a tied weight is added to the first one: three times 48 elements of 4 bytes."""
    program = mlp(blocks=1, tied=True)
    backward = next(
        op for op in program.ops() if isinstance(op, ops.Compute) and op.segment == "pre.backward"
    )
    of = machine(memory_bytes_per_s=1e6, launch_s=1.0)
    alone = segment_cost(program.segment_by_name["pre.backward"], of).seconds
    assert Durations(program, of).seconds(backward) == pytest.approx(alone + 1.0 + 576e-6)


def test_every_op_has_a_duration() -> None:
    program = applied(
        mlp(blocks=2, precision="fp16", clip=1.0, micro_steps=2, tied=True), for_stage(3, 4)
    )
    durations = Durations(program, machine(memory_bytes_per_s=1e9))
    seen = set()
    for op in program.ops():
        if not isinstance(op, ops.Collective):
            assert durations.seconds(op) >= 0
            seen.add(type(op))
    assert {ops.Cast, ops.Fill, ops.GradNorm, ops.CheckFinite, ops.Decide} <= seen
    assert {ops.UpdateScale, ops.OptimizerStep, ops.Compute} <= seen
