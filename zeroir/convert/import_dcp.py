"""Checkpoints of ``torch.distributed.checkpoint``: of FSDP2, DDP, torchtitan and others.

``.metadata`` is the pickle of ``torch.distributed.checkpoint.metadata.Metadata``, which is read as data. It names the
shape of each tensor, its chunks, and the file, offset and length of each. A chunk is a file of ``torch.save`` within a
larger one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Final

from zeroir.convert.imported import (
    Box,
    ImportedModel,
    ImportedTensor,
    MappedFile,
    weights,
)
from zeroir.convert.imported_archive import DTYPES, Archive, UnknownTensor
from zeroir.convert.imported_optimizer import (
    MODEL_KEYS,
    number_in,
    optimizer_in,
    with_optimizer,
)
from zeroir.convert.pickled_data import Made, Named, UnreadablePickleError, read_pickle
from zeroir.errors import UserError

METADATA: Final = ".metadata"

_MODULE: Final = "torch.distributed.checkpoint.metadata."
_TRAINING: Final = frozenset({"optim", "optimizer"})
_STEP_KEYS: Final = ("step", "global_step", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """Bytes ``[start, start + size_bytes)`` of a file of the folder."""

    file: str
    start: int
    size_bytes: int


class _Folder:
    """The files of a checkpoint and what its metadata says about them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        file = MappedFile(folder / METADATA)
        try:
            metadata = read_pickle(bytes(file.data))
        except UnreadablePickleError as error:
            raise self.damaged(f"{METADATA} cannot be read ({error})") from error
        if not isinstance(metadata, Made) or metadata.path != f"{_MODULE}Metadata":
            raise self.damaged(f"{METADATA} is not of torch.distributed.checkpoint")
        fields = self.fields(metadata)
        self.entries = self.mapping(fields.get("state_dict_metadata"))
        paths = fields.get("planner_data")
        self.paths = paths if isinstance(paths, Mapping) else {}
        self._places = {}
        for index, info in self.mapping(fields.get("storage_data")).items():
            key = self.fields(index)
            offset = key.get("offset")
            starts = None if offset is None else self.sizes(offset)
            self._places[key.get("fqn"), starts] = self._stored(self.fields(info))
        self._files: dict[str, MappedFile] = {}

    def archive(self, name: object, starts: tuple[int, ...] | None) -> tuple[Archive, MappedFile]:
        """What was saved for an entry, or for a chunk of it that begins at an index."""
        place = self._places.get((name, starts))
        if place is None and starts is not None:
            place = self._places.get((name, None))
        if place is None:
            raise self.damaged(f"{METADATA} has no place for {name}")
        if place.file not in self._files:
            self._files[place.file] = MappedFile(self.path / place.file)
        file = self._files[place.file]
        return Archive(file, place.start, place.start + place.size_bytes), file

    def fields(self, made: object) -> Mapping[object, object]:
        """The fields of an instance of a data class."""
        state = made.state if isinstance(made, Made) else None
        if not isinstance(state, Mapping):
            raise self.damaged(f"{METADATA} has another form")
        return state

    def mapping(self, value: object) -> Mapping[object, object]:
        """A dictionary of the metadata."""
        if not isinstance(value, Mapping):
            raise self.damaged(f"{METADATA} has another form")
        return value

    def sizes(self, value: object) -> tuple[int, ...]:
        """A ``torch.Size`` of the metadata."""
        if isinstance(value, Made) and value.path == "torch.Size" and len(value.arguments) == 1:
            value = value.arguments[0]
        items = value if isinstance(value, tuple | list) else [value]
        sizes = tuple(item for item in items if isinstance(item, int) and item >= 0)
        if len(sizes) != len(items):
            raise self.damaged(f"{METADATA} has a size that is none")
        return sizes

    def damaged(self, problem: str) -> UserError:
        """The error that the checkpoint cannot be read."""
        return UserError(f"'{self.path}' is damaged, or not a checkpoint of PyTorch: {problem}.")

    def _stored(self, info: Mapping[object, object]) -> _Stored:
        file, start, size = (info.get(key) for key in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or not isinstance(start, int) or not isinstance(size, int):
            raise self.damaged(f"{METADATA} has a place without a file")
        if info.get("transform_descriptors"):
            raise UserError(f"'{self.path / file}' is compressed: save the checkpoint without it.")
        # A path that leaves the folder could be any file of this machine.
        if Path(file).is_absolute() or ".." in Path(file).parts:
            raise self.damaged(f"{METADATA} names a file outside its folder")
        return _Stored(file=file, start=start, size_bytes=size)


def import_dcp(folder: Path) -> ImportedModel:
    """The model of a checkpoint, and the optimizer's states where they have the names of parameters.

    Raises:
        UserError: if a file is missing or damaged, or no model is in it.
    """
    files = _Folder(folder)
    tree: dict[object, object] = {}
    for name, entry in files.entries.items():
        value = _value(files, name, entry)
        path = files.paths.get(name)
        keys = path if isinstance(path, tuple) and path else (name,)
        container = tree
        for key in keys[:-1]:
            inner = container.setdefault(key, {})
            if not isinstance(inner, dict):
                raise files.damaged(f"{name} is within a value")
            container = inner
        container[keys[-1]] = value
    beside, tensors = _model(tree)
    if not tensors:
        raise UserError(
            f"'{folder}' has no tensors of a model: save a dictionary with model.state_dict() under 'model'."
        )
    model = weights(tensors)
    optimizer = optimizer_in(beside, tensors)
    if optimizer is not None:
        model = with_optimizer(model, optimizer, str(folder))
    steps = (number_in(beside.get(key)) for key in _STEP_KEYS)
    step = next((int(step) for step in steps if step is not None), model.step)
    return replace(model, step=max(step, 0))


def _model(
    tree: dict[object, object],
) -> tuple[dict[object, object], dict[str, ImportedTensor]]:
    """The dictionary that has the model under a usual key, or among its own entries, and the tensors of the model."""
    for key in MODEL_KEYS:
        part = tree.get(key)
        if isinstance(part, dict) and (tensors := _tensors_by_name(part)):
            return tree, tensors
    if len(tree) == 1:
        (only,) = tree.values()
        if isinstance(only, dict) and not all(isinstance(v, ImportedTensor) for v in only.values()):
            beside, tensors = _model(only)
            if beside is not only or tensors:
                return beside, tensors
    rest = {key: value for key, value in tree.items() if key not in _TRAINING}
    return tree, _tensors_by_name(rest)


def _tensors_by_name(tree: Mapping[object, object], prefix: str = "") -> dict[str, ImportedTensor]:
    """The tensors of dictionaries within dictionaries, by their keys with dots between them."""
    tensors: dict[str, ImportedTensor] = {}
    for key, value in tree.items():
        if isinstance(value, ImportedTensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, dict):
            tensors |= _tensors_by_name(value, f"{prefix}{key}.")
    return tensors


def _value(files: _Folder, name: object, entry: object) -> object:
    """The value of an entry: a tensor, or what was pickled."""
    path = entry.path if isinstance(entry, Made) else ""
    if path == f"{_MODULE}BytesStorageMetadata":
        return files.archive(name, None)[0].plain_tree()
    if path != f"{_MODULE}TensorStorageMetadata":
        raise files.damaged(f"{name} is neither a tensor nor a value")
    fields = files.fields(entry)
    shape = files.sizes(fields.get("size"))
    dtype = _dtype(files, fields.get("properties"), name)
    chunks = fields.get("chunks")
    boxes = [
        box
        for chunk in (chunks if isinstance(chunks, list) else [])
        if (box := _box(files, name, files.fields(chunk), dtype)) is not None
    ]
    if sum(prod(box.shape) for box in boxes) != prod(shape):
        raise files.damaged(f"the chunks of {name} are not the whole of it")
    for box in boxes:
        if len(box.starts) != len(shape) or any(
            start + size > whole
            for start, size, whole in zip(box.starts, box.shape, shape, strict=True)
        ):
            raise files.damaged(f"a chunk of {name} is outside")
    return ImportedTensor(dtype=dtype, shape=shape, extent=shape, boxes=tuple(boxes))


def _box(files: _Folder, name: object, chunk: Mapping[object, object], dtype: str) -> Box | None:
    starts, sizes = files.sizes(chunk.get("offsets")), files.sizes(chunk.get("sizes"))
    if not prod(sizes):
        return None
    archive, file = files.archive(name, starts)
    tensor = archive.value(archive.tree)
    if isinstance(tensor, UnknownTensor):
        raise UserError(f"'{files.path}' has {name}, which cannot be imported: {tensor.reason}.")
    if not isinstance(tensor, ImportedTensor) or tensor.shape != sizes or tensor.dtype != dtype:
        raise files.damaged(f"a chunk of {name} has another shape or dtype")
    return Box(starts=starts, elements=tensor.boxes[0].elements, file=file)


def _dtype(files: _Folder, properties: object, name: object) -> str:
    """The dtype in the properties of a tensor: the first of the values that torch pickles of them."""
    state = properties.state if isinstance(properties, Made) else None
    first = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(first, Named) or first.module != "torch":
        raise files.damaged(f"{METADATA} has no dtype of {name}")
    if first.name not in DTYPES:
        raise UserError(f"'{files.path}' has {name} in the dtype {first.path}: convert it first.")
    return DTYPES[first.name]
