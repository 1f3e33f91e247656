"""State comes back as it was, through JSON and bytes, and nothing else can be in a checkpoint."""

from __future__ import annotations

import collections
import json
import math
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from pydantic import JsonValue

from tests.support.checkpoint_files import ORIGIN
from zeroir.checkpoint.manifest import Manifest
from zeroir.checkpoint.manifest_file import manifest_bytes, parse_manifest
from zeroir.checkpoint.state_tree import (
    LARGEST_DEPTH,
    StoredArray,
    TensorCodec,
    decode,
    encode,
    tensor_names,
)
from zeroir.errors import UserError

NAN_WITH_PAYLOAD = struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0]

_keys = st.text(max_size=4) | st.just("$") | st.integers() | st.booleans() | st.binary(max_size=3)
_arrays = st_numpy.arrays(
    dtype=st_numpy.boolean_dtypes()
    | st_numpy.integer_dtypes()
    | st_numpy.unsigned_integer_dtypes()
    | st_numpy.floating_dtypes(sizes=(16, 32, 64)),
    shape=st_numpy.array_shapes(min_dims=0, min_side=0, max_side=3),
)
trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(1 << 60, 1 << 4000)
    | st.floats()
    | st.just(NAN_WITH_PAYLOAD)
    | st.text(st.characters(), max_size=5)
    | st.just("\ud800")
    | st.binary(max_size=5)
    | _arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_keys, inner, max_size=3)
    ),
    max_leaves=8,
)


def through_file(tree: object, codec: TensorCodec | None = None) -> object:
    """The tree from the bytes of a manifest, and from those of its arrays."""
    value, arrays = encode(tree, codec=codec)
    manifest = Manifest(step=1, origin=ORIGIN, shared=value)
    again = parse_manifest(manifest_bytes(manifest), "manifest.json").shared
    assert sorted(tensor_names(again)) == sorted(arrays)
    assert all(array.data.nbytes for array in arrays.values())
    return decode(again, lambda name: arrays[name].data, codec=codec)


def require_same(left: object, right: object) -> None:
    """Equal types, bits and orders."""
    assert type(left) is type(right)
    match left, right:
        case np.ndarray(), np.ndarray():
            assert left.dtype.newbyteorder("=") == right.dtype.newbyteorder("=")
            assert left.shape == right.shape
            little = left.astype(left.dtype.newbyteorder("<"))
            assert little.tobytes() == right.tobytes()
        case float(), float():
            assert struct.pack("<d", left) == struct.pack("<d", right)
        case (list() | tuple(), list() | tuple()):
            assert len(left) == len(right)
            for pair in zip(left, right, strict=True):
                require_same(*pair)
        case dict(), dict():
            require_same(list(left), list(right))
            require_same(list(left.values()), list(right.values()))
        case _:
            assert left == right


@given(trees)
def test_trees_come_back(tree: object) -> None:
    require_same(tree, through_file(tree))


def test_plain_state_is_plain_json() -> None:
    state = {"epoch": 3, "loss": 0.5, "shuffled": True, "files": ["a", "b"], "next": None}
    assert encode(state) == (state, {})


def test_numbers_of_numpy_come_back_as_arrays() -> None:
    again = through_file([np.float32(1.5), np.int64(3), np.bool_(True)])
    assert isinstance(again, list)
    assert [(array.dtype.name, array.shape, array.item()) for array in again] == [
        ("float32", (), 1.5),
        ("int64", (), 3),
        ("bool", (), True),
    ]


def test_subclasses_come_back_as_what_they_contain() -> None:
    ordered = collections.OrderedDict(b=1, a=2)
    require_same(through_file(ordered), {"b": 1, "a": 2})


def test_arrays_in_any_memory_order_come_back() -> None:
    array = np.arange(24, dtype=">i4").reshape(2, 3, 4).transpose(2, 0, 1)[::2]
    again = through_file(array)
    assert isinstance(again, np.ndarray)
    assert again.dtype == np.int32
    assert again.tolist() == array.tolist()


