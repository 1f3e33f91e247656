"""What a rank saves of its memory at one moment: references for a save that training waits for, otherwise copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroir.checkpoint.manifest import StoredScalar
from zeroir.errors import memory_for
from zeroir.ir.buffers import Role
from zeroir.ir.contents import GRAD, FlatContent, WeightContent
from zeroir.ir.program import MICRO_STEP, Program
from zeroir.runtime.checkpoint.parts import SavedPart, kept_scalars, saved_parts, saved_quantities
from zeroir.runtime.rank_memory import RankMemory
from zeroir.runtime.tensors import IR_DTYPE

WEIGHT_SUM = "sum of weights"
"""The name of the sum of this rank's weights among the sums of an open step; no buffer has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensor:
    """A tensor that each rank has for itself, and that is written once for all ranks with the same bits."""

    name: str
    shape: tuple[int, ...]
    tensor: Tensor

    @property
    def dtype(self) -> str:
        """The dtype as the IR spells it."""
        return IR_DTYPE[self.tensor.dtype].value


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a rank: elements of flats, module buffers, scalars, and the sums of a step that has begun."""

    parts: Sequence[tuple[SavedPart, Tensor]]
    buffers: Sequence[RankTensor]
    sums: Sequence[RankTensor]
    scalars: Sequence[StoredScalar]


class HostCopies:
    """Memory of the host for copies, which every snapshot of a rank uses again."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}

    def copy(self, key: str, source: Tensor) -> Tensor:
        """A copy of a flat tensor, which is valid until the next copy under this key."""
        target = self._tensors.get(key)
        if target is None or target.numel() != source.numel() or target.dtype != source.dtype:
            with memory_for("a copy of this rank's state", "save with wait=True"):
                target = torch.empty(
                    source.numel(), dtype=source.dtype, pin_memory=source.device.type == "cuda"
                )
            self._tensors[key] = target
        return target.copy_(source)


def take_snapshot(
    program: Program,
    memory: RankMemory,
    *,
    copies: HostCopies | None,
    weight_sum: Tensor | float | None = None,
) -> Snapshot:
    """The state of a rank between two sections, while no op is under way.

    Without ``copies`` tensors on the CPU are the buffers themselves. ``weight_sum`` is given within a step.
    """

    def taken(key: str, tensor: Tensor) -> Tensor:
        if copies is not None:
            return copies.copy(key, tensor)
        return tensor.cpu()

    with torch.no_grad():
        parts = [
            (
                part,
                taken(
                    part.tensor,
                    memory.buffer(part.buffer)[part.offset :][: part.stop - part.start],
                ),
            )
            for part in saved_parts(program, memory.rank, saved_quantities(program))
        ]
        buffers = [
            RankTensor(
                name=binding.name,
                shape=binding.shape,
                tensor=taken(binding.buffer, memory.buffer(binding.buffer)),
            )
            for binding in program.module_buffers
            if binding.data is None and program.buffer_by_name[binding.buffer].numel
        ]
        sums: list[RankTensor] = []
        if weight_sum is not None:
            for name in open_buffers(program):
                tensor = taken(name, memory.buffer(name))
                sums.append(RankTensor(name=name, shape=tuple(tensor.shape), tensor=tensor))
            total = torch.tensor([float(weight_sum)], dtype=torch.float64)
            sums.append(RankTensor(name=WEIGHT_SUM, shape=(1,), tensor=total))
        scalars = [
            StoredScalar(
                name=name,
                dtype=program.buffer_by_name[name].dtype.value,
                values=tuple(memory.buffer(name).double().tolist()),
            )
            for name in kept_scalars(program)
        ]
    return Snapshot(parts=parts, buffers=buffers, sums=sums, scalars=scalars)


def open_buffers(program: Program) -> list[str]:
    """The buffers in which micro-steps hand something to the next one of their step.

    The settings of optimizer groups do not belong to them.
    """
    section = program.section_by_name.get(MICRO_STEP)
    if section is None:
        return []
    names: list[str] = []
    settings = {name for group in program.groups for name in (group.lr, group.hyper)}
    for buffer in program.buffers:
        is_sum = isinstance(buffer.holds, WeightContent) or buffer.role is Role.SCALAR
        if isinstance(buffer.holds, FlatContent):
            is_sum = buffer.holds.quantity == GRAD
        if buffer.is_persistent and is_sum and buffer.name not in settings:
            names.append(buffer.name)
    live = set(section.entry.live)
    for holding in section.entry.holdings:
        content = holding.content
        if isinstance(content, FlatContent) and content.quantity != GRAD:
            continue
        if holding.region.buffer in live and holding.region.buffer not in names:
            names.append(holding.region.buffer)
    return names
