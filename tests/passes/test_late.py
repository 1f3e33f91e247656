"""Allocs move down past what nobody can tell them from: lives meet less, and all else stays as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.support import machine
from tests.passes.happens import before
from tests.passes.strategies import Case, cases
from tests.support.examples import examples
from tests.support.programs import mlp
from tests.support.schedules import Case as Schedule
from tests.support.schedules import is_same, run
from zeroir.cost.simulate import simulate
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.dtypes import DType
from zeroir.ir.memory.lifetimes import Lifetimes
from zeroir.ir.memory.most_live import MostLive, most_live
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, Program, Section
from zeroir.ir.verify import verify
from zeroir.passes.late import allocate_late
from zeroir.passes.pipelines import for_stage

MACHINE = machine(memory_bytes_per_s=1e9, node_bytes_per_s=1e8, node_latency_s=1e-6)
ALL_IN_ONE = 1 << 20


def others(program: Program) -> list[list[Op]]:
    return [
        [op for op in section.body if not isinstance(op, ops.Alloc)] for section in program.sections
    ]


def most(program: Program) -> MostLive:
    found = Lifetimes.of(program)
    sizes = [program.buffer_by_name[name].size_bytes for name in found.buffers]
    return most_live(found, range(len(sizes)), sizes)


def over(section: Section) -> dict[tuple[str, int], set[tuple[str, int]]]:
    """For each life, by its buffer and its number among that buffer's, those that are over when it begins."""
    masks = before(section.body)
    counts: dict[tuple[type[Op], str], int] = {}
    ends: dict[tuple[str, int], int] = {}
    found: dict[tuple[str, int], set[tuple[str, int]]] = {}
    for index, op in enumerate(section.body):
        if isinstance(op, ops.Alloc | ops.Release):
            number = counts[type(op), op.buffer] = counts.get((type(op), op.buffer), 0) + 1
            if isinstance(op, ops.Release):
                ends[op.buffer, number] = index
            else:
                mask = masks[index]
                found[op.buffer, number] = {life for life, end in ends.items() if mask >> end & 1}
    return found


@given(cases(stages=(2, 3)), st.sampled_from([0, ALL_IN_ONE]))
@examples(12)
def test_nothing_but_allocs_moves_and_no_life_meets_more(case: Case, bucket: int) -> None:
    program = replace(case, bucket=bucket).scheduled()
    after = allocate_late(program)
    assert others(after) == others(program)
    assert allocate_late(after) == after
    assert verify(after).is_valid
    assert simulate(after, MACHINE).step_ns == simulate(program, MACHINE).step_ns
    assert most(after).size_bytes <= most(program).bound_bytes
    for old, new in zip(program.sections, after.sections, strict=True):
        known = over(new)
        assert all(known[life] >= lives for life, lives in over(old).items())


@pytest.mark.parametrize("stage", [2, 3])
def test_the_numbers_stay_to_the_bit(stage: int) -> None:
    program = Schedule(stage=stage, micro_steps=2, bucket=ALL_IN_ONE).scheduled
    after = allocate_late(program)
    assert after != program
    for seed in range(3):
        assert is_same(run(after, schedule_seed=seed), run(program))


def test_a_shard_of_merged_gradients_meets_nothing_of_the_backward() -> None:
    """It is needed only when all is reduced, however early the gradient that it is a shard of was to be reduced."""
    program = mlp(blocks=4, dim=8, batch=256, micro_steps=2)
    for step in for_stage(2, 3, bucket=ALL_IN_ONE):
        program = step(program)
    shards = sum(b.size_bytes for b in program.buffers if b.name.endswith(".grad"))
    assert most(allocate_late(program)).size_bytes == most(program).size_bytes - shards > 0


def fill(name: str, stream: str, event: str | None = None) -> Op:
    region = Region(buffer=name, offset=0, numel=8)
    return ops.Fill(destination=region, value=0.0, stream=stream, event=event)


def lowered(*body: Op) -> list[str]:
    """What the ops allocate or fill after the allocs have moved."""
    buffers = tuple(
        Buffer(name=name, dtype=DType.F32, numel=8, space=Space.DEVICE, role=Role.ACTIVATION)
        for name in "abc"
    )
    program = Program(
        mesh=Mesh(axes=(Axis(name="dp", size=2),)),
        buffers=buffers,
        sections=(Section(name=LAST_MICRO_STEP, body=body),),
    )
    found = []
    for op in allocate_late(program).sections[0].body:
        match op:
            case ops.Alloc():
                found.append(f"alloc {op.buffer}")
            case ops.Fill():
                found.append(f"fill {op.destination.buffer}")
            case ops.Release():
                found.append(f"release {op.buffer}")
            case ops.Wait():
                found.append("wait")
            case _:
                pass
    return found


def alloc(name: str, event: str | None = None) -> Op:
    return ops.Alloc(buffer=name, stream="compute", event=event)


def test_where_an_alloc_may_go() -> None:
    wait = ops.Wait(waited="r", on="compute")
    use = fill("a", "compute")
    signal, other = fill("b", "compute", event="b"), fill("c", "reduce", event="r")
    # Past waits, ops of other streams, and ops of its own that signal nothing.
    assert lowered(alloc("a"), other, wait, fill("b", "compute"), use)[-2:] == ["alloc a", "fill a"]
    # Not past an op that signals.
    assert lowered(alloc("a"), other, signal, wait, use) == [
        *("fill c", "alloc a", "fill b", "wait", "fill a")
    ]
    # Not where the alloc itself signals, and not where another stream touches its buffer first.
    for stays in ([alloc("a", event="a"), wait, use], [alloc("a"), wait, fill("a", "reduce")]):
        assert lowered(*stays) == ["alloc a", "wait", "fill a"]
    # Not past the end of a life that nobody uses, and not out of a section that leaves it live.
    release = ops.Release(buffer="a", stream="compute")
    assert lowered(alloc("a"), wait, release) == ["wait", "alloc a", "release a"]
    assert lowered(alloc("a"), wait) == ["alloc a", "wait"]
    # Of several the order stays.
    both = fill("b", "compute"), fill("a", "compute")
    assert lowered(alloc("b"), alloc("a"), wait, *both)[:3] == ["wait", "alloc b", "fill b"]
