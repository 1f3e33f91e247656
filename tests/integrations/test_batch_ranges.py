"""Ranges of sizes: which dims a data loader's batches have, how their ranges grow, and what one program cannot take."""

from __future__ import annotations

import pytest
import torch

from zeroir.config.shapes import parse_shapes
from zeroir.errors import UserError
from zeroir.integrations.batch_ranges import BatchRanges, RangeLimits, Sizes, sizes_of, tokens_of


def text_batch(rows: int, length: int, of_labels: int | None = None) -> Sizes:
    labels = (rows,) if of_labels is None else (rows, of_labels)
    return {"ids": (rows, length), "mask": (rows, length), "labels": labels, "scale": ()}


TOKENS = frozenset(("ids", "mask", "labels"))


def proposed(*seen: Sizes, multiple: int = 1, most_positions: int | None = None) -> BatchRanges:
    tokens = frozenset(path for path in TOKENS & seen[0].keys() if len(seen[0][path]) == 2)
    return BatchRanges.proposed(
        seen, RangeLimits(tokens=tokens, multiple=multiple, most_positions=most_positions)
    )


def test_rows_and_lengths_of_the_first_batch_are_dims() -> None:
    ids = torch.zeros(4, 5, dtype=torch.int64)
    batch = {"ids": ids, "mask": ids.bool(), "scores": torch.zeros(4, 5), "y": torch.zeros(4)}
    ranges = BatchRanges.proposed([sizes_of(batch)], RangeLimits(tokens=tokens_of(batch)))
    text = "ids: 1<=rows<=4, 2<=length<=64; mask: rows, length; scores: rows, length; y: rows"
    assert ranges.text() == text
    assert parse_shapes(text)
    assert proposed(text_batch(1, 5)).text().startswith("ids: 1, 2<=length<=64")
    assert proposed({"x": (4, 5, 6), "w": (7,)}).text() == "x: 1<=rows<=4, 5, 6"
    assert str(ranges) == "rows 1 to 4, length 2 to 64"


def test_lengths_end_with_the_positions_of_the_model_and_are_multiples_of_the_collators() -> None:
    assert "length<=48;" in proposed(text_batch(2, 40), most_positions=48).text()
    ranges = proposed(text_batch(2, 40), most_positions=60, multiple=8)
    assert ranges.text().startswith("ids: 1<=rows<=2, 1<=8*length<=7;")
    assert ranges.takes(text_batch(1, 56))
    assert not ranges.takes(text_batch(1, 44))
    limits = RangeLimits(tokens=frozenset(("ids", "mask")), most_positions=60, multiple=8)
    other = ranges.grown([text_batch(2, 44)], limits)
    assert other.text().startswith("ids: 1<=rows<=2, 2<=length<=60;")


def test_ranges_grow_to_what_any_rank_has_seen() -> None:
    first = proposed(text_batch(4, 5), text_batch(3, 11))
    assert first.text().startswith("ids: 1<=rows<=4, 2<=length<=64;")
    limits = RangeLimits(tokens=frozenset(("ids", "mask")))
    assert first.takes(text_batch(1, 64))
    assert not first.takes(text_batch(5, 9))
    assert not first.takes({**text_batch(4, 9), "mask": (4, 8)})
    second = first.grown([text_batch(4, 9), text_batch(6, 80)], limits)
    assert second.text().startswith("ids: 1<=rows<=6, 2<=length<=128;")
    assert second.covers(first)
    assert not first.covers(second)
    third = second.grown([text_batch(4, 1)], limits)
    assert third.text().startswith("ids: 1<=rows<=6, 1<=length<=128;")


def test_sizes_that_turn_out_to_differ_become_dims_and_equal_ones_share_a_dim() -> None:
    limits = RangeLimits(tokens=frozenset(("ids", "mask", "labels")))
    first = proposed(text_batch(4, 5, of_labels=5))
    assert first.text().endswith("labels: rows, length")
    split = first.grown([text_batch(4, 7, of_labels=6)], limits)
    assert split.text().endswith("mask: rows, length; labels: rows, 2<=length_2<=64")
    assert split.covers(first)
    image = proposed({"x": (4, 3, 20, 20)})
    for sizes, text in (((30, 30), "2<=size<=32, size"), ((30, 24), "2<=size<=32, 2<=size_2<=32")):
        grown = image.grown([{"x": (4, 3, *sizes)}], RangeLimits(tokens=frozenset()))
        assert grown.text() == f"x: 1<=rows<=4, 3, {text}"
        image = grown


def test_examples_differ_from_each_other_and_from_fixed_sizes() -> None:
    ranges = proposed({"ids": (8, 8), "x": (8, 7)})
    assert ranges.example() == {"ids": (5, 3), "x": (5, 7)}
    assert proposed({"ids": (2, 8)}).example() == {"ids": (2, 7)}
    assert proposed({"ids": (1, 2)}).example() == {"ids": (1, 2)}


def test_what_compiling_has_shown_limits_ranges() -> None:
    seen = [text_batch(4, 5)]
    limits = RangeLimits(tokens=frozenset(("ids", "mask")))
    limits.exact.add(("ids", 1))
    ranges = BatchRanges.proposed(seen, limits)
    assert ranges.text() == "ids: 1<=rows<=4, 2<=length<=5; mask: rows, length; labels: rows"
    limits.fixed |= {("ids", 1): "net.py:7 asks.", ("mask", 1): "net.py:7 asks."}
    assert (
        BatchRanges.proposed(seen, limits).text()
        == "ids: 1<=rows<=4, 5; mask: rows, 5; labels: rows"
    )
    with pytest.raises(UserError, match=r"of 'ids' is 5 in a batch and 6 in another.*net\.py:7"):
        ranges.grown([text_batch(4, 5), text_batch(4, 6)], limits)


def test_batches_without_rows_are_refused() -> None:
    with pytest.raises(UserError, match="no rows"):
        proposed({"x": ()})
    with pytest.raises(UserError, match="'x' is empty"):
        sizes_of({"x": torch.zeros(0, 3)})
