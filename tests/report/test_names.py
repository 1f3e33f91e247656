"""Amounts as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroir.errors import UserError
from zeroir.ir.byte_sizes import format_bytes, parse_bytes
from zeroir.report.names import counted, format_flops, shortened


@given(count=st.integers(0, 9 * 10**14))
def test_an_amount_reads_back_to_its_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.05)
    assert float(format_bytes(count).split()[0]) < 1000


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GB", 80 * 10**9), ("512 MiB", 512 * 2**20), ("1e9", 10**9), ("1.5k", 1500), ("7b", 7)],
)
def test_amounts(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "lots", "-1", "80 giga", "GB", "0x10", "nan"])
def test_texts_that_are_no_amount_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="no amount of memory"):
        parse_bytes(text)


def test_words() -> None:
    assert format_bytes(999_999) == "1.0 MB"
    assert format_flops(0) == "0 FLOP"
    assert format_flops(889_200_000) == "889.2 MFLOP"
    assert counted(1, "rank") == "1 rank"
    assert counted(1000, "rank") == "1,000 ranks"
    assert shortened([*"abcdef"]) == [*"abcdef"]
    assert shortened([*"abcdefg"]) == ["a", "b", "c", "…", "f", "g"]
