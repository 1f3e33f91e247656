"""The content of torch's files as the importing process receives it: read in another process, and mapped here.

``torch_process.py`` explains why. Its answer is in msgpack, with extension types for tensors and instances of classes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cache, partial
from pathlib import Path
from typing import Final, cast

import msgpack
import numpy as np

import zeroir
from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES
from zeroir.convert.imported import ImportedTensor, MappedFile, elements_at, whole
from zeroir.errors import InternalError, UserError


class RecordKind(IntEnum):
    """The extension types of an answer, and the content of each."""

    TENSOR = 1
    """Its file, its first byte there, its dtype, shape and strides."""

    CHUNKS = 2
    """A tensor in chunks: its dtype and shape, and for each chunk the index of its first element, and a tensor."""

    UNKNOWN = 3
    """A tensor that cannot be imported: the reason."""

    CLASS = 4
    """The path of a class unknown to torch. It is the first item of a list; the second has the attributes."""


SAVE: Final = "save"
"""The request kind for files of ``torch.save``."""

DCP: Final = "dcp"
"""The request kind for folders of ``torch.distributed.checkpoint``."""

METADATA: Final = ".metadata"
"""The file that identifies a folder as a ``torch.distributed.checkpoint`` checkpoint."""

REFUSED: Final = 2
"""The exit code of a reader that refused a file; stdout has the message."""

Entry = tuple[tuple[object, ...], object]
"""The keys and the value of an entry of a checkpoint."""

MODULE: Final = "zeroir.convert.torch_process"
_ARCHIVE_START: Final = b"PK\x03\x04"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownTensor:
    """A tensor that cannot be imported, for instance a sparse one; ``reason`` says why."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownClass:
    """A class unknown to torch, by its path. In a tuple, it precedes the attributes of an instance."""

    path: str


def read_torch_files(files: Sequence[MappedFile]) -> list[object]:
    """Read files of ``torch.save``.

    Returns:
        For each file dictionaries, tuples instead of lists, numbers, strings, ``ImportedTensor``, ``UnknownTensor``
        and ``UnknownClass``. Anything else is None.

    Raises:
        UserError: if a file is damaged, not of this format, or cannot be read within the limits.
    """
    for file in files:
        if bytes(file.data[: len(_ARCHIVE_START)]) != _ARCHIVE_START:
            raise UserError(
                f"'{file.path}' is not a file that torch.save has written since PyTorch 1.6: "
                "load it with torch, and save it again."
            )
    if not files:
        return []
    mapped = {str(file.path): file for file in files}
    return [_unpacked(part, mapped.__getitem__) for part in _read(SAVE, list(mapped))]


def read_dcp(folder: Path) -> list[Entry]:
    """Read a checkpoint of ``torch.distributed.checkpoint``.

    Returns:
        For each entry its keys in nested dictionaries, and its value in the form of ``read_torch_files``.

    Raises:
        UserError: if a file is damaged, or cannot be read within the limits.
    """
    if not (folder / METADATA).is_file():
        raise UserError(f"'{folder / METADATA}' is not a file.")
    file_at = cache(lambda path: MappedFile(Path(path)))
    return [cast(Entry, _unpacked(part, file_at)) for part in _read(DCP, [str(folder)])]


def _read(kind: str, paths: Sequence[str]) -> list[bytes]:
    reader = _run(kind, paths)
    what = paths[0] if len(paths) == 1 else str(Path(paths[0]).parent)
    if reader.returncode == REFUSED:
        raise UserError(reader.stdout.decode(errors="replace"))
    if reader.returncode < 0:
        end = signal.Signals(-reader.returncode).name
        raise UserError(
            f"'{what}' ended the process that read it ({end}): it is damaged, or was made to do harm."
        )
    if reader.returncode:
        raise InternalError(f"'{what}' could not be read:\n{reader.stderr.decode()}")
    parts: list[bytes] = msgpack.unpackb(reader.stdout)
    return parts


def _run(kind: str, paths: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    home = str(Path(zeroir.__file__).parents[1])
    places = [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # With -P no module is imported from the working directory, which may be the imported folder.
    return subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-m", MODULE, kind, *paths],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )


def _unpacked(data: bytes, file_at: Callable[[str], MappedFile]) -> object:
    def extended(code: int, form: bytes) -> object:
        parts = unpack(form)
        match code:
            case RecordKind.TENSOR:
                path, *place = parts
                return _tensor(file_at(path), *place)
            case RecordKind.CHUNKS:
                dtype, shape, chunks = parts
                boxes = tuple(replace(chunk.boxes[0], starts=starts) for starts, chunk in chunks)
                return ImportedTensor(dtype=dtype, shape=shape, extent=shape, boxes=boxes)
            case RecordKind.UNKNOWN:
                return UnknownTensor(reason=parts)
            case _:
                return UnknownClass(path=parts)

    unpack = partial(
        msgpack.unpackb,
        use_list=False,
        strict_map_key=False,
        ext_hook=extended,
    )
    value: object = unpack(data)
    return value


def _tensor(
    file: MappedFile, begin: int, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> ImportedTensor:
    """Return a tensor whose elements begin at a byte of a file."""
    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    flat = elements_at(file, begin, dtype, (0 if 0 in shape else last + 1,), "a tensor")
    steps = tuple(step * ITEMSIZE_BYTES[dtype] for step in strides)
    elements = np.lib.stride_tricks.as_strided(flat, shape, steps, writeable=False)
    return whole(dtype, elements, file)
