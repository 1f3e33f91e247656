"""Laws of the layout of parameters in a flat, for any shapes and world sizes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroir.ir.dtypes import DType
from zeroir.ir.layout import Parameter, layout, padded_numel, used_numel
from zeroir.ir.program import Flat

SHAPES = st.lists(
    st.lists(st.integers(0, 70), max_size=3).map(tuple) | st.tuples(st.integers(1, 10**7)),
    max_size=12,
)
WORLD_SIZES = st.integers(1, 1024)


def parameters(shapes: list[tuple[int, ...]]) -> list[Parameter]:
    return [Parameter(name=f"p{i}", shape=shape) for i, shape in enumerate(shapes)]


@given(SHAPES, WORLD_SIZES)
def test_slots_are_aligned_in_order_and_apart(
    shapes: list[tuple[int, ...]], world_size: int
) -> None:
    slots, padded = layout(parameters(shapes), world_size)
    assert [slot.name for slot in slots] == [f"p{i}" for i in range(len(shapes))]
    stop = 0
    for slot, shape in zip(slots, shapes, strict=True):
        assert slot.offset % 64 == 0
        assert stop <= slot.offset < stop + 64
        assert slot.numel == math.prod(shape)
        stop = slot.offset + slot.numel
    assert stop <= padded


@given(SHAPES, WORLD_SIZES, WORLD_SIZES)
def test_offsets_do_not_depend_on_the_world_size(
    shapes: list[tuple[int, ...]], one: int, other: int
) -> None:
    assert layout(parameters(shapes), one)[0] == layout(parameters(shapes), other)[0]


@given(SHAPES, WORLD_SIZES)
def test_padding_is_the_least_that_shards_evenly(
    shapes: list[tuple[int, ...]], world_size: int
) -> None:
    slots, padded = layout(parameters(shapes), world_size)
    flat = Flat(
        name="f", unit="f", dtype=DType.F32, is_trainable=True, padded_numel=padded, slots=slots
    )
    used = used_numel(flat)
    assert padded % (world_size * 256) == 0
    assert used <= padded
    assert padded - used < world_size * 256 or (used == 0 and padded == world_size * 256)
    assert padded == padded_numel(used, world_size)


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="no ranks"):
        padded_numel(10, 0)
