"""The weights of a checkpoint as an export writes them: with the chosen values and dtype, slice by slice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from zeroir.checkpoint.manifest import MASTER
from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES
from zeroir.convert.formats import AS_TRAINED, WeightDtype
from zeroir.convert.stored_tensors import BufferInFiles, StoredTensors, TensorInFiles
from zeroir.ir.contents import EMA

_FLOATING: Final = ("f64", "f32", "f16", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTensor:
    """A parameter or buffer: all its names, its dtype in the export, and the place of its stored elements."""

    names: tuple[str, ...]
    dtype: str
    tensor: TensorInFiles

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the model."""
        return self.tensor.shape

    @property
    def size_bytes(self) -> int:
        """The exported bytes."""
        return self.tensor.numel * ITEMSIZE_BYTES[self.dtype]

    def elements(self, start: int, shape: tuple[int, ...]) -> ExportedTensor:
        """Return the consecutive elements from ``start`` on, in the given shape."""
        return replace(self, tensor=self.tensor.elements(start, shape))

    def parts(self, stored: StoredTensors) -> Iterator[memoryview]:
        """Yield the exported bytes in order, part by part."""
        return cast(stored.slices(self.tensor), self.tensor.dtype, self.dtype)


def exported_parameters(
    stored: StoredTensors, dtype: WeightDtype, *, use_ema: bool
) -> list[ExportedTensor]:
    """Return the parameters of a checkpoint, or with ``use_ema`` their averages; frozen ones have no average.

    Raises:
        UserError: if the checkpoint has no averages.
    """
    quantity = EMA if use_ema else MASTER
    parameters = []
    for parameter in stored.parameters:
        tensor = stored.weight(parameter, quantity)
        is_cast = dtype != AS_TRAINED and tensor.dtype in _FLOATING
        parameters.append(
            ExportedTensor(
                names=parameter.names, dtype=dtype if is_cast else tensor.dtype, tensor=tensor
            )
        )
    return parameters


def exported_buffers(stored: StoredTensors) -> list[ExportedTensor]:
    """Return the buffers in the model's ``state_dict``, in their own dtypes."""
    return [
        ExportedTensor(names=buffer.names, dtype=buffer.tensor.dtype, tensor=buffer.tensor)
        for buffer in stored.buffers
    ]


def notes_on_buffers(buffers: Iterable[BufferInFiles]) -> list[str]:
    """Return a note if the values of a buffer differ between ranks, of which only one is exported."""
    differing = [buffer.names[0] for buffer in buffers if buffer.differs]
    if not differing:
        return []
    return [f"Buffers differ between ranks, such as {differing[0]}; those of rank 0 were written."]


def cast(parts: Iterable[memoryview], stored: str, wanted: str) -> Iterator[memoryview]:
    """Convert elements from one floating-point dtype to another, rounding to nearest even as torch does."""
    if stored == wanted:
        yield from parts
        return
    import torch

    from zeroir.convert.torch_dtypes import TORCH_DTYPES

    for part in parts:
        elements = torch.frombuffer(part, dtype=TORCH_DTYPES[stored]).to(TORCH_DTYPES[wanted])
        yield elements.view(torch.uint8).numpy().data
