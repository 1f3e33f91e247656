"""Files of ranks: the safetensors library reads them, and checksums are of every byte."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save_file

from tests.support.checkpoint_files import tensor_to_write
from zeroir.checkpoint import local_storage, writing
from zeroir.checkpoint.manifest import StoredFile
from zeroir.checkpoint.safetensors_header import ITEMSIZE_BYTES, StoredTensorSpec, header_bytes
from zeroir.checkpoint.storages import open_storage
from zeroir.checkpoint.writing import write_file
from zeroir.errors import InternalError, UserError

TORCH_DTYPES = {
    "bool": torch.bool,
    **{f"u{bits}": getattr(torch, f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"i{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    "bf16": torch.bfloat16,
    "c64": torch.complex64,
    "f8_e4m3": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2,
    "f8_e8m0": torch.float8_e8m0fnu,
}


def write(folder: Path, *tensors: tuple[StoredTensorSpec, list[memoryview]]) -> StoredFile:
    return write_file(open_storage(str(folder)), str(folder), "x.safetensors", tensors)


def test_every_dtype_is_one_of_the_library() -> None:
    assert TORCH_DTYPES.keys() == ITEMSIZE_BYTES.keys()
    assert all(TORCH_DTYPES[name].itemsize == size for name, size in ITEMSIZE_BYTES.items())


def test_the_library_reads_every_dtype(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    tensors = {}
    for name, size in ITEMSIZE_BYTES.items():
        data = draws.integers(0, 2 if name == "bool" else 256, 5 * size, np.uint8).tobytes()
        tensors[name] = tensor_to_write(f"a.{name}", name, data)
    write(tmp_path, *tensors.values())
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == {f"a.{name}" for name in tensors}
    for name, (_, parts) in tensors.items():
        tensor = read[f"a.{name}"]
        assert tensor.dtype is TORCH_DTYPES[name]
        assert tensor.shape == (5,)
        assert tensor.view(torch.uint8).numpy().tobytes() == bytes(parts[0])
        assert tensor.data_ptr() % tensor.element_size() == 0


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=5).filter(
            lambda name: name != "__metadata__"
        ),
        st.tuples(st.sampled_from(sorted(ITEMSIZE_BYTES.keys() - {"f8_e8m0"})), st.integers(1, 9)),
        min_size=1,
        max_size=6,
    )
)
def test_the_library_agrees_on_any_header(tensors: dict[str, tuple[str, int]]) -> None:
    # The library's reader of bytes lacks one dtype that its reader of files has.
    specs = [
        StoredTensorSpec(name=name, dtype=dtype, numel=numel)
        for name, (dtype, numel) in tensors.items()
    ]
    header = header_bytes(specs)
    assert len(header) % 8 == 0
    read = load(header + bytes(sum(spec.size_bytes for spec in specs)))
    assert {name: (tensor.dtype, tensor.numel()) for name, tensor in read.items()} == {
        name: (TORCH_DTYPES[dtype], numel) for name, (dtype, numel) in tensors.items()
    }


def test_a_single_tensor_gives_the_bytes_of_the_library(tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32)
    spec = StoredTensorSpec(name="a", dtype="f32", numel=6, shape=(2, 3))
    write(tmp_path, (spec, [values.data]))
    theirs = tmp_path / "theirs.safetensors"
    save_file({"a": torch.from_numpy(values.reshape(2, 3))}, theirs, metadata={"format": "pt"})
    assert (tmp_path / "x.safetensors").read_bytes() == theirs.read_bytes()


@given(st.data())
def test_checksums_are_of_every_byte(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("file")
    tensors = []
    for index in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from(["u8", "bf16", "f32"]))
        size_bytes = data.draw(st.integers(1, 20)) * ITEMSIZE_BYTES[dtype]
        content = memoryview(data.draw(st.binary(min_size=size_bytes, max_size=size_bytes)))
        cuts = sorted(data.draw(st.lists(st.integers(0, size_bytes), max_size=3)))
        parts = [content[a:b] for a, b in zip([0, *cuts], [*cuts, size_bytes], strict=True)]
        tensors.append((tensor_to_write(f"t{index}", dtype, bytes(content))[0], parts))
    stored = write(folder, *tensors)
    written = (folder / "x.safetensors").read_bytes()
    assert stored.size_bytes == len(written)
    assert stored.checksum == f"xxh3_128:{xxhash.xxh3_128_hexdigest(written)}"
    header, rest = written[: -sum(map(_nbytes, tensors))], written[-sum(map(_nbytes, tensors)) :]
    assert stored.header_checksum == f"xxh3_128:{xxhash.xxh3_128_hexdigest(header)}"
    contents = {spec.name: b"".join(parts) for spec, parts in tensors}
    for tensor in stored.tensors:
        content_bytes = contents[tensor.name]
        assert rest.startswith(content_bytes)
        rest = rest[len(content_bytes) :]
        assert tensor.checksum == f"xxh3_128:{xxhash.xxh3_128_hexdigest(content_bytes)}"
    assert not rest


def _nbytes(tensor: tuple[StoredTensorSpec, list[memoryview]]) -> int:
    return tensor[0].size_bytes


def test_large_tensors_are_written_in_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "CHUNK_BYTES", 100)
    monkeypatch.setattr(local_storage, "WRITE_BYTES", 64)
    values = np.arange(1001, dtype=np.int32)
    stored = write(tmp_path, (StoredTensorSpec(name="a", dtype="i32", numel=1001), [values.data]))
    assert load_file(tmp_path / "x.safetensors")["a"].tolist() == values.tolist()
    assert stored.tensors[0].checksum == f"xxh3_128:{xxhash.xxh3_128_hexdigest(values.tobytes())}"


def test_parts_are_asked_for_one_after_the_other(tmp_path: Path) -> None:
    """The memory of a part may be used again for the next one."""
    buffer = bytearray(4)

    def parts() -> Iterator[memoryview]:
        for value in range(3):
            buffer[:] = value.to_bytes(4, "little")
            yield memoryview(buffer)

    spec = StoredTensorSpec(name="a", dtype="i32", numel=3)
    write_file(open_storage(str(tmp_path)), str(tmp_path), "x", [(spec, parts())])
    assert load((tmp_path / "x").read_bytes())["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "tensor",
    [
        (StoredTensorSpec(name="a", dtype="f32", numel=0), []),
        (StoredTensorSpec(name="a", dtype="f32", numel=2), [memoryview(bytes(4))]),
        (StoredTensorSpec(name="a", dtype="f32", numel=1), [memoryview(bytes(4))] * 2),
        (StoredTensorSpec(name="a", dtype="f32", numel=2, shape=(2, 2)), [memoryview(bytes(8))]),
        (StoredTensorSpec(name="__metadata__", dtype="f32", numel=1), [memoryview(bytes(4))]),
    ],
)
def test_tensors_have_as_many_bytes_as_they_say(
    tmp_path: Path, tensor: tuple[StoredTensorSpec, list[memoryview]]
) -> None:
    with pytest.raises(InternalError):
        write(tmp_path, tensor)
    assert not list(tmp_path.iterdir())


def test_two_tensors_with_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InternalError):
        write(tmp_path, *[tensor_to_write("a", "f32", bytes(4))] * 2)


def test_a_file_that_exists_stays(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_text("mine")
    with pytest.raises(UserError, match=r"x.safetensors' cannot be written: it exists, and a"):
        write(tmp_path, tensor_to_write("a", "f32", bytes(4)))
    assert (tmp_path / "x.safetensors").read_text() == "mine"


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "its disk is full"),
        (errno.EDQUOT, "your quota on its disk is used up"),
        (errno.EIO, r"its disk fails \(Input/output error\)"),
        (errno.EXDEV, "Invalid cross-device link"),
    ],
)
def test_a_disk_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    for call in ("write", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            sentence = f"^'{tmp_path}/x.safetensors' cannot be written: {reason}"
            with pytest.raises(UserError, match=sentence):
                write(tmp_path, tensor_to_write("a", "f32", bytes(4)))
        assert not list(tmp_path.iterdir())


def test_an_interrupted_file_is_removed(tmp_path: Path) -> None:
    def parts() -> Iterator[memoryview]:
        yield memoryview(bytes(4))
        raise KeyboardInterrupt

    spec = StoredTensorSpec(name="a", dtype="f32", numel=2)
    with pytest.raises(KeyboardInterrupt):
        write_file(open_storage(str(tmp_path)), str(tmp_path), "x", [(spec, parts())])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_file_is_written_to_its_end_when_the_program_ends(tmp_path: Path) -> None:
    program = """
import atexit, sys, threading, time
from zeroir.checkpoint.safetensors_header import StoredTensorSpec
from zeroir.checkpoint.storages import open_storage
from zeroir.checkpoint.writing import write_file

def parts():
    for value in range(20):
        time.sleep(0.01)
        yield memoryview(bytes([value]))

def write():
    spec = StoredTensorSpec(name="a", dtype="u8", numel=20)
    threading.main_thread().join()
    write_file(open_storage(sys.argv[1]), sys.argv[1], "x", [(spec, parts())])

thread = threading.Thread(target=write, daemon=True)
thread.start()
atexit.register(thread.join)
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert load((tmp_path / "x").read_bytes())["a"].tolist() == list(range(20))
