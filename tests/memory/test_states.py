"""Bytes kept, sent and needed, against the ZeRO paper's formulas and by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.config import make_options
from zeroir.ir.analysis.effects import effects
from zeroir.ir.analysis.traffic import collective_bytes
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.ops import (
    AllGather,
    Alloc,
    AllReduce,
    Broadcast,
    Op,
    Pair,
    Prefetch,
    ReduceScatter,
    Release,
)
from zeroir.ir.program import Program, Section, State
from zeroir.memory.curve import peak
from zeroir.memory.states import model_state_bytes
from zeroir.passes.pipelines import for_options

MESH = Mesh(axes=(Axis(name="dp", size=4),))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_adam_keeps_sixteen_bytes_a_parameter(precision: str) -> None:
    program = mlp(precision=precision)
    padded = sum(flat.padded_numel for flat in program.flats)
    states = model_state_bytes(program)
    assert states == {
        "param": 2 * padded,
        "grad": 2 * padded,
        "master": 4 * padded,
        "state": 8 * padded,
    }
    assert sum(states.values()) == (2 + 2 + 12) * padded


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"), [("sgd", 0), ("momentum", 4), ("adam", 8), ("adamw", 8)]
)
def test_fp32_needs_no_master_weights(optimizer: str, per_parameter: int) -> None:
    program = mlp(optimizer=optimizer)
    padded = sum(flat.padded_numel for flat in program.flats)
    assert model_state_bytes(program) == {
        "param": 4 * padded,
        "grad": 4 * padded,
        "master": 0,
        "state": per_parameter * padded,
    }


def buffer(name: str, numel: int, dtype: DType = DType.F16, role: Role = Role.GRAD) -> Buffer:
    return Buffer(name=name, dtype=dtype, numel=numel, space=Space.DEVICE, role=role)


def program(ops: list[Op], *buffers: Buffer, section: str = "update") -> Program:
    return Program(mesh=MESH, buffers=buffers, sections=(Section(name=section, body=tuple(ops)),))


FULL, SHARD = buffer("full", 1024), buffer("shard", 256)
FLAG = buffer("flag", 1, DType.F32, Role.SCALAR)
SLICE = Region(buffer="full", offset=0, numel=1024, shard="dp")


def pair(source: Region, destination: Region) -> tuple[Pair, ...]:
    return (Pair(source=source, destination=destination),)


@pytest.mark.parametrize(
    ("op", "key"),
    [
        (AllGather(pairs=pair(whole(SHARD), whole(FULL)), comm="c", stream="s"), "all_gather"),
        (AllGather(pairs=pair(SLICE, whole(FULL)), comm="c", stream="s"), "all_gather"),
        (Prefetch(pairs=pair(whole(SHARD), whole(FULL)), comm="c", stream="s"), "all_gather"),
        (
            ReduceScatter(pairs=pair(whole(FULL), whole(SHARD)), comm="c", stream="s"),
            "reduce_scatter",
        ),
        (ReduceScatter(pairs=pair(whole(FULL), SLICE), comm="c", stream="s"), "reduce_scatter"),
        (AllReduce(pairs=pair(whole(FULL), whole(FULL)), comm="c", stream="s"), "all_reduce"),
        (Broadcast(pairs=pair(whole(FULL), whole(FULL)), comm="c", stream="s"), "broadcast"),
    ],
)
def test_a_collective_counts_its_full_buffer_once(op: Op, key: str) -> None:
    for section in ("last_micro_step", "update"):
        counted = collective_bytes(program([op], FULL, SHARD, section=section))
        assert counted[key] == 2 * 1024
        assert sum(counted.values()) == 2 * 1024
    assert sum(collective_bytes(program([op], FULL, SHARD, section="micro_step")).values()) == 0


def test_what_travels_counts_in_its_own_dtype() -> None:
    op = AllGather(
        pairs=pair(whole(SHARD), whole(FULL)), comm="c", stream="s", wire_dtype=DType.F32
    )
    assert collective_bytes(program([op], FULL, SHARD))["all_gather"] == 4 * 1024


def test_scalars_are_counted_apart_even_in_one_launch_with_others() -> None:
    pairs = pair(whole(FULL), whole(FULL)) + pair(whole(FLAG), whole(FLAG))
    counted = collective_bytes(program([AllReduce(pairs=pairs, comm="c", stream="s")], FULL, FLAG))
    assert {key: size for key, size in counted.items() if size} == {"all_reduce": 2048, "scalar": 4}


def test_the_peak_is_the_fullest_moment() -> None:
    a, b, c = buffer("a", 100), buffer("b", 50, role=Role.SAVED), buffer("c", 60, role=Role.SAVED)
    kept = dataclasses.replace(buffer("kept", 10, role=Role.PARAM), holds=NamedContent(name="kept"))
    host = dataclasses.replace(kept, name="host", space=Space.HOST)

    def alloc(name: str) -> Alloc:
        return Alloc(buffer=name, stream="compute")

    def release(name: str) -> Release:
        return Release(buffer=name, stream="compute")

    ops: list[Op] = [alloc("a"), alloc("b"), release("a"), alloc("c"), release("b"), release("c")]
    built = program(ops, a, b, c, kept, host)
    assert peak(built).role_bytes == {"grad": 200, "saved": 100, "param": 20}
    assert (peak(built).section, peak(built).index) == ("update", 1)
    assert peak(built).total_bytes == 320
    assert peak(built, space=Space.HOST).role_bytes == {"param": 20}

    section = Section(name="evaluate", entry=State(live=("a", "b", "c")), body=())
    carried = dataclasses.replace(built, sections=(*built.sections, section))
    assert (peak(carried).section, peak(carried).index) == ("evaluate", -1)
    assert peak(carried).total_bytes == 440


def walked(program: Program) -> int:
    """The peak by the slow way: the sum of what is live after every prefix of every section."""
    names = program.buffer_by_name
    best = 0
    for section in program.sections:
        for stop in range(len(section.body) + 1):
            live = {b.name for b in program.buffers if b.is_persistent} | set(section.entry.live)
            for op in section.body[:stop]:
                live |= set(effects(op).allocs)
                live -= set(effects(op).frees)
            device = [names[n].size_bytes for n in live if names[n].space is Space.DEVICE]
            best = max(best, sum(device))
    return best


@pytest.mark.parametrize("make", [mlp, lambda: mlp(precision="fp16", micro_steps=3, clip=1.0)])
def test_the_peak_agrees_with_a_walk_over_every_prefix(make: Callable[[], Program]) -> None:
    assert peak(make()).total_bytes == walked(make())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_stages_keep_and_send_what_the_zero_paper_says(stage: int, world_size: int) -> None:
    values = {"precision": "fp16", "optimizer": "adamw", "stage": stage, "world_size": world_size}
    options = make_options({**values, "elide": False})
    lowered = applied(mlp(precision="fp16"), for_options(options))
    psi = sum(flat.padded_numel for flat in lowered.flats)
    cuts = [world_size if stage >= needed else 1 for needed in (3, 2, 1, 1)]
    sizes = (2 * psi, 2 * psi, 4 * psi, 8 * psi)
    assert list(model_state_bytes(lowered).values()) == [
        size // cut for size, cut in zip(sizes, cuts, strict=True)
    ]
    sent = dict(collective_bytes(lowered))
    del sent["scalar"]
    # An all-reduce is a reduce-scatter and an all-gather, so it is sent twice.
    times = sum(sent.values()) + sent["all_reduce"]
    assert times == (3 if stage == 3 else 2) * 2 * psi
