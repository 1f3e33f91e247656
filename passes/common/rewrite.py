"""Shared rewriting of programs: change the regions of ops, insert ops, find the contents of buffers.

All functions return new values; programs are never changed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import networkx

from zeroir.errors import InternalError
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Buffer, Region, Role, View
from zeroir.ir.contents import PARAM, FlatContent, Micro
from zeroir.ir.mesh import STREAMS, Stream
from zeroir.ir.op_fields import op_fields, operands
from zeroir.ir.ops import Op
from zeroir.ir.optimizers.catalogue import OWN_STATES
from zeroir.ir.optimizers.forms import block_numel
from zeroir.ir.program import Flat, Holding, Program, Section, State

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")
Change = Callable[[Region], Region]


# -------------------------------------------------------------------------------------------------------- regions


def map_regions(op: Op, change: Change) -> Op:
    """Return the op with every region that it names changed; buffers that it allocates or releases are kept."""
    return op if isinstance(op, ops.Memory | ops.Wait) else _mapped(op, change)


def _mapped(value: D, change: Change) -> D:
    """Return an op, or a dataclass inside one, with every region in it changed."""
    kind = type(value)
    values: dict[str, Any] = {
        name: _map_value(getattr(value, name), change) if has_regions else getattr(value, name)
        for name, has_regions in _fields_and_regions(kind)
    }
    return kind(**values)


def _map_value(value: object, change: Change) -> object:
    match value:
        case Region():
            return change(value)
        case None:
            return None
        case View():
            return View(region=change(value.region), shape=value.shape, stride=value.stride)
        case tuple():
            return tuple([_map_value(item, change) for item in value])
        case _:
            assert is_dataclass(value)
            assert not isinstance(value, type)
            return _mapped(value, change)


@cache
def _fields_and_regions(kind: type) -> tuple[tuple[str, bool], ...]:
    """Return the fields of an op class, or of a dataclass inside one, and whether there are regions in them."""
    with_regions = {operand.field.name for operand in operands(kind)}
    return tuple((field.name, field.name in with_regions) for field in op_fields(kind))


def map_state(state: State, change: Change) -> State:
    """Return the state with the regions of its holdings changed."""
    return replace(
        state, holdings=tuple(replace(h, region=change(h.region)) for h in state.holdings)
    )


def as_shard(region: Region, size: int) -> Region:
    """Return the region of a full buffer after the buffer was reduced to this rank's 1/``size`` of it.

    Only the whole full buffer and this rank's slice of it are possible; both become the whole shard, and a part of the
    slice a part of the shard.
    """
    if region.offset != 0 or region.numel % size:
        raise InternalError(
            f"%{region.buffer}[{region.offset}:{region.stop}] names a part of a flat, "
            "which has no place in one rank's shard of it"
        )
    first, stop = region.part or (0, region.numel // size)
    return Region(buffer=region.buffer, offset=first, numel=stop - first)


def is_whole(region: Region, program: Program) -> bool:
    """Return whether the region is a whole buffer, or this rank's slice of a whole buffer."""
    return region.offset == 0 and region.numel == program.buffer_by_name[region.buffer].numel


# ----------------------------------------------------------------------------------------------------- op lists


def insert(
    body: Sequence[Op],
    *,
    before: Mapping[int, Sequence[Op]] | None = None,
    after: Mapping[int, Sequence[Op]] | None = None,
    without: Collection[int] = (),
) -> tuple[Op, ...]:
    """Return the body with ops inserted before and after the op at each index, and without the ops at some indices.

    ``before[len(body)]`` is inserted at the end.
    """
    inserted: list[Op] = []
    for index, op in enumerate(body):
        inserted.extend((before or {}).get(index, ()))
        if index not in without:
            inserted.append(op)
        inserted.extend((after or {}).get(index, ()))
    inserted.extend((before or {}).get(len(body), ()))
    return tuple(inserted)


def used_buffers(op: Op) -> frozenset[str]:
    """Return buffers whose elements the op reads or writes; allocating and releasing do not count."""
    effect = effects(op)
    return frozenset(r.buffer for r in (*effect.reads, *effect.writes, *effect.accumulates))


def map_sections(program: Program, change: Callable[[Section], Section]) -> Program:
    """Return the program with every section changed."""
    return replace(program, sections=tuple(change(section) for section in program.sections))


# ------------------------------------------------------------------------------------------------------- buffers


