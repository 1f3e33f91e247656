"""Reading checkpoints: manifests, elements of tensors, and the verification of every byte."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from zeroir.checkpoint.checksums import Checksum, HashingThread, checksum_of
from zeroir.checkpoint.manifest import MANIFEST_NAME, Manifest, StoredFile, StoredTensor
from zeroir.checkpoint.manifest_file import (
    HEAD_BYTES,
    LARGEST_BYTES,
    parse_manifest,
    require_head,
)
from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES
from zeroir.checkpoint.storage import InputFile, join
from zeroir.checkpoint.storages import open_storage
from zeroir.errors import DamagedCheckpointError

CHUNK_BYTES: Final = 4 << 20
"""The most bytes that verification reads at once."""

OPEN_FILES: Final = 64
"""The most files of a checkpoint that are open at once; systems allow about a thousand for each process."""


def read_manifest(path: str) -> Manifest:
    """Read the manifest of the checkpoint at a path.

    Raises:
        DamagedCheckpointError: if there is no checkpoint, or its manifest is damaged.
    """
    manifest_path = join(path, MANIFEST_NAME)
    storage = open_storage(path)
    if storage.size_bytes(manifest_path) is None:
        raise DamagedCheckpointError(
            f"'{path}' is not a checkpoint: it contains no {MANIFEST_NAME}; name a folder that does."
        )
    with contextlib.closing(storage.open(manifest_path)) as file:
        if file.size_bytes > LARGEST_BYTES:
            raise DamagedCheckpointError(
                f"'{manifest_path}' is damaged: it has {file.size_bytes} bytes, and {LARGEST_BYTES} is the limit; use "
                "another checkpoint."
            )
        if file.size_bytes > CHUNK_BYTES:
            require_head(_read(file, HEAD_BYTES), manifest_path)
        return parse_manifest(_read(file, file.size_bytes), manifest_path)


def _read(file: InputFile, size_bytes: int) -> bytes:
    """Read the first bytes of a file, or all if it has fewer."""
    data = bytearray(size_bytes)
    return bytes(memoryview(data)[: file.read_into(memoryview(data), 0)])


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyItem:
    """A range of bytes with a checksum: a tensor of a file, or its header (``tensor`` is None)."""

    file: str
    tensor: str | None
    size_bytes: int


def verify_items(manifest: Manifest) -> tuple[VerifyItem, ...]:
    """Return all items of a checkpoint, in the order of its files; together they cover every byte."""
    items = []
    for file in manifest.files:
        items.append(VerifyItem(file=file.name, tensor=None, size_bytes=_header_bytes(file)))
        items.extend(
            VerifyItem(file=file.name, tensor=tensor.name, size_bytes=_size_bytes(tensor))
            for tensor in file.tensors
        )
    return tuple(items)


@dataclass(slots=True, kw_only=True)
class CheckpointFiles:
    """The files of a checkpoint, each opened at its first read. A context manager; not thread-safe.

    Before the first bytes of a file are used, its size and its header are checked against the manifest.
    """

    path: str
    manifest: Manifest
    from_disk: bool = False
    """Whether files are read from the disk even if the system has them cached."""
    _open: dict[str, _OpenFile] = field(default_factory=dict)
    """The open files, the one opened last at the end."""

    def read_into(self, file: str, tensor: str, start: int, buffer: memoryview) -> None:
        """Fill a buffer with consecutive elements of a tensor, beginning with element ``start``.

        Raises:
            DamagedCheckpointError: if the file is missing, truncated, damaged or another one; it names the file.
        """
        opened = self._file(file)
        place = opened.places[tensor]
        itemsize_bytes = ITEMSIZE_BYTES[place.tensor.dtype]
        data = buffer.cast("B")
        if start < 0 or start * itemsize_bytes + data.nbytes > _size_bytes(place.tensor):
            raise ValueError(f"{tensor} has {place.tensor.numel} elements")
        offset = place.offset_bytes + start * itemsize_bytes
        if opened.input.read_into(data, offset) < data.nbytes:
            raise _refused(self.path, file, tensor, "it ends early")

    def bytes(self, file: str, tensor: str, start: int, stop: int) -> memoryview:
        """Read elements ``[start, stop)`` of a tensor into new memory."""
        itemsize_bytes = ITEMSIZE_BYTES[self._file(file).places[tensor].tensor.dtype]
        buffer = memoryview(bytearray((stop - start) * itemsize_bytes))
        self.read_into(file, tensor, start, buffer)
        return buffer

    def verify(self, item: VerifyItem) -> None:
        """Read an item and compare its checksum.

        Raises:
            DamagedCheckpointError: if the file is missing, truncated, damaged or another one; it names the file and the
                tensor.
        """
        opened = self._file(item.file)
        if item.tensor is None:
            return
        place = opened.places[item.tensor]
        checksum = Checksum()
        chunks = _chunks(opened.input, place.offset_bytes, item.size_bytes)
        read_bytes = 0
        with HashingThread() as hashing:
            for chunk in chunks:
                if read_bytes:
                    hashing.end()
                hashing.begin(chunk, (checksum,))
                read_bytes += chunk.nbytes
            if read_bytes:
                hashing.end()
        if read_bytes < item.size_bytes:
            raise _refused(self.path, item.file, item.tensor, "it ends early")
        if checksum.text != place.tensor.checksum:
            raise _refused(self.path, item.file, item.tensor, "its checksum differs")

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].input.close()

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _file(self, name: str) -> _OpenFile:
        if name not in self._open:
            if len(self._open) == OPEN_FILES:
                oldest = next(iter(self._open))
                self._open.pop(oldest).input.close()
            stored = next(file for file in self.manifest.files if file.name == name)
            self._open[name] = _open_file(self.path, stored, self.from_disk)
        return self._open[name]


def require_files(path: str, manifest: Manifest) -> None:
    """Check that all files of a checkpoint exist with their sizes; nothing is read.

    Raises:
        DamagedCheckpointError: if a file is missing or truncated; it names the file.
    """
    storage = open_storage(path)
    for file in manifest.files:
        _require_size(file, path, storage.size_bytes(join(path, file.name)))


def verify_all(path: str, manifest: Manifest) -> None:
    """Read a whole checkpoint and compare all checksums.

    Raises:
        DamagedCheckpointError: if a byte differs from what was saved; it names the file and the tensor.
    """
    with CheckpointFiles(path=path, manifest=manifest) as files:
        for item in verify_items(manifest):
            files.verify(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    tensor: StoredTensor
    offset_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpenFile:
    input: InputFile
    places: dict[str, _Place]


def _open_file(path: str, stored: StoredFile, from_disk: bool) -> _OpenFile:
    """Open a file, and check its size and header against the manifest."""
    storage = open_storage(path)
    file_path = join(path, stored.name)
    _require_size(stored, path, storage.size_bytes(file_path))
    file = storage.open(file_path, from_disk=from_disk)
    try:
        header = bytearray(_header_bytes(stored))
        if file.read_into(memoryview(header), 0) < len(header):
            raise _refused(path, stored.name, None, "it ends early")
        if checksum_of(header) != stored.header_checksum:
            raise _refused(path, stored.name, None, "the checksum of its header differs")
        places = {}
        offset_bytes = len(header)
        for tensor in stored.tensors:
            places[tensor.name] = _Place(tensor=tensor, offset_bytes=offset_bytes)
            offset_bytes += _size_bytes(tensor)
    except BaseException:
        file.close()
        raise
    return _OpenFile(input=file, places=places)


def _chunks(file: InputFile, offset: int, size_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes of a file from an offset on; a chunk is overwritten when the second one after it is requested."""
    buffers = [memoryview(bytearray(min(CHUNK_BYTES, size_bytes))) for _ in range(2)]
    for number, start in enumerate(range(0, size_bytes, CHUNK_BYTES)):
        chunk = buffers[number % 2][: min(CHUNK_BYTES, size_bytes - start)]
        read_bytes = file.read_into(chunk, offset + start)
        yield chunk[:read_bytes]
        if read_bytes < chunk.nbytes:
            return


def _require_size(file: StoredFile, path: str, size_bytes: int | None) -> None:
    if size_bytes is None:
        raise _refused(path, file.name, None, "it is missing")
    if size_bytes != file.size_bytes:
        raise _refused(
            path, file.name, None, f"it has {size_bytes} bytes instead of {file.size_bytes}"
        )


def _size_bytes(tensor: StoredTensor) -> int:
    return tensor.numel * ITEMSIZE_BYTES[tensor.dtype]


def _header_bytes(file: StoredFile) -> int:
    """Return the size of the header: that of the file less those of its tensors."""
    return file.size_bytes - sum(_size_bytes(tensor) for tensor in file.tensors)


def _refused(path: str, file: str, tensor: str | None, problem: str) -> DamagedCheckpointError:
    what = f"'{join(path, file)}'" if tensor is None else f"tensor {tensor} of '{join(path, file)}'"
    return DamagedCheckpointError(
        f"{what[0].upper()}{what[1:]} is not what was saved: {problem}; use another checkpoint."
    )