@dataclass(frozen=True, slots=True)
class Quarter:
    """A tensor of another library, with a dtype that numpy lacks."""

    data: bytes


@dataclass(slots=True)
class QuarterCodec:
    """Its bytes as an array and back."""

    kind: str = "quarter"

    def encode(self, value: object) -> StoredArray | None:
        if not isinstance(value, Quarter):
            return None
        data = memoryview(value.data)
        return StoredArray(kind=self.kind, dtype="f8_e4m3", shape=(len(data),), data=data)

    def decode(self, array: StoredArray) -> object:
        return Quarter(bytes(array.data))


def test_tensors_of_other_libraries_come_back_through_their_codec() -> None:
    assert through_file({"x": (Quarter(b"abc"), 1)}, QuarterCodec()) == {"x": (Quarter(b"abc"), 1)}


def test_without_the_codec_tensors_are_arrays_of_bytes() -> None:
    value, arrays = encode(Quarter(b"abc"), codec=QuarterCodec())
    again = decode(value, lambda name: arrays[name].data)
    assert isinstance(again, np.ndarray)
    assert again.tolist() == list(b"abc")


def _endless() -> list[object]:
    endless: list[object] = []
    endless.append(endless)
    return endless


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"loader": [1, object()]}, r"^state\['loader'\]\[1\] is of type object"),
        ({1, 2}, "^state is of type set"),
        ({"x": Pair(1, 2)}, r"^state\['x'\] is of type Pair"),
        ({"x": 1j}, r"^state\['x'\] is of type complex"),
        (np.array(["a"]), "^state is of type ndarray"),
        (np.array([None]), "^state is of type ndarray"),
        ({"x": len}, r"^state\['x'\] is of type builtin_function_or_method"),
        (_endless(), r"^state\[0\]\[0\]\[0\]… is nested more than 64 levels"),
    ],
)
def test_nothing_else_is_state(tree: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        encode(tree)


def test_the_deepest_tree_comes_back() -> None:
    deep: object = 1
    for level in range(LARGEST_DEPTH):
        deep = {level: deep}
    require_same(deep, through_file(deep))


ARRAY = {"$": "array", "kind": "numpy", "dtype": "f32", "shape": [1], "tensor": "state.0"}


@pytest.mark.parametrize(
    "value",
    [
        {"$": "object"},
        *({"$": "float", "hex": text} for text in ("00", 3)),
        {"$": "int", "hex": "x"},
        {"$": "tuple"},
        {"$": "tuple", "items": {"a": 1}},
        *({"$": "dict", "items": items} for items in ([[1]], [[[], 1]])),
        *({**ARRAY, "shape": shape} for shape in ([2], [-1, -1])),
        {**ARRAY, "dtype": "f3"},
        {**ARRAY, "tensor": "state.1"},
        {key: value for key, value in ARRAY.items() if key != "tensor"},
    ],
)
def test_json_that_is_no_tree_is_refused(value: dict[str, JsonValue]) -> None:
    tensors = {"state.0": memoryview(bytes(4))}
    with pytest.raises(UserError, match="not well-formed"):
        decode(value, tensors.__getitem__)


def test_the_json_is_readable_by_others() -> None:
    array: npt.NDArray[np.float32] = np.ones((2, 1), np.float32)
    value, arrays = encode({"a": math.inf, "b": (1,), "c": b"\0", 3: array}, prefix="rank0")
    assert json.loads(json.dumps(value)) == {
        "$": "dict",
        "items": [
            ["a", {"$": "float", "hex": "000000000000f07f"}],
            ["b", {"$": "tuple", "items": [1]}],
            ["c", {"$": "bytes", "hex": "00"}],
            [
                3,
                {
                    "$": "array",
                    "kind": "numpy",
                    "dtype": "f32",
                    "shape": [2, 1],
                    "tensor": "rank0.0",
                },
            ],
        ],
    }
    assert bytes(arrays["rank0.0"].data) == array.tobytes()
