"""Files that were made to do harm where they are imported: none runs code or takes all memory, and each is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zeroir.convert.import_checkpoint import import_checkpoint
from zeroir.errors import UserError


def refused(source: Path, problem: str) -> None:
    """An import of it ends in one sentence and writes nothing."""
    checkpoint = source.parent / "checkpoint"
    with pytest.raises(UserError, match=problem) as error:
        import_checkpoint(source, str(checkpoint))
    assert source.name in str(error.value)
    assert "\n" not in str(error.value)
    assert not checkpoint.exists()


def header_of(**entries: object) -> bytes:
    return json.dumps(entries).encode()


def entry(shape: list[int], start: int, stop: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "header",
    [
        header_of(w=entry([4], 0, 400)),
        header_of(w=entry([1 << 62, 1 << 62], 0, 16)),
        header_of(w=entry([5], 0, 16)),
        header_of(w=entry([-4], 0, 16)),
        header_of(w=entry([4], -16, 0)),
        header_of(w=entry([4], 16, 0)),
        header_of(w=entry([4], 0, 16), v=entry([4], 0, 16)),
        header_of(w=entry([2], 8, 16)),
        header_of(w=entry([2], 0, 8)),
        header_of(w=entry([4], 0, 16, "F99")),
        header_of(w={"shape": [4], "data_offsets": [0, 16]}),
        header_of(w="a text"),
        b'{"w":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
        b"{" * 100,
        b"{\xff}",
    ],
)
def test_headers_of_safetensors_that_lie(header: bytes, tmp_path: Path) -> None:
    """Sizes, offsets beyond the file, before it or in each other, deep nesting, and what is no header."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    refused(path, "is damaged")


def test_a_dtype_that_checkpoints_lack(tmp_path: Path) -> None:
    header = header_of(w=entry([32], 0, 16, "F4"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    refused(path, "w in the dtype F4")


@pytest.mark.parametrize("header_bytes", [90_000_000, 1 << 39])
def test_a_sparse_file_of_safetensors(header_bytes: int, tmp_path: Path) -> None:
    """A terabyte that takes no disk, with a header of 90 MB of zeros or of half of it."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(header_bytes.to_bytes(8, "little") + b"{")
        file.truncate(1 << 40)
    refused(tmp_path / "model.safetensors", "is damaged")
