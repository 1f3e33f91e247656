"""Files of safetensors, and models of Hugging Face: folders with one such file, or with several and an index.

See https://github.com/huggingface/safetensors#format. Older models have files of ``torch.save`` instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES, LENGTH_BYTES
from zeroir.convert.import_state_dict import state_dict_tensors
from zeroir.convert.imported import (
    ImportedModel,
    ImportedTensor,
    MappedFile,
    elements_at,
    weights,
    whole,
)
from zeroir.errors import UserError

SAFETENSORS: Final = "*.safetensors"
MODEL_FILES: Final = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)
"""Files that make a folder a model of Hugging Face; the first that exists is read."""

_DTYPES: Final[Mapping[str, str]] = {
    **{dtype.upper(): dtype for dtype in ITEMSIZE_BYTES},
    "F8_E8M0FNU": "f8_e8m0",
}


def is_safetensors(file: MappedFile) -> bool:
    """Whether a file begins like one of safetensors."""
    return (
        file.size_bytes > LENGTH_BYTES
        and bytes(file.data[LENGTH_BYTES : LENGTH_BYTES + 1]) == b"{"
        and int.from_bytes(file.data[:LENGTH_BYTES], "little") <= file.size_bytes - LENGTH_BYTES
    )


def safetensors_tensors(file: MappedFile) -> dict[str, ImportedTensor]:
    """The tensors of a file of safetensors by name.

    Raises:
        UserError: if it is damaged, or has a dtype that checkpoints lack.
    """
    start = LENGTH_BYTES + int.from_bytes(file.data[:LENGTH_BYTES], "little")
    header = _json(bytes(file.data[LENGTH_BYTES:start]), file.path)
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {
                "dtype": str() as dtype,
                "shape": [*sizes],
                "data_offsets": [int() as begin, int() as end],
            }:
                shape = tuple(size for size in sizes if isinstance(size, int))
            case _:
                raise UserError(f"'{file.path}' is damaged: its header has no place for {name}.")
        if dtype not in _DTYPES:
            raise UserError(f"'{file.path}' has {name} in the dtype {dtype}: convert it first.")
        elements = elements_at(file, start + begin, _DTYPES[dtype], shape, name)
        if elements.nbytes != end - begin or len(shape) != len(sizes):
            raise UserError(
                f"'{file.path}' is damaged: {name} has another shape than its elements."
            )
        tensors[name] = whole(_DTYPES[dtype], elements, file)
    return tensors


def import_safetensors(file: MappedFile) -> ImportedModel:
    """The model in one file of safetensors."""
    return weights(safetensors_tensors(file))


def import_hugging_face(folder: Path) -> ImportedModel:
    """The model in a folder of Hugging Face, with its configuration.

    Raises:
        UserError: if a file is missing or damaged.
    """
    tensors: dict[str, ImportedTensor] = {}
    for path in _files(folder):
        file = MappedFile(path)
        read = safetensors_tensors(file) if path.match(SAFETENSORS) else state_dict_tensors(file)
        twice = sorted(tensors.keys() & read.keys())
        if twice:
            raise UserError(f"'{folder}' has {twice[0]} in two files: name the one to import.")
        tensors |= read
    return replace(weights(tensors), config=_config(folder))


def _files(folder: Path) -> Iterator[Path]:
    name = next((name for name in MODEL_FILES if (folder / name).exists()), None)
    if name is None:
        yield from sorted(folder.glob(SAFETENSORS))
    elif name.endswith(".json"):
        places = _json((folder / name).read_bytes(), folder / name).get("weight_map")
        if not isinstance(places, dict):
            raise UserError(f"'{folder / name}' is damaged: it has no weight_map.")
        for file in dict.fromkeys(places.values()):
            # A name with a folder could be any file of this machine.
            if not isinstance(file, str) or Path(file).name != file:
                raise UserError(f"'{folder / name}' is damaged: it names no file in its folder.")
            if not (folder / file).exists():
                raise UserError(f"'{folder}' lacks {file}, which its index names.")
            yield folder / file
    else:
        yield folder / name


def _config(folder: Path) -> JsonValue:
    path = folder / "config.json"
    return _json(path.read_bytes(), path) if path.exists() else None


def _json(data: bytes, path: Path) -> dict[str, JsonValue]:
    try:
        value: JsonValue = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"'{path}' is damaged: it has no JSON where it should.") from error
    if not isinstance(value, dict):
        raise UserError(f"'{path}' is damaged: its JSON is no object.")
    return value
