"""What holds in every manifest: names lead to files of the folder, and each element of a parameter is in one tensor."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import prod
from typing import Final

from zeroir.checkpoint.manifest import (
    MANIFEST_NAME,
    MASTER,
    Manifest,
    StoredBuffer,
    StoredFile,
    StoredFlat,
    StoredQuantity,
    StoredTensor,
)
from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES, LENGTH_BYTES
from zeroir.ir.optimizers.forms import block_numel

_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
"""A file in the folder itself: a manifest must not lead its reader to files elsewhere."""


def contradictions(manifest: Manifest) -> Iterator[str]:
    """What is wrong with a manifest, one clause for each; nothing if its reader may rely on it."""
    yield from _repeated("file", (file.name for file in manifest.files))
    for file in manifest.files:
        yield from _in_file(file)
    tensors = {
        (file.name, tensor.name): tensor for file in manifest.files for tensor in file.tensors
    }
    yield from _repeated("flat", (flat.name for flat in manifest.flats))
    yield from _repeated(
        "parameter",
        (
            name
            for flat in manifest.flats
            for parameter in flat.parameters
            for name in (parameter.name, *parameter.aliases)
        ),
    )
    for flat in manifest.flats:
        yield from _in_flat(flat, tensors)
    open_pieces = manifest.open_step.pieces if manifest.open_step is not None else ()
    for buffer in (*manifest.buffers, *open_pieces):
        yield from _in_buffer(buffer, tensors)
    yield from _repeated("rank", (str(state.rank) for state in manifest.ranks))


def _in_file(file: StoredFile) -> Iterator[str]:
    if not _FILE_NAME.fullmatch(file.name) or file.name == MANIFEST_NAME:
        yield f"{file.name!r} is not a name of a file in the folder"
    yield from _repeated(f"tensor of {file.name}", (tensor.name for tensor in file.tensors))
    data_bytes = 0
    for tensor in file.tensors:
        if tensor.dtype not in ITEMSIZE_BYTES:
            yield f"{tensor.name} has the dtype {tensor.dtype!r}"
        elif tensor.numel < 1:
            yield f"{tensor.name} has no elements"
        else:
            data_bytes += tensor.numel * ITEMSIZE_BYTES[tensor.dtype]
    if file.size_bytes < LENGTH_BYTES + len("{}") + data_bytes:
        yield f"{file.name} is smaller than its tensors"


def _in_flat(flat: StoredFlat, tensors: dict[tuple[str, str], StoredTensor]) -> Iterator[str]:
    stop = 0
    for parameter in flat.parameters:
        if parameter.offset < stop or min(parameter.shape, default=1) < 0:
            yield f"{parameter.name} overlaps the parameter before it"
        stop = parameter.offset + prod(parameter.shape)
    block = max((block_numel(quantity.name) for quantity in flat.quantities), default=1)
    for parameter in flat.parameters:
        if parameter.offset % block:
            yield f"{parameter.name} begins within a block of {block} elements, which share a scale"
    yield from _repeated(f"quantity of {flat.name}", (stored.name for stored in flat.quantities))
    for quantity in flat.quantities:
        yield from _in_quantity(flat, quantity, tensors)


def _in_quantity(
    flat: StoredFlat, quantity: StoredQuantity, tensors: dict[tuple[str, str], StoredTensor]
) -> Iterator[str]:
    what = f"{quantity.name} of {flat.name}"
    intervals = []
    for piece in quantity.pieces:
        yield from _in_tensor(
            what, piece.file, piece.tensor, quantity.dtype, piece.stop - piece.start, tensors
        )
        intervals.append((piece.start, piece.stop))
    intervals.sort()
    if any(before[1] > after[0] for before, after in pairwise(intervals)):
        yield f"{what} has elements in several tensors"
    if quantity.name != MASTER:
        return
    for parameter in flat.parameters:
        missing = _first_missing(
            parameter.offset, parameter.offset + prod(parameter.shape), intervals
        )
        if missing is not None:
            yield f"no tensor has element {missing - parameter.offset} of {parameter.name}"


def _first_missing(start: int, stop: int, intervals: list[tuple[int, int]]) -> int | None:
    """The first of the elements ``[start, stop)`` that is in none of the intervals, which are in order."""
    index = max(bisect_right(intervals, start, key=lambda interval: interval[0]) - 1, 0)
    while start < stop:
        if index == len(intervals) or not intervals[index][0] <= start < intervals[index][1]:
            return start
        start = intervals[index][1]
        index += 1
    return None


def _in_buffer(buffer: StoredBuffer, tensors: dict[tuple[str, str], StoredTensor]) -> Iterator[str]:
    numel = prod(buffer.shape)
    if numel:
        yield from _in_tensor(buffer.name, buffer.file, buffer.tensor, buffer.dtype, numel, tensors)


def _in_tensor(
    what: str,
    file: str,
    name: str,
    dtype: str,
    numel: int,
    tensors: dict[tuple[str, str], StoredTensor],
) -> Iterator[str]:
    tensor = tensors.get((file, name))
    if tensor is None:
        yield f"{what} is in tensor {name} of {file}, which does not exist"
    elif (tensor.dtype, tensor.numel) != (dtype, numel):
        yield (
            f"{what} has {numel} elements of {dtype} in tensor {name} of {file}, which has {tensor.numel} of "
            f"{tensor.dtype}"
        )


def _repeated(noun: str, names: Iterable[str]) -> Iterator[str]:
    seen = set()
    for name in names:
        if name in seen:
            yield f"the {noun} {name} stands twice"
        seen.add(name)
