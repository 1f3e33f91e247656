"""Released memory comes back when the program's waits allow it, and what is live is bounded by the program alone."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from tests.runtime.support import lowered
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.buffers import Region, Role
from zeroir.ir.mesh import HOST
from zeroir.ir.program import Program
from zeroir.passes import manager
from zeroir.passes.pipelines import for_stage
from zeroir.runtime.reuse import Clocks, Reuse, buffers_reused_in_order


def fill(stream: str, event: str | None = None) -> ops.Fill:
    region = Region(buffer="x", offset=0, numel=1)
    return ops.Fill(destination=region, value=0.0, stream=stream, event=event)


def test_a_stream_comes_after_what_it_waited_for_and_no_more() -> None:
    clocks = Clocks()
    for op in (fill("a", "0"), fill("a"), ops.Wait(waited="0", on="b"), fill("b", "1")):
        clocks.issue(op)
    assert clocks.is_after("b", {"a": 1})
    assert not clocks.is_after("b", {"a": 2})
    assert not clocks.is_after("c", {"a": 1})
    clocks.issue(ops.Wait(waited="1", on="c"))
    assert clocks.is_after("c", {"a": 1, "b": 1})  # what b waited for, c comes after, too


def test_a_wait_of_the_host_orders_every_stream() -> None:
    clocks = Clocks()
    clocks.issue(fill("a", "0"))
    clocks.issue(fill("b"))
    clocks.issue(ops.Wait(waited="0", on=HOST))
    assert clocks.is_after("b", {"a": 1})
    assert clocks.is_after("never seen", {"a": 1})


def test_a_joint_orders_all_but_what_crosses_it() -> None:
    clocks = Clocks()
    for op in (fill("a"), fill("a", "0"), fill("b")):
        clocks.issue(op)
    clocks.join(["0"])
    assert clocks.is_after("c", {"a": 1, "b": 1})
    assert not clocks.is_after("c", {"a": 2})
    clocks.join([])
    assert clocks.is_after("c", {"a": 2})


def test_what_is_kept_is_dropped_at_the_wait_that_allows_it() -> None:
    program = lowered(mlp(blocks=4), 3, 4)
    (name, *_) = sorted(buffers_reused_in_order(program))
    reuse, tensor = Reuse(program), torch.empty(8)
    reuse.issue(fill("compute", "0"))
    reuse.keep(name, tensor, "gather", "compute")
    alive = weakref.ref(tensor)
    del tensor
    reuse.issue(fill("compute", "1"))
    reuse.issue(ops.Wait(waited="1", on="reduce"))
    assert alive() is not None
    reuse.issue(ops.Wait(waited="0", on="gather"))
    assert alive() is None


def simulated(program: Program) -> tuple[int, int]:
    """Peaks of gathered bytes: those that the program has live, and with them those that wait to be used again."""
    reuse = Reuse(program)
    ordered = buffers_reused_in_order(program)
    live: dict[str, Tensor] = {}
    taken_on: dict[str, str] = {}
    most_live = most_allocated = 0
    for section in program.sections:
        reuse.join([])
        for op in section.body:
            match op:
                case ops.Alloc() if program.buffer_by_name[op.buffer].role is Role.GATHERED:
                    live[op.buffer] = torch.empty(program.buffer_by_name[op.buffer].numel)
                    taken_on[op.buffer] = op.stream
                case ops.Release() if op.buffer in live:
                    tensor = live.pop(op.buffer)
                    if op.buffer in ordered:
                        reuse.keep(op.buffer, tensor, taken_on[op.buffer], op.stream)
                case _:
                    pass
            reuse.issue(op)
            live_bytes = sum(tensor.nbytes for tensor in live.values())
            most_live = max(most_live, live_bytes)
            most_allocated = max(most_allocated, live_bytes + reuse.kept_bytes)
        reuse.join([])
        assert reuse.kept_bytes == 0
    return most_live, most_allocated


@pytest.mark.parametrize("distance", [0, 1, 2])
def test_gathered_memory_is_what_the_program_has_live(distance: int) -> None:
    """However far the host runs ahead: it is all issued here before anything could run."""
    logical = mlp(blocks=12, dim=32)
    program = manager.run(logical, for_stage(3, 4, distance=distance))
    live, allocated = simulated(program)
    unit = max(b.size_bytes for b in program.buffers if b.role is Role.GATHERED)
    assert live == allocated == (distance + 1) * unit


def test_parameters_and_gradients_are_reused_in_order_at_stage_3() -> None:
    """Those whose release something waits for: the bounds on gathers and on full gradients see to it."""
    program = lowered(mlp(blocks=4), 3, 4)
    bounded = {
        b.name
        for b in program.buffers
        if b.role is Role.GATHERED or (b.role is Role.GRAD and not b.is_persistent)
    }
    inner = {name for name in bounded if name.startswith("blocks") and name != "blocks.0.grad_full"}
    assert {"blocks.1.full", "blocks.1.grad_full"} <= inner
    assert inner <= buffers_reused_in_order(program) <= bounded
