"""Files as ``torch.save`` writes them, slice by slice: a dictionary of tensors that is never in memory as a whole.

Such a file is a zip archive without compression: ``archive/data.pkl`` is a pickle of the dictionary, in which storages
are persistent ids, and ``archive/data/0``, ``archive/data/1``, … are the bytes of the storages. The pickle is written
here instruction by instruction (protocol 2, https://docs.python.org/3/library/pickletools.html), and refers to three
names alone, which ``torch.load(weights_only=True)`` accepts: ``collections.OrderedDict``,
``torch._utils._rebuild_tensor_v2`` and the class of a storage.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Final

from zeroir.errors import UserError

_ROOT: Final = "archive"
_ALIGNMENT_BYTES: Final = 64
"""Storages begin at multiples of it, so that a file that is mapped into memory has aligned tensors."""

_LOCAL_HEADER_BYTES: Final = 30
_ZIP64_EXTRA_BYTES: Final = 20
_PADDING_ID: Final = 0x4246
"""The id of the extra field with which torch pads the header of a record, too."""

_STORAGE_CLASSES: Final = {
    "f64": "DoubleStorage",
    "f32": "FloatStorage",
    "f16": "HalfStorage",
    "bf16": "BFloat16Storage",
    "i64": "LongStorage",
    "i32": "IntStorage",
    "i16": "ShortStorage",
    "i8": "CharStorage",
    "u8": "ByteStorage",
    "bool": "BoolStorage",
    "c64": "ComplexFloatStorage",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedTensor:
    """A tensor of the dictionary: its keys (several for a tied one), and its bytes in parts, row-major."""

    keys: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    numel: int
    size_bytes: int
    parts: Iterable[memoryview]


def write_torch_archive(file: BinaryIO, tensors: Sequence[ArchivedTensor]) -> None:
    """Write a dictionary of tensors to a seekable file. Tensors with several keys share their storage under them.

    Raises:
        UserError: if torch has no storage class for a dtype.
    """
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _write_text(archive, file, "data.pkl", _pickled(tensors))
        _write_text(archive, file, "byteorder", b"little")
        for index, tensor in enumerate(tensors):
            _write_record(archive, file, f"data/{index}", tensor.parts, tensor.size_bytes)
        _write_text(archive, file, "version", b"3\n")


def _write_text(archive: zipfile.ZipFile, file: BinaryIO, name: str, text: bytes) -> None:
    _write_record(archive, file, name, (memoryview(text),), len(text))


def _write_record(
    archive: zipfile.ZipFile,
    file: BinaryIO,
    name: str,
    parts: Iterable[memoryview],
    size_bytes: int,
) -> None:
    """Write a file of the archive, whose bytes begin at a multiple of the alignment."""
    info = zipfile.ZipInfo(f"{_ROOT}/{name}")
    is_large = size_bytes >= zipfile.ZIP64_LIMIT
    header_bytes = _LOCAL_HEADER_BYTES + len(info.filename) + _ZIP64_EXTRA_BYTES * is_large
    padding_bytes = -(file.tell() + header_bytes + 4) % _ALIGNMENT_BYTES
    info.extra = struct.pack("<HH", _PADDING_ID, padding_bytes) + b"\0" * padding_bytes
    with archive.open(info, "w", force_zip64=is_large) as record:
        for part in parts:
            record.write(part)


def _pickled(tensors: Sequence[ArchivedTensor]) -> bytes:
    """The pickle of an ordered dictionary of tensors."""
    out = bytearray(b"\x80\x02")
    out += _global("collections", "OrderedDict") + b")R("
    for index, tensor in enumerate(tensors):
        rebuilt = _tensor(index, tensor)
        for key in tensor.keys:
            out += _text(key) + rebuilt
    return bytes(out + b"u.")


def _tensor(index: int, tensor: ArchivedTensor) -> bytes:
    """The call that rebuilds a contiguous tensor on a storage: offset 0, no gradient, no hooks."""
    if tensor.dtype not in _STORAGE_CLASSES:
        raise UserError(
            f"{tensor.keys[0]} has dtype {tensor.dtype}, which a state_dict of weights cannot have: use --format hf."
        )
    storage = (
        b"("
        + _text("storage")
        + _global("torch", _STORAGE_CLASSES[tensor.dtype])
        + _text(str(index))
        + _text("cpu")
        + _integer(tensor.numel)
        + b"tQ"
    )
    strides = []
    stride = 1
    for size in reversed(tensor.shape):
        strides.append(stride)
        stride *= max(size, 1)
    return (
        _global("torch._utils", "_rebuild_tensor_v2")
        + b"("
        + storage
        + _integer(0)
        + _integers(tensor.shape)
        + _integers(strides[::-1])
        + b"\x89"
        + _global("collections", "OrderedDict")
        + b")RtR"
    )


def _global(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _integer(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def _integers(values: Iterable[int]) -> bytes:
    return b"(" + b"".join(map(_integer, values)) + b"t"
