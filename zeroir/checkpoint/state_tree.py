"""State of the user's objects as plain JSON: trees of numbers, strings, lists, dictionaries, bytes, arrays and tensors.

None, bool, int, float, str, list and dict with string keys are encoded as themselves. Anything that JSON lacks is an
object whose first key is ``$``:

    {"$": "float", "hex": "000000000000f07f"}     infinities and not-a-numbers, as the 8 bytes of a little-endian f64
    {"$": "int", "hex": "-1f…"}                   integers of 64 bits and more
    {"$": "str", "hex": "…"}                      text with lone surrogates, as UTF-8 with them
    {"$": "bytes", "hex": "…"}
    {"$": "tuple", "items": […]}
    {"$": "dict", "items": [[key, value], …]}     dictionaries with other keys, or with a key "$"
    {"$": "array", "kind": "numpy", "dtype": "f32", "shape": [2, 3], "tensor": "state.0"}

An array's bytes are a tensor of a file; an array without elements has no ``tensor``. Decoding returns equal trees, with
the same dtypes and bits, order of dictionaries, and lists distinct from tuples. Decoded data cannot run code.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Final, Protocol

import numpy as np
from pydantic import JsonValue

from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES
from zeroir.errors import UserError

TAG: Final = "$"
NUMPY: Final = "numpy"
LARGEST_DEPTH: Final = 64
"""The largest nesting of trees: a level takes up to three of JSON, of which pydantic reads 255."""

_NUMPY_DTYPES: Final = {
    "bool": np.dtype(np.bool_),
    "u8": np.dtype("u1"),
    "i8": np.dtype("i1"),
    **{f"{kind}{8 * size}": np.dtype(f"<{kind}{size}") for kind in "ui" for size in (2, 4, 8)},
    **{f"f{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
    "c64": np.dtype("<c8"),
}
_NAMES: Final = {dtype: name for name, dtype in _NUMPY_DTYPES.items()}
_PLAIN_INT: Final = 1 << 63
_REMEDY: Final = (
    "give None, numbers, texts, bytes, lists, tuples, dictionaries, arrays or tensors instead"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """An array or tensor as row-major, little-endian bytes. ``kind`` tells what it is decoded to."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


class TensorCodec(Protocol):
    """Converts tensors of another library, such as torch, to arrays and back."""

    kind: str

    def encode(self, value: object) -> StoredArray | None:
        """Return the bytes of a value if it is a tensor of the library, otherwise None."""

    def decode(self, array: StoredArray) -> object:
        """Return the tensor with bytes from ``encode``."""


def encode(
    tree: object, *, prefix: str = "state", codec: TensorCodec | None = None
) -> tuple[JsonValue, dict[str, StoredArray]]:
    """Encode a tree as JSON; also return its arrays by the names of the tensors to write (``state.0``, …), none empty.

    Raises:
        UserError: if the tree contains something else, or is nested too deeply (it may contain itself); it names the
            place.
    """
    encoder = _Encoder(prefix=prefix, codec=codec)
    return encoder.encode(tree, ()), encoder.arrays


