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

    Persistent buffers are allocated, as zeros, with the object; temporary ones by ``alloc``. With ``is_poisoned``
    undefined elements are NaN and a released buffer is overwritten, so that a wrong order of ops shows in the
    numbers. Buffers on disk are files under ``directory`` (a temporary one by default) mapped into memory. On CUDA,
    what one stream takes and another releases goes through ``reuse``.
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
        self._alloc_stream: dict[str, str] = {}
        for buffer in program.buffers:
            if buffer.is_persistent:
                tensor = self._new(buffer)
                tensor.zero_()
                self._tensors[buffer.name] = tensor

    def is_live(self, name: str) -> bool:
        """Whether the buffer is allocated now."""
        return name in self._tensors

    def buffer(self, name: str) -> Tensor:
        """The whole buffer as a one-dimensional tensor; InternalError when it is not live."""
        try:
            return self._tensors[name]
        except KeyError:
            raise InternalError(
                f"rank {self.rank} uses buffer %{name}, which is not allocated at that point"
            ) from None

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
        if name in self._tensors:
            raise InternalError(f"rank {self.rank} allocates buffer %{name}, which is live already")
        tensor = self._new(self._buffers[name])
        if self._is_poisoned:
            poison(tensor)
        self._tensors[name] = tensor
        self._alloc_stream[name] = stream

    def release(self, name: str, stream: str) -> None:
        """End a temporary buffer on a stream."""
        tensor = self.buffer(name)
        if self._is_poisoned:
            poison(tensor)
        if tensor.is_cuda and self._alloc_stream[name] != stream:
            self.reuse.keep(name, tensor, self._alloc_stream[name], stream)
        del self._tensors[name]

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
