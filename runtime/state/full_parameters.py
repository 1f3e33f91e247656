"""Unsharded parameters, gathered from the shards of all ranks, flat by flat."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.held_elements import held_by_all, held_elements
from zeroir.ir.buffers import Buffer, Region, whole
from zeroir.ir.contents import EMA, MASTER, PARAM, FlatContent
from zeroir.ir.program import Flat, Program, Slot
from zeroir.runtime.comm.base import CollectiveTensors, Comm, TensorPair
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.memory.tensors import common
from zeroir.runtime.state.waiting_states import WaitingStates, WaitingValues, whole_values
from zeroir.torch_ops.types import TORCH_DTYPE


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPart:
    """Parameters of one dtype that are gathered together: those of a flat, or a single one.

    ``gather`` returns the elements of the flat from ``start`` on, once per local rank, in memory of their own. All
    ranks call it together.
    """

    slots: tuple[Slot, ...]
    dtype: torch.dtype
    start: int
    gather: Callable[[], list[Tensor]]

    def elements(self, slot: Slot) -> range:
        """Return where a parameter's elements are in the gathered tensor."""
        return range(slot.offset - self.start, slot.offset - self.start + slot.numel)


def whole_parameters(
    program: Program,
    ranks: Sequence[RankMemory],
    comm: Comm,
    names: Collection[str] | None = None,
    *,
    masters: bool,
    ema: bool = False,
    waiting: WaitingStates | None = None,
) -> Iterator[tuple[Slot, list[Tensor]]]:
    """Yield every parameter, or those in ``names`` by the names of their slots, with one copy for each local rank.

    A copy has the parameter's shape and its own memory, on the rank's device, in the dtype with which segments compute,
    or with ``masters`` in FP32 where the program has master weights, or they are ``waiting``. With ``ema`` it is the
    moving average where there is one. One part at a time is gathered. All ranks iterate together.

    Raises:
        UserError: with ``ema``, where the program keeps no averages.
    """
    parts = parameter_parts(program, ranks, comm, names, masters=masters, ema=ema, waiting=waiting)
    for part in parts:
        values = part.gather()
        for slot in part.slots:
            place = part.elements(slot)
            yield slot, [_own(each, place).view(slot.shape) for each in values]
        del values


def _own(values: Tensor, place: range) -> Tensor:
    """Return these elements in memory of their own."""
    if len(place) == values.numel():
        return values
    return values[place.start : place.stop].clone()


def parameter_parts(
    program: Program,
    ranks: Sequence[RankMemory],
    comm: Comm,
    names: Collection[str] | None = None,
    *,
    masters: bool,
    ema: bool = False,
    waiting: WaitingStates | None = None,
) -> list[ParameterPart]:
    """Return the parts in which ``whole_parameters`` gathers: flats, or parameters that are less than half of one.

    Raises:
        UserError: with ``ema``, where the program keeps no averages.
    """
    if ema:
        require_averages(program)
    parts: list[ParameterPart] = []
    for flat in program.flats:
        slots = [slot for slot in flat.slots if names is None or slot.name in names]
        if masters and waiting is not None and not flat.is_trainable:
            held = [slot for slot in slots if (slot.name, MASTER) in waiting.values]
            slots = [slot for slot in slots if slot not in held]
            for slot in held:
                own = waiting.values[slot.name, MASTER]
                gather = partial(_gather_waiting, program, ranks, comm, own)
                parts.append(
                    ParameterPart(
                        slots=(slot,), dtype=own.own.dtype, start=slot.offset, gather=gather
                    )
                )
        if not slots:
            continue
        buffers, dtype = _source(program, flat, masters=masters, ema=ema)
        holders = [(whole(buffer), content) for buffer, content in buffers]
        groups = [(tuple(slots), range(flat.padded_numel))]
        if 2 * sum(slot.numel for slot in slots) < flat.numel:
            groups = [((slot,), range(slot.offset, slot.offset + slot.numel)) for slot in slots]
        parts += [
            ParameterPart(
                slots=group,
                dtype=dtype,
                start=elements.start,
                gather=partial(flat_part, program, ranks, comm, holders, dtype, elements),
            )
            for group, elements in groups
        ]
    return parts


