"""Published weights: the image of a safetensors file, which is made and sent in chunks, one gathered flat at a time.

Tensors have the names of the module's ``state_dict``; tied ones are there once, and the header lists their other names.
Chunks are in descending order of element sizes, so that each tensor is aligned to its elements.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from zeroir.checkpoint.safetensors_header import (
    ITEMSIZE_BYTES,
    StoredTensorSpec,
    header_bytes,
)
from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.runtime.checkpoint.model_facts import ModelFacts
from zeroir.runtime.comm.base import Comm
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.full_parameters import ParameterPart, parameter_parts
from zeroir.runtime.state.waiting_states import WaitingStates
from zeroir.torch_ops.types import IR_DTYPE

ALIASES: Final = "aliases"
"""The key of the header's metadata with the other names of tied tensors, as JSON: ``{name: [other, ...]}``."""
STEP: Final = "step"
"""The key of the header's metadata with the number of training steps done."""
VERSION: Final = "version"
"""The key of the header's metadata with the version of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tensors of one dtype that are sent together.

    ``gather`` returns a flat tensor that has them at ``places``, in ascending order, in memory of its own. All ranks
    call it together, and drop the result before they gather the next chunk.
    """

    specs: tuple[StoredTensorSpec, ...]
    gather: Callable[[], Tensor]
    places: tuple[range, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.size_bytes for spec in self.specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """The weights of a model at a step, in chunks; ``aliases`` has the other names of tensors with several."""

    chunks: tuple[Chunk, ...]
    aliases: Mapping[str, Sequence[str]]
    step: int

    def header(self, version: int) -> bytes:
        """Return the header of the file."""
        metadata = {
            VERSION: str(version),
            STEP: str(self.step),
            ALIASES: json.dumps(self.aliases, separators=(",", ":")),
        }
        return header_bytes([spec for chunk in self.chunks for spec in chunk.specs], metadata)


def image_of(
    program: Program,
    memory: RankMemory,
    comm: Comm,
    facts: ModelFacts,
    others: Mapping[str, Tensor],
    waiting: WaitingStates,
    step: int,
    *,
    masters: bool,
    ema: bool,
) -> Image:
    """Return the image of a rank's parameters, as ``whole_parameters`` has them, and of its persistent buffers.

    ``others`` are the tensors of the module that the program does not hold.

    Raises:
        UserError: where a tensor has a dtype that is not sent; with ``ema``, where the program keeps no averages.
    """
    own_names: dict[str, list[str]] = {}
    for flat in program.flats:
        for slot in flat.slots:
            # A frozen module beside the model has no names in its ``state_dict``.
            names = [name for name in (slot.name, *slot.aliases) if facts.is_of_model(name)]
            if names:
                own_names[slot.name] = names
    parts = parameter_parts(
        program, [memory], comm, own_names, masters=masters, ema=ema, waiting=waiting
    )
    chunks = [_chunk_of_parameters(part, own_names) for part in parts]
    for name, tensor in _buffers(program, memory, others):
        names = [each for each in (name, *facts.aliases(name)) if facts.is_of_model(each)]
        if names and tensor.numel():
            own_names[name] = names
            chunks.append(_chunk_of_buffer(names[0], tensor))
    chunks.sort(key=lambda chunk: -ITEMSIZE_BYTES[chunk.specs[0].dtype])
    return Image(
        chunks=tuple(chunks),
        aliases={first: rest for first, *rest in own_names.values() if rest},
        step=step,
    )


def _buffers(
    program: Program, memory: RankMemory, others: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for binding in program.module_buffers:
        if binding.data is None:
            yield binding.name, memory.buffer(binding.buffer).view(binding.shape)
    yield from others.items()


def _chunk_of_parameters(part: ParameterPart, names: Mapping[str, Sequence[str]]) -> Chunk:
    def gather() -> Tensor:
        (values,) = part.gather()
        return values

    slots = sorted(part.slots, key=lambda slot: slot.offset)
    return Chunk(
        specs=tuple(_spec(names[slot.name][0], part.dtype, slot.shape) for slot in slots),
        gather=gather,
        places=tuple(part.elements(slot) for slot in slots),
    )


def _chunk_of_buffer(name: str, tensor: Tensor) -> Chunk:
    return Chunk(
        specs=(_spec(name, tensor.dtype, tuple(tensor.shape)),),
        gather=lambda: tensor.detach().reshape(-1).clone(),
        places=(range(tensor.numel()),),
    )


def _spec(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> StoredTensorSpec:
    if dtype not in IR_DTYPE:
        raise UserError(f"'{name}' is a tensor of {dtype}, which engine.publish does not send.")
    numel = torch.Size(shape).numel()
    return StoredTensorSpec(name=name, dtype=IR_DTYPE[dtype].value, numel=numel, shape=shape)


def packed(values: Tensor, places: Sequence[range]) -> Tensor:
    """Return the bytes of these elements of a flat tensor, in ascending order, one after the other, u8 on the host.

    Values on the host are moved within their own memory, so that no second copy of them is needed.
    """
    host = values.cpu().view(torch.uint8)
    address, size_bytes = host.data_ptr(), values.element_size()
    stop = 0
    for place in places:
        start, count = place.start * size_bytes, len(place) * size_bytes
        if start != stop:
            # Torch copies no memory onto itself, and storage that numpy has seen cannot be freed early.
            ctypes.memmove(address + stop, address + start, count)
        stop += count
    return host[:stop]
