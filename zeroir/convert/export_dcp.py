"""A checkpoint of ``torch.distributed.checkpoint``: the model and its optimizer by fully-qualified names.

    {"model": {name: weights, …},
     "optim": {"state": {name: {"step": …, "exp_avg": …, "exp_avg_sq": …}, …},
               "param_groups": [{"params": [name, …], "lr": …, …}]}}

This is the result of ``torch.distributed.checkpoint.state_dict.get_state_dict``, so ``set_state_dict`` loads it into
FSDP2, DDP and plain modules. torch's own planner and file writer write the files. Large tensors are split into blocks
of rows, so that ranks read little more than their shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from zeroir.artifact.output_folders import DISTRIBUTED, folder_written_whole
from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES
from zeroir.convert.exported import (
    ExportedTensor,
    exported_buffers,
    exported_parameters,
)
from zeroir.convert.formats import WeightDtype
from zeroir.convert.loaded_tensor import loaded_tensor
from zeroir.convert.stored_tensors import StoredTensors, TensorInFiles
from zeroir.convert.torch_dtypes import TORCH_DTYPES
from zeroir.convert.torch_optimizer_states import (
    STEP,
    OptimizerGroupInFiles,
    notes_on_states,
    optimizer_groups,
    states,
)

BLOCK_BYTES: Final = 32 << 20
"""The most bytes of a block of rows, unless one row is larger."""

FILE_BYTES: Final = 64 << 20
"""The most bytes of a file, unless one block is larger."""


def export_dcp(
    stored: StoredTensors, output: Path, *, dtype: WeightDtype, use_ema: bool
) -> list[str]:
    """Export the checkpoint to a folder, and return notes for the user.

    Raises:
        UserError: if the checkpoint is damaged or lacks what was requested, or the folder cannot be written.
    """
    groups = optimizer_groups(stored)
    weights = [*exported_parameters(stored, dtype, use_ema=use_ema), *exported_buffers(stored)]
    state_dict: dict[str, object] = {
        "model": {
            name: _StoredValue(stored=stored, exported=weight)
            for weight in weights
            for name in weight.names
        }
    }
    if groups:
        state_dict["optim"] = _optimizer(stored, groups)
    with folder_written_whole(output, DISTRIBUTED) as folder:
        _write(folder, state_dict)
    return notes_on_states(stored, groups)


def _optimizer(stored: StoredTensors, groups: Iterable[OptimizerGroupInFiles]) -> dict[str, object]:
    """Return the states and settings of the optimizer, as ``get_optimizer_state_dict`` returns them."""
    state: dict[str, dict[str, object]] = {}
    param_groups = []
    for group in groups:
        for parameter in group.parameters:
            of_parameter: dict[str, object] = {
                name: _StoredValue(stored=stored, exported=_unchanged(tensor))
                for name, tensor in states(stored, parameter).items()
            }
            if group.counts_steps:
                of_parameter[STEP] = torch.tensor(stored.step_count, dtype=torch.float32)
            if of_parameter:
                state[parameter.name] = of_parameter
        names = [parameter.name for parameter in group.parameters]
        param_groups.append({**group.settings, "params": names})
    return {"state": state, "param_groups": param_groups}


def _unchanged(tensor: TensorInFiles) -> ExportedTensor:
    return ExportedTensor(names=(), dtype=tensor.dtype, tensor=tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredValue:
    """A tensor of a state dictionary that is read when it is written."""

    stored: StoredTensors
    exported: ExportedTensor

    def write_items(self, key: str) -> Iterator[WriteItem]:
        """Yield the items to write: its blocks."""
        size = torch.Size(self.exported.shape)
        properties = TensorProperties(dtype=TORCH_DTYPES[self.exported.dtype])
        for chunk in self._chunks():
            yield WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
            )

    def block(self, index: MetadataIndex) -> Tensor:
        """Load the elements of a block."""
        chunk = next(chunk for chunk in self._chunks() if chunk.offsets == index.offset)
        row_numel = prod(self.exported.shape[1:])
        start = chunk.offsets[0] * row_numel if self.exported.shape else 0
        return loaded_tensor(self.stored, self.exported.elements(start, tuple(chunk.sizes)))

    def _chunks(self) -> Iterator[ChunkStorageMetadata]:
        """Yield blocks of rows of at most ``BLOCK_BYTES``."""
        shape = self.exported.shape
        if not shape or self.exported.size_bytes <= BLOCK_BYTES:
            yield ChunkStorageMetadata(
                offsets=torch.Size([0] * len(shape)), sizes=torch.Size(shape)
            )
            return
        row_bytes = prod(shape[1:]) * ITEMSIZE_BYTES[self.exported.dtype]
        block_rows = max(BLOCK_BYTES // row_bytes, 1)
        for start in range(0, shape[0], block_rows):
            rows = min(block_rows, shape[0] - start)
            yield ChunkStorageMetadata(
                offsets=torch.Size([start, *[0] * (len(shape) - 1)]),
                sizes=torch.Size([rows, *shape[1:]]),
            )


class _BlockwisePlanner(DefaultSavePlanner):
    """torch's planner, extended to state dictionaries with stored values."""

    def create_local_plan(self) -> SavePlan:
        """Plan the blocks of stored values, and everything else as torch does."""
        plan = super().create_local_plan()
        items = [item for item in plan.items if item.index.fqn not in self._stored_values]
        for key, value in self._stored_values.items():
            items += value.write_items(key)
        self.plan = replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> object:
        """Load a block when it is about to be written."""
        value = self._stored_values.get(index.fqn)
        return super().lookup_object(index) if value is None else value.block(index)

    @property
    def _stored_values(self) -> dict[str, _StoredValue]:
        return {
            key: value for key, value in self.state_dict.items() if isinstance(value, _StoredValue)
        }


def _write(folder: Path, state_dict: dict[str, object]) -> None:
    """Write a state dictionary with torch's planner and writer, like a job whose ranks save one after the other.

    The writer keeps the tensors of a file in memory until the file is written, so several files are used.
    """
    writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    planner = _BlockwisePlanner()
    planner.set_up_planner(state_dict, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    whole = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan(
        [replace(whole, items=items) for items in _files(whole.items)]
    )
    results = []
    for plan in writer.prepare_global_plan(plans):
        written = writer.write_data(planner.finish_plan(plan), planner)
        written.wait()
        results.append(written.value())
    writer.finish(metadata, results)


def _files(items: Iterable[WriteItem]) -> list[list[WriteItem]]:
    """Distribute the items among files."""
    files: list[list[WriteItem]] = [[]]
    size_bytes = 0
    for item in items:
        item_bytes = 0
        if item.tensor_data is not None:
            data = item.tensor_data
            item_bytes = data.chunk.sizes.numel() * data.properties.dtype.itemsize
        if files[-1] and size_bytes + item_bytes > FILE_BYTES:
            files.append([])
            size_bytes = 0
        files[-1].append(item)
        size_bytes += item_bytes
    return files