def _gather_waiting(
    program: Program, ranks: Sequence[RankMemory], comm: Comm, waiting: WaitingValues
) -> list[Tensor]:
    return [
        whole_values(program, memory, comm, waiting).to(memory.device, copy=True)
        for memory in ranks
    ]


def require_averages(program: Program) -> None:
    """Raise UserError where the program keeps no moving averages of the weights."""
    if not any(isinstance(op, ops.Average) for op in program.ops()):
        raise UserError(
            "The program keeps no moving average of the weights: compile it with --ema 0.999, for example."
        )


def flat_buffers(
    program: Program, flat: str, quantities: Sequence[str]
) -> list[tuple[Buffer, FlatContent]]:
    """Return the persistent buffers that hold a quantity of a flat between steps, with their contents."""
    return [
        (buffer, buffer.holds)
        for buffer in program.buffers
        if isinstance(buffer.holds, FlatContent)
        and buffer.holds.flat == flat
        and buffer.holds.quantity in quantities
    ]


def flat_part(
    program: Program,
    ranks: Sequence[RankMemory],
    comm: Comm,
    holders: Sequence[tuple[Region, FlatContent]],
    dtype: torch.dtype,
    elements: range,
) -> list[Tensor]:
    """Return these elements of a flat from the regions that hold it, converted to ``dtype``, once per local rank.

    Where they are not all elements of sharded regions, only the ranks that hold some of them send data. On a real
    backend all ranks call this together.
    """
    mesh = program.mesh
    parts = [torch.zeros(len(elements), dtype=dtype, device=memory.device) for memory in ranks]

    def targets(held: range) -> list[Tensor]:
        return [part[held.start - elements.start : held.stop - elements.start] for part in parts]

    for region, content in holders:
        numel = region.local_numel(mesh)
        if content.shard is None:
            held = common(range(content.offset, content.offset + numel), elements)
            for memory, target in zip(ranks, targets(held), strict=True):
                start = region.local_range(mesh, mesh.coordinate(memory.rank))[0] - content.offset
                target.copy_(memory.read(region.buffer, start + held.start, start + held.stop))
            continue
        name = next(c.name for c in program.comms if c.axis == content.shard)
        count = mesh.size(content.shard)
        together = held_by_all(content, numel, mesh)
        sources = [
            memory.read(region.buffer, *region.local_range(mesh, mesh.coordinate(memory.rank))).to(
                memory.device, dtype
            )
            for memory in ranks
        ]
        if len(together) == 1 and common(together[0], elements) == together[0]:
            comm.all_gather(_collective(name, sources, targets(together[0])))
            continue
        for coordinate in range(count):
            theirs = held_elements(content, numel, {content.shard: coordinate})
            held = common(theirs, elements)
            if held:
                start, stop = held.start - theirs.start, held.stop - theirs.start
                pieces = [source[start:stop] for source in sources]
                comm.broadcast(_collective(name, pieces, targets(held)), coordinate)
    return parts


def _source(
    program: Program, flat: Flat, *, masters: bool, ema: bool
) -> tuple[list[tuple[Buffer, FlatContent]], torch.dtype]:
    """Return the buffers that hold the wanted values of a flat's parameters, and the dtype of the result."""
    # Between steps the parameters may exist only as master weights.
    quantities = (MASTER, PARAM) if masters else (PARAM, MASTER)
    buffers_of = (
        flat_buffers(program, flat.name, (quantity,))
        for quantity in ((EMA, *quantities) if ema else quantities)
    )
    buffers = next(filter(None, buffers_of))
    return buffers, TORCH_DTYPE[buffers[0][0].dtype if masters else flat.dtype]


def _collective(
    name: str, sources: Sequence[Tensor], destinations: Sequence[Tensor]
) -> CollectiveTensors:
    pairs = [
        [TensorPair(source=source, destination=destination)]
        for source, destination in zip(sources, destinations, strict=True)
    ]
    return CollectiveTensors(comm=name, pairs=pairs, staging=[None] * len(pairs))