def claimed_name(name: str, taken: set[str]) -> str:
    """Return this name, followed by underscores where it is ``taken``; add the result to ``taken``."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def with_streams(streams: tuple[Stream, ...], used: Collection[str]) -> tuple[Stream, ...]:
    """Return the streams, and those that are used but not among them."""
    declared = {stream.name for stream in streams}
    return (*streams, *(s for s in STREAMS if s.name in used and s.name not in declared))


def replace_buffers(program: Program, changed: Mapping[str, Sequence[Buffer]]) -> Program:
    """Return the program with each named buffer replaced, at its place, by those given."""
    buffers: list[Buffer] = []
    for buffer in program.buffers:
        buffers.extend(changed.get(buffer.name, (buffer,)))
    return replace(program, buffers=tuple(buffers))


def sharded(buffer: Buffer, axis: str, size: int, *, reduced: tuple[str, ...] = ()) -> Buffer:
    """Return this rank's shard of the buffer; ``reduced`` names the axes over which its gradient is summed."""
    holds = buffer.holds
    if isinstance(holds, FlatContent):
        holds = replace(holds, shard=axis, reduced=reduced)
    return replace(buffer, numel=buffer.numel // size, holds=holds)


def param_buffers(program: Program) -> Mapping[str, Flat]:
    """Return the persistent buffers that hold parameters, and the flat of each."""
    return {
        buffer.name: program.flat_by_name[buffer.holds.flat]
        for buffer in program.buffers
        if isinstance(buffer.holds, FlatContent) and buffer.holds.quantity == PARAM
    }


def contributed_buffers(program: Program) -> Mapping[str, Flat]:
    """Return the buffers to which compute ops write gradients, and the flat of each."""
    flats: dict[str, Flat] = {}
    for op in program.ops():
        if isinstance(op, ops.Compute):
            for destination in op.destinations:
                if destination is not None and destination.gradient is not None:
                    home, _ = program.parameter_by_name[destination.gradient]
                    flats[destination.view.region.buffer] = home
    return flats


def content_of(region: Region, program: Program) -> FlatContent:
    """Return the content of a region of a persistent buffer whose resting content is elements of a flat."""
    holds = program.buffer_by_name[region.buffer].holds
    if not isinstance(holds, FlatContent):
        raise InternalError(f"%{region.buffer} does not rest with elements of a flat")
    return replace(holds, offset=holds.offset + region.offset, shard=region.shard or holds.shard)


def complete_gradient(holding: Holding) -> FlatContent | None:
    """Return the content of the region, if it is the gradient of all micro-steps."""
    match holding.content:
        case FlatContent(quantity="grad", micro=Micro.ALL) as content:
            return content
        case _:
            return None


def complete_gradients(section: Section) -> Mapping[str, FlatContent]:
    """Return the gradients that are complete at the exit of a section, by buffer."""
    return {
        holding.region.buffer: content
        for holding in section.exit.holdings
        if (content := complete_gradient(holding)) is not None
    }


def on_more_ranks(op: ops.Decide, times: int, program: Program) -> ops.Decide:
    """Return the decision for ``times`` as many ranks.

    The weights of micro-batches are summed over ranks separately.
    """
    return op if program.weight is not None else replace(op, divisor=op.divisor * times)


def flat_of_buffer(program: Program) -> Mapping[str, Flat]:
    """Return the flat whose coordinates each full-sized buffer uses: by its content, or by the ops that link it to one.

    Sections say what parameters compute ops read and to what gradients they contribute; casts, transfers and optimizer
    steps map each element to the element of the same index. So temporaries need no naming convention. A buffer that is
    linked to several flats, such as a slot that they use in turn, has no home. Scales of a flat's blocks count as
    full-sized, although they are fewer: they are sharded like the flat, whose shards split no block.
    """
    stated: dict[str, Flat] = {
        buffer.name: program.flat_by_name[buffer.holds.flat]
        for buffer in program.buffers
        if isinstance(buffer.holds, FlatContent) and buffer.holds.quantity not in OWN_STATES
    }
    stated.update(contributed_buffers(program))
    links = networkx.Graph()
    for op in program.ops():
        # A page contains elements of one flat after another.
        names = [name for name in _linked(op) if program.buffer_by_name[name].role is not Role.PAGE]
        networkx.add_path(links, names)
    flats = dict(stated)
    for linked in networkx.connected_components(links):
        homes = {stated[name].name for name in linked if name in stated}
        if len(homes) == 1:
            home = program.flat_by_name[homes.pop()]
            flats.update((name, home) for name in linked if name not in stated)
    return {
        buffer.name: flats[buffer.name]
        for buffer in program.buffers
        if buffer.name in flats and buffer.numel == full_numel(buffer, flats[buffer.name])
    }


def full_numel(buffer: Buffer, flat: Flat) -> int:
    """Return the elements of a buffer for all of a flat: one for each element of the flat, or for each block."""
    block = block_numel(buffer.holds.quantity) if isinstance(buffer.holds, FlatContent) else 1
    return -(-flat.padded_numel // block)


def _linked(op: Op) -> tuple[str, ...]:
    """Return the buffers that an op uses element by element, none if it does not."""
    names: list[str] = []
    for field in op.same_elements:
        regions = getattr(op, field)
        names += [r.buffer for r in (regions if isinstance(regions, tuple) else (regions,))]
    return tuple(names)


def gap_fills(flat: Flat, buffer: str, stream: str) -> tuple[ops.Fill, ...]:
    """Return ops that zero the gaps between and after a flat's parameters.

    Where there are many, one op for the whole.
    """
    gaps: list[tuple[int, int]] = []
    stop = 0
    for slot in sorted(flat.slots, key=lambda slot: slot.offset):
        if slot.offset > stop:
            gaps.append((stop, slot.offset))
        stop = max(stop, slot.offset + slot.numel)
    if flat.padded_numel > stop:
        gaps.append((stop, flat.padded_numel))
    if len(gaps) > _MOST_GAP_FILLS:
        gaps = [(0, flat.padded_numel)]
    return tuple(
        ops.Fill(
            destination=Region(buffer=buffer, offset=start, numel=stop - start),
            value=0.0,
            stream=stream,
        )
        for start, stop in gaps
    )


_MOST_GAP_FILLS = 2
"""Above this many gaps, one launch that writes the flat twice is cheaper than a launch for each gap."""
