"""Files that were made to do harm where they are imported: none runs code or takes all memory, and each is refused."""

from __future__ import annotations

import contextlib
import json
import os
import pickle  # noqa: TID251 - what is to be refused is written here
import random
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from tests.convert.support import imported_tensors
from tests.support.zygote import ROOT
from zeroir.convert.import_checkpoint import import_checkpoint
from zeroir.errors import UserError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)


def refused(source: Path, problem: str) -> None:
    """An import of it ends in one sentence and writes nothing."""
    checkpoint = source.parent / "checkpoint"
    with pytest.raises(UserError, match=problem) as error:
        import_checkpoint(source, str(checkpoint))
    assert str(source) in str(error.value)
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


# ---------------------------------------------------------------------------------------------- files of torch.save


class Harm:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker
        self._expression = f"open({str(marker)!r}, 'w').close()"


class Runs(Harm):
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._marker}",)


class Evaluates(Harm):
    def __reduce__(self) -> tuple[object, ...]:
        return eval, (self._expression,)


class Rebuilt(Harm):
    """Hidden behind a function of torch that readers of weights know."""

    def __reduce__(self) -> tuple[object, ...]:
        arguments: tuple[object, ...] = eval, torch.Tensor, (self._expression,), {}
        return torch._tensor._rebuild_from_type_v2, arguments


