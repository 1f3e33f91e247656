"""The elements of a flat in a region with a given content: on one rank, and on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeroir.ir.buffers import Buffer, Space
from zeroir.ir.contents import FlatContent
from zeroir.ir.mesh import Mesh


def held_elements(content: FlatContent, numel: int, coordinate: Mapping[str, int]) -> range:
    """Return the elements that a region of ``numel`` local elements holds on the rank at a mesh coordinate."""
    start = content.offset
    if content.shard is not None:
        start += coordinate[content.shard] * _stride(content, numel)
    return range(start, start + numel)


def held_by_all(content: FlatContent, numel: int, mesh: Mesh) -> tuple[range, ...]:
    """Return the elements that all ranks hold together, as few ranges in order; each rank holds ``numel``."""
    count = 1 if content.shard is None else mesh.size(content.shard)
    stride = _stride(content, numel)
    if stride == numel:
        return (range(content.offset, content.offset + count * numel),)
    starts = range(content.offset, content.offset + count * stride, stride)
    return tuple(range(start, start + numel) for start in starts)


def is_within(elements: Sequence[range], others: Sequence[range]) -> bool:
    """Return whether all of the elements are among the others; both as returned by ``held_by_all``."""
    return all(
        any(other.start <= part.start and part.stop <= other.stop for other in others)
        for part in elements
    )


def save_order(held: tuple[Buffer, FlatContent]) -> tuple[bool, bool]:
    """Return the key that sorts buffers with the same elements: a checkpoint uses the first of them.

    Slices come before copies of the whole, and among these buffers in host memory before others.
    """
    buffer, content = held
    return content.shard is None, buffer.space is not Space.HOST


def _stride(content: FlatContent, numel: int) -> int:
    return numel if content.stride is None else content.stride
