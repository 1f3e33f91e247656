"""Padded batches have the loss of the batches themselves, and what cannot be padded is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding

from zeroir.errors import UserError
from zeroir.integrations.fitted_batches import BatchShape, cropped, largest, padded, rows_of


def batch(rows: int, length: int, **others: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * 100 + length)
    ids = torch.randint(1, 7, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, **others}


def loss(values: dict[str, object]) -> Tensor:
    """A mean over the labels that count, of a model that reads the ids and the mask."""
    ids, mask, labels = values["input_ids"], values["attention_mask"], values["labels"]
    assert isinstance(ids, Tensor)
    assert isinstance(mask, Tensor)
    assert isinstance(labels, Tensor)
    table = torch.randn(7, 7, generator=torch.Generator().manual_seed(3))
    hidden = embedding(ids, table) * mask[..., None]
    hidden = hidden + hidden.sum(1, keepdim=True)
    return cross_entropy(hidden.flatten(0, 1), labels.flatten())


def test_added_rows_and_positions_leave_the_loss_as_it_is() -> None:
    own = batch(2, 5)
    shape = BatchShape.of(batch(4, 8))
    fitted = padded(own, shape, pad_token=6)
    assert BatchShape.of(fitted) == shape
    torch.testing.assert_close(loss(fitted), loss(dict(own)))
    ids = fitted["input_ids"]
    assert isinstance(ids, Tensor)
    assert ids[0, 5:].tolist() == [6, 6, 6]
    output = torch.arange(4 * 8 * 3).view(4, 8, 3)
    assert torch.equal(cropped(output, BatchShape.of(own), shape), output[:2, :5])


def test_lengths_grow_in_steps_up_to_the_positions_of_the_model() -> None:
    first = BatchShape.of(batch(2, 5))
    assert first.grown(BatchShape.of(batch(1, 4)), None) == first
    longer = first.grown(BatchShape.of(batch(2, 70)), None)
    assert dict(longer.lengths)["input_ids"] == 128
    assert dict(first.grown(BatchShape.of(batch(2, 70)), 100).lengths)["labels"] == 100
    most = largest([BatchShape.of(batch(1, 9)), BatchShape.of(batch(3, 4))])
    assert (most.rows, dict(most.lengths)["attention_mask"]) == (3, 9)


def test_pieces_of_a_batch_are_its_rows_and_after_its_end_the_last_one() -> None:
    whole = batch(5, 3)
    pieces = [rows_of(whole, start, start + 2)["input_ids"] for start in (0, 2, 4, 6)]
    ids = whole["input_ids"]
    expected = [ids[:2], ids[2:4], ids[4:], ids[4:]]
    for piece, rows in zip(pieces, expected, strict=True):
        assert isinstance(piece, Tensor)
        assert torch.equal(piece, rows)


def test_what_padding_would_change_is_refused() -> None:
    shape = BatchShape.of(batch(2, 8))
    ids = batch(2, 5)["input_ids"]
    with pytest.raises(UserError, match="no 'attention_mask'"):
        padded({"input_ids": ids}, BatchShape(rows=2, lengths=(("input_ids", 8),)), 0)
    with pytest.raises(UserError, match="dataloader_drop_last=True"):
        padded(batch(1, 8, labels=torch.randn(1)), shape, 0)
    with pytest.raises(UserError, match="different tensors"):
        largest([shape, BatchShape.of({"input_ids": ids})])
    with pytest.raises(UserError, match="no rows"):
        BatchShape.of({"x": torch.tensor(1.0)})
