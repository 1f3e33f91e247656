"""The tensors of a checkpoint as the model has them: one for each parameter, buffer and optimizer state, by name.

A checkpoint stores pieces of flats. A parameter is an interval of a flat, so each of its quantities consists of
consecutive elements of one or more pieces. They are read in slices of at most ``SLICE_BYTES``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Final

import numpy as np

from zeroir.checkpoint.manifest import (
    MASTER,
    Manifest,
    Piece,
    StoredFlat,
    StoredParameter,
    StoredQuantity,
)
from zeroir.checkpoint.reading import CheckpointFiles, VerifyItem, read_manifest, verify_items
from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES
from zeroir.errors import UserError
from zeroir.ir.eight_bit_states import BLOCK_NUMEL, blocks_numel, code_values
from zeroir.ir.optimizers.forms import ABSMAX, CODES, is_signed

SLICE_BYTES: Final = 32 << 20
"""The most bytes of a tensor that are read at once."""

STEP: Final = "step"
"""The scalar that counts the updates of the optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Consecutive elements ``[start, stop)`` of a tensor in a file."""

    file: str
    tensor: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockScales:
    """The scales of an 8-bit state: the place of those of all blocks, and the first block of the tensor's elements.

    ``skipped_numel`` elements of that block precede the first element of the tensor.
    """

    scales: TensorInFiles
    first_block: int
    skipped_numel: int
    signed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInFiles:
    """A tensor of a model or an optimizer: its dtype as in manifests, its shape, and the places of its elements.

    With ``scales`` the extents contain u8 codes, and the tensor is the f32 one that they encode.
    """

    dtype: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]
    scales: BlockScales | None = None

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """The bytes of all elements."""
        return self.numel * ITEMSIZE_BYTES[self.dtype]

    def elements(self, start: int, shape: tuple[int, ...]) -> TensorInFiles:
        """Return the consecutive elements from ``start`` on in the given shape; they may cross rows of the tensor."""
        stop = start + prod(shape)
        extents = []
        position = 0
        for extent in self.extents:
            first, last = max(start - position, 0), min(stop - position, extent.stop - extent.start)
            if first < last:
                extents.append(
                    replace(extent, start=extent.start + first, stop=extent.start + last)
                )
            position += extent.stop - extent.start
        scales = self.scales
        if scales is not None:
            blocks, skipped_numel = divmod(scales.skipped_numel + start, BLOCK_NUMEL)
            scales = replace(
                scales, first_block=scales.first_block + blocks, skipped_numel=skipped_numel
            )
        return replace(self, shape=shape, extents=tuple(extents), scales=scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInFiles:
    """A parameter: its names, and the flat that contains it."""

    flat: StoredFlat
    slot: StoredParameter

    @property
    def name(self) -> str:
        """The first of its names in the order of the model's modules."""
        return self.slot.name

    @property
    def names(self) -> tuple[str, ...]:
        """All its names; a tied parameter has several."""
        return (self.slot.name, *self.slot.aliases)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferInFiles:
    """A buffer in the model's ``state_dict``; ``differs`` tells whether its values differ between ranks."""

    names: tuple[str, ...]
    tensor: TensorInFiles
    differs: bool


