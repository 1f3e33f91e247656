"""What was saved is read, and nothing else: damage is refused by the names of the file and the tensor."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoint_files import rank_bytes, save_checkpoint, signed_manifest
from zeroir.checkpoint import reading
from zeroir.checkpoint.manifest import MANIFEST_NAME, Manifest
from zeroir.checkpoint.reading import (
    CheckpointFiles,
    VerifyItem,
    read_manifest,
    require_files,
    verify_all,
    verify_items,
)
from zeroir.checkpoint.storages import open_storage
from zeroir.errors import DamagedCheckpointError, UserError

FILES = ("rank-00000.safetensors", "rank-00001.safetensors")
NUMEL = 6


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    path = tmp_path_factory.mktemp("saved") / "step-00000003"
    return path, save_checkpoint(str(path), step=3, numel=NUMEL)


@pytest.fixture
def copied(saved: tuple[Path, Manifest], tmp_path: Path) -> tuple[Path, Manifest]:
    return Path(shutil.copytree(saved[0], tmp_path / "copy")), saved[1]


@given(
    st.integers(0, NUMEL),
    st.integers(0, NUMEL),
    st.integers(0, 1),
    st.sampled_from(["flat.master", "flat.exp_avg"]),
)
def test_elements_are_those_that_were_saved(
    saved: tuple[Path, Manifest], first: int, last: int, rank: int, tensor: str
) -> None:
    path, manifest = saved
    start, stop = sorted((first, last))
    size = 4 if tensor == "flat.master" else 2
    with CheckpointFiles(path=str(path), manifest=manifest) as files:
        data = files.bytes(FILES[rank], tensor, start, stop)
        assert data == rank_bytes(3, rank, NUMEL)[tensor][start * size : stop * size]
        with pytest.raises(ValueError, match="has 6 elements"):
            files.bytes(FILES[rank], tensor, start, NUMEL + 1)


def test_elements_fill_views_of_any_type(saved: tuple[Path, Manifest]) -> None:
    path, manifest = saved
    values = np.zeros(2, np.float32)
    with CheckpointFiles(path=str(path), manifest=manifest) as files:
        files.read_into(FILES[1], "flat.master", 2, values.data)
    assert values.tobytes() == rank_bytes(3, 1, NUMEL)["flat.master"][8:16]


def test_items_are_every_byte(saved: tuple[Path, Manifest]) -> None:
    path, manifest = saved
    items = verify_items(manifest)
    for name in FILES:
        sizes = [item.size_bytes for item in items if item.file == name]
        assert sum(sizes) == (path / name).stat().st_size
    assert [item.tensor for item in items] == [None, "flat.master", "flat.exp_avg"] * 2


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "OPEN_FILES", 2)
    manifest = save_checkpoint(str(tmp_path / "many"), step=1, ranks=5)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    with CheckpointFiles(path=str(tmp_path / "many"), manifest=manifest) as files:
        for rank in (0, 1, 2, 3, 4, 0, 2):
            data = files.bytes(manifest.files[rank].name, "flat.master", 0, 6)
            assert data == rank_bytes(1, rank, 6)["flat.master"]
            assert len(list(descriptors.iterdir())) <= before + 2
    assert len(list(descriptors.iterdir())) == before


def _place(path: Path, name: str, byte: int, manifest: Manifest) -> str:
    """What a message must name: the file, and the tensor that has the byte."""
    file = next(file for file in manifest.files if file.name == name)
    items = [item for item in verify_items(manifest) if item.file == name]
    stop = 0
    for item in items:
        stop += item.size_bytes
        if byte < stop:
            tensor = "" if item.tensor is None else f"tensor {item.tensor} of "
            return re.escape(f"{tensor}'{path / file.name}'").replace("tensor", "[tT]ensor")
    raise AssertionError


@pytest.mark.slow
def test_every_flipped_bit_is_named(copied: tuple[Path, Manifest]) -> None:
    path, manifest = copied
    verify_all(str(path), manifest)
    for name in FILES[1:]:
        whole = (path / name).read_bytes()
        for byte in range(len(whole)):
            place = re.compile(_place(path, name, byte, manifest))
            for bit in range(8):
                with (path / name).open("r+b") as file:
                    file.seek(byte)
                    file.write(bytes([whole[byte] ^ 1 << bit]))
                with pytest.raises(UserError, match=place) as refusal:
                    verify_all(str(path), manifest)
                assert refusal.value.exit_code == 2
            (path / name).write_bytes(whole)
    verify_all(str(path), manifest)


@pytest.mark.parametrize("chunk_bytes", [1, 5, 8, 23, 24, 25])
def test_tensors_of_several_chunks_are_verified_whole(
    copied: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(reading, "CHUNK_BYTES", chunk_bytes)
    path, manifest = copied
    verify_all(str(path), manifest)
    whole = (path / FILES[0]).read_bytes()
    start = whole.index(rank_bytes(3, 0, NUMEL)["flat.master"])
    for byte in range(start, start + 4 * NUMEL):
        flipped = bytearray(whole)
        flipped[byte] ^= 1
        (path / FILES[0]).write_bytes(flipped)
        with pytest.raises(DamagedCheckpointError, match=r"^Tensor flat.master of .* its checksum"):
            verify_all(str(path), manifest)


@pytest.mark.slow
def test_every_truncated_file_is_named(copied: tuple[Path, Manifest]) -> None:
    path, manifest = copied
    for name in FILES:
        whole = (path / name).read_bytes()
        for length in (*range(len(whole)), len(whole) + 1):
            (path / name).write_bytes((whole + b"\0")[:length])
            message = f"'{path / name}' is not what was saved: it has {length} bytes instead of "
            for check in (verify_all, require_files):
                with pytest.raises(UserError, match=re.escape(message)):
                    check(str(path), manifest)
        (path / name).write_bytes(whole)


def test_a_file_that_shrinks_while_it_is_read_is_named(copied: tuple[Path, Manifest]) -> None:
    path, manifest = copied
    with CheckpointFiles(path=str(path), manifest=manifest) as files:
        files.verify(verify_items(manifest)[1])
        (path / FILES[0]).write_bytes(b"")
        for read in (
            lambda: files.verify(verify_items(manifest)[1]),
            lambda: files.bytes(FILES[0], "flat.master", 0, 1),
        ):
            with pytest.raises(UserError, match=r"^Tensor flat.master of .* it ends early"):
                read()


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _make_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize("size_bytes", [64 << 20, 1500 << 20, 32 << 30])
def test_a_sparse_manifest_is_refused_before_it_is_read(
    copied: tuple[Path, Manifest], size_bytes: int
) -> None:
    path, _ = copied
    (path / MANIFEST_NAME).write_bytes(b"")
    os.truncate(path / MANIFEST_NAME, size_bytes)
    before = peak_bytes()
    with pytest.raises(UserError, match=rf"{MANIFEST_NAME}' is damaged: it "):
        read_manifest(str(path))
    assert peak_bytes() - before < 16 << 20


def test_a_manifest_that_claims_a_large_header_is_refused(copied: tuple[Path, Manifest]) -> None:
    path, manifest = copied
    os.truncate(path / FILES[0], 32 << 30)
    files = (manifest.files[0].model_copy(update={"size_bytes": 32 << 30}), manifest.files[1])
    edited = json.loads(manifest.model_copy(update={"files": files}).model_dump_json())
    (path / MANIFEST_NAME).write_bytes(signed_manifest(edited))
    with pytest.raises(UserError, match=rf"{FILES[0]} has 343\d+ bytes beside its tensors"):
        read_manifest(str(path))


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "it is missing"),
        (_make_folder, "it is missing"),
        (_make_loop, "cannot be read: Too many levels"),
    ],
)
def test_a_missing_file_is_named(
    copied: tuple[Path, Manifest], name: str, damage: Callable[[Path], None], message: str
) -> None:
    path, manifest = copied
    damage(path / name)
    for check in (verify_all, require_files):
        with pytest.raises(UserError, match=f"{re.escape(str(path / name))}.*{message}"):
            check(str(path), manifest)


def test_a_file_of_another_checkpoint_is_named(
    copied: tuple[Path, Manifest], tmp_path: Path
) -> None:
    path, manifest = copied
    save_checkpoint(str(tmp_path / "other"), step=4, numel=NUMEL)
    shutil.copy(tmp_path / "other" / FILES[1], path / FILES[1])
    message = f"Tensor flat.master of '{path / FILES[1]}' .* its checksum"
    with pytest.raises(UserError, match=message):
        verify_all(str(path), manifest)
    with CheckpointFiles(path=str(path), manifest=manifest, from_disk=True) as files:
        refused = {
            (item.file, item.tensor) for item in verify_items(manifest) if is_refused(files, item)
        }
    assert refused == {(FILES[1], "flat.master"), (FILES[1], "flat.exp_avg")}


def is_refused(files: CheckpointFiles, item: VerifyItem) -> bool:
    try:
        files.verify(item)
    except DamagedCheckpointError as error:
        return f"{item.file}' is not what was saved" in str(error)
    return False


def test_files_of_ranks_that_are_exchanged_are_named(copied: tuple[Path, Manifest]) -> None:
    path, manifest = copied
    (path / FILES[0]).rename(path / "aside")
    (path / FILES[1]).rename(path / FILES[0])
    (path / "aside").rename(path / FILES[1])
    with CheckpointFiles(path=str(path), manifest=manifest) as files:
        tensors = [item for item in verify_items(manifest) if item.tensor is not None]
        assert all(is_refused(files, item) for item in tensors)


def test_what_the_manifest_does_not_name_is_not_read(copied: tuple[Path, Manifest]) -> None:
    path, manifest = copied
    (path / "README").write_text("A note of the user's.")
    verify_all(str(path), manifest)


def test_what_has_become_a_pipe_or_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "pipe", tmp_path / "folder"):
        with pytest.raises(DamagedCheckpointError, match=f"^'{path}' is not a file: use another"):
            open_storage(str(path)).open(str(path))


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.safetensors").write_bytes(b"")
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        with pytest.raises(UserError, match=rf"^'{path}' is not a checkpoint"):
            read_manifest(str(path))


@pytest.mark.parametrize(
    ("number", "is_damage"),
    [
        *((number, True) for number in (errno.EIO, errno.EUCLEAN, errno.ESTALE)),
        *((number, False) for number in (errno.EACCES, errno.EMFILE)),
    ],
)
def test_a_checkpoint_that_the_disk_cannot_read_is_damaged(
    saved: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch, number: int, is_damage: bool
) -> None:
    """Where others may be readable, an earlier checkpoint is used; permissions are for the user to mend."""
    path, manifest = saved

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", fail)
    for read in (lambda: read_manifest(str(path)), lambda: verify_all(str(path), manifest)):
        with pytest.raises(UserError, match=f"^'{path}/.*' cannot be read: .*: ") as refusal:
            read()
        assert isinstance(refusal.value, DamagedCheckpointError) is is_damage
