"""The gradients of a step between its last micro-step and the update."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir.analysis.held_elements import held_elements
from zeroir.ir.buffers import Region
from zeroir.ir.contents import FlatContent, Micro
from zeroir.ir.program import LAST_MICRO_STEP, Program, Slot
from zeroir.runtime.comm.job import Job
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.memory.tensors import common
from zeroir.runtime.state.full_parameters import flat_part

Holders = Mapping[str, Sequence[tuple[Region, FlatContent]]]
"""The regions that hold the gradient of each flat."""


def gradient_holders(program: Program, names: Set[str]) -> Holders:
    """Return the regions that hold the gradients of these parameters after the last micro-step.

    Raises:
        UserError: where the update begins before, and has changed them.
    """
    holders: dict[str, list[tuple[Region, FlatContent]]] = {}
    for holding in program.section_by_name[LAST_MICRO_STEP].exit.holdings:
        content = holding.content
        if isinstance(content, FlatContent) and content.micro is Micro.ALL:
            holders.setdefault(content.flat, []).append((holding.region, content))
    for flat in program.flats:
        wanted = [slot.name for slot in flat.slots if slot.name in names]
        if wanted and flat.name not in holders:
            raise UserError(
                f"The gradient of {wanted[0]} is gone after the last micro-step, because the update overlaps with the "
                "backward: compile with communication=zeroir.Communication(overlap_update=False)."
            )
    return holders


def gradients(
    program: Program, memory: RankMemory, job: Job, names: Set[str], divisor: float
) -> Iterator[tuple[Slot, Tensor]]:
    """Yield the gradients of these parameters, f32 of their shapes, unsharded, divided by ``divisor``."""
    holders = gradient_holders(program, names)
    for flat in program.flats:
        for slot in flat.slots:
            if slot.name in names:
                own = holders[flat.name]
                elements = range(slot.offset, slot.offset + slot.numel)
                (values,) = flat_part(program, [memory], job.comm, own, torch.float32, elements)
                yield slot, values.div_(divisor).view(slot.shape)


def gradient_norms(
    program: Program, memory: RankMemory, job: Job, names: Set[str], divisor: float
) -> dict[str, float]:
    """Return the L2 norms of the gradients of these parameters, of which no rank gathers any."""
    holders = gradient_holders(program, names)
    slots = [(flat, slot) for flat in program.flats for slot in flat.slots if slot.name in names]
    mesh = program.mesh
    coordinate = mesh.coordinate(memory.rank)
    squares: list[float] = []
    for flat, slot in slots:
        square = 0.0
        for region, content in holders[flat.name]:
            held = held_elements(content, region.local_numel(mesh), coordinate)
            own = common(held, range(slot.offset, slot.offset + slot.numel))
            if own:
                start = region.local_range(mesh, coordinate)[0] - held.start
                values = memory.read(region.buffer, start + own.start, start + own.stop)
                copies = 1 if content.shard is None else mesh.size(content.shard)
                square += float(values.double().square().sum()) * copies
        squares.append(square)
    rows = job.exchange(squares)
    totals = [sum(of_ranks) / len(rows) for of_ranks in zip(*rows, strict=True)]
    return {
        slot.name: math.sqrt(total) / divisor
        for (_, slot), total in zip(slots, totals, strict=True)
    }
