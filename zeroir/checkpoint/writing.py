"""Writing the file of a rank in one pass: each byte is written and added to the checksums."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from zeroir.checkpoint.checksums import Checksum, HashingThread
from zeroir.checkpoint.manifest import StoredFile, StoredTensor
from zeroir.checkpoint.safetensors_header import (
    StoredTensorSpec,
    header_bytes,
    in_file_order,
)
from zeroir.checkpoint.storage import PAUSES_S, OutputFile, PassingError, Storage, join
from zeroir.errors import InternalError

CHUNK_BYTES: Final = 16 << 20
"""The bytes that another thread hashes while they are written."""


def write_file(
    storage: Storage,
    folder: str,
    name: str,
    tensors: Sequence[tuple[StoredTensorSpec, Iterable[memoryview]]],
    *,
    hashes_beside: bool = True,
) -> StoredFile:
    """Write a new safetensors file, which is durable on return.

    If a store fails temporarily, the file is written again, provided that the parts can be iterated again.

    The bytes of each tensor come in consecutive parts: contiguous views of any element type, which are not used once
    the next one is requested. Tensors are written, and their parts requested, in descending order of element sizes.
    With ``hashes_beside`` another thread computes the hashes meanwhile, which is faster and uses a second core.

    Returns:
        the file's record for the manifest, with checksums of the bytes in the caller's memory.

    Raises:
        UserError: if the file cannot be written; nothing is left of it.
    """
    can_repeat = not any(isinstance(parts, Iterator) for _, parts in tensors)
    for pause_s in PAUSES_S if can_repeat else ():
        with contextlib.suppress(PassingError):
            return _write_once(storage, folder, name, tensors, hashes_beside=hashes_beside)
        time.sleep(pause_s)
    return _write_once(storage, folder, name, tensors, hashes_beside=hashes_beside)


def _write_once(
    storage: Storage,
    folder: str,
    name: str,
    tensors: Sequence[tuple[StoredTensorSpec, Iterable[memoryview]]],
    *,
    hashes_beside: bool,
) -> StoredFile:
    ordered = [tensors[index] for index in in_file_order([spec for spec, _ in tensors])]
    header = header_bytes([spec for spec, _ in ordered])
    whole = Checksum()
    stored = []
    output = storage.create(join(folder, name))
    try:
        whole.add(header)
        output.write(memoryview(header))
        with HashingThread() if hashes_beside else contextlib.nullcontext() as hashing:
            for spec, parts in ordered:
                checksum = _write_tensor(hashing, output, spec, parts, whole)
                stored.append(
                    StoredTensor(
                        name=spec.name, dtype=spec.dtype, numel=spec.numel, checksum=checksum
                    )
                )
        output.finish()
    finally:
        output.abandon()
    header_checksum = Checksum()
    header_checksum.add(header)
    return StoredFile(
        name=name,
        size_bytes=len(header) + sum(spec.size_bytes for spec, _ in ordered),
        checksum=whole.text,
        header_checksum=header_checksum.text,
        tensors=tuple(stored),
    )


def _write_tensor(
    hashing: HashingThread | None,
    output: OutputFile,
    spec: StoredTensorSpec,
    parts: Iterable[memoryview],
    whole: Checksum,
) -> str:
    """Write one tensor, add its bytes to the checksum of the whole file, and return its own checksum."""
    checksum = Checksum()
    written_bytes = 0
    for part in parts:
        if not part.nbytes:
            continue
        data = part.cast("B")
        for start in range(0, data.nbytes, CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            if hashing is not None:
                hashing.begin(chunk, (checksum, whole))
                output.write(chunk)
                hashing.end()
                continue
            checksum.add(chunk)
            whole.add(chunk)
            output.write(chunk)
        written_bytes += data.nbytes
    if written_bytes != spec.size_bytes:
        raise InternalError(f"{spec} came with {written_bytes} bytes instead of {spec.size_bytes}.")
    return checksum.text
