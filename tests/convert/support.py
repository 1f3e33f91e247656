"""What tests of imports share."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from zeroir.checkpoint.reading import read_manifest


def imported_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of an imported checkpoint in their shapes, by ``<parameter>.<quantity>``, and buffers by name."""
    manifest = read_manifest(str(checkpoint))
    files = {file.name: load_file(checkpoint / file.name) for file in manifest.files}
    tensors = {}
    for flat in manifest.flats:
        (parameter,) = flat.parameters
        for quantity in flat.quantities:
            for piece in quantity.pieces:
                values = files[piece.file][piece.tensor].reshape(parameter.shape)
                for name in (parameter.name, *parameter.aliases):
                    tensors[f"{name}.{quantity.name}"] = values
    for buffer in manifest.buffers:
        for name in (buffer.name, *buffer.aliases):
            tensors[name] = files[buffer.file][buffer.tensor].reshape(buffer.shape)
    return tensors