def decode(
    value: JsonValue,
    load: Callable[[str], memoryview],
    *,
    codec: TensorCodec | None = None,
) -> object:
    """Decode a tree; ``load`` returns the bytes of a tensor by name.

    Arrays of a kind that the codec does not know become numpy arrays, or, if numpy lacks their dtype, arrays of their
    bytes.

    Raises:
        UserError: if the JSON is not what ``encode`` returns.
    """
    try:
        return _Decoder(load=load, codec=codec).decode(value)
    except (KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise UserError(
            f"The state in a checkpoint is not well-formed ({error}): use another checkpoint."
        ) from error


def tensor_names(value: JsonValue) -> Iterator[str]:
    """Yield the names of the tensors to which an encoded tree refers."""
    match value:
        case {"$": "array", "tensor": str(name)}:
            yield name
        case dict():
            for item in value.values():
                yield from tensor_names(item)
        case list():
            for item in value:
                yield from tensor_names(item)


@dataclass(slots=True, kw_only=True)
class _Encoder:
    prefix: str
    codec: TensorCodec | None
    arrays: dict[str, StoredArray] = field(default_factory=dict)

    def encode(self, tree: object, place: tuple[object, ...]) -> JsonValue:
        if len(place) > LARGEST_DEPTH:
            raise UserError(
                f"{_written(place[:3])}… is nested more than {LARGEST_DEPTH} levels or contains itself: {_REMEDY}."
            )
        array = self._array(tree)
        if array is not None:
            return self._encode_array(array)
        if tree is None or isinstance(tree, bool):
            return tree
        if isinstance(tree, int):
            number = int(tree)
            return (
                number if -_PLAIN_INT <= number < _PLAIN_INT else {TAG: "int", "hex": f"{number:x}"}
            )
        if isinstance(tree, float):
            if math.isfinite(tree):
                return float(tree)
            return {TAG: "float", "hex": struct.pack("<d", tree).hex()}
        if isinstance(tree, str):
            return _encode_text(str(tree))
        if isinstance(tree, bytes | bytearray):
            return {TAG: "bytes", "hex": tree.hex()}
        if type(tree) is tuple:
            return {TAG: "tuple", "items": self._items(tree, place)}
        if isinstance(tree, list):
            return self._items(tree, place)
        if isinstance(tree, dict):
            return self._dict(tree, place)
        raise UserError(
            f"{_written(place)} is of type {type(tree).__qualname__}, which a checkpoint cannot hold: {_REMEDY}."
        )

    def _items(
        self, items: tuple[object, ...] | list[object], place: tuple[object, ...]
    ) -> list[JsonValue]:
        return [self.encode(item, (*place, index)) for index, item in enumerate(items)]

    def _dict(self, tree: dict[object, object], place: tuple[object, ...]) -> JsonValue:
        if all(isinstance(key, str) and _is_plain(key) for key in tree) and TAG not in tree:
            return {str(key): self.encode(item, (*place, key)) for key, item in tree.items()}
        return {
            TAG: "dict",
            "items": [
                [self.encode(key, (*place, key)), self.encode(item, (*place, key))]
                for key, item in tree.items()
            ],
        }

    def _array(self, value: object) -> StoredArray | None:
        if isinstance(value, np.ndarray | np.generic):
            plain = np.asarray(value)
            if plain.dtype.kind in "biufc":
                plain = plain.astype(plain.dtype.newbyteorder("<"), copy=False)
            name = _NAMES.get(plain.dtype)
            if name is None:
                return None
            return StoredArray(
                kind=NUMPY, dtype=name, shape=plain.shape, data=memoryview(plain.tobytes())
            )
        return self.codec.encode(value) if self.codec is not None else None

    def _encode_array(self, array: StoredArray) -> JsonValue:
        encoded: dict[str, JsonValue] = {
            TAG: "array",
            "kind": array.kind,
            "dtype": array.dtype,
            "shape": list(array.shape),
        }
        if array.numel:
            name = f"{self.prefix}.{len(self.arrays)}"
            self.arrays[name] = array
            encoded["tensor"] = name
        return encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoder:
    load: Callable[[str], memoryview]
    codec: TensorCodec | None

    def decode(self, value: JsonValue) -> object:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        match value.get(TAG):
            case None:
                return {key: self.decode(item) for key, item in value.items()}
            case "float":
                return struct.unpack("<d", bytes.fromhex(_text(value, "hex")))[0]
            case "int":
                return int(_text(value, "hex"), 16)
            case "str":
                return bytes.fromhex(_text(value, "hex")).decode("utf-8", "surrogatepass")
            case "bytes":
                return bytes.fromhex(_text(value, "hex"))
            case "tuple":
                return tuple(self.decode(item) for item in _list(value["items"]))
            case "dict":
                pairs = (_list(pair) for pair in _list(value["items"]))
                return {self.decode(key): self.decode(item) for key, item in pairs}
            case "array":
                return self._decode_array(value)
            case tag:
                raise ValueError(f"unknown kind {tag!r}")

    def _decode_array(self, value: dict[str, JsonValue]) -> object:
        shape = tuple(int(str(size)) for size in _list(value["shape"]))
        dtype = _text(value, "dtype")
        numel = prod(shape)
        data = self.load(_text(value, "tensor")) if numel else memoryview(b"")
        if data.nbytes != numel * ITEMSIZE_BYTES[dtype]:
            raise ValueError(f"an array of {data.nbytes} bytes")
        array = StoredArray(kind=_text(value, "kind"), dtype=dtype, shape=shape, data=data)
        if self.codec is not None and array.kind == self.codec.kind:
            return self.codec.decode(array)
        if dtype not in _NUMPY_DTYPES:
            return np.frombuffer(data, np.uint8).copy()
        return np.frombuffer(data, _NUMPY_DTYPES[dtype]).reshape(shape).copy()


def _encode_text(text: str) -> JsonValue:
    if _is_plain(text):
        return text
    return {TAG: "str", "hex": text.encode("utf-8", "surrogatepass").hex()}


def _is_plain(text: str) -> bool:
    """Return whether the text can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(value: dict[str, JsonValue], key: str) -> str:
    text = value[key]
    if not isinstance(text, str):
        raise TypeError(f"{key} is {text!r}")
    return text


def _list(value: JsonValue) -> list[JsonValue]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return value


def _written(place: tuple[object, ...]) -> str:
    return "state" + "".join(f"[{key!r}]" for key in place)
