"""The bytes of torch tensors, for the files of checkpoints and for tensors in trees of state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from zeroir.checkpoint.state_tree import StoredArray
from zeroir.errors import UserError
from zeroir.runtime.disk.elements import ElementsOnDisk

_CHUNK_BYTES: Final = 64 << 20

_NAMES: Final = {
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}
_DTYPES: Final = {name: dtype for dtype, name in _NAMES.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order: a view of a contiguous CPU tensor, otherwise of a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The bytes of a flat tensor, or of elements on disk, in order; other memory is copied to the host chunk by chunk.

    They can be iterated again, so that a file is rewritten after a temporary failure of an object store.
    """

    values: Tensor | ElementsOnDisk

    def __iter__(self) -> Iterator[memoryview]:
        if not isinstance(self.values, Tensor):
            yield from map(bytes_of, self.values.chunks())
            return
        numel = self.values.numel()
        is_on_host = self.values.device.type == "cpu"
        per_chunk = numel if is_on_host else _CHUNK_BYTES // self.values.itemsize
        for start in range(0, numel, per_chunk):
            yield bytes_of(self.values[start : start + per_chunk])


class TorchTensors:
    """Encodes torch tensors in trees of state; decoded tensors are on the CPU."""

    kind: str = "torch"

    def encode(self, value: object) -> StoredArray | None:
        if not isinstance(value, Tensor):
            return None
        name = _NAMES.get(value.dtype)
        if name is None or value.layout is not torch.strided or value.is_meta:
            raise UserError(
                f"The state has a tensor of {value.dtype} with the layout {value.layout} on {value.device}, which a "
                "checkpoint cannot hold: convert it to a dense tensor of bool, integers or floats."
            )
        # A copy, because the tensor may change before it is written.
        return StoredArray(
            kind=self.kind,
            dtype=name,
            shape=tuple(value.shape),
            data=memoryview(bytearray(bytes_of(value))),
        )

    def decode(self, array: StoredArray) -> object:
        flat = torch.empty(array.numel, dtype=_DTYPES[array.dtype])
        if array.numel:
            flat.view(torch.uint8).copy_(torch.frombuffer(bytearray(array.data), dtype=torch.uint8))
        return flat.view(array.shape)
