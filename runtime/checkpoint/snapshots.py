"""The state that a rank saves: the buffers themselves while training waits, otherwise copies of them.

Buffers on disk are never copied, so training waits until they are written to the checkpoint.

The copies of section ``save`` complete some time after it was issued, so a snapshot takes two calls:
``SnapshotMaker.__init__`` while no section runs, and ``SnapshotMaker.snapshot`` in the thread that writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from zeroir.checkpoint.manifest import StoredScalar
from zeroir.errors import UserError
from zeroir.ir.buffers import Role
from zeroir.ir.contents import GRAD, FlatContent, WeightContent
from zeroir.ir.program import MICRO_STEP, Program
from zeroir.runtime.checkpoint.parts import SavedPart, saved_parts, saved_quantities
from zeroir.runtime.disk.elements import ElementsOnDisk
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.host_snapshot import SavedState
from zeroir.torch_ops.types import IR_DTYPE

WEIGHT_SUM: Final = "sum of weights"
"""The name of this rank's sum of weights among the sums of an unfinished step; it is not in a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensor:
    """A tensor of which each rank has its own; identical ones are written once."""

    name: str
    shape: tuple[int, ...]
    tensor: Tensor

    @property
    def dtype(self) -> str:
        """The dtype's name in the IR."""
        return IR_DTYPE[self.tensor.dtype].value


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state of a rank: elements of flats, module buffers, scalars, and the sums of an unfinished step."""

    parts: Sequence[tuple[SavedPart, Tensor | ElementsOnDisk]]
    buffers: Sequence[RankTensor]
    sums: Sequence[RankTensor]
    scalars: Sequence[StoredScalar]


def with_unread(snapshot: Snapshot, unread: Mapping[str, Tensor]) -> Snapshot:
    """Return the snapshot with additional tensors of the model, which the program does not hold."""
    added = [
        RankTensor(
            name=name, shape=tuple(value.shape), tensor=value.detach().cpu().contiguous().flatten()
        )
        for name, value in unread.items()
    ]
    return replace(snapshot, buffers=[*snapshot.buffers, *added])


class SnapshotMaker:
    """Takes the state of a rank between two sections. ``weight_sum`` is given within a step.

    With ``saved`` the state is read from its copies. Without it the state is read from the buffers, which must not
    change before the snapshot is written. Module buffers that no section writes are never copied: a load waits for the
    save to end.
    """

    def __init__(
        self,
        program: Program,
        memory: RankMemory,
        *,
        saved: SavedState | None,
        weight_sum: float | None,
    ) -> None:
        self.rank = memory.rank
        self._program = program
        self._memory = memory
        self._saved = saved
        self._sums: list[RankTensor] = []
        if weight_sum is not None:
            for name in open_buffers(program):
                tensor = memory.buffer(name).detach().to("cpu", copy=True)
                self._sums.append(RankTensor(name=name, shape=tuple(tensor.shape), tensor=tensor))
            total = torch.tensor([weight_sum], dtype=torch.float64)
            self._sums.append(RankTensor(name=WEIGHT_SUM, shape=(1,), tensor=total))

    def snapshot(self) -> Snapshot:
        """Return the state, once its copies are complete; the training's streams do not wait."""
        if self._saved is not None:
            self._saved.wait()
        program = self._program
        return Snapshot(
            parts=[
                (part, self._part(part.buffer, part.offset, part.stop - part.start))
                for part in saved_parts(program, self._memory.rank, saved_quantities(program))
            ],
            buffers=[
                RankTensor(
                    name=binding.name,
                    shape=binding.shape,
                    tensor=self._elements(
                        binding.buffer, 0, program.buffer_by_name[binding.buffer].numel
                    ).cpu(),
                )
                for binding in program.module_buffers
                if binding.data is None and program.buffer_by_name[binding.buffer].numel
            ],
            sums=self._sums,
            scalars=[
                StoredScalar(
                    name=name,
                    dtype=program.buffer_by_name[name].dtype.value,
                    values=tuple(
                        self._elements(name, 0, program.buffer_by_name[name].numel)
                        .double()
                        .tolist()
                    ),
                )
                for name in program.counters
            ],
        )

    def release(self) -> None:
        """Release the memory of the copies for the next save."""
        if self._saved is not None:
            self._saved.release()

    def _part(self, name: str, start: int, numel: int) -> Tensor | ElementsOnDisk:
        if self._memory.is_on_disk(name):
            return ElementsOnDisk(memory=self._memory, buffer=name, start=start, stop=start + numel)
        return self._elements(name, start, numel)

    def _elements(self, name: str, start: int, numel: int) -> Tensor:
        """Return elements of a buffer, from their copy if there is one."""
        copied = None if self._saved is None else self._saved.tensors.get(name)
        if copied is None:
            return self._memory.buffer(name)[start : start + numel]
        return copied.tensor[start - copied.start : start - copied.start + numel]


def open_buffers(program: Program) -> list[str]:
    """Return the names of the buffers that micro-steps pass to the next micro-step of the same step.

    The settings of optimizer groups do not count.
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


def require_same_sums(present: Program, following: Program) -> None:
    """Raise UserError unless a program can continue a step of the present one."""
    own, theirs = _sums(present), _sums(following)
    are_alike = own == theirs and present.flats == following.flats
    if not are_alike or MICRO_STEP not in following.section_by_name:
        different = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
        which = f", such as %{different[0]}" if different else ""
        raise UserError(
            f"A step has begun, and the program to go on with has other sums of micro-steps{which}: call update() "
            "before go_on_with()."
        )


def _sums(program: Program) -> dict[str, tuple[object, ...]]:
    buffers = [program.buffer_by_name[name] for name in open_buffers(program)]
    return {buffer.name: (buffer.space, buffer.dtype, buffer.numel) for buffer in buffers}
