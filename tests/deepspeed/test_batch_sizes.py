"""DeepSpeed's rule on batch sizes: any two give the third, and contradictions are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroir.deepspeed.batch_sizes import resolve_batch_sizes
from zeroir.errors import UserError

SIZES = st.integers(1, 64)
MAYBE = st.none() | st.integers(1, 200)


@given(SIZES, SIZES, SIZES, st.sampled_from(["train", "micro", "accumulation", None]))
def test_any_two_give_the_third(
    micro: int, accumulation: int, ranks: int, hidden: str | None
) -> None:
    whole = {"train": micro * accumulation * ranks, "micro": micro, "accumulation": accumulation}
    given_sizes = {name: None if name == hidden else size for name, size in whole.items()}
    sizes = resolve_batch_sizes(**given_sizes, world_size=ranks, example=3)
    assert {"train": sizes.train, "micro": sizes.micro, "accumulation": sizes.accumulation} == whole


@given(MAYBE, MAYBE, MAYBE, SIZES, SIZES)
def test_the_product_holds_and_what_is_given_stays(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int, example: int
) -> None:
    """Or it is refused, exactly where no whole numbers make the product."""
    try:
        sizes = resolve_batch_sizes(
            train=train, micro=micro, accumulation=accumulation, world_size=ranks, example=example
        )
    except UserError:
        assert train is not None
        known = (micro or 1) * (accumulation or 1) * ranks
        is_complete = micro is not None and accumulation is not None
        assert train != known if is_complete else train % known
        return
    assert sizes.train == sizes.micro * sizes.accumulation * ranks
    assert sizes.train == train or train is None
    assert sizes.micro == (micro or (example if train is None else sizes.micro))
    assert sizes.accumulation == accumulation or accumulation is None


def test_the_total_alone_means_no_accumulation() -> None:
    sizes = resolve_batch_sizes(train=32, micro=None, accumulation=None, world_size=4, example=8)
    assert (sizes.micro, sizes.accumulation) == (8, 1)


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "words"),
    [
        (30, None, None, "train_batch_size is 30, which is no multiple of"),
        (32, 3, None, "which is no multiple of train_micro_batch_size_per_gpu × ranks = 12"),
        (32, 2, 2, "train_batch_size is 32, but 2 × 2 × 4 is 16: train_batch_size ="),
    ],
)
def test_contradictions_are_one_sentence(
    train: int, micro: int | None, accumulation: int | None, words: str
) -> None:
    with pytest.raises(UserError) as caught:
        resolve_batch_sizes(
            train=train, micro=micro, accumulation=accumulation, world_size=4, example=8
        )
    assert words in str(caught.value)
