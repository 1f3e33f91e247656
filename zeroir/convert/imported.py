"""The imported content of another library's files: tensors that are read block by block when they are written.

Files are mapped, not read. A tensor consists of boxes, each from one file: the shard of a rank, or the whole tensor.
They are assembled block by block, so that at most a block is in memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from zeroir.checkpoint.manifest import MASTER, StoredGroup, StoredScalar
from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES
from zeroir.errors import UserError

BLOCK_BYTES: Final = 32 << 20
"""The most bytes of a tensor that are assembled at once."""

FLOATING: Final = frozenset({"f64", "f32", "f16", "bf16", "f8_e4m3", "f8_e5m2", "f8_e8m0"})
"""The dtypes of manifests that parameters can have."""

Bits = NDArray[np.unsignedinteger]
"""Elements of a dtype with this size; only their bits matter."""

_BITS: Final[Mapping[int, np.dtype[np.unsignedinteger]]] = {
    size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)
}
_MOST_DIMENSIONS: Final = 64
"""The limit of numpy and torch."""


class MappedFile:
    """A memory-mapped file of another library."""

    def __init__(self, path: Path) -> None:
        """Map a file.

        Raises:
            UserError: if it cannot be read, or is empty.
        """
        self.path = path
        if path.exists() and not path.is_file():
            raise UserError(f"'{path}' is not a file.")
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise UserError(f"'{path}' is empty.") from error
        except OSError as error:
            raise UserError(f"'{path}' cannot be read: {error.strerror or error}.") from error
        self.data = memoryview(self._map)

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self.data.nbytes

    def forget(self) -> None:
        """Release the memory of the pages that were read."""
        self._map.madvise(mmap.MADV_DONTNEED)


def elements_at(
    file: MappedFile, offset_bytes: int, dtype: str, shape: tuple[int, ...], what: str
) -> Bits:
    """Return consecutive elements of a file in row-major order, without reading them; ``what`` is named in errors.

    Raises:
        UserError: if the file ends before them.
    """
    itemsize = ITEMSIZE_BYTES[dtype]
    if (
        len(shape) > _MOST_DIMENSIONS
        or min(shape, default=0) < 0
        or offset_bytes < 0
        or offset_bytes + prod(shape) * itemsize > file.size_bytes
    ):
        raise UserError(f"'{file.path}' is damaged: it ends before the elements of {what}.")
    return np.frombuffer(
        file.data, _BITS[itemsize], count=prod(shape), offset=offset_bytes
    ).reshape(shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Box:
    """A part of a tensor: the index of its first element, and its elements in a file."""

    starts: tuple[int, ...]
    elements: Bits
    file: MappedFile

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return self.elements.shape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportedTensor:
    """A tensor: its dtype as in manifests, its shape, and its boxes.

    ``extent`` is the shape in which the boxes are placed: that of the tensor, or ``(numel,)`` if they are parts of its
    elements in row-major order. The boxes cover it without overlap.
    """

    dtype: str
    shape: tuple[int, ...]
    extent: tuple[int, ...]
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def place(self) -> tuple[object, ...] | None:
        """A key that is equal for tensors with the same elements of one file; None if there are no elements."""
        if not self.numel or len(self.boxes) != 1:
            return None
        elements = self.boxes[0].elements
        return self.dtype, self.shape, elements.__array_interface__["data"][0], elements.strides

    def blocks(self, what: str) -> Iterator[memoryview]:
        """Yield the bytes of the elements in row-major order; ``what`` is named in errors.

        Raises:
            UserError: if the boxes do not cover the tensor.
        """
        most_numel = max(BLOCK_BYTES // ITEMSIZE_BYTES[self.dtype], 1)
        for starts, stops in _blocks(self.extent, most_numel):
            block = self._block(starts, stops, what)
            yield np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
            for box in self.boxes:
                box.file.forget()

    def _block(self, starts: tuple[int, ...], stops: tuple[int, ...], what: str) -> Bits:
        if len(self.boxes) == 1 and self.boxes[0].shape == self.extent:
            return self.boxes[0].elements[tuple(map(slice, starts, stops))]
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        block = np.empty(sizes, _BITS[ITEMSIZE_BYTES[self.dtype]])
        is_covered = np.zeros(sizes, np.bool_)
        for box in self.boxes:
            source, target = [], []
            for start, stop, first, size in zip(starts, stops, box.starts, box.shape, strict=True):
                begin, end = max(start, first), min(stop, first + size)
                source.append(slice(begin - first, max(end, begin) - first))
                target.append(slice(begin - start, max(end, begin) - start))
            if is_covered[tuple(target)].any():
                raise UserError(f"'{box.file.path}' contains elements of {what} twice.")
            block[tuple(target)] = box.elements[tuple(source)]
            is_covered[tuple(target)] = True
        if not is_covered.all():
            raise UserError(f"Some elements of {what} are in no file: the checkpoint is not whole.")
        return block


def whole(dtype: str, elements: Bits, file: MappedFile) -> ImportedTensor:
    """Return a tensor whose elements are all in one file."""
    shape = elements.shape
    box = Box(starts=(0,) * len(shape), elements=elements, file=file)
    return ImportedTensor(dtype=dtype, shape=shape, extent=shape, boxes=(box,))


def _blocks(
    extent: tuple[int, ...], most_numel: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield the first and end indices of blocks of rows with at most so many elements, in row-major order."""
    if prod(extent) <= most_numel:
        if prod(extent):
            yield (0,) * len(extent), extent
        return
    rows, inner = extent[0], extent[1:]
    if prod(inner) <= most_numel:
        step = most_numel // prod(inner)
        for row in range(0, rows, step):
            yield (row, *(0 for _ in inner)), (min(row + step, rows), *inner)
        return
    for row in range(rows):
        for starts, stops in _blocks(inner, most_numel):
            yield (row, *starts), (row + 1, *stops)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedParameter:
    """A parameter: its values, and the elementwise optimizer states by the names of their quantities."""

    name: str
    values: ImportedTensor
    aliases: tuple[str, ...] = ()
    is_trainable: bool = True
    states: Mapping[str, ImportedTensor] = field(default_factory=dict)

    @property
    def quantities(self) -> Mapping[str, ImportedTensor]:
        """All tensors of the parameter by the names of quantities."""
        return {MASTER: self.values, **self.states}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedBuffer:
    """A buffer of the model."""

    name: str
    tensor: ImportedTensor
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedModel:
    """A model, and its training state if there is one; ``notes`` say what was left out."""

    parameters: tuple[ImportedParameter, ...]
    buffers: tuple[ImportedBuffer, ...] = ()
    step: int = 0
    scalars: tuple[StoredScalar, ...] = ()
    groups: tuple[StoredGroup, ...] = ()
    config: JsonValue = None
    notes: tuple[str, ...] = ()


def weights(tensors: Mapping[str, ImportedTensor]) -> ImportedModel:
    """Return a model of which only the tensors are known.

    Names of the same elements are one parameter. Tensors that are not floating-point are buffers. The others may be
    parameters or buffers, which only the program that loads them knows.
    """
    names_at: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        names_at.setdefault(tensor.place or name, []).append(name)
    parameters, buffers = [], []
    for first, *aliases in names_at.values():
        tensor = tensors[first]
        if tensor.dtype in FLOATING:
            parameters.append(ImportedParameter(name=first, aliases=tuple(aliases), values=tensor))
        else:
            buffers.append(ImportedBuffer(name=first, aliases=tuple(aliases), tensor=tensor))
    return ImportedModel(parameters=tuple(parameters), buffers=tuple(buffers))
