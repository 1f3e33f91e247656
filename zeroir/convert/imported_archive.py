"""The files of ``torch.save``: a zip archive with a pickle, and the bytes of each tensor's storage beside it.

The layout is that of ``torch.serialization``. The pickle is read as data (``zeroir/convert/pickled_data.py``), and of
what it names only tensors, sizes and dictionaries have a meaning here. Nothing is decompressed: PyTorch stores the
bytes as they are, so that they are mapped.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES
from zeroir.convert.imported import ImportedTensor, MappedFile, elements_at, whole
from zeroir.convert.pickled_data import (
    Made,
    Named,
    Persistent,
    UnreadablePickleError,
    read_pickle,
)
from zeroir.errors import UserError

ARCHIVE_START: Final = b"PK\x03\x04"
"""The first bytes of a zip archive."""

DTYPES: Final[Mapping[str, str]] = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint64": "u64",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "bool": "bool",
    "complex64": "c64",
    "float8_e4m3fn": "f8_e4m3",
    "float8_e5m2": "f8_e5m2",
    "float8_e8m0fnu": "f8_e8m0",
}
"""torch's names of dtypes, and those of manifests."""

_STORAGES: Final[Mapping[str, str]] = {
    "DoubleStorage": "f64",
    "FloatStorage": "f32",
    "HalfStorage": "f16",
    "BFloat16Storage": "bf16",
    "LongStorage": "i64",
    "IntStorage": "i32",
    "ShortStorage": "i16",
    "CharStorage": "i8",
    "ByteStorage": "u8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "c64",
    "UntypedStorage": "u8",
}
_REBUILDING: Final = (
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
)
_PLAIN_TYPES: Final = (
    "torch.Tensor",
    "torch._tensor.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.nn.parameter.Buffer",
)
"""Classes whose instances are their elements. Attributes that a library gave them have no meaning here."""

_MOST_NESTED: Final = 16
_LOCAL_HEADER: Final = struct.Struct("<26xHH")
_LOCAL_HEADER_BYTES: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownTensor:
    """A tensor that cannot be imported, for instance a quantized one; ``reason`` says why."""

    reason: str