@pytest.mark.parametrize("kind", [Runs, Evaluates, Rebuilt])
@pytest.mark.parametrize("place", ["value", "key", "state", "deep", "model"])
def test_a_pickle_that_would_run_code_runs_none(
    kind: type[Harm], place: str, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    harm = kind(marker)
    state: object = {"w": torch.ones(3), "harm": harm}
    match place:
        case "key":
            state = {"w": torch.ones(3), harm: 1}
        case "state":
            ordered = OrderedDict(w=torch.ones(3))
            ordered.__dict__["_metadata"] = harm
            state = ordered
        case "deep":
            state = {"model": {"w": torch.ones(3)}, "optimizer": {"state": [{"x": (harm,)}]}}
        case "model":
            state = harm
    torch.save(state, tmp_path / "model.pt")
    if kind is Evaluates and place != "model":
        import_checkpoint(tmp_path / "model.pt", str(tmp_path / "checkpoint"))
        assert torch.equal(imported_tensors(tmp_path / "checkpoint")["w.master"], torch.ones(3))
    else:
        # torch refuses every function of the operating system.
        refused(tmp_path / "model.pt", "posix" if kind is Runs else "model.pt")
    assert not marker.exists()
    # The file is one that does harm where it is loaded.
    with contextlib.suppress(AttributeError):
        torch.load(tmp_path / "model.pt", weights_only=False)
    assert marker.exists()


def pushed(value: int) -> bytes:
    """The opcodes of a number."""
    data = value.to_bytes(16, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def doubled(depth: int) -> bytes:
    """A tuple that has the same tuple twice, and so on."""
    return b")" + b"".join(bytes([ord("q"), n, ord("h"), n, 0x86]) for n in range(depth))


def tensor(numel: int = 4, offset: int = 0, size: int = 4, step: int = 1, key: int = 0) -> bytes:
    """A tensor with a storage of ``numel`` elements, as the pickle says."""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0%dX\x03\0\0\0cpu" % key
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n("
        + (storage + pushed(numel) + b"tQ")
        + pushed(offset)
        + (pushed(size) + b"\x85" + pushed(step) + b"\x85")
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )


def write_archive(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """Write what torch.save would: a pickle, and the four elements of a tensor."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + pickled + b".")
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", bytes(16))
        archive.writestr("archive/version", "3\n")


def with_tensor(value: bytes) -> bytes:
    """A state dictionary with a tensor, and something else."""
    return b"}X\x01\0\0\0w" + tensor() + b"sX\x01\0\0\0v" + value + b"s"


DEEP_TUPLE = b")" + b"\x85" * 200_000
DEEP_LIST = b"]" * 100_000 + b"a" * 99_999


def test_the_archive_of_these_tests_is_read(tmp_path: Path) -> None:
    write_archive(tmp_path / "model.pt", with_tensor(b"K\x01"))
    import_checkpoint(tmp_path / "model.pt", str(tmp_path / "checkpoint"))
    assert imported_tensors(tmp_path / "checkpoint")["w.master"].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    "pickled",
    [
        pytest.param(b"cbuiltins\nbytearray\n" + pushed(1 << 40) + b"\x85R", id="bytearray"),
        pytest.param(
            b"ctorch\nFloatTensor\n" + pushed(1 << 40) + b"\x85R",
            id="tensor",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            b"ctorch.storage\nUntypedStorage\n" + pushed(1 << 40) + b"\x85R",
            id="storage",
            marks=pytest.mark.slow,
        ),
        pytest.param(doubled(40), id="twice", marks=pytest.mark.slow),
        pytest.param(doubled(40) + b")R", id="message", marks=pytest.mark.slow),
        pytest.param(DEEP_LIST, id="deep-list", marks=pytest.mark.slow),
        pytest.param(b"}" + DEEP_TUPLE + b"K\x01s", id="deep-key"),
        pytest.param(b"}" + doubled(40) + b"K\x01s", id="endless-key", marks=pytest.mark.slow),
        pytest.param(b"]q\0h\0a", id="cycle", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("limited_readers")
def test_pickles_that_take_memory_or_time(pickled: bytes, tmp_path: Path) -> None:
    write_archive(tmp_path / "model.pt", with_tensor(pickled))
    refused(tmp_path / "model.pt", "more than|ended the process|nested too deeply")


@pytest.mark.parametrize(
    "pickled",
    [b"X\xff\xff\xff\xff", b"h\x07", b"\x8c\x01a"],
    ids=["text-without-end", "nothing-remembered", "another-protocol"],
)
def test_pickles_that_torch_does_not_read(pickled: bytes, tmp_path: Path) -> None:
    write_archive(tmp_path / "model.pt", with_tensor(pickled))
    refused(tmp_path / "model.pt", "weights_only=True")


@pytest.mark.slow
@pytest.mark.parametrize(
    "lying",
    [
        {"numel": 1 << 40, "size": 1 << 40},
        {"numel": 5, "size": 5},
        *({"size": size} for size in (5, -4, 1 << 62)),
        *({"step": step} for step in (2, 1 << 62)),
        *({"offset": offset} for offset in (1, -1, 1 << 62)),
        {"key": 7},
    ],
    ids=str,
)
def test_sizes_in_pickles_that_lie(lying: dict[str, int], tmp_path: Path) -> None:
    write_archive(tmp_path / "model.pt", b"}X\x01\0\0\0w" + tensor(**lying) + b"s")
    refused(tmp_path / "model.pt", "damaged")


def test_a_zip_bomb(tmp_path: Path) -> None:
    write_archive(tmp_path / "model.pt", with_tensor(bytes(1 << 26)), zipfile.ZIP_DEFLATED)
    assert (tmp_path / "model.pt").stat().st_size < 1 << 17
    refused(tmp_path / "model.pt", "is compressed")


def changed_directory(path: Path, member: bytes, field: slice, value: bytes) -> None:
    """Change a field of a member in the directory of an archive."""
    data = bytearray(path.read_bytes())
    begin = data.rindex(b"archive/" + member) - 46
    assert data[begin : begin + 4] == b"PK\x01\x02"
    data[begin + field.start : begin + field.stop] = value
    path.write_bytes(data)


OFFSET, STORED, SIZE = slice(42, 46), slice(20, 24), slice(24, 28)
COMPRESSION, FLAGS, MOST = slice(10, 12), slice(8, 10), b"\xff\xff\xff\x7f"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (OFFSET, bytes(4)),
        (OFFSET, MOST),
        (SIZE, MOST),
        (SIZE, bytes(4)),
        (STORED, MOST),
        (COMPRESSION, b"\x08\0"),
        (FLAGS, b"\x01\0"),
    ],
    ids=["overlap", "beyond", "size", "no-size", "stored-size", "compressed", "encrypted"],
)
def test_directories_of_archives_that_lie(field: slice, value: bytes, tmp_path: Path) -> None:
    write_archive(tmp_path / "model.pt", with_tensor(b"K\x01"))
    changed_directory(tmp_path / "model.pt", b"data/0", field, value)
    refused(tmp_path / "model.pt", "model.pt")


def objects(depth: int) -> bytes:
    """An instance of an unknown class with another one as its attributes, and so on."""
    return b"cunknown\nClass\n)\x81" * depth + b"N" + b"b" * depth


def test_unknown_objects_within_each_other(tmp_path: Path) -> None:
    write_archive(tmp_path / "model.pt", with_tensor(objects(200)))
    import_checkpoint(tmp_path / "model.pt", str(tmp_path / "imported"))
    write_archive(tmp_path / "model.pt", with_tensor(objects(20_000)))
    refused(tmp_path / "model.pt", "nested too deeply")


@pytest.mark.slow
def test_a_value_that_would_take_memory_where_it_is_used(tmp_path: Path) -> None:
    """The reader has the memory for a tuple that occurs 67 million times, but its answer would be too large."""
    write_archive(tmp_path / "model.pt", with_tensor(doubled(26)))
    refused(tmp_path / "model.pt", "memory")


def test_names_that_mean_two_tensors_or_none(tmp_path: Path) -> None:
    surrogate = b"}X\x03\0\0\0\xed\xa0\x80" + tensor() + b"s"
    twice = b"}X\x01\0\0\x001" + tensor() + b"sK\x01" + tensor() + b"s"
    for pickled, problem in ((surrogate, "surrogates"), (twice, "two tensors")):
        write_archive(tmp_path / "model.pt", pickled)
        refused(tmp_path / "model.pt", problem)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json", "latest"])
def test_sparse_texts_beside_a_model(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)
    refused(folder, "is not a folder" if name == "latest" else "more than 64 MB")


@pytest.mark.slow
def test_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    draws = random.Random(0)
    torch.save({"w": torch.arange(40.0), "v": torch.ones(3, 5)[:, 1:]}, tmp_path / "model.pt")
    saved(tmp_path / "dcp")
    (elements,) = (tmp_path / "dcp").glob("*.distcp")
    for path in (tmp_path / "model.pt", tmp_path / "dcp" / ".metadata", elements):
        whole = path.read_bytes()
        source = path if path.name == "model.pt" else tmp_path / "dcp"
        for number in range(50):
            damaged = bytearray(whole)
            if number % 4 == 0:
                del damaged[draws.randrange(len(whole)) :]
            else:
                damaged[draws.randrange(len(whole))] ^= 1 << draws.randrange(8)
            path.write_bytes(damaged)
            checkpoint = str(tmp_path / f"{path.name}-{number}")
            with contextlib.suppress(UserError):
                import_checkpoint(source, checkpoint, weights_only=True)
        path.write_bytes(whole)


@pytest.mark.slow
def test_a_folder_with_modules(tmp_path: Path) -> None:
    """Where the working directory is the imported folder, nothing in it is imported as a module."""
    torch.save({"w": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    for name in ("torch", "msgpack", "zeroir", "resource"):
        (tmp_path / f"{name}.py").write_text("open('marker', 'w').close()")
    command = [sys.executable, "-P", "-m", "zeroir", "import", ".", "-o", "checkpoint"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert imported_tensors(tmp_path / "checkpoint")["w.master"].tolist() == [1.0] * 3
    assert not (tmp_path / "marker").exists()


def test_a_tensor_that_would_fill_the_disk(tmp_path: Path) -> None:
    """Of 16 bytes, each element of which stands in two billion places."""
    write_archive(tmp_path / "model.pt", b"}X\x01\0\0\0w" + tensor(size=1 << 33, step=0) + b"s")
    refused(tmp_path / "model.pt", "repeat elements")


@pytest.mark.parametrize(
    "name", ["model.safetensors", "pytorch_model.bin", "config.json", ".metadata", "elements"]
)
def test_what_is_no_file(name: str, tmp_path: Path) -> None:
    """A pipe is not waited for."""
    folder = tmp_path / "folder"
    if name == "elements":
        saved(folder)
        (path,) = folder.glob("*.distcp")
        path.unlink()
    else:
        folder.mkdir()
        path = folder / name
        if name == "config.json":
            save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    os.mkfifo(path)
    refused(folder, "is not a file")


# ---------------------------------------------------------------------------- folders of torch.distributed.checkpoint


def saved(folder: Path) -> Metadata:
    """A checkpoint of a tensor of 4 by 3 elements and a number; its metadata."""
    save({"model": {"w": torch.ones(4, 3)}, "step": 7}, checkpoint_id=folder)
    return FileSystemReader(folder).read_metadata()


def write_metadata(folder: Path, metadata: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.fixture
def dcp(tmp_path: Path) -> Path:
    return tmp_path / "dcp"


def changed(metadata: Metadata, case: str) -> object:
    """The metadata with one change."""
    tensor = metadata.state_dict_metadata["model.w"]
    assert isinstance(tensor, TensorStorageMetadata)
    (chunk,) = tensor.chunks
    index = next(index for index in metadata.storage_data if index.fqn == "model.w")
    place = metadata.storage_data[index]
    match case:
        case "outside" | "absolute":
            place.relative_path = "../secret" if case == "outside" else "/etc/passwd"
        case "before" | "beyond":
            place.offset = -1 if case == "before" else 1 << 60
        case "too-long":
            place.length = 1 << 60
        case "too-short":
            place.length -= 1
        case "no-place":
            del metadata.storage_data[index]
        case "large" | "small":
            tensor.size = chunk.sizes = torch.Size([1 << 40 if case == "large" else 2, 3])
        case "moved" | "moved-before":
            chunk.offsets = torch.Size([1 if case == "moved" else -1, 0])
            metadata.storage_data[MetadataIndex("model.w", chunk.offsets)] = place
        case "negative":
            chunk.sizes = torch.Size([-4, -3])
        case "twice":
            half = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 3]))
            tensor.size = torch.Size([8, 3])
            tensor.chunks = [half, half]
        case "other-dtype":
            tensor.properties.dtype = torch.int32
        case "keys" | "value-within-tensor":
            keys = ("step",) * 10_000 if case == "keys" else ("model", "w", "step")
            metadata.planner_data["step"] = keys
        case "compressed":
            place.transform_descriptors = ["zstd"]
        case "no-tensor":
            metadata.state_dict_metadata["step"] = tensor
        case "no-metadata":
            return {"state_dict_metadata": {}}
        case "of-others":
            vars(metadata)["state_dict_metadata"] = {"model.w": index}
    return metadata


LIES = (
    "outside absolute before beyond too-long too-short no-place large small moved moved-before negative twice "
    "other-dtype keys value-within-tensor compressed no-tensor no-metadata of-others"
)


@pytest.mark.slow
@pytest.mark.parametrize("case", LIES.split())
def test_metadata_that_lies(case: str, dcp: Path) -> None:
    metadata = saved(dcp)
    write_metadata(dcp, changed(metadata, case))
    refused(dcp, "is damaged|is compressed|twice")


@pytest.mark.slow
@pytest.mark.parametrize(
    "pickled",
    [
        pytest.param(b"\x80\x04}" + DEEP_TUPLE + b"K\x01s.", id="deep-key"),
        pytest.param(b"\x80\x04}" + doubled(40) + b"K\x01s.", id="endless-key"),
        pytest.param(b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little"), id="bytes"),
    ],
)
@pytest.mark.usefixtures("limited_readers")
def test_metadata_that_takes_memory_or_time(pickled: bytes, dcp: Path) -> None:
    dcp.mkdir()
    (dcp / ".metadata").write_bytes(pickled)
    refused(dcp, "more than|ended the process")


@pytest.mark.parametrize(
    "pickled",
    [
        pytest.param(b"\x80\x04cbuiltins\nbytearray\n" + pushed(1 << 40) + b"\x85R.", id="call"),
        pytest.param(b"\x80\x04cos\nsystem\nX\x04\0\0\0true\x85R.", id="system"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_metadata_of_something_else(pickled: bytes, dcp: Path) -> None:
    dcp.mkdir()
    (dcp / ".metadata").write_bytes(pickled)
    refused(dcp, "not of torch.distributed.checkpoint")


def test_metadata_that_takes_no_disk(dcp: Path) -> None:
    """A terabyte of zeros does not raise the limits."""
    dcp.mkdir()
    with (dcp / ".metadata").open("wb") as file:
        file.write(b"\x80\x04\x8e" + (1 << 39).to_bytes(8, "little"))
        file.truncate(1 << 40)
    refused(dcp, "takes more than 2 GB of memory")


def test_metadata_of_dcp_that_would_run_code_runs_none(dcp: Path, tmp_path: Path) -> None:
    dcp.mkdir()
    write_metadata(dcp, Runs(tmp_path / "marker"))
    refused(dcp, r"\.metadata")
    assert not (tmp_path / "marker").exists()
