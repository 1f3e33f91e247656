"""Import of safetensors files, and of Hugging Face models: folders with one such file, or with several and an index.

See https://github.com/huggingface/safetensors#format. Older models have files of ``torch.save`` instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Final

from pydantic import JsonValue
from safetensors import SafetensorError, safe_open

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
"""Files that identify a folder as a Hugging Face model; the first that exists is read."""

_MOST_JSON_BYTES: Final = 64 << 20
"""More than the index of a million tensors has."""

_DTYPES: Final[Mapping[str, str]] = {dtype.upper(): dtype for dtype in ITEMSIZE_BYTES}
"""The library's names of dtypes, and those of manifests."""


def is_safetensors(file: MappedFile) -> bool:
    """Return whether a file begins like a safetensors file."""
    return (
        file.size_bytes > LENGTH_BYTES
        and bytes(file.data[LENGTH_BYTES : LENGTH_BYTES + 1]) == b"{"
        and int.from_bytes(file.data[:LENGTH_BYTES], "little") <= file.size_bytes - LENGTH_BYTES
    )


def safetensors_tensors(file: MappedFile) -> dict[str, ImportedTensor]:
    """Return the tensors of a safetensors file by name.

    The library reads and checks the header, and allows neither gaps between tensors nor bytes after the last one. So
    each tensor begins where the previous one ends. They are read from the mapped file, since numpy has no BF16.

    Raises:
        UserError: if the file is damaged, or has a dtype that checkpoints lack.
    """
    try:
        with safe_open(file.path, framework="numpy") as opened:
            tensors = {name: opened.get_slice(name) for name in opened.offset_keys()}
            forms = {
                name: (str(tensor.get_dtype()), tuple(map(int, tensor.get_shape())))
                for name, tensor in tensors.items()
            }
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"'{file.path}' is damaged, or not a file of safetensors: {str(error).rstrip('.')}."
        ) from error
    for name, (dtype, _) in forms.items():
        if dtype not in _DTYPES:
            raise UserError(f"'{file.path}' has {name} in the dtype {dtype}: convert it first.")
    begin = file.size_bytes - sum(
        prod(shape) * ITEMSIZE_BYTES[_DTYPES[dtype]] for dtype, shape in forms.values()
    )
    found = {}
    for name, (dtype, shape) in forms.items():
        elements = elements_at(file, begin, _DTYPES[dtype], shape, name)
        found[name] = whole(_DTYPES[dtype], elements, file)
        begin += elements.nbytes
    return found


def import_safetensors(file: MappedFile) -> ImportedModel:
    """Import the model in a safetensors file."""
    return weights(safetensors_tensors(file))


def import_hugging_face(folder: Path) -> ImportedModel:
    """Import the model in a Hugging Face folder, with its configuration.

    Raises:
        UserError: if a file is missing or damaged.
    """
    files = [MappedFile(path) for path in _files(folder)]
    if any(file.path.match(SAFETENSORS) for file in files):
        parts = [safetensors_tensors(file) for file in files]
    else:
        parts = state_dict_tensors(files)
    tensors: dict[str, ImportedTensor] = {}
    for part in parts:
        twice = sorted(tensors.keys() & part.keys())
        if twice:
            raise UserError(f"'{folder}' has {twice[0]} in two files: name the one to import.")
        tensors |= part
    return replace(weights(tensors), config=_config(folder))


def _files(folder: Path) -> Iterator[Path]:
    name = next((name for name in MODEL_FILES if (folder / name).exists()), None)
    if name is None:
        yield from sorted(folder.glob(SAFETENSORS))
    elif name.endswith(".json"):
        places = _json(folder / name).get("weight_map")
        if not isinstance(places, dict):
            raise UserError(f"'{folder / name}' is damaged: it has no weight_map.")
        for file in dict.fromkeys(places.values()):
            # A name with a folder could be any file on this machine.
            if not isinstance(file, str) or Path(file).name != file:
                raise UserError(f"'{folder / name}' is damaged: it names no file in its folder.")
            if not (folder / file).exists():
                raise UserError(f"'{folder}' lacks {file}, which its index names.")
            yield folder / file
    else:
        yield folder / name


def _config(folder: Path) -> JsonValue:
    path = folder / "config.json"
    return _json(path) if path.exists() else None


def _json(path: Path) -> dict[str, JsonValue]:
    if not path.is_file():
        raise UserError(f"'{path}' is not a file.")
    with path.open("rb") as file:
        data = file.read(_MOST_JSON_BYTES + 1)
    if len(data) > _MOST_JSON_BYTES:
        raise UserError(
            f"'{path}' is damaged: it has more than {_MOST_JSON_BYTES >> 20} MB of JSON."
        )
    try:
        value: JsonValue = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"'{path}' is damaged: it has no JSON where it should.") from error
    if not isinstance(value, dict):
        raise UserError(f"'{path}' is damaged: its JSON is no object.")
    return value