class Archive:
    """A file of ``torch.save``, or such a file within a larger one: bytes ``[start, stop)`` of ``file``."""

    def __init__(self, file: MappedFile, start: int = 0, stop: int | None = None) -> None:
        """Read the list of members and the pickle.

        Raises:
            UserError: if it is damaged, or none of this format.
        """
        self._file = file
        self._start = start
        self._stop = file.size_bytes if stop is None else stop
        if not 0 <= start <= self._stop <= file.size_bytes:
            raise self._damaged("it ends early")
        try:
            with zipfile.ZipFile(_Window(file.data[start : self._stop])) as archive:
                self._members = {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error) as error:
            raise self._damaged(str(error)) from error
        pickles = [name for name in self._members if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise self._damaged("it has no data.pkl")
        self._root = pickles[0].removesuffix("data.pkl")
        if f"{self._root}byteorder" in self._members and self._bytes("byteorder") != b"little":
            raise UserError(
                f"'{file.path}' was saved on a big-endian machine: save it again on another one."
            )
        try:
            self._tree = read_pickle(self._bytes("data.pkl"))
        except UnreadablePickleError as error:
            raise self._damaged(f"its pickle cannot be read ({error})") from error

    @property
    def tree(self) -> object:
        """What was saved; its tensors and everything else that has to be made are ``Made``."""
        return self._tree

    def plain_tree(self) -> object:
        """What was saved: dictionaries, lists, tuples, numbers, texts, ``ImportedTensor`` and ``UnknownTensor``.

        Anything else is None, and so is what is nested deeper than state dictionaries are.
        """
        return self._plain(self._tree, {}, 0)

    def value(self, made: object) -> object:
        """A value of the tree: ``ImportedTensor`` or ``UnknownTensor`` for a tensor, a tuple for a ``torch.Size``."""
        if not isinstance(made, Made):
            return made
        match made.path, made.arguments:
            case "torch.Size", (tuple() as sizes,):
                return sizes
            case (
                "torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state",
                (Made(function=Named(name=name)) as data, *_),
            ) if not name.startswith("_rebuild_parameter"):
                return self.value(data)
            case (
                "torch._tensor._rebuild_from_type_v2",
                (Named() as function, Named() as kind, tuple() as arguments, *_),
            ) if kind.path in _PLAIN_TYPES and function.path in _REBUILDING:
                return self.value(Made(function=function, arguments=arguments))
            case "torch._utils._rebuild_tensor_v2", (storage, offset, shape, strides, *_):
                return self._tensor(storage, None, offset, shape, strides)
            case "torch._utils._rebuild_tensor_v3", (
                storage,
                offset,
                shape,
                strides,
                _,
                _,
                dtype,
                *_,
            ):
                return self._tensor(storage, dtype, offset, shape, strides)
            case _:
                pass
        if made.path.startswith(("torch._utils._rebuild", "torch._tensor._rebuild")):
            return UnknownTensor(reason=f"torch makes it by {made.path}")
        return made

    def _plain(self, value: object, known: dict[int, object], depth: int) -> object:
        """See ``plain_tree``; ``known`` has the containers that were read already, which a pickle may name often."""
        if isinstance(value, bool | int | float | str | bytes):
            return value
        if depth > _MOST_NESTED:
            return None
        if id(value) in known:
            return known[id(value)]
        result: object = None
        known[id(value)] = None
        if isinstance(value, dict):
            result = {key: self._plain(item, known, depth + 1) for key, item in value.items()}
        elif isinstance(value, list):
            result = [self._plain(item, known, depth + 1) for item in value]
        elif isinstance(value, tuple):
            result = tuple(self._plain(item, known, depth + 1) for item in value)
        elif isinstance(value, Made):
            made = self.value(value)
            result = made if isinstance(made, ImportedTensor | UnknownTensor | tuple) else None
        known[id(value)] = result
        return result

    def _tensor(
        self, storage: object, dtype: object, offset: object, shape: object, strides: object
    ) -> ImportedTensor | UnknownTensor:
        key, stored_dtype, what = self._storage(storage)
        if isinstance(dtype, Named):
            stored_dtype = DTYPES.get(dtype.name)
            what = dtype.path
        if stored_dtype is None:
            return UnknownTensor(reason=f"it has the dtype of {what}")
        sizes, steps = self._numbers(shape), self._numbers(strides)
        if len(sizes) != len(steps) or not isinstance(offset, int):
            raise self._damaged("a tensor has no shape")
        # Every element lies between the first one and the last one of each dimension.
        needed = 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        if 0 in sizes:
            needed = 0
        itemsize = ITEMSIZE_BYTES[stored_dtype]
        begin, size_bytes = self._place(f"data/{key}")
        if offset < 0 or (offset + needed) * itemsize > size_bytes:
            raise self._damaged(f"the tensor {key} ends early")
        flat = elements_at(
            self._file, begin + offset * itemsize, stored_dtype, (needed,), f"the tensor {key}"
        )
        elements = np.lib.stride_tricks.as_strided(
            flat, sizes, tuple(step * itemsize for step in steps), writeable=False
        )
        return whole(stored_dtype, elements, self._file)

    def _storage(self, storage: object) -> tuple[str, str | None, str]:
        """The key of a storage, the dtype of its elements (None for one that manifests lack), and its type's name."""
        match storage:
            case Persistent(key=("storage", Named() as kind, str() as key, *_)):
                return key, _STORAGES.get(kind.name), kind.path
            case _:
                raise self._damaged("a tensor has no storage")

    def _numbers(self, value: object) -> tuple[int, ...]:
        sizes = self.value(value)
        if not isinstance(sizes, tuple):
            raise self._damaged("a tensor has no shape")
        numbers = tuple(size for size in sizes if isinstance(size, int) and size >= 0)
        if len(numbers) != len(sizes):
            raise self._damaged("a tensor has no shape")
        return numbers

    def _place(self, member: str) -> tuple[int, int]:
        """The first byte of a member in the file, and the number of its bytes."""
        info = self._members.get(self._root + member)
        if info is None:
            raise self._damaged(f"it has no {member}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise self._damaged(f"{member} is compressed")
        header = self._start + info.header_offset
        if header < 0 or header + _LOCAL_HEADER_BYTES > self._stop:
            raise self._damaged(f"{member} is outside")
        name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(self._file.data, header)
        begin = header + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if begin + info.file_size > self._stop:
            raise self._damaged(f"{member} ends early")
        return begin, info.file_size

    def _bytes(self, member: str) -> bytes:
        begin, size_bytes = self._place(member)
        return bytes(self._file.data[begin : begin + size_bytes])

    def _damaged(self, problem: str) -> UserError:
        return UserError(f"'{self._file.path}' is damaged, or not a file of torch.save: {problem}.")


def open_archive(file: MappedFile) -> Archive:
    """A file of ``torch.save``.

    Raises:
        UserError: if it is damaged, or none of this format.
    """
    if bytes(file.data[: len(ARCHIVE_START)]) != ARCHIVE_START:
        raise UserError(
            f"'{file.path}' is not a file that torch.save has written since PyTorch 1.6: "
            "load it with torch, and save it again."
        )
    return Archive(file)


class _Window(io.RawIOBase):
    """Bytes in memory as a file, without a copy."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._data.nbytes}[whence]
        if base + offset < 0:
            raise ValueError("a negative position")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = None if size is None or size < 0 else self._position + size
        part = bytes(self._data[self._position : stop])
        self._position += len(part)
        return part
