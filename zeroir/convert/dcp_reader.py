"""Reading of ``torch.distributed.checkpoint`` checkpoints, in the process of ``torch_reader.py``.

``.metadata`` is a pickle. ``FileSystemReader.read_metadata`` of torch 2.11 to 2.13 loads it with ``pickle.load``, which
calls anything that the pickle names, and ``torch.load(weights_only=True)`` does not support its protocol. So a subclass
of ``pickle.Unpickler`` reads it here, which resolves only torch's metadata classes. The metadata has the shape of each
tensor, its chunks, and the file, offset and length of each. A chunk, or a value that is not a tensor, is a file of
``torch.save`` within a larger file; ``DefaultLoadPlanner`` would load these values with ``weights_only=False``.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 - for a subclass of its Unpickler, which finds a few classes alone
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Final, cast

import msgpack
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from zeroir.convert.torch_files import METADATA, RecordKind
from zeroir.convert.torch_reader import (
    DTYPE_NAMES,
    Archive,
    Window,
    problem_of,
    read_archive,
    reason,
    stand_in,
)
from zeroir.errors import UserError, is_out_of_memory

_MOST_KEYS: Final = 64
"""The largest nesting of dictionaries."""

_FOUND: Final[dict[str, object]] = {
    **{
        f"{kind.__module__}.{kind.__qualname__}": kind
        for kind in (
            dcp.BytesStorageMetadata,
            dcp.ChunkStorageMetadata,
            dcp.Metadata,
            dcp.MetadataIndex,
            dcp.StorageMeta,
            dcp.TensorProperties,
            dcp.TensorStorageMetadata,
            dcp._MEM_FORMAT_ENCODING,
            _StorageInfo,
        )
    },
    **{str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)},
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        path = f"{module}.{name}"
        return _FOUND.get(path) or stand_in(path)


def packed_entries(folder: Path) -> Iterator[bytes]:
    """Yield the entries of a checkpoint in msgpack, each with its keys and its value.

    Raises:
        UserError: if the checkpoint is damaged.
    """
    try:
        with (folder / METADATA).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, dcp.Metadata):
            raise TypeError("it has no Metadata")
        checkpoint = _DcpCheckpoint(folder=folder, metadata=metadata)
        for name, entry in metadata.state_dict_metadata.items():
            yield checkpoint.packed(name, entry)
    except (OSError, UserError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"'{folder / METADATA}' is damaged, or not of torch.distributed.checkpoint ({reason(error)}): use another "
            "checkpoint."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _DcpCheckpoint:
    folder: Path
    metadata: dcp.Metadata

    def packed(self, name: str, entry: object) -> bytes:
        """Return the keys of an entry, and its value."""
        keys = (self.metadata.planner_data or {}).get(name)
        if not isinstance(keys, tuple) or not keys:
            keys = (name,)
        if len(keys) > _MOST_KEYS:
            raise ValueError(f"{name} is nested too deeply")
        if isinstance(entry, dcp.BytesStorageMetadata):
            archive = self._archive(dcp.MetadataIndex(name))
            return archive.packed([keys, archive.value])
        if isinstance(entry, dcp.TensorStorageMetadata):
            return cast(bytes, msgpack.packb([keys, self._tensor(name, entry)]))
        raise TypeError(f"{name} is neither a tensor nor a value")

    def _tensor(self, name: str, entry: dcp.TensorStorageMetadata) -> msgpack.ExtType:
        dtype = entry.properties.dtype
        if dtype not in DTYPE_NAMES:
            raise UserError(f"'{self.folder}' has {name} in the dtype {dtype}: convert it first.")
        chunks = [chunk for chunk in entry.chunks if chunk.sizes.numel()]
        if sum(chunk.sizes.numel() for chunk in chunks) != entry.size.numel():
            raise ValueError(f"the chunks of {name} are not the whole of it")
        parts = []
        for chunk in chunks:
            archive = self._archive(dcp.MetadataIndex(name, chunk.offsets))
            part = archive.value
            if not isinstance(part, Tensor) or (part.shape, part.dtype) != (chunk.sizes, dtype):
                raise ValueError(f"a chunk of {name} has another shape or dtype")
            if (problem := problem_of(part)) is not None:
                raise UserError(f"'{self.folder}' has {name}, which cannot be imported: {problem}.")
            for start, size, whole in zip(chunk.offsets, part.shape, entry.size, strict=True):
                if not 0 <= start <= whole - size:
                    raise ValueError(f"a chunk of {name} is outside of it")
            parts.append([tuple(chunk.offsets), archive.extended(part)])
        form = [DTYPE_NAMES[dtype], tuple(entry.size), parts]
        return msgpack.ExtType(RecordKind.CHUNKS, msgpack.packb(form))

    def _archive(self, index: dcp.MetadataIndex) -> Archive:
        """Read what was saved for an entry, or for a chunk of it."""
        place = self.metadata.storage_data[index]
        name = Path(place.relative_path)
        path = self.folder / name
        # Another path could be any file on this machine.
        if name.is_absolute() or ".." in name.parts:
            raise UserError(f"'{self.folder}' is damaged: {METADATA} names a file outside of it.")
        if getattr(place, "transform_descriptors", None):
            raise UserError(f"'{path}' is compressed: save the checkpoint without it.")
        status = path.stat()
        if not S_ISREG(status.st_mode):
            raise UserError(f"'{path}' is not a file.")
        if not 0 <= place.offset <= place.offset + place.length <= status.st_size:
            raise UserError(f"'{path}' is damaged: it ends early.")
        with path.open("rb") as file:
            part = io.BufferedReader(Window(file, place.offset, place.length))
            return read_archive(path, part, place.offset)
