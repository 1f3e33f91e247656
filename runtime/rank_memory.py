"""The buffers of one rank: flat tensors by name, and the regions and views of them that ops use."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor
from torch.profiler import record_function

from zeroir.errors import InternalError, memory_for
from zeroir.ir.buffers import Region, Role, Space, View
from zeroir.ir.dtypes import DType
from zeroir.ir.program import Program
from zeroir.memory.placement import Placement, places_to_run
from zeroir.runtime.tensors import TORCH_DTYPE, poison


def allocation_range(space: Space) -> str:
    """The name under which profilers show the allocations of this space: on a CPU, all are in one memory."""
    return f"{space} memory"


class RankMemory:
    """The buffers of one rank while a program runs.

    The constructor allocates everything but snapshots, which are allocated at their first use, with undefined elements:
    persistent buffers, as zeros, and one block per space for the temporary
    buffers, at the offsets of the program's plan (computed here where the program has none). With ``is_deferred`` each
    persistent buffer, and the blocks, are allocated at their first use, and the rest by ``allocate``: so a module in
    hand can be freed while its values move to the buffers. ``alloc`` and ``release`` only mark buffers as live or not,
    so a view of a buffer is made once; its user calls ``require`` before each use. With ``is_poisoned`` undefined
    elements are NaN and a released buffer is overwritten, so that a wrong order of ops shows in the numbers. Buffers on
    disk are files under ``directory``, a temporary one by default, mapped into memory. ``placed`` gives the offsets to
    several ranks that share them.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        device: torch.device,
        *,
        is_poisoned: bool = False,
        directory: Path | None = None,
        placed: Mapping[Space, Placement] | None = None,
        is_deferred: bool = False,
    ) -> None:
        self.rank = rank
        self.device = device
        self._mesh = program.mesh
        self._coordinate = program.mesh.coordinate(rank)
        self._is_poisoned = is_poisoned
        self._directory = directory
        self._placed = places_to_run(program) if placed is None else placed
        self._buffer_by_name = program.buffer_by_name
        self._persistent = frozenset(b.name for b in program.buffers if b.is_persistent)
        self._live: set[str] = set(self._persistent)
        self._tensors: dict[str, Tensor] = {}
        self._has_blocks = False
        if not is_deferred:
            self.allocate()

    def allocate(self) -> None:
        """Allocate what is not allocated yet."""
        for name, buffer in self._buffer_by_name.items():
            if buffer.is_persistent and buffer.role is not Role.SNAPSHOT:
                self._tensor(name)
        self._allocate_blocks()

    def adopt(self, other: RankMemory) -> frozenset[str]:
        """Take the persistent buffers of another program's memory that are like this one's, with their contents.

        Alike are buffers of one name, space, dtype and number of elements; their names are returned.
        """
        names: set[str] = set()
        for name in self._persistent & other._persistent:
            own, theirs = self._buffer_by_name[name], other._buffer_by_name[name]
            if own.role is Role.SNAPSHOT:
                continue  # The other program may still be copying to it.
            if (own.space, own.dtype, own.numel) == (theirs.space, theirs.dtype, theirs.numel):
                self._tensors[name] = other.buffer(name)
                names.add(name)
        return frozenset(names)

    def is_live(self, name: str) -> bool:
        """Whether the buffer is allocated now."""
        return name in self._live

    def require(self, names: frozenset[str]) -> None:
        """Raise an InternalError unless all these buffers are allocated now."""
        if not names <= self._live:
            name = min(names - self._live)
            raise InternalError(
                f"rank {self.rank} uses buffer %{name}, which is not allocated at that point"
            )

    def settle(self, temporaries: Collection[str]) -> None:
        """Set which temporary buffers are live, after ops that were not carried out one by one."""
        self._live = {*self._persistent, *temporaries}

    def clear(self, names: Collection[str]) -> None:
        """Free the persistent ones of these buffers; at their next use they are zeros again."""
        for name in self._persistent.intersection(names):
            self._tensors.pop(name, None)

    def buffer(self, name: str) -> Tensor:
        """The whole buffer as a 1-d tensor; InternalError where it is not live."""
        if name not in self._live:
            self.require(frozenset((name,)))
        return self._tensor(name)

    def region(self, region: Region) -> Tensor:
        """The elements of the region on this rank as a 1-d tensor, live or not; see ``require``."""
        start, stop = region.local_range(self._mesh, self._coordinate)
        return self._tensor(region.buffer)[start:stop]

    def view(self, view: View) -> Tensor:
        """The strided tensor of the view on this rank, live or not; see ``require``."""
        start, _ = view.region.local_range(self._mesh, self._coordinate)
        tensor = self._tensor(view.region.buffer)
        return tensor.as_strided(view.shape, view.stride, tensor.storage_offset() + start)

    def offset_numel(self, view: View) -> int:
        """The index of the view's first element in its memory: the buffer itself, or the block of its space."""
        start, _ = view.region.local_range(self._mesh, self._coordinate)
        buffer = self._buffer_by_name[view.region.buffer]
        if buffer.is_persistent:
            return start
        offset_bytes = self._placed[buffer.space].offsets[buffer.name]
        return offset_bytes // buffer.dtype.itemsize_bytes + start

    def alloc(self, name: str) -> None:
        """Begin a temporary buffer."""
        if name in self._live:
            raise InternalError(f"rank {self.rank} allocates buffer %{name}, which is live already")
        self._live.add(name)
        if self._is_poisoned:
            poison(self._tensor(name))

    def release(self, name: str) -> None:
        """End a temporary buffer."""
        tensor = self.buffer(name)
        if self._is_poisoned:
            poison(tensor)
        self._live.remove(name)

    def _tensor(self, name: str) -> Tensor:
        """The whole buffer, live or not, allocated if need be."""
        tensor = self._tensors.get(name)
        if tensor is not None:
            return tensor
        if name in self._persistent:
            buffer = self._buffer_by_name[name]
            tensor = self._new(buffer.space, buffer.numel, buffer.dtype, name)
            if buffer.role is not Role.SNAPSHOT:
                tensor.zero_()
            self._tensors[name] = tensor
            return tensor
        self._allocate_blocks()
        return self._tensors[name]

    def _allocate_blocks(self) -> None:
        if self._has_blocks:
            return
        for space, placement in self._placed.items():
            block = self._new(space, placement.size_bytes, DType.U8, f"temporaries.{space}")
            for name, start in placement.offsets.items():
                buffer = self._buffer_by_name[name]
                elements = block[start : start + buffer.size_bytes]
                self._tensors[name] = elements.view(TORCH_DTYPE[buffer.dtype])
        self._has_blocks = True

    def _new(self, space: Space, numel: int, dtype: DType, name: str) -> Tensor:
        with memory_for("the program's buffers"), record_function(allocation_range(space)):
            return self._uninitialised(space, numel, TORCH_DTYPE[dtype], name)

    def _uninitialised(
        self, space: Space, numel: int, torch_dtype: torch.dtype, name: str
    ) -> Tensor:
        match space:
            case Space.DEVICE:
                return torch.empty(numel, dtype=torch_dtype, device=self.device)
            case Space.HOST:
                is_pinned = self.device.type == "cuda"
                return torch.empty(numel, dtype=torch_dtype, pin_memory=is_pinned)
            case Space.DISK:
                path = self._disk() / f"{name}.bin"
                path.parent.mkdir(parents=True, exist_ok=True)
                return torch.from_file(str(path), shared=True, size=numel, dtype=torch_dtype)
            case _:
                assert_never(space)

    def _disk(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="zeroir-"))
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        return self._directory / f"rank{self.rank}"
