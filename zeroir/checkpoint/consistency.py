"""The invariants of a manifest: it names only files of its folder, and each element of a parameter is in one tensor."""

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
from zeroir.checkpoint.safetensors_header import (
    ITEMSIZE_BYTES,
    LARGEST_JSON_BYTES,
    LENGTH_BYTES,
)
from zeroir.checkpoint.state_tree import tensor_names
from zeroir.ir.dtypes import DType
from zeroir.ir.optimizers.forms import StateForm, block_numel, form_of, numbers_of
from zeroir.ir.own_coordinates import extents
from zeroir.ir.program import Flat, Slot

_FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
"""A file directly in the folder: a manifest must not make its reader open files elsewhere."""

_NO_SETTINGS: Final = frozenset({"params", "param_names", "name"})
"""Keys of torch's param groups that are not settings."""


def contradictions(manifest: Manifest) -> Iterator[str]:
    """Yield the contradictions in a manifest, one clause for each; none if a reader may rely on it."""
    yield from _repeated("file", (file.name for file in manifest.files))
    for file in manifest.files:
        yield from _in_file(file)
    world_size = manifest.origin.world_size
    if manifest.origin.mesh and prod(size for _, size in manifest.origin.mesh) != world_size:
        yield f"its mesh has not {world_size} ranks"
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
    yield from _in_groups(manifest)
    open_pieces = manifest.open_step.pieces if manifest.open_step is not None else ()
    for buffer in (*manifest.buffers, *open_pieces):
        yield from _in_buffer(buffer, tensors)
        if not buffer.ranks or max(buffer.ranks) >= world_size:
            yield f"{buffer.name} is of ranks {list(buffer.ranks)}, and there are {world_size}"
    for kind, buffers in (("buffer", manifest.buffers), ("sum", open_pieces)):
        owners = (f"{buffer.name} of rank {rank}" for buffer in buffers for rank in buffer.ranks)
        yield from _repeated(kind, owners)
    yield from _repeated("scalar", (scalar.name for scalar in manifest.scalars))
    yield from _repeated("rank", (str(state.rank) for state in manifest.ranks))
    for state in manifest.ranks:
        if state.rank >= world_size:
            yield f"it has the state of rank {state.rank}, and there are {world_size}"
    yield from _in_states(manifest)


def _in_file(file: StoredFile) -> Iterator[str]:
    if not _FILE_NAME.fullmatch(file.name) or file.name == MANIFEST_NAME:
        yield f"{file.name!r} is not a name of a file in the folder"
    yield from _repeated(f"tensor of {file.name}", (tensor.name for tensor in file.tensors))
    data_bytes = 0
    for tensor in file.tensors:
        data_bytes += tensor.numel * ITEMSIZE_BYTES[tensor.dtype]
    header_bytes = file.size_bytes - data_bytes
    if header_bytes < LENGTH_BYTES + len("{}"):
        yield f"{file.name} is smaller than its tensors"
    if header_bytes > LENGTH_BYTES + LARGEST_JSON_BYTES:
        yield f"{file.name} has {header_bytes} bytes beside its tensors"


def _in_flat(flat: StoredFlat, tensors: dict[tuple[str, str], StoredTensor]) -> Iterator[str]:
    stop = 0
    for parameter in flat.parameters:
        if parameter.offset < stop:
            yield f"{parameter.name} overlaps the parameter before it"
        stop = parameter.offset + prod(parameter.shape)
    block = max((block_numel(quantity.name) for quantity in flat.quantities), default=1)
    for parameter in flat.parameters:
        if parameter.offset % block:
            yield f"{parameter.name} begins within a block of {block} elements, which share a scale"
    yield from _repeated(f"quantity of {flat.name}", (stored.name for stored in flat.quantities))
    if not flat.is_trainable and any(quantity.name != MASTER for quantity in flat.quantities):
        yield f"{flat.name} has states and is not trained"
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
    for extent in extents(quantity.name, as_flat(flat)):
        missing = _first_missing(extent.offset, extent.offset + extent.numel, intervals)
        if missing is not None:
            yield f"no tensor has element {missing - extent.offset} of {quantity.name} of {extent.slot.name}"
    numbers = numbers_of(quantity.name)
    if form_of(quantity.name) is StateForm.EIGHT_BITS and quantity.dtype != numbers.dtype:
        yield f"{what} has the dtype {quantity.dtype} instead of {numbers.dtype}"


def _first_missing(start: int, stop: int, intervals: list[tuple[int, int]]) -> int | None:
    """Return the first of the elements ``[start, stop)`` that no interval contains; the intervals are in order."""
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


def _in_groups(manifest: Manifest) -> Iterator[str]:
    yield from _repeated("group", (group.name for group in manifest.groups))
    trained = {
        name
        for flat in manifest.flats
        if flat.is_trainable
        for parameter in flat.parameters
        for name in (parameter.name, *parameter.aliases)
    }
    for group in manifest.groups:
        for key in _NO_SETTINGS & group.settings.keys():
            yield f"the group {group.name} has {key} among its settings"
        for name in group.parameters:
            if name not in trained:
                yield f"the group {group.name} has {name}, which is no parameter that is trained"


def _in_states(manifest: Manifest) -> Iterator[str]:
    """Yield each tensor of a rank's state that its file lacks."""
    names = {file.name: {tensor.name for tensor in file.tensors} for file in manifest.files}
    for state in manifest.ranks:
        for name in tensor_names(state.state):
            if state.file is None or name not in names.get(state.file, ()):
                yield f"the state of rank {state.rank} is in tensor {name} of {state.file}, which does not exist"


def as_flat(stored: StoredFlat) -> Flat:
    """Return a flat of a checkpoint as a program's ``Flat``, which computes the places of parameters."""
    return Flat(
        name=stored.name,
        unit=stored.name,
        dtype=DType.F32,
        is_trainable=stored.is_trainable,
        padded_numel=0,
        slots=tuple(
            Slot(name=p.name, offset=p.offset, shape=p.shape, aliases=p.aliases)
            for p in stored.parameters
        ),
    )


def _repeated(noun: str, names: Iterable[str]) -> Iterator[str]:
    seen = set()
    for name in names:
        if name in seen:
            yield f"the {noun} {name} stands twice"
        seen.add(name)
