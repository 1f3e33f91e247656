"""A folder that ``from_pretrained`` of Hugging Face's libraries loads.

    model.safetensors                         or, above the size of a shard,
    model-00001-of-00003.safetensors …        and model.safetensors.index.json, which names the file of each tensor
    config.json                               where the checkpoint has the model's configuration

See https://huggingface.co/docs/transformers/main/en/models#sharded-checkpoints. A tied parameter is written once, under
the first of its names in the order of modules (``model.embed_tokens.weight``, ``shared.weight``): from_pretrained ties
the others to it. If the configuration has ``tie_word_embeddings: false``, it ties nothing, so each name is written. The
safetensors library can only write tensors that are all in memory, so the files are written like those of checkpoints.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import JsonValue

from zeroir.artifact.output_folders import HUGGING_FACE, folder_written_whole
from zeroir.checkpoint.local_storage import LocalStorage
from zeroir.checkpoint.safetensors_header import METADATA, StoredTensorSpec
from zeroir.checkpoint.writing import write_file
from zeroir.convert.exported import (
    ExportedTensor,
    exported_buffers,
    exported_parameters,
)
from zeroir.convert.formats import WeightDtype
from zeroir.convert.stored_tensors import StoredTensors
from zeroir.errors import UserError

WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
CONFIG: Final = "config.json"

_DTYPE_NAMES: Final = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedTensor:
    name: str
    exported: ExportedTensor


def export_hugging_face(
    stored: StoredTensors,
    output: Path,
    *,
    dtype: WeightDtype,
    use_ema: bool,
    max_shard_bytes: int,
) -> list[str]:
    """Export the checkpoint to a folder, and return notes for the user.

    Raises:
        UserError: if the checkpoint is damaged or lacks what was requested, or the folder cannot be written.
    """
    config = stored.manifest.config
    parameters = exported_parameters(stored, dtype, use_ema=use_ema)
    is_untied = isinstance(config, dict) and config.get("tie_word_embeddings") is False
    tensors, outside = _named(
        [*parameters, *exported_buffers(stored)],
        owner=stored.manifest.config_owner,
        is_untied=is_untied,
    )
    if any(tensor.name == METADATA for tensor in tensors):
        raise UserError(
            f"A file of safetensors has no tensor '{METADATA}', which is the name of its metadata: use --format dcp or "
            "state-dict."
        )
    shards = _shards(tensors, max_shard_bytes)
    with folder_written_whole(output, HUGGING_FACE) as folder:
        for index, shard in enumerate(shards, start=1):
            name = WEIGHTS if len(shards) == 1 else _shard_name(index, len(shards))
            _write_shard(stored, folder, name, shard)
        if len(shards) > 1:
            _write_json(folder / INDEX, _index(shards))
        if isinstance(config, dict):
            _write_json(folder / CONFIG, _config(config, parameters))
    notes = []
    if outside:
        notes.append(
            f"{len(outside)} tensors were left out, because they are not in {stored.manifest.config_owner}, the module "
            f"that the configuration describes: {outside[0]}{', …' if len(outside) > 1 else '.'}"
        )
    if not isinstance(config, dict):
        notes.append(
            f"The checkpoint has no configuration of the model: from_pretrained needs a {CONFIG} beside the weights."
        )
    return notes


def _named(
    tensors: Sequence[ExportedTensor], *, owner: str, is_untied: bool
) -> tuple[list[_NamedTensor], list[str]]:
    """Return the tensors of the module ``owner`` by their names in it, and the names of the others."""
    prefix = f"{owner}." if owner else ""
    named = []
    outside = []
    for tensor in tensors:
        names = [name.removeprefix(prefix) for name in tensor.names if name.startswith(prefix)]
        if not names:
            outside.append(tensor.names[0])
        elif tensor.size_bytes:
            kept = names if is_untied else names[:1]
            named += [_NamedTensor(name=name, exported=tensor) for name in kept]
    return named, outside


def _shards(tensors: Sequence[_NamedTensor], max_shard_bytes: int) -> list[list[_NamedTensor]]:
    """Distribute consecutive tensors among files of at most this size; a larger tensor has its own file."""
    shards: list[list[_NamedTensor]] = [[]]
    size_bytes = 0
    for tensor in tensors:
        if shards[-1] and size_bytes + tensor.exported.size_bytes > max_shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(tensor)
        size_bytes += tensor.exported.size_bytes
    return shards


def _shard_name(index: int, count: int) -> str:
    return f"model-{index:05}-of-{count:05}.safetensors"


def _write_shard(
    stored: StoredTensors, folder: Path, name: str, tensors: Sequence[_NamedTensor]
) -> None:
    specs = [
        StoredTensorSpec(
            name=tensor.name,
            dtype=tensor.exported.dtype,
            numel=tensor.exported.tensor.numel,
            shape=tensor.exported.shape,
        )
        for tensor in tensors
    ]
    parts = [tensor.exported.parts(stored) for tensor in tensors]
    write_file(LocalStorage(), str(folder), name, list(zip(specs, parts, strict=True)))


def _index(shards: Sequence[Sequence[_NamedTensor]]) -> JsonValue:
    total_bytes = sum(tensor.exported.size_bytes for shard in shards for tensor in shard)
    return {
        "metadata": {"total_size": total_bytes},
        "weight_map": {
            tensor.name: _shard_name(index, len(shards))
            for index, shard in enumerate(shards, start=1)
            for tensor in shard
        },
    }


def _config(
    config: dict[str, JsonValue], parameters: Sequence[ExportedTensor]
) -> dict[str, JsonValue]:
    """Return the configuration with the dtype of most exported elements, in which from_pretrained loads the weights."""
    counts: Counter[str] = Counter()
    for parameter in parameters:
        counts[parameter.dtype] += parameter.tensor.numel
    most_common = max(counts, key=lambda dtype: counts[dtype], default=None)
    if most_common not in _DTYPE_NAMES:
        return config
    # transformers before version 5 calls it torch_dtype.
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: _DTYPE_NAMES[most_common]}


def _write_json(path: Path, value: JsonValue) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
