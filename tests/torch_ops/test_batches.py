"""Batches: any containers of tensors and constants keep their types, and every leaf has one path."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.examples import examples
from zeroir.errors import UserError
from zeroir.torch_ops.batches import Batch, flatten, is_same_constant, with_tensors


class Pair(NamedTuple):
    first: object
    second: object


@dataclass
class Plain:
    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Frozen:
    first: object
    second: object


@dataclass(frozen=True)
class Computing:
    """Its constructor takes one field and computes the other one."""

    first: object
    second: object = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "second", 3)


class Encoding(UserDict[str, object]):
    """A mapping with a state beside its items, as that of tokenisers."""

    def __init__(self, items: dict[str, object]) -> None:
        super().__init__(items)
        self.encodings = ["beside the items"]


class Colour(enum.IntEnum):
    RED = 1


KEYS = st.sampled_from(["tokens", "labels", "0", "a b", "ü"])


def containers(items: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    dicts = st.dictionaries(KEYS, items, max_size=3)
    return st.one_of(
        st.lists(items, max_size=3),
        st.lists(items, max_size=3).map(tuple),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(lambda values: defaultdict(int, values)),
        dicts.map(Encoding),
        st.builds(Pair, items, items),
        st.builds(Plain, items, items),
        st.builds(Frozen, items, items),
        st.builds(Computing, items),
    )


CONSTANTS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=3)
)
BATCHES = st.recursive(
    st.one_of(CONSTANTS, st.integers(0, 9).map(lambda n: torch.tensor([float(n)]))),
    containers,
    max_leaves=8,
)


def items_of(value: object) -> list[object] | None:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if is_dataclass(value):
        return [getattr(value, each.name) for each in fields(value)]
    return None


def leaves_of(value: object) -> list[object]:
    """The leaves of a batch in order, found without the code that is tested."""
    items = items_of(value)
    return [value] if items is None else [leaf for item in items for leaf in leaves_of(item)]


def assert_equal_but_for(value: object, other: object, shift: float) -> None:
    """The same types and constants, and tensors that are larger by ``shift``."""
    assert type(value) is type(other)
    items, others = items_of(value), items_of(other)
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        assert torch.equal(value + shift, other)
    elif items is None or others is None:
        assert repr(value) == repr(other)
    else:
        assert len(items) == len(others)
        for item, twin in zip(items, others, strict=True):
            assert_equal_but_for(item, twin, shift)


@given(BATCHES)
@examples(150)
def test_every_leaf_has_one_path_and_the_types_stay(batch: Batch) -> None:
    wanted = leaves_of(batch)
    before = repr(batch)
    leaves = flatten(batch)
    tensors = [leaf for leaf in wanted if isinstance(leaf, Tensor)]
    constants = [leaf for leaf in wanted if not isinstance(leaf, Tensor)]
    assert list(map(id, leaves.tensors.values())) == list(map(id, tensors))
    assert list(map(repr, leaves.constants.values())) == list(map(repr, constants))
    order: list[int] = []

    def shifted(tensor: Tensor) -> Tensor:
        order.append(id(tensor))
        return tensor + 1

    moved = with_tensors(batch, shifted)
    assert order == list(map(id, tensors))
    assert_equal_but_for(batch, moved, 1)
    assert repr(batch) == before
    assert list(flatten(moved).tensors) == list(leaves.tensors)


def test_a_mapping_keeps_what_it_has_beside_its_items() -> None:
    encoding = Encoding({"tokens": torch.ones(2)})
    moved = with_tensors(encoding, lambda tensor: tensor + 1)
    assert moved.encodings == ["beside the items"]
    assert torch.equal(encoding["tokens"], torch.ones(2))  # type: ignore[arg-type]


def test_constants_are_of_pythons_own_types() -> None:
    constants = flatten({"colour": Colour.RED, "flag": True, "x": torch.ones(1)}).constants
    assert {key: type(value) for key, value in constants.items()} == {"colour": int, "flag": bool}


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        (True, 1, False),
        (1, 1.0, False),
        (0.0, -0.0, False),
        (None, False, False),
        (math.nan, math.nan, True),
        ("a", "a", True),
        ("1", 1, False),
    ],
)
def test_constants_are_compared_by_type_and_value(a: object, b: object, is_same: bool) -> None:
    constants = flatten((a, b)).constants
    assert is_same_constant(constants["0"], constants["1"]) is is_same


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ({"a.b": 1, "a": {"b": 2}}, "In the batch, two values have the path a.b"),
        ((torch.ones(1), object()), "its element 1 is of type object"),
        (b"bytes", "^The batch is of type bytes"),
        ({"x": np.ones(2)}, r"its element x is of type ndarray; .* torch\.as_t"),
        (iter([1]), "^The batch is of type list_iterator; .* instead of yielding"),
        ({"x": torch.ones(1, device="meta")}, "The input x of the batch is on the meta device"),
        (({1, 2},), "its element 0 is of type set"),
    ],
)
def test_what_is_no_batch_is_refused_by_path(batch: Batch, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        flatten(batch)