class StoredTensors:
    """A context manager for the tensors of a checkpoint, which closes the files; not thread-safe.

    Raises:
        UserError: if there is no complete checkpoint at the path.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path)
        self._files = CheckpointFiles(path=path, manifest=self.manifest)
        self._checked: set[tuple[str, str]] = set()

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    @cached_property
    def parameters(self) -> tuple[ParameterInFiles, ...]:
        """The parameters, in the order of the flats and of the elements of each."""
        return tuple(
            ParameterInFiles(flat=flat, slot=slot)
            for flat in self.manifest.flats
            for slot in flat.parameters
        )

    @cached_property
    def parameter_by_name(self) -> Mapping[str, ParameterInFiles]:
        """The parameters under all their names."""
        return {name: parameter for parameter in self.parameters for name in parameter.names}

    @cached_property
    def buffers(self) -> tuple[BufferInFiles, ...]:
        """The buffers in the ``state_dict``; if their values differ between ranks, those of the lowest rank."""
        by_name: dict[str, BufferInFiles] = {}
        for stored in sorted(
            self.manifest.buffers, key=lambda stored: min(stored.ranks, default=0)
        ):
            if not stored.is_persistent:
                continue
            first = by_name.get(stored.name)
            numel = prod(stored.shape)
            extent = Extent(file=stored.file, tensor=stored.tensor, start=0, stop=numel)
            by_name[stored.name] = BufferInFiles(
                names=(stored.name, *stored.aliases),
                tensor=TensorInFiles(dtype=stored.dtype, shape=stored.shape, extents=(extent,))
                if first is None
                else first.tensor,
                differs=first is not None,
            )
        return tuple(by_name.values())

    @property
    def step_count(self) -> float:
        """The updates of the optimizer, which are fewer than the steps if some were skipped."""
        for scalar in self.manifest.scalars:
            if scalar.name == STEP:
                return scalar.values[0]
        return float(self.manifest.step)

    def weight(self, parameter: ParameterInFiles, quantity: str = MASTER) -> TensorInFiles:
        """Return a quantity of a parameter in its shape; for a frozen parameter the weights, whatever the quantity.

        Raises:
            UserError: if the checkpoint lacks the quantity.
        """
        tensor = self.state(parameter, quantity if parameter.flat.is_trainable else MASTER)
        if tensor is None:
            raise UserError(
                f"'{self.path}' has no quantity {quantity} of {parameter.name}: "
                + ("it was saved without an average." if quantity != MASTER else "it is damaged.")
            )
        return tensor

    def state(self, parameter: ParameterInFiles, quantity: str) -> TensorInFiles | None:
        """Return a quantity of a parameter, in its shape; None if the checkpoint lacks it."""
        stored = quantity_of(parameter.flat, quantity)
        if stored is None:
            return None
        slot = parameter.slot
        if quantity in ABSMAX.values():
            shape = (blocks_numel(prod(slot.shape)),)
            return self.elements(stored, slot.offset // BLOCK_NUMEL, shape, parameter.name)
        return self.elements(stored, slot.offset, slot.shape, parameter.name)

    def widened(self, parameter: ParameterInFiles, state: str) -> TensorInFiles | None:
        """Return an 8-bit state of a parameter as the FP32 tensor that it encodes; None if the checkpoint lacks it."""
        codes = self.state(parameter, CODES[state])
        scales = self.state(parameter, ABSMAX[state])
        if codes is None or scales is None:
            return None
        of_blocks = BlockScales(
            scales=scales, first_block=0, skipped_numel=0, signed=is_signed(state)
        )
        return replace(codes, dtype="f32", scales=of_blocks)

    def elements(
        self, quantity: StoredQuantity, offset: int, shape: tuple[int, ...], owner: str
    ) -> TensorInFiles:
        """Return elements of a quantity from an offset on, in the given shape; ``owner`` is named in errors.

        Raises:
            UserError: if no piece contains one of the elements.
        """
        position, stop = offset, offset + prod(shape)
        extents = []
        for piece in sorted(quantity.pieces, key=lambda piece: piece.start):
            if piece.stop > position and piece.start < stop:
                if piece.start > position:
                    break
                extents.append(_extent(piece, position, min(piece.stop, stop)))
                position = extents[-1].stop + piece.start
        if position < stop:
            raise UserError(
                f"'{self.path}' is damaged: it lacks elements of {quantity.name} of {owner}; use another checkpoint."
            )
        return TensorInFiles(dtype=quantity.dtype, shape=shape, extents=tuple(extents))

    def slices(self, tensor: TensorInFiles) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in order, in parts of whole elements and at most ``SLICE_BYTES``.

        Raises:
            UserError: if a file is damaged.
        """
        if tensor.scales is not None:
            yield from self._widened(tensor, tensor.scales)
            return
        size = ITEMSIZE_BYTES[tensor.dtype]
        for extent in tensor.extents:
            self._check(extent)
            for start in range(extent.start, extent.stop, SLICE_BYTES // size):
                stop = min(start + SLICE_BYTES // size, extent.stop)
                yield self._files.bytes(extent.file, extent.tensor, start, stop)

    def _widened(self, tensor: TensorInFiles, scales: BlockScales) -> Iterator[memoryview]:
        """Yield the FP32 elements of an 8-bit state, in parts of whole blocks except for the first and the last."""
        codes = replace(tensor, dtype="u8", scales=None)
        values = np.array(code_values(signed=scales.signed), dtype=np.float32)
        most = SLICE_BYTES // ITEMSIZE_BYTES["f32"]
        start = 0
        while start < tensor.numel:
            blocks, skipped_numel = divmod(scales.skipped_numel + start, BLOCK_NUMEL)
            count = min(most - skipped_numel, tensor.numel - start)
            part = np.frombuffer(b"".join(self.slices(codes.elements(start, (count,)))), np.uint8)
            count_blocks = blocks_numel(skipped_numel + count)
            own = scales.scales.elements(scales.first_block + blocks, (count_blocks,))
            of_blocks = np.frombuffer(b"".join(self.slices(own)), "<f4")
            of_elements = np.repeat(of_blocks, BLOCK_NUMEL)[skipped_numel : skipped_numel + count]
            yield memoryview(values[part] * of_elements).cast("B")
            start += count

    def _check(self, extent: Extent) -> None:
        """Verify the checksum of a tensor in a file before its elements are first used."""
        if (extent.file, extent.tensor) not in self._checked:
            self._files.verify(self._items[extent.file, extent.tensor])
            self._checked.add((extent.file, extent.tensor))

    @cached_property
    def _items(self) -> dict[tuple[str, str | None], VerifyItem]:
        return {(item.file, item.tensor): item for item in verify_items(self.manifest)}


def quantity_of(flat: StoredFlat, name: str) -> StoredQuantity | None:
    """Return the quantity of a flat with this name."""
    return next((quantity for quantity in flat.quantities if quantity.name == name), None)


def _extent(piece: Piece, start: int, stop: int) -> Extent:
    """Return the elements ``[start, stop)`` of a flat within a piece's tensor."""
    return Extent(
        file=piece.file, tensor=piece.tensor, start=start - piece.start, stop=stop - piece.start
    )
