"""The buffers of one rank: flat tensors by name, and the regions and views of them that ops use."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, assert_never

import torch
from torch import Tensor
from torch.profiler import record_function

from zeroir.errors import InternalError, memory_for
from zeroir.ir.buffers import Region, Role, Space, View
from zeroir.ir.dtypes import DType
from zeroir.ir.program import Program
from zeroir.memory.placement import Placement, places_to_run
from zeroir.runtime.device.driver import driver
from zeroir.runtime.disk.disk_buffers import DiskBuffers
from zeroir.runtime.disk.requests import PreparedTransfer
from zeroir.runtime.disk.scratch_file import PAGE_BYTES
from zeroir.runtime.memory.tensors import poison
from zeroir.torch_ops.types import TORCH_DTYPE

CHUNK_BYTES: Final = 32 << 20
"""The most host bytes at once for a buffer on disk that is read or written between steps."""


def allocation_range(space: Space) -> str:
    """Return the name under which profilers show the allocations of this space: on a CPU, all are in one memory."""
    return f"{space} memory"


class RankMemory:
    """The buffers of one rank while a program runs.

    The constructor allocates everything except snapshots, which are allocated at their first use, with undefined
    elements: persistent buffers, as zeros, and one block per space for the temporary buffers, at the offsets of the
    program's plan (computed here where the program has none). With ``is_deferred`` each persistent buffer, and the
    blocks, are allocated at their first use, and the rest by ``allocate``, so that a module can be freed while its
    values move to the buffers. ``alloc`` and ``release`` only mark buffers as live or not, so each view of a buffer is
    created once; its user calls ``require`` before each use. With ``is_poisoned`` undefined elements are NaN and a
    released buffer is overwritten, so that a wrong order of ops shows in the numbers. ``placed`` passes the offsets to
    several ranks that share them.

    Buffers on disk have no tensors: ``load`` and ``store`` copy their elements, and between steps ``read`` and
    ``write`` do, which work for buffers in every space. They are in a file in ``disk_folder``, by default in the folder
    for temporary files (``DiskBuffers``). Methods that use them raise UserError where the disk or the folder fails.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        device: torch.device,
        *,
        is_poisoned: bool = False,
        disk_folder: Path | None = None,
        placed: Mapping[Space, Placement] | None = None,
        is_deferred: bool = False,
    ) -> None:
        self.rank = rank
        self.device = device
        self._mesh = program.mesh
        self._coordinate = program.mesh.coordinate(rank)
        self._is_poisoned = is_poisoned
        self._disk_folder = disk_folder
        self._disk: DiskBuffers | None = None
        self._placed = places_to_run(program) if placed is None else placed
        self._buffer_by_name = program.buffer_by_name
        self._persistent = frozenset(b.name for b in program.buffers if b.is_persistent)
        self._on_disk = frozenset(b.name for b in program.buffers if b.space is Space.DISK)
        self._live: set[str] = set(self._persistent)
        self._tensors: dict[str, Tensor] = {}
        self._has_blocks = False
        self._block: Tensor | None = None
        if not is_deferred:
            self.allocate()

    def allocate(self) -> None:
        """Allocate what is not allocated yet."""
        for name, buffer in self._buffer_by_name.items():
            is_held = buffer.is_persistent and buffer.role is not Role.SNAPSHOT
            if is_held and name not in self._on_disk:
                self._tensor(name)
        self._allocate_blocks()
        if self._on_disk and self._disk is None:
            self._disk = self._new_disk()

    def adopt(self, other: RankMemory) -> frozenset[str]:
        """Take over the persistent buffers of another program's memory that match this one's, with their contents.

        Buffers match if they have the same name, space, dtype and number of elements; their names are returned.
        """
        names: set[str] = set()
        on_disk: set[str] = set()
        for name in self._persistent & other._persistent:
            own, theirs = self._buffer_by_name[name], other._buffer_by_name[name]
            if own.role is Role.SNAPSHOT:
                continue  # The other program may still be copying to it.
            if (own.space, own.dtype, own.numel) == (theirs.space, theirs.dtype, theirs.numel):
                names.add(name)
                if own.space is Space.DISK:
                    on_disk.add(name)
                else:
                    self._tensors[name] = other.buffer(name)
        if on_disk:
            self._disk = other.disk
            self._disk.keep(on_disk)
            self._add_to_disk(self._disk)
        return frozenset(names)

    @property
    def can_be_parked(self) -> bool:
        """Whether all temporary buffers are on the device, and none is on disk."""
        return not self._on_disk and self._placed.keys() <= {Space.DEVICE}

    def park(self) -> None:
        """Free the memory of temporary buffers until ``unpark``; their tensors remain valid."""
        if self._block is not None:
            self._block.untyped_storage().resize_(0)

    def unpark(self) -> None:
        """Allocate the memory of temporary buffers again, with undefined elements."""
        if self._block is not None:
            with memory_for("the program's buffers"):
                self._block.untyped_storage().resize_(self._block.numel())

    def is_live(self, name: str) -> bool:
        """Return whether the buffer is allocated now."""
        return name in self._live

    def require(self, names: frozenset[str]) -> None:
        """Raise InternalError unless all these buffers are allocated now."""
        if not names <= self._live:
            name = min(names - self._live)
            raise InternalError(
                f"rank {self.rank} uses buffer %{name}, which is not allocated at that point"
            )

    def settle(self, temporaries: Collection[str]) -> None:
        """Set which temporary buffers are live, after ops that were not run one by one."""
        self._live = {*self._persistent, *temporaries}

    def clear(self, names: Collection[str]) -> None:
        """Free the persistent ones of these buffers; at their next use they are zeros again."""
        for name in self._persistent.intersection(names):
            self._tensors.pop(name, None)

    def is_on_disk(self, name: str) -> bool:
        """Return whether the buffer is on disk, so that it has no tensor."""
        return name in self._on_disk

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements of a live buffer as a 1-d tensor: a copy on the CPU if it is on disk, otherwise no copy."""
        if name not in self._on_disk:
            return self.buffer(name)[start:stop]
        self.require(frozenset((name,)))
        buffer = self._buffer_by_name[name]
        numel = (buffer.numel if stop is None else stop) - start
        elements = _at_page(numel, TORCH_DTYPE[buffer.dtype])
        self.disk.reading(name, start * elements.itemsize, elements)()
        return elements

    def read_in_chunks(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> Iterator[Tensor]:
        """Yield elements of a live buffer in order: copies of 32 MiB if it is on disk, otherwise a view of all."""
        buffer = self._buffer_by_name[name]
        stop = buffer.numel if stop is None else stop
        per_chunk = stop - start
        if name in self._on_disk:
            per_chunk = CHUNK_BYTES // buffer.dtype.itemsize_bytes
        for first in range(start, stop, max(per_chunk, 1)):
            yield self.read(name, first, min(first + per_chunk, stop))

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Copy a flat tensor of any dtype and device to a live buffer, from element ``start`` on."""
        if name not in self._on_disk:
            self.buffer(name)[start : start + values.numel()].copy_(values)
            return
        self.require(frozenset((name,)))
        dtype = TORCH_DTYPE[self._buffer_by_name[name].dtype]
        per_chunk = CHUNK_BYTES // dtype.itemsize
        for first in range(0, values.numel(), per_chunk):
            chunk = values[first : first + per_chunk].to("cpu", dtype).contiguous()
            self.disk.writing(name, (start + first) * dtype.itemsize, chunk)()

    def clear_elements(self, name: str, start: int = 0, stop: int | None = None) -> None:
        """Write zeros to a live buffer."""
        if name not in self._on_disk:
            self.buffer(name)[start:stop].zero_()
            return
        buffer = self._buffer_by_name[name]
        stop = buffer.numel if stop is None else stop
        # One-dimensional, so that even a single element has a stride of 1 and its bytes can be viewed.
        zero = torch.zeros(1, dtype=TORCH_DTYPE[buffer.dtype])
        self.write(name, start, zero.expand(stop - start))

    def loading(self, source: Region, destination: Region) -> PreparedTransfer:
        """Return a function that reads a region on disk into one on the host, live or not; call ``require`` before."""
        start, _ = source.local_range(self._mesh, self._coordinate)
        target = self.region(destination)
        return self.disk.reading(source.buffer, start * target.itemsize, target)

    def storing(self, source: Region, destination: Region) -> PreparedTransfer:
        """Return a function that writes a region on the host to one on disk, live or not; call ``require`` before."""
        start, _ = destination.local_range(self._mesh, self._coordinate)
        elements = self.region(source)
        return self.disk.writing(destination.buffer, start * elements.itemsize, elements)

    @property
    def disk(self) -> DiskBuffers:
        """The buffers on disk, which are allocated at the first use of one of them."""
        if self._disk is None:
            self._disk = self._new_disk()
        return self._disk

    def _new_disk(self) -> DiskBuffers:
        disk = DiskBuffers(self._disk_folder, self.rank)
        self._add_to_disk(disk)
        return disk

    def _add_to_disk(self, disk: DiskBuffers) -> None:
        sizes = {name: self._buffer_by_name[name].size_bytes for name in sorted(self._on_disk)}
        disk.add({name: size for name, size in sizes.items() if name in self._persistent})
        placement = self._placed.get(Space.DISK)
        if placement is not None:
            parts = {
                name: range(start, start + sizes[name]) for name, start in placement.offsets.items()
            }
            disk.add_parts(placement.size_bytes, parts)

    def buffer(self, name: str) -> Tensor:
        """Return the whole buffer, which is not on disk, as a 1-d tensor; raise InternalError where it is not live."""
        if name not in self._live:
            self.require(frozenset((name,)))
        return self._tensor(name)

    def region(self, region: Region) -> Tensor:
        """Return the region's elements on this rank as a 1-d tensor, live or not; call ``require`` before."""
        start, stop = region.local_range(self._mesh, self._coordinate)
        return self._tensor(region.buffer)[start:stop]

    def view(self, view: View) -> Tensor:
        """Return the strided tensor of the view on this rank, live or not; call ``require`` before."""
        start, _ = view.region.local_range(self._mesh, self._coordinate)
        tensor = self._tensor(view.region.buffer)
        return tensor.as_strided(view.shape, view.stride, tensor.storage_offset() + start)

    def offset_numel(self, view: View) -> int:
        """Return the index of the view's first element in its memory: the buffer itself, or the block of its space."""
        start, _ = view.region.local_range(self._mesh, self._coordinate)
        buffer = self._buffer_by_name[view.region.buffer]
        if buffer.is_persistent:
            return start
        offset_bytes = self._placed[buffer.space].offsets[buffer.name]
        return offset_bytes // buffer.dtype.itemsize_bytes + start

    def alloc(self, name: str) -> None:
        """Mark a temporary buffer as live."""
        if name in self._live:
            raise InternalError(f"rank {self.rank} allocates buffer %{name}, which is live already")
        self._live.add(name)
        if self._is_poisoned:
            self._poison(name)

    def release(self, name: str) -> None:
        """Mark a temporary buffer as not live."""
        if name not in self._live:
            self.require(frozenset((name,)))
        if self._is_poisoned:
            self._poison(name)
        self._live.remove(name)

    def _poison(self, name: str) -> None:
        if name not in self._on_disk:
            poison(self._tensor(name))
            return
        buffer = self._buffer_by_name[name]
        undefined = torch.empty(1, dtype=TORCH_DTYPE[buffer.dtype])
        poison(undefined)
        self.write(name, 0, undefined.expand(buffer.numel))

    def _tensor(self, name: str) -> Tensor:
        """Return the whole buffer, live or not; allocate it if necessary."""
        tensor = self._tensors.get(name)
        if tensor is not None:
            return tensor
        if name in self._on_disk:
            raise InternalError(f"buffer %{name} of rank {self.rank} is on disk and has no tensor")
        if name in self._persistent:
            buffer = self._buffer_by_name[name]
            tensor = self._new(buffer.space, buffer.numel, buffer.dtype)
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
            if space is Space.DISK:
                continue
            block = self._new(space, placement.size_bytes, DType.U8)
            if space is Space.DEVICE:
                self._block = block
            for name, start in placement.offsets.items():
                buffer = self._buffer_by_name[name]
                elements = block[start : start + buffer.size_bytes]
                self._tensors[name] = elements.view(TORCH_DTYPE[buffer.dtype])
        self._has_blocks = True

    def _new(self, space: Space, numel: int, dtype: DType) -> Tensor:
        with memory_for("the program's buffers"), record_function(allocation_range(space)):
            return self._uninitialised(space, numel, TORCH_DTYPE[dtype])

    def _uninitialised(self, space: Space, numel: int, torch_dtype: torch.dtype) -> Tensor:
        match space:
            case Space.DEVICE:
                return torch.empty(numel, dtype=torch_dtype, device=self.device)
            case Space.HOST if self.device.type == "cuda":
                return driver().pinned_empty(numel, torch_dtype, self.device)
            case Space.HOST if self._on_disk:
                return _at_page(numel, torch_dtype)
            case Space.HOST:
                return torch.empty(numel, dtype=torch_dtype)
            case Space.DISK:
                raise InternalError("a buffer on disk has no tensor")
            case _:
                assert_never(space)


def _at_page(numel: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor that is aligned to a page, so that disks can access it without a copy.

    Pinned memory is aligned to pages anyway.
    """
    octets = torch.empty(numel * dtype.itemsize + PAGE_BYTES, dtype=torch.uint8)
    start = -octets.data_ptr() % PAGE_BYTES
    return octets[start : start + numel * dtype.itemsize].view(dtype)
