"""Reading of files of ``torch.save`` with ``torch.load(weights_only=True)``, in the process of ``torch_process.py``.

No elements are read. Tensors are loaded to the device ``meta``, where torch records the place of each storage in the
file. The result, in msgpack, has the place of each tensor, and the importing process maps the files.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, cast

import msgpack
import torch
from torch import Tensor, nn

from zeroir.convert.torch_dtypes import TORCH_DTYPES
from zeroir.convert.torch_files import RecordKind
from zeroir.errors import UserError, is_out_of_memory

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_PLAIN_TYPES: Final = (Tensor, nn.Parameter, nn.Buffer)
_LOCAL_HEADER: Final = struct.Struct("<26xHH")
_MOST_SHOWN: Final = 300


class InertClass:
    """The replacement of an instance of a class unknown to torch. The class is not imported."""

    path = ""
    state: object = None

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state


def stand_in(path: str) -> Callable[..., object]:
    """Return what a pickle is to call instead of a function or class unknown to torch."""
    if path == "collections.defaultdict":
        return lambda *_: {}
    return type("InertClass", (InertClass,), {"path": path})


class Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, size_bytes: int) -> None:
        self._file, self._start, self._size_bytes = file, start, size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position relative to the beginning of the part, the current position, or the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Read up to the end of the part."""
        target = memoryview(buffer).cast("B")
        size = min(target.nbytes, max(self._size_bytes - self._position, 0))
        data = os.pread(self._file.fileno(), size, self._start + self._position)
        target[: len(data)] = data
        self._position += len(data)
        return len(data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """The result of ``torch.save`` in the bytes of a file from ``start`` on."""

    path: Path
    start: int
    value: object
    sizes_bytes: dict[int, int]
    """The sizes of the members of the zip archive by the offsets of their first bytes."""

    def packed(self, value: object) -> bytes:
        """Serialize a part of the value to msgpack, with extension types for tensors and instances of classes.

        Raises:
            UserError: if it is nested deeper than state dictionaries are, or has strings that other programs cannot
                read.
        """
        try:
            return cast(bytes, msgpack.packb(value, default=self.extended))
        except UnicodeEncodeError as error:
            raise UserError(
                f"'{self.path}' has a text with surrogates: give its tensors other names."
            ) from error
        except ValueError as error:
            raise UserError(
                f"'{self.path}' is nested too deeply: save the state dictionaries alone."
            ) from error

    def extended(self, value: object) -> object:
        """Serialize a tensor, or an instance of a class; None for anything else that msgpack lacks."""
        if isinstance(value, Tensor):
            problem = problem_of(value)
            if problem is not None:
                return msgpack.ExtType(RecordKind.UNKNOWN, msgpack.packb(problem))
            return msgpack.ExtType(RecordKind.TENSOR, msgpack.packb(self._place(value)))
        if isinstance(value, InertClass):
            return [msgpack.ExtType(RecordKind.CLASS, msgpack.packb(value.path)), value.state]
        return None

    def _place(self, tensor: Tensor) -> tuple[object, ...]:
        """Return the file of a tensor and its first byte there, its dtype, shape and strides."""
        storage, steps = tensor.untyped_storage(), tensor.stride()
        offset = cast(int, storage._checkpoint_offset)
        last = sum((size - 1) * step for size, step in zip(tensor.shape, steps, strict=True))
        stop_bytes = (tensor.storage_offset() + last + 1) * tensor.itemsize if tensor.numel() else 0
        # torch trusts the pickle about the members of the archive.
        if not stop_bytes <= storage.nbytes() <= self.sizes_bytes.get(offset, 0):
            raise UserError(f"'{self.path}' is damaged: a tensor has fewer elements than it says.")
        begin = self.start + offset + tensor.storage_offset() * tensor.itemsize
        return str(self.path), begin, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), steps


def problem_of(tensor: Tensor) -> str | None:
    """Return why a tensor cannot be imported, or None if it can."""
    if type(tensor) not in _PLAIN_TYPES or tensor.layout != torch.strided:
        return f"it is a {type(tensor).__name__} with the layout {tensor.layout}"
    if tensor.dtype not in DTYPE_NAMES:
        return f"it has the dtype {tensor.dtype}"
    if tensor.is_conj() or tensor.is_neg():
        return "its elements were saved before they were conjugated or negated"
    if tensor.untyped_storage()._checkpoint_offset is None:
        return "it was saved without elements"
    return None


def read_archive(path: Path, file: BinaryIO, start: int = 0) -> Archive:
    """Read the result of ``torch.save``; ``file`` begins at byte ``start`` of the file at the path.

    Raises:
        UserError: if torch cannot read it.
    """
    try:
        sizes_bytes = _sizes_bytes(path, file)
        file.seek(0)
        unlisted = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        file.seek(0)
        with torch.serialization.safe_globals([(stand_in(name), name) for name in unlisted]):
            value = torch.load(file, map_location="meta", weights_only=True)
    except UserError:
        raise
    except zipfile.BadZipFile as error:
        raise UserError(
            f"'{path}' is damaged, or not a file of torch.save ({error}): use another file."
        ) from error
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"'{path}' is damaged, or has what torch.load does not read with weights_only=True ({reason(error)}): "
            "save the state dictionaries alone."
        ) from error
    return Archive(path=path, start=start, value=value, sizes_bytes=sizes_bytes)


def _sizes_bytes(path: Path, file: BinaryIO) -> dict[int, int]:
    """Return the sizes of a zip archive's members by the offsets of their first bytes.

    Raises:
        UserError: if torch would read bytes as elements that are none.
    """
    sizes_bytes = {}
    stop = 0
    with zipfile.ZipFile(file) as archive:
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise UserError(f"'{path}' is compressed: save it again with torch.save.")
            if info.header_offset < stop:
                raise UserError(f"'{path}' is damaged: the members of its archive overlap.")
            if info.filename.endswith("/byteorder") and archive.read(info) != b"little":
                raise UserError(f"'{path}' is of a big-endian machine: save it on another one.")
            file.seek(info.header_offset)
            header = file.read(_LOCAL_HEADER.size)
            begin = info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
            sizes_bytes[begin] = info.file_size
            stop = begin + info.file_size
    return sizes_bytes


def reason(error: Exception) -> str:
    """Return the message of an error without torch's advice around it."""
    text = str(error).split("\n\nCheck the documentation of torch.load")[0]
    text = text.split("\n\n")[-1].split("WeightsUnpickler error: ")[-1].strip()
    return (text.splitlines() or [type(error).__name__])[0][:_MOST_SHOWN].rstrip(".")


def packed_file(path: Path) -> bytes:
    """Return the content of a file of ``torch.save`` in msgpack.

    Raises:
        UserError: if torch cannot read it.
    """
    with path.open("rb") as file:
        archive = read_archive(path, file)
        return archive.packed(archive.value)
