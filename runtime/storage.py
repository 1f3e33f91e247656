"""The buffers of one rank: flat tensors by name, and the slices and views that ops name."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import assert_never

import torch
from torch import Tensor

from zeroir.errors import InternalError
from zeroir.ir.buffers import Buffer, Region, Space, View
from zeroir.ir.program import Program
from zeroir.runtime.reuse import Reuse
from zeroir.runtime.tensors import TORCH_DTYPE, poison


class Memory:
    """What one rank holds while a program runs.

    Persistent buffers are allocated, as zeros, with the object; temporary ones by ``alloc``. A temporary buffer stays
    the same tensor from one ``alloc`` to the next and only its storage comes and goes, so a view of it is made once;
    whoever keeps one asks ``require`` before each use. With ``is_poisoned`` undefined elements are NaN and a released
    buffer is overwritten, so that a wrong order of ops shows in the numbers. Buffers on disk are files under
    ``directory`` (a temporary one by default) mapped into memory. On CUDA, what one stream takes and another releases
    goes through ``reuse``.
    """

    def __init__(
        self,
        program: Program,
        rank: int,
        device: torch.device,
        *,
        is_poisoned: bool = False,
        directory: Path | None = None,
    ) -> None:
        self.rank = rank
        self.device = device
        self.reuse = Reuse(program)
        self._mesh = program.mesh
        self._coordinate = program.mesh.coordinate(rank)
        self._buffers = program.buffer_by_name
        self._is_poisoned = is_poisoned
        self._directory = directory
        self._tensors: dict[str, Tensor] = {}
        self._live: set[str] = set()
        self._alloc_stream: dict[str, str] = {}
        for buffer in program.buffers:
            if buffer.is_persistent:
                tensor = self._new(buffer)
                tensor.zero_()
                self._tensors[buffer.name] = tensor
                self._live.add(buffer.name)

    def is_live(self, name: str) -> bool:
        """Whether the buffer is allocated now."""
        return name in self._live

    def require(self, names: frozenset[str]) -> None:
        """InternalError unless all these buffers are allocated now."""
        if not names <= self._live:
            name = min(names - self._live)
            raise InternalError(
                f"rank {self.rank} uses buffer %{name}, which is not allocated at that point"
            )

    def buffer(self, name: str) -> Tensor:
        """The whole buffer as a one-dimensional tensor; InternalError when it is not live."""
        if name not in self._live:
            self.require(frozenset((name,)))
        return self._tensors[name]

    def region(self, region: Region) -> Tensor:
        """The elements that the region names on this rank, as a one-dimensional tensor."""
        start, stop = region.local_range(self._mesh, self._coordinate)
        return self.buffer(region.buffer)[start:stop]

    def view(self, view: View) -> Tensor:
        """The strided tensor that the view names on this rank."""
        start, _ = view.region.local_range(self._mesh, self._coordinate)
        tensor = self.buffer(view.region.buffer)
        return tensor.as_strided(view.shape, view.stride, tensor.storage_offset() + start)

    def alloc(self, name: str, stream: str) -> None:
        """Begin a temporary buffer on a stream."""
        if name in self._live:
            raise InternalError(f"rank {self.rank} allocates buffer %{name}, which is live already")
        tensor = self._tensors.get(name)
        if tensor is None:
            tensor = self._tensors[name] = self._new(self._buffers[name])
        elif not self.reuse.take_back(name):
            _resize(tensor, tensor.nbytes)
        if self._is_poisoned:
            poison(tensor)
        self._live.add(name)
        self._alloc_stream[name] = stream

    def release(self, name: str, stream: str) -> None:
        """End a temporary buffer on a stream."""
        tensor = self.buffer(name)
        if self._is_poisoned:
            poison(tensor)
        self._live.remove(name)
        if tensor.is_cuda and self._alloc_stream[name] != stream:
            self.reuse.keep(name, tensor, self._alloc_stream[name], stream)
        elif self._buffers[name].space is not Space.DISK:
            _resize(tensor, 0)

    def _new(self, buffer: Buffer) -> Tensor:
        dtype = TORCH_DTYPE[buffer.dtype]
        match buffer.space:
            case Space.DEVICE:
                return torch.empty(buffer.numel, dtype=dtype, device=self.device)
            case Space.HOST:
                is_pinned = self.device.type == "cuda"
                return torch.empty(buffer.numel, dtype=dtype, pin_memory=is_pinned)
            case Space.DISK:
                path = self._disk() / f"{buffer.name}.bin"
                path.parent.mkdir(parents=True, exist_ok=True)
                return torch.from_file(str(path), shared=True, size=buffer.numel, dtype=dtype)
            case _:
                assert_never(buffer.space)

    def _disk(self) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="zeroir-"))
            weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        return self._directory / f"rank{self.rank}"


def _resize(tensor: Tensor, size_bytes: int) -> None:
    """Give a tensor's storage memory, or take it away; views of it stay valid."""
    tensor.untyped_storage().resize_(size_bytes)
