"""Finds the first parameter with a gradient that is not finite, and the tensor of a batch with such values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroir.ir.contents import GRAD, FlatContent
from zeroir.ir.program import Program
from zeroir.runtime.checkpoint.parts import elements_on
from zeroir.runtime.comm.job import Job
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.memory.tensors import common
from zeroir.torch_ops.batches import Batch, flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class BadParameter:
    """The first such parameter, in the order of use, and its unit.

    ``count`` of ``of`` parameters have such gradients.
    """

    name: str
    unit: str
    count: int
    of: int


def first_bad_parameter(program: Program, memory: RankMemory, job: Job) -> BadParameter | None:
    """Return the first trained parameter whose gradient is not finite; None where there is none.

    All ranks call this together, between the last micro-step and the update, which changes gradients in place.
    """
    slots = [
        (flat.unit, slot) for flat in program.flats if flat.is_trainable for slot in flat.slots
    ]
    bad = _bad(program, memory)
    rows = job.exchange([float(slot.name in bad) for _, slot in slots])
    are_bad = [any(flags) for flags in zip(*rows, strict=True)]
    if not any(are_bad):
        return None
    unit, slot = slots[are_bad.index(True)]
    return BadParameter(name=slot.name, unit=unit, count=sum(are_bad), of=len(slots))


def bad_input(batch: Batch) -> str | None:
    """Return the path of the first tensor of a batch with values that are not finite; None where there is none."""
    for path, tensor in flatten(batch).tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return path
    return None


def _bad(program: Program, memory: RankMemory) -> frozenset[str]:
    """Return the parameters whose gradient has a value on this rank that is not finite."""
    names: set[str] = set()
    for buffer in program.buffers:
        content = buffer.holds
        if not isinstance(content, FlatContent) or content.quantity != GRAD:
            continue
        held = elements_on(program, buffer, content, memory.rank)
        for slot in program.flat_by_name[content.flat].slots:
            elements = common(held, range(slot.offset, slot.offset + slot.numel))
            if elements:
                first = elements.start - held.start
                values = memory.read(buffer.name, first, first + len(elements))
                if not bool(torch.isfinite(values).all()):
                    names.add(slot.name)
    return frozenset(names)
