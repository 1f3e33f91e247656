"""The model's ``state_dict`` in one file, which ``torch.load(path, weights_only=True)`` reads.

``torch.save`` writes the file with fake tensors, which have no elements, and reserves the space for them. Then the
elements are written to their places slice by slice, so that no whole tensor is ever in memory. The checksums of the zip
archive, which torch does not read, are those of empty data.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroir.artifact.outputs import STATE_DICT, written_whole
from zeroir.convert.exported import exported_buffers, exported_parameters
from zeroir.convert.formats import WeightDtype
from zeroir.convert.stored_tensors import StoredTensors
from zeroir.convert.torch_dtypes import TORCH_DTYPES


def export_state_dict(
    stored: StoredTensors, output: Path, *, dtype: WeightDtype, use_ema: bool
) -> None:
    """Write parameters and persistent buffers under all their names; tied ones share their storage.

    Raises:
        UserError: if the checkpoint is damaged or lacks what was requested, or the file cannot be written.
    """
    tensors = [*exported_parameters(stored, dtype, use_ema=use_ema), *exported_buffers(stored)]
    with FakeTensorMode():
        empty = [torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype]) for tensor in tensors]
    state_dict = {
        name: values for tensor, values in zip(tensors, empty, strict=True) for name in tensor.names
    }
    with written_whole(output, STATE_DICT) as file:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(state_dict, file)
        file.flush()
        places = torch.load(file.name, map_location="meta", weights_only=True)
        for tensor in tensors:
            file.seek(places[tensor.names[0]].untyped_storage()._checkpoint_offset)
            for part in tensor.parts(stored):
                file.write(part)
