"""The abstract memory never claims what some rank's memory does not hold."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.verify.domain import (
    ZERO,
    Elements,
    NamedKey,
    Slice,
    Split,
    Value,
    Zero,
    mapped,
    pack,
    spread,
    unpack,
)
from zeroir.ir.verify.intervals import IntervalMap
from zeroir.ir.verify.memory import Memory

NUMEL = 12
NAMES = ("a", "b", "c")
Token = tuple[str, int] | int | None
"""An element of a named content, a number, or nothing known."""


def value_at(value: Value, position: int, rank: int, ranks: int) -> Token:
    """What the value says of one element on one rank."""
    match value:
        case Zero():
            return 0
        case Elements(key=NamedKey(name=name)):
            return name, position + value.shift + sum(s * rank for _, s in value.strides)
        case Slice():
            index = position + value.shift + sum(s * rank for _, s in value.strides)
            for a, b, inner in value.array:
                if a <= index < b:
                    return value_at(inner, index, rank, ranks)
            return None
        case Split():
            numel = (value.stop - value.start) // ranks
            local = position - value.start - rank * numel
            if 0 <= local < numel:
                return value_at(value.own, local, rank, ranks)
            for a, b, inner in value.rest:
                if a <= position - value.start < b:
                    return value_at(inner, position - value.start, rank, ranks)
            return None
        case _:
            return None


@dataclass(frozen=True)
class Copy:
    source: Region
    destination: Region


@dataclass(frozen=True)
class Put:
    destination: Region
    name: str


@dataclass(frozen=True)
class Clear:
    destination: Region


@dataclass(frozen=True)
class Gather:
    source: Region
    destination: Region


Step = Copy | Put | Clear | Gather


@st.composite
def regions(draw: st.DrawFn, ranks: int, numel: int | None = None) -> Region:
    """A region with that many local elements, cut or not."""
    is_cut = draw(st.booleans())
    local = draw(st.integers(1, NUMEL // ranks)) if numel is None else numel
    if numel is not None and numel * ranks > NUMEL:
        is_cut = False
    total = local * ranks if is_cut else local
    offset = draw(st.integers(0, NUMEL - total))
    return Region(
        buffer=draw(st.sampled_from(NAMES)),
        offset=offset,
        numel=total,
        shard="dp" if is_cut else None,
    )


@st.composite
def programs(draw: st.DrawFn) -> tuple[int, list[Step]]:
    ranks = draw(st.integers(2, 3))
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 10))):
        region = draw(regions(ranks))
        local = region.numel // ranks if region.shard else region.numel
        match draw(st.integers(0, 3)):
            case 0:
                steps.append(Copy(region, draw(regions(ranks, local))))
            case 1:
                steps.append(Put(region, draw(st.sampled_from("xyz"))))
            case 2:
                steps.append(Clear(region))
            case _:
                offset = draw(st.integers(0, NUMEL - local * ranks))
                name = draw(st.sampled_from(NAMES))
                steps.append(
                    Gather(region, Region(buffer=name, offset=offset, numel=local * ranks))
                )
    return ranks, steps


@given(programs())
def test_what_the_abstract_memory_claims_every_rank_holds(case: tuple[int, list[Step]]) -> None:
    ranks, steps = case
    mesh = Mesh(axes=(Axis(name="dp", size=ranks),))
    buffers = {
        name: Buffer(name=name, dtype=DType.F32, numel=NUMEL, space=Space.DEVICE, role=Role.STAGING)
        for name in NAMES
    }
    memory = Memory(buffers, mesh)
    real: list[dict[str, list[Token]]] = [{n: [None] * NUMEL for n in NAMES} for _ in range(ranks)]

    def bounds(region: Region, rank: int) -> tuple[int, int]:
        return region.local_range(mesh, {"dp": rank})

    def take(region: Region, rank: int) -> list[Token]:
        start, stop = bounds(region, rank)
        return real[rank][region.buffer][start:stop]

    def give(region: Region, rank: int, values: list[Token]) -> None:
        start, stop = bounds(region, rank)
        real[rank][region.buffer][start:stop] = values

    for step in steps:
        match step:
            case Copy():
                memory.write(step.destination, memory.read(step.source))
                taken = [take(step.source, rank) for rank in range(ranks)]
                for rank in range(ranks):
                    give(step.destination, rank, taken[rank])
            case Put():
                numel = memory.numel(step.destination)
                memory.write(step.destination, [(0, numel, Elements(NamedKey(step.name, 0)))])
                for rank in range(ranks):
                    give(step.destination, rank, [(step.name, i) for i in range(numel)])
            case Clear():
                memory.write(step.destination, [(0, memory.numel(step.destination), ZERO)])
                for rank in range(ranks):
                    give(step.destination, rank, [0] * memory.numel(step.destination))
            case Gather():
                numel = memory.numel(step.source)
                memory.write(
                    step.destination, spread(memory.read(step.source), "dp", ranks, numel, numel)
                )
                total = [token for rank in range(ranks) for token in take(step.source, rank)]
                for rank in range(ranks):
                    give(step.destination, rank, total)

    for name, buffer in buffers.items():
        for a, b, value in memory.read(Region(buffer=name, offset=0, numel=buffer.numel)):
            for rank in range(ranks):
                for position in range(a, b):
                    claimed = value_at(value, position, rank, ranks)
                    assert claimed is None or claimed == real[rank][name][position]


def test_gathered_slices_are_the_whole_again() -> None:
    """What stage 1 does: step the own slice, gather it, and every element is new."""
    mesh = Mesh(axes=(Axis(name="dp", size=4),))
    buffer = Buffer(name="p", dtype=DType.F32, numel=64, space=Space.DEVICE, role=Role.PARAM)
    memory = Memory({"p": buffer}, mesh)
    whole = Region(buffer="p", offset=0, numel=64)
    own = Region(buffer="p", offset=0, numel=64, shard="dp")
    memory.write(whole, [(0, 64, Elements(NamedKey("old", 0)))])
    ((_, _, mine),) = memory.read(own)
    assert mine == Elements(NamedKey("old", 0), 0, (("dp", 16),))
    new = mapped(mine, lambda _: Elements(NamedKey("new", 0), 0, (("dp", 16),)))
    memory.write(own, [(0, 16, new)])
    assert isinstance(pack(memory.read(whole)), Split)
    memory.write(whole, spread(memory.read(own), "dp", 4, 16, 16))
    assert pack(memory.read(whole)) == Elements(NamedKey("new", 0))


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 2)), max_size=30),
    st.integers(0, 20),
    st.integers(0, 20),
)
def test_an_interval_map_is_an_array(
    writes: list[tuple[int, int, int]], low: int, high: int
) -> None:
    kept, array = IntervalMap(20, 0), [0] * 20
    for a, b, value in writes:
        start, stop = min(a, b), max(a, b)
        kept.write(start, stop, value)
        array[start:stop] = [value] * (stop - start)
    start, stop = min(low, high), max(low, high)
    pieces = kept.read(start, stop)
    assert [v for a, b, v in pieces for _ in range(a, b)] == array[start:stop]
    assert [a for a, _, _ in pieces[1:]] == [b for _, b, _ in pieces[:-1]]
    every = kept.read(0, 20)
    assert all(left[2] != right[2] for left, right in pairwise(every))


def test_packing_and_unpacking_are_inverse() -> None:
    pieces: list[tuple[int, int, Value]] = [(0, 3, ZERO), (3, 8, Elements(NamedKey("x", 0), 2))]
    assert unpack(pack(pieces), 8) == pieces
