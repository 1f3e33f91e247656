"""Padding of batches of any length to a program, which is compiled for one shape.

Additional rows are copies of the last row whose labels are -100, and additional positions have the values with which
tokenizers pad. This does not change a loss that ignores the label -100, like torch's cross entropy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from zeroir.errors import UserError

LABELS: Final = "labels"
_IDS: Final = "input_ids"
_MASK: Final = "attention_mask"
_IGNORED: Final = -100
"""The label that ``torch.nn.functional.cross_entropy`` ignores."""

_LENGTH_STEP: Final = 64
"""Lengths greater than the first one are rounded up to multiples of it, to limit the number of programs."""

_NO_TOKEN: Final = {
    _IDS: None,
    _MASK: 0,
    "token_type_ids": 0,
    LABELS: _IGNORED,
    "decoder_input_ids": None,
    "decoder_attention_mask": 0,
}
"""Tensors of the shape [rows, length] that can be padded, and the padding value; None is the padding token."""

Inputs = Mapping[str, object]
"""A batch by the names of forward's arguments. Values other than tensors stay unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """The number of rows of a batch, and the lengths of the tensors that can be padded, in the order of their names."""

    rows: int
    lengths: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, batch: Inputs) -> BatchShape:
        """Return the shape of a batch, where the first dimension of every tensor is the rows.

        Raises:
            UserError: if the batch has no rows.
        """
        tensors = _tensors(batch)
        rows = [tensor.shape[0] for tensor in tensors.values() if tensor.ndim]
        if not rows or not rows[0]:
            raise UserError(
                "The batch has no rows: give tensors whose first dimension is the batch."
            )
        lengths = {
            name: tensor.shape[1]
            for name, tensor in sorted(tensors.items())
            if name in _NO_TOKEN and tensor.ndim == 2
        }
        return cls(rows=rows[0], lengths=tuple(lengths.items()))

    def numbers(self) -> list[int]:
        """Return the rows and the lengths as numbers to exchange between ranks."""
        return [self.rows, *(length for _, length in self.lengths)]

    def with_numbers(self, numbers: Sequence[int]) -> BatchShape:
        """Return a shape of the same tensors with these rows and lengths."""
        names = [name for name, _ in self.lengths]
        return BatchShape(rows=numbers[0], lengths=tuple(zip(names, numbers[1:], strict=True)))

    def grown(self, needed: BatchShape, most: int | None) -> BatchShape:
        """Return this shape with more rows and longer tensors where ``needed`` exceeds it.

        Longer lengths are rounded up, but not beyond ``most``, the model's number of positions.
        """
        present = dict(self.lengths)
        lengths = {
            name: present[name] if length <= present[name] else _rounded_up(length, most)
            for name, length in needed.lengths
        }
        return BatchShape(rows=max(self.rows, needed.rows), lengths=tuple(lengths.items()))


def largest(shapes: Iterable[BatchShape]) -> BatchShape:
    """Return the most rows and the greatest lengths of some shapes.

    Raises:
        UserError: if they have different tensors.
    """
    first, *others = shapes
    for shape in others:
        if [name for name, _ in shape.lengths] != [name for name, _ in first.lengths]:
            raise UserError(
                "The batches of a step have different tensors: let the data collator give the same ones in every batch."
            )
    numbers = zip(*(shape.numbers() for shape in (first, *others)), strict=True)
    return first.with_numbers([max(column) for column in numbers])


def padded(batch: Inputs, shape: BatchShape, pad_token: int) -> dict[str, object]:
    """Pad a batch to the rows and lengths of ``shape``, which are at least its own.

    Raises:
        UserError: if padding would change the loss: ids without an attention mask, or rows without integer labels.
    """
    lengths = dict(shape.lengths)
    own = BatchShape.of(batch)
    if any(lengths[name] > length for name, length in own.lengths if name == _IDS):
        _require_mask(batch)
    if shape.rows > own.rows:
        _require_labels(batch, own.rows, shape.rows)
    values = dict(batch)
    for name, tensor in _tensors(batch).items():
        longer = tensor
        if name in lengths:
            fill = _NO_TOKEN[name]
            longer = torch.nn.functional.pad(
                tensor,
                (0, lengths[name] - tensor.shape[1]),
                value=pad_token if fill is None else fill,
            )
        if tensor.ndim and shape.rows > own.rows:
            copies = longer[-1:].expand(shape.rows - own.rows, *longer.shape[1:])
            added = torch.full_like(copies, _IGNORED) if name == LABELS else copies
            longer = torch.cat([longer, added])
        values[name] = longer
    return values


def cropped(output: Tensor, own: BatchShape, shape: BatchShape) -> Tensor:
    """Remove the padding of rows and positions from an output.

    A second dimension as long as the padded ids is that of the positions.
    """
    if output.ndim and output.shape[0] == shape.rows:
        output = output[: own.rows]
    long, short = dict(shape.lengths).get(_IDS), dict(own.lengths).get(_IDS)
    if output.ndim >= 2 and output.shape[1] == long:
        output = output[:, :short]
    return output


def rows_of(batch: Inputs, start: int, stop: int) -> dict[str, object]:
    """Return the rows from ``start`` to ``stop``; only the last row if the batch has fewer."""
    values = dict(batch)
    for name, tensor in _tensors(batch).items():
        if tensor.ndim:
            values[name] = tensor[min(start, tensor.shape[0] - 1) : stop]
    return values


def _tensors(batch: Inputs) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, Tensor)}


def _rounded_up(length: int, most: int | None) -> int:
    rounded = -(-length // _LENGTH_STEP) * _LENGTH_STEP
    return rounded if most is None else max(length, min(rounded, most))


def _require_mask(batch: Inputs) -> None:
    if _MASK not in batch:
        raise UserError(
            f"The batches have different lengths but no '{_MASK}', so they cannot be padded to one length: let the "
            "data collator return the mask, or pad every batch to the same length."
        )


def _require_labels(batch: Inputs, rows: int, expected: int) -> None:
    labels = batch.get(LABELS)
    if not isinstance(labels, Tensor) or not labels.ndim or labels.dtype.is_floating_point:
        raise UserError(
            f"A batch has {rows} rows instead of {expected}, and no integer '{LABELS}' by which added rows could be "
            "ignored: set dataloader_drop_last=True."
        )
