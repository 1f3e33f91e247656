"""The model's ``state_dict`` in one file, which ``torch.load(path, weights_only=True)`` reads."""

from __future__ import annotations

from pathlib import Path

from zeroir.artifact.outputs import STATE_DICT, written_whole
from zeroir.convert.exported import exported_buffers, exported_parameters
from zeroir.convert.formats import WeightDtype
from zeroir.convert.stored_tensors import StoredTensors
from zeroir.convert.torch_archive import ArchivedTensor, write_torch_archive


def export_state_dict(
    stored: StoredTensors, output: Path, *, dtype: WeightDtype, use_ema: bool
) -> None:
    """Write parameters and persistent buffers under all their names; tied ones share their storage.

    Raises:
        UserError: if the checkpoint is damaged or lacks what is asked for, or the file cannot be written.
    """
    tensors = [*exported_parameters(stored, dtype, use_ema=use_ema), *exported_buffers(stored)]
    archived = [
        ArchivedTensor(
            keys=tensor.names,
            dtype=tensor.dtype,
            shape=tensor.shape,
            numel=tensor.tensor.numel,
            size_bytes=tensor.size_bytes,
            parts=tensor.parts(stored),
        )
        for tensor in tensors
    ]
    with written_whole(output, STATE_DICT) as file:
        write_torch_archive(file, archived)
