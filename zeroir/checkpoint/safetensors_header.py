"""The header of safetensors files: 8 bytes with the length of a JSON object, which names the place of each tensor.

See https://github.com/huggingface/safetensors#format. The data begins at a multiple of 8 bytes, and tensors are in
descending order of their element sizes, so that each is aligned to its elements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from zeroir.errors import InternalError

ITEMSIZE_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("bool", "u8", "i8", "f8_e4m3", "f8_e5m2", "f8_e8m0"), 1),
    **dict.fromkeys(("u16", "i16", "f16", "bf16"), 2),
    **dict.fromkeys(("u32", "i32", "f32"), 4),
    **dict.fromkeys(("u64", "i64", "f64", "c64"), 8),
}
"""The bytes of one element for each dtype of a manifest; safetensors uses the same names in upper case."""

LENGTH_BYTES: Final = 8
METADATA: Final = "__metadata__"
"""The key of the header that is not a tensor's name."""
_METADATA: Final = {"format": "pt"}
"""Hugging Face's loaders require it."""

_ALIGNMENT_BYTES: Final = 8
LARGEST_JSON_BYTES: Final = 100_000_000
"""The limit of the safetensors library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensorSpec:
    """A tensor to write: its dtype as in manifests, and its elements. It is one-dimensional unless a shape is given."""

    name: str
    dtype: str
    numel: int
    shape: tuple[int, ...] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * ITEMSIZE_BYTES[self.dtype]


def in_file_order(specs: Sequence[StoredTensorSpec]) -> list[int]:
    """Return the indices of tensors in their order in a file."""
    return sorted(range(len(specs)), key=lambda index: -ITEMSIZE_BYTES[specs[index].dtype])


def header_bytes(
    specs: Sequence[StoredTensorSpec], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the header of a file whose tensors are in this order, with further ``metadata``.

    Raises:
        InternalError: if a tensor is empty, a name is used twice, or the header is larger than readers accept.
    """
    header: dict[str, object] = {METADATA: {**_METADATA, **(metadata or {})}}
    start = 0
    for spec in specs:
        shape = (spec.numel,) if spec.shape is None else spec.shape
        if not spec.numel or prod(shape) != spec.numel or spec.name in header:
            raise InternalError(f"A tensor of a checkpoint is empty or not well-formed: {spec}.")
        stop = start + spec.size_bytes
        header[spec.name] = {
            "dtype": spec.dtype.upper(),
            "shape": list(shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > LARGEST_JSON_BYTES:
        raise InternalError(f"The header of a checkpoint's file has {len(text)} bytes.")
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
