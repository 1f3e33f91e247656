"""Checkpoints of modules, written without an engine: cut into flats, and each flat into the files of several ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import JsonValue
from torch import Tensor, nn

from zeroir.checkpoint.local_storage import LocalStorage
from zeroir.checkpoint.manifest import (
    MASTER,
    Manifest,
    Origin,
    Piece,
    Setting,
    StoredBuffer,
    StoredFlat,
    StoredGroup,
    StoredParameter,
    StoredQuantity,
    StoredScalar,
)
from zeroir.checkpoint.publish import begin
from zeroir.checkpoint.safetensors_header import StoredTensorSpec
from zeroir.checkpoint.writing import write_file
from zeroir.convert.torch_dtypes import TORCH_DTYPES

DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

States = Mapping[str, Mapping[str, Tensor]]
"""Quantities beside the weights: by the name of the quantity and that of the parameter."""


@dataclass(slots=True)
class _RankFile:
    tensors: list[tuple[StoredTensorSpec, Iterable[memoryview]]] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor) -> None:
        spec = StoredTensorSpec(name=name, dtype=DTYPES[tensor.dtype], numel=tensor.numel())
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        self.tensors.append((spec, [data.numpy().data]))


def write_checkpoint(
    path: Path,
    module: nn.Module,
    *,
    rank_count: int = 3,
    flat_count: int = 2,
    step: int = 0,
    states: States | None = None,
    groups: Sequence[StoredGroup] = (),
    scalars: Sequence[StoredScalar] = (),
    config: JsonValue = None,
    config_owner: str = "",
    buffers_of_rank_1: nn.Module | None = None,
) -> Manifest:
    """Write a checkpoint of a module, cut as if ranks had saved shards; empty pieces are left out as ours are.

    Buffers are those of rank 0, and of all ranks where no other module has those of rank 1.
    """
    draft = begin(str(path))
    files = [_RankFile() for _ in range(rank_count)]
    flats = [
        _flat(f"flat{index}", parameters, states or {}, files)
        for index, parameters in enumerate(_flats(module, flat_count))
    ]
    last = draft.file_name(rank_count - 1)
    everyone = tuple(range(rank_count))
    others = everyone if buffers_of_rank_1 is None else (0, *everyone[2:])
    buffers = list(_buffers(module, files[-1], last, others))
    if buffers_of_rank_1 is not None:
        buffers[:0] = _buffers(buffers_of_rank_1, files[-1], last, (1,))
    named = [
        (draft.file_name(rank), file.tensors) for rank, file in enumerate(files) if file.tensors
    ]
    stored = [write_file(LocalStorage(), draft.folder, name, each) for name, each in named]
    manifest = Manifest(
        step=step,
        origin=Origin(zeroir="test", world_size=rank_count, saved_at="2026-01-01T00:00:00Z"),
        files=tuple(stored),
        flats=tuple(flats),
        buffers=tuple(buffers),
        scalars=(StoredScalar(name="step", dtype="f32", values=(float(step),)), *scalars),
        groups=tuple(groups),
        config=config,
        config_owner=config_owner,
    )
    draft.publish(manifest)
    return manifest


def adamw_group(module: nn.Module, **settings: Setting) -> StoredGroup:
    """One group of AdamW with all trainable parameters of a module."""
    names = tuple(name for name, value in module.named_parameters() if value.requires_grad)
    return StoredGroup(name="default", algorithm="adamw", settings=settings, parameters=names)


def _flats(
    module: nn.Module, flat_count: int
) -> Iterator[Sequence[tuple[StoredParameter, Tensor]]]:
    """The parameters of each flat: consecutive ones of one dtype, trainable or frozen, at multiples of 64 elements."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
    for parameters in kinds.values():
        per_flat = -(-len(parameters) // flat_count)
        for start in range(0, len(parameters), per_flat):
            offset = 0
            slots: list[tuple[StoredParameter, Tensor]] = []
            for parameter in parameters[start : start + per_flat]:
                name, *aliases = names[id(parameter)]
                slot = StoredParameter(
                    name=name, offset=offset, shape=tuple(parameter.shape), aliases=tuple(aliases)
                )
                slots.append((slot, parameter))
                offset += -(-parameter.numel() // 64) * 64
            yield slots


def _flat(
    name: str,
    parameters: Sequence[tuple[StoredParameter, Tensor]],
    states: States,
    files: Sequence[_RankFile],
) -> StoredFlat:
    last, last_values = parameters[-1]
    numel = last.offset + last_values.numel()
    by_quantity: dict[str, Mapping[str, Tensor]] = {
        MASTER: {slot.name: values for slot, values in parameters}
    }
    is_trainable = parameters[0][1].requires_grad
    if is_trainable:
        by_quantity |= states
    quantities = []
    for quantity, values in by_quantity.items():
        dtype = next(iter(values.values())).dtype
        whole = torch.zeros(numel, dtype=dtype)
        for slot, parameter in parameters:
            whole[slot.offset : slot.offset + parameter.numel()] = (
                values[slot.name].detach().flatten()
            )
        pieces = tuple(_pieces(f"{name}.{quantity}", whole, files))
        quantities.append(StoredQuantity(name=quantity, dtype=DTYPES[dtype], pieces=pieces))
    return StoredFlat(
        name=name,
        dtype=DTYPES[parameters[0][1].dtype],
        is_trainable=is_trainable,
        parameters=tuple(slot for slot, _ in parameters),
        quantities=tuple(quantities),
    )


def _pieces(name: str, whole: Tensor, files: Sequence[_RankFile]) -> Iterator[Piece]:
    """Each rank's part of a flat; small flats leave nothing for the last ranks."""
    part_numel = -(-whole.numel() // len(files) // 256) * 256
    for rank, file in enumerate(files):
        start, stop = rank * part_numel, min((rank + 1) * part_numel, whole.numel())
        if start < stop:
            file.add(name, whole[start:stop].clone())
            yield Piece(file=f"rank-{rank:05}.safetensors", tensor=name, start=start, stop=stop)


def _buffers(
    module: nn.Module, file: _RankFile, file_name: str, ranks: tuple[int, ...]
) -> Iterator[StoredBuffer]:
    saved = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        tensor = f"buffer.{name}.{ranks[0]}"
        file.add(tensor, buffer)
        yield StoredBuffer(
            name=name,
            dtype=DTYPES[buffer.dtype],
            shape=tuple(buffer.shape),
            ranks=ranks,
            file=file_name,
            tensor=tensor,
            is_persistent=name in saved,
        )
