"""Flat buffers, and the regions and views of them that ops name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, ClassVar

from zeroir.ir.contents import Content, SnapshotContent
from zeroir.ir.dtypes import DType
from zeroir.ir.fields import Declares, Form, NameKind
from zeroir.ir.mesh import Mesh


class Space(StrEnum):
    """The memory of a buffer. ``host`` memory is pinned where a device uses it."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Role(StrEnum):
    """The purpose of a buffer; memory is accounted by role."""

    PARAM = "param"
    MASTER = "master"
    GRAD = "grad"
    STATE = "state"
    GATHERED = "gathered"
    ACTIVATION = "activation"
    SAVED = "saved"
    INPUT = "input"
    SCALAR = "scalar"
    MODULE_BUFFER = "module_buffer"
    CONSTANT = "constant"
    RNG = "rng"
    OUTPUT = "output"
    STAGING = "staging"
    WORKSPACE = "workspace"
    SNAPSHOT = "snapshot"
    PAGE = "page"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A one-dimensional array on every rank. ``numel`` counts this rank's elements.

    A buffer with a resting content (``holds``) is persistent: it is live outside every section, and has that content at
    each boundary between sections unless the section's state says otherwise. A buffer without one is temporary: an
    ``alloc`` begins and a ``release`` ends it. ``offset`` is the place of a temporary buffer, in bytes, in the memory
    that all temporary buffers of its space share, once a program is planned.
    """

    syntax: ClassVar[str] = "{name} : {dtype}{numel} {space} {role} [offset={offset}] [= {holds}]"

    name: Annotated[str, Declares(NameKind.BUFFER)]
    dtype: DType
    numel: Annotated[int, Form.BRACKETED]
    space: Space
    role: Role
    holds: Content | None = None
    offset: int | None = None

    @property
    def is_persistent(self) -> bool:
        """Whether the buffer outlives the sections."""
        return self.holds is not None

    @property
    def size_bytes(self) -> int:
        """Bytes on one rank."""
        return self.numel * self.dtype.itemsize_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Elements ``[offset, offset + numel)`` of a buffer; with ``shard`` only this rank's 1/size slice of them.

    The text is ``%b`` for a whole buffer, ``%b[0:64]`` for a part and ``%b[0:64]@dp`` for a slice, in which rank
    ``r`` of an axis of size ``n`` names elements ``[offset + r * numel/n, offset + (r+1) * numel/n)``. With ``part``
    it names elements ``[start, stop)`` of those alone, counted from the first of them: ``%b[0:64]@dp[8:16]``.
    """

    buffer: str
    offset: int
    numel: int
    shard: str | None = None
    part: tuple[int, int] | None = None

    @property
    def stop(self) -> int:
        """One past the last element, before slicing."""
        return self.offset + self.numel

    def overlaps(self, other: Region) -> bool:
        """Return whether the two have common elements, before slicing; parts of slices count as the whole region."""
        return self.buffer == other.buffer and self.offset < other.stop and other.offset < self.stop

    def local_numel(self, mesh: Mesh) -> int:
        """Return number of elements that one rank names."""
        if self.part is not None:
            return self.part[1] - self.part[0]
        return self.numel if self.shard is None else self.numel // mesh.size(self.shard)

    def local_range(self, mesh: Mesh, coordinate: dict[str, int]) -> tuple[int, int]:
        """Return the first and one-past-last element that the rank at ``coordinate`` names."""
        start, numel = self.offset, self.numel
        if self.shard is not None:
            numel //= mesh.size(self.shard)
            start += coordinate[self.shard] * numel
        first, stop = (0, numel) if self.part is None else self.part
        return start + first, start + stop


def whole(buffer: Buffer) -> Region:
    """Return the region that covers a buffer."""
    return Region(buffer=buffer.name, offset=0, numel=buffer.numel)


def part_of(region: Region, start: int, stop: int) -> Region:
    """Return elements ``[start, stop)`` of those that a rank names by a region, counted from the first of them."""
    if region.part is not None:
        first = region.part[0]
        return replace(region, part=(first + start, first + stop))
    if region.shard is not None:
        return replace(region, part=(start, stop))
    return replace(region, offset=region.offset + start, numel=stop - start)


def copied_region(content: SnapshotContent) -> Region:
    """Return the region that a snapshot is a copy of."""
    return Region(
        buffer=content.buffer, offset=content.offset, numel=content.numel, shard=content.shard
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A region seen as a strided tensor, as a segment reads or writes it; strides count elements."""

    region: Region
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides of a row-major tensor of that shape, as torch computes them (a size of 0 counts as 1)."""
    stride = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        stride[i] = stride[i + 1] * max(shape[i + 1], 1)
    return tuple(stride)


def span_numel(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last one of a strided tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
