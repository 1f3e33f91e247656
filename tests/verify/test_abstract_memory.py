"""The abstract memory describes correctly what every rank's memory holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.programs import mlp
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import Axis, Mesh
from zeroir.verify.interpreter.abstract_memory import AbstractMemory
from zeroir.verify.interpreter.domain import (
    ZERO,
    Elements,
    NamedKey,
    Slice,
    Split,
    Value,
    Zero,
    at_coordinate,
    mapped,
    pack,
    spread,
    unpack,
)
from zeroir.verify.interpreter.flat_layout import FlatLayout
from zeroir.verify.interpreter.intervals import IntervalMap

NUMEL = 12
NAMES = ("a", "b", "c")
Token = tuple[str, int] | int | None
"""An element of a named content, a number, or an unknown value."""
Point = Mapping[str, int]


def value_at(value: Value, position: int, point: Point, mesh: Mesh) -> Token:
    """The element that the value describes at one position on one rank."""

    def index(of: Elements | Slice) -> int:
        return position + of.shift + sum(step * point[axis] for axis, step in of.strides)

    match value:
        case Zero():
            return 0
        case Elements(key=NamedKey(name=name)):
            return name, index(value)
        case Slice():
            for a, b, inner in value.array:
                if a <= index(value) < b:
                    return value_at(inner, index(value), point, mesh)
            return None
        case Split():
            numel = (value.stop - value.start) // mesh.size(value.axis)
            local = position - value.start - point[value.axis] * numel
            if 0 <= local < numel:
                return value_at(value.own, local, point, mesh)
            for a, b, inner in value.rest:
                if a <= position - value.start < b:
                    return value_at(inner, position - value.start, point, mesh)
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
    axis: str = "dp"


@dataclass(frozen=True)
class Broadcast:
    source: Region
    destination: Region
    axis: str
    root: int


Step = Copy | Put | Clear | Gather | Broadcast


def mesh_of(sizes: Sequence[int]) -> Mesh:
    names = ("dp", "replicate")
    return Mesh(axes=tuple(Axis(name=n, size=s) for n, s in zip(names, sizes, strict=False)))


@st.composite
def regions(draw: st.DrawFn, mesh: Mesh, numel: int | None = None) -> Region:
    """A region with ``numel`` local elements, sliced or not, or a part of such a region."""
    if draw(st.integers(0, 3)) == 0:
        around = draw(regions(mesh))
        most = around.local_numel(mesh)
        wanted = draw(st.integers(1, most)) if numel is None else numel
        if around.part is None and wanted <= most:
            start = draw(st.integers(0, most - wanted))
            return replace(around, part=(start, start + wanted))
    axis = draw(st.sampled_from([None, *(axis.name for axis in mesh.axes)]))
    size = 1 if axis is None else mesh.size(axis)
    local = draw(st.integers(1, NUMEL // size)) if numel is None else numel
    if local * size > NUMEL:
        axis, size = None, 1
    offset = draw(st.integers(0, NUMEL - local * size))
    return Region(
        buffer=draw(st.sampled_from(NAMES)), offset=offset, numel=local * size, shard=axis
    )


@st.composite
def programs(draw: st.DrawFn) -> tuple[Mesh, list[Step]]:
    mesh = mesh_of(draw(st.sampled_from([(2,), (3,), (2, 2), (3, 2)])))
    steps: list[Step] = []
    for _ in range(draw(st.integers(1, 10))):
        region = draw(regions(mesh))
        local = region.local_numel(mesh)
        axis = draw(st.sampled_from(mesh.axes))
        match draw(st.integers(0, 4)):
            case 0:
                steps.append(Copy(region, draw(regions(mesh, local))))
            case 1:
                steps.append(Put(region, draw(st.sampled_from("xyz"))))
            case 2:
                steps.append(Clear(region))
            case 3:
                root = draw(st.integers(0, axis.size - 1))
                steps.append(Broadcast(region, draw(regions(mesh, local)), axis.name, root))
            case _ if local * axis.size <= NUMEL:
                offset = draw(st.integers(0, NUMEL - local * axis.size))
                whole = Region(
                    buffer=draw(st.sampled_from(NAMES)), offset=offset, numel=local * axis.size
                )
                steps.append(Gather(region, whole, axis.name))
            case _:
                pass
    return mesh, steps


def _region(name: str, start: int, stop: int, shard: str | None = None) -> Region:
    return Region(buffer=name, offset=start, numel=stop - start, shard=shard)


# What stands in the slice of a slice is itself another thing on every rank: of a's own slice in b[2], which is zero on
# rank 0 alone, the gather takes rank 1's.
GATHERED_SLICE_OF_A_SLICE = (
    mesh_of((2,)),
    [
        Clear(_region("a", 0, 1)),
        Copy(_region("a", 0, 2, "dp"), _region("b", 2, 3)),
        Gather(_region("b", 1, 3, "dp"), _region("a", 0, 2)),
    ],
)
# The same with a broadcast, which takes root's slice to all.
BROADCAST_SLICE_OF_A_SLICE = (
    mesh_of((2, 2)),
    [
        Clear(_region("a", 0, 1)),
        Put(_region("a", 1, 2), "x"),
        Copy(_region("a", 0, 2, "replicate"), _region("c", 0, 1)),
        Broadcast(_region("c", 0, 2, "dp"), _region("a", 0, 1), "replicate", 0),
    ],
)


@examples(250)
@example(GATHERED_SLICE_OF_A_SLICE)
@example(BROADCAST_SLICE_OF_A_SLICE)
@given(programs())
def test_what_the_abstract_memory_claims_every_rank_holds(case: tuple[Mesh, list[Step]]) -> None:
    check_claims(*case)


@pytest.mark.slow
@examples(1000)
@given(programs())
def test_what_the_abstract_memory_claims_holds_for_many(case: tuple[Mesh, list[Step]]) -> None:
    check_claims(*case)


def check_claims(mesh: Mesh, steps: list[Step]) -> None:
    """Compare the abstract memory with real ranks that run the same steps."""
    buffers = {
        name: Buffer(name=name, dtype=DType.F32, numel=NUMEL, space=Space.DEVICE, role=Role.STAGING)
        for name in NAMES
    }
    memory = AbstractMemory(buffers, mesh)
    points = list(mesh.coordinates())
    real: list[dict[str, list[Token]]] = [{n: [None] * NUMEL for n in NAMES} for _ in points]

    def take(region: Region, rank: int) -> list[Token]:
        start, stop = region.local_range(mesh, points[rank])
        return real[rank][region.buffer][start:stop]

    def give(region: Region, rank: int, values: list[Token]) -> None:
        start, stop = region.local_range(mesh, points[rank])
        real[rank][region.buffer][start:stop] = values

    for step in steps:
        given: list[list[Token]] = [[]] * len(points)
        match step:
            case Copy():
                memory.write(step.destination, memory.read(step.source))
                given = [take(step.source, rank) for rank in range(len(points))]
            case Put():
                numel = memory.numel(step.destination)
                memory.write(step.destination, [(0, numel, Elements(NamedKey(step.name, 0)))])
                given = [[(step.name, i) for i in range(numel)] for _ in points]
            case Clear():
                numel = memory.numel(step.destination)
                memory.write(step.destination, [(0, numel, ZERO)])
                given = [[0] * numel for _ in points]
            case Gather():
                numel, size = memory.numel(step.source), mesh.size(step.axis)
                pieces = spread(memory.read(step.source), step.axis, size, numel, numel)
                memory.write(step.destination, pieces)
                for group in mesh.groups(step.axis):
                    total = [token for rank in group for token in take(step.source, rank)]
                    for rank in group:
                        given[rank] = total
            case Broadcast():
                read = memory.read(step.source)
                memory.write(
                    step.destination,
                    [(a, b, at_coordinate(v, step.axis, step.root)) for a, b, v in read],
                )
                for group in mesh.groups(step.axis):
                    for rank in group:
                        given[rank] = take(step.source, group[step.root])
        for rank, values in enumerate(given):
            give(step.destination, rank, values)

    for name, buffer in buffers.items():
        for a, b, value in memory.read(Region(buffer=name, offset=0, numel=buffer.numel)):
            for rank, point in enumerate(points):
                for position in range(a, b):
                    claimed = value_at(value, position, point, mesh)
                    assert claimed is None or claimed == real[rank][name][position]


def test_gathered_slices_are_the_whole_again() -> None:
    """As at stage 1: after each rank updates its own slice and gathers the others, every element is new."""
    mesh = Mesh(axes=(Axis(name="dp", size=4),))
    buffer = Buffer(name="p", dtype=DType.F32, numel=64, space=Space.DEVICE, role=Role.PARAM)
    memory = AbstractMemory({"p": buffer}, mesh)
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


def test_no_element_outside_a_flat_goes_unexamined() -> None:
    program = mlp(blocks=1)
    flat = program.flats[0]
    layout = FlatLayout(program)
    (*_, last) = layout.cuts(flat.name)
    stop = flat.padded_numel
    assert layout.between(flat.name, stop, stop + 1) == [(stop, stop + 1, last[2])]
    assert layout.between(flat.name, -1, 0) == [(-1, 0, last[2])]
    assert layout.between(flat.name, stop - 1, stop + 1) == [(stop - 1, stop, last[2])]


def test_packing_and_unpacking_are_inverse() -> None:
    pieces: list[tuple[int, int, Value]] = [(0, 3, ZERO), (3, 8, Elements(NamedKey("x", 0), 2))]
    assert unpack(pack(pieces), 8) == pieces
