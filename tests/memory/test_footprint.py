"""What a rank's device must hold, when it is fullest, and which line of the model is to blame."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.buffers import Space
from zeroir.ir.text import parse
from zeroir.memory.curve import live_bytes, peak
from zeroir.memory.footprint import WORKSPACE, footprint
from zeroir.memory.placement import place_all, unplaced
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.workspace.op_scratch import SCALAR_BYTES, scratch_bytes

TEXT = """zeroir 1
mesh dp=1
streams compute:device gather:device
buffer %x : f32[64] device input = value x
buffer %a : f32[256] device activation
buffer %b : f32[128] device gathered
input x : f32[64] -> %x

segment @double($0: f32[64]) workspace eager=96 {
  $1 = aten.mul.Tensor($0, $0) : f32[64]  at "model.py:3"
  return ($1)
}

section evaluate {
  alloc %a  stream=compute
  !0 = compute @double(%x) -> (%a[0:64])  unit=u stream=compute
  release %a  stream=compute
  alloc %b  stream=gather
  release %b  stream=gather
}
"""


def test_streams_that_no_wait_orders_count_together() -> None:
    found = footprint(parse(TEXT))
    assert found.fullest.role_bytes == {
        "activation": 1024,
        "gathered": 512,
        "input": 256,
        WORKSPACE: 96,
    }
    assert found.fullest.is_exact
    assert (found.resting_bytes, found.arena_bytes, found.scratch_bytes) == (256, 1536, 96)
    assert found.total_bytes == found.fullest.live_bytes == 1888


def test_what_a_wait_orders_counts_apart_and_the_line_of_the_model_is_named() -> None:
    ordered = TEXT.replace("  alloc %b", "  wait !0  on=gather\n  alloc %b")
    found = footprint(parse(ordered))
    assert found.fullest.role_bytes == {"activation": 1024, "gathered": 512, "input": 256}
    after = ordered.replace("  release %a", "  !1 = release %a").replace("wait !0", "wait !1")
    found = footprint(parse(after))
    assert found.fullest.role_bytes == {"activation": 1024, "input": 256, WORKSPACE: 96}
    assert (found.fullest.section, found.fullest.index) == ("evaluate", 1)
    assert (found.fullest.unit, found.fullest.source) == ("u", "model.py:3")
    assert found.arena_bytes == 1024


def test_each_space_counts_its_own_buffers_and_the_scratch_of_its_own_ops() -> None:
    streams = "streams compute:device gather:device optimizer:host\n"
    with_host = (
        TEXT.replace("streams compute:device gather:device\n", streams)
        .replace(
            "input x",
            "buffer %s : f32[64] host state = zeros\nbuffer %t : f32[1] host staging\ninput x",
        )
        .replace(
            "  release %b  stream=gather\n",
            """  release %b  stream=gather
  alloc %t  stream=optimizer
  fill %t = 2.0  stream=optimizer
  scale %t by %t  stream=optimizer
  release %t  stream=optimizer
""",
        )
    )
    program = parse(with_host)
    device, host = (footprint(program, space=space) for space in (Space.DEVICE, Space.HOST))
    assert device == footprint(parse(TEXT))
    assert (host.resting_bytes, host.arena_bytes, host.scratch_bytes) == (256, 4096, SCALAR_BYTES)
    assert host.fullest.role_bytes == {"state": 256, WORKSPACE: SCALAR_BYTES, "staging": 4}
    (section,) = program.sections
    assert max(live_bytes(program, section, space=Space.HOST).workspace) == SCALAR_BYTES
    assert max(live_bytes(program, section).workspace) == 96


@pytest.mark.parametrize("stage", range(4))
def test_it_bounds_what_program_order_shows(stage: int) -> None:
    program = applied(mlp(blocks=3), for_stage(stage, 2))
    found = footprint(program)
    assert peak(program).total_bytes <= found.fullest.live_bytes <= found.fullest.bound_bytes
    (placement,) = place_all(program).values()
    assert found.arena_bytes == placement.size_bytes
    assert found == footprint(PlanMemory()(program))
    least = footprint(program, place=unplaced)
    assert replace(least, arena_bytes=found.arena_bytes) == found
    assert least.arena_bytes == placement.live_bytes


def test_scratch_memory_is_where_its_op_works() -> None:
    """Lion steps chunk by chunk in scratch memory: on the device, or on the host where that updates."""
    passes = for_stage(2, 2)
    on_device = applied(mlp(optimizer="lion"), passes)
    on_host = applied(mlp(optimizer="lion"), (*passes, OffloadOptimizer()))
    (step, *_) = (op for op in on_host.ops() if isinstance(op, ops.OptimizerStep))
    step_bytes = scratch_bytes(on_host, step)
    assert step_bytes > 0
    assert scratch_bytes(on_host, step, space=Space.HOST) == step_bytes
    assert scratch_bytes(on_host, step, space=Space.DEVICE) == 0
    assert footprint(on_device, space=Space.HOST, kernels="none").scratch_bytes == 0
    assert footprint(on_host, space=Space.HOST, kernels="none").scratch_bytes == step_bytes
    assert footprint(on_device, kernels="none").scratch_bytes >= step_bytes
    assert footprint(on_host, kernels="none").scratch_bytes < step_bytes
