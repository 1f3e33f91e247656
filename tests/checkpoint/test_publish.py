"""A checkpoint appears whole or not at all, whatever call of the system fails, and failures leave nothing."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoint_files import flat_manifest, save_checkpoint, tensor_to_write
from zeroir.checkpoint.folder import CheckpointFolder
from zeroir.checkpoint.publish import begin
from zeroir.checkpoint.reading import read_manifest, verify_all
from zeroir.checkpoint.storages import open_storage
from zeroir.checkpoint.writing import write_file
from zeroir.errors import InternalError, UserError

CHANGES = ("open", "write", "fsync", "mkdir", "rename")
"""The calls that write. Removals fail in a test of their own."""


class Failing:
    """Lets one call of the system fail, counted from 0 over all kinds."""

    def __init__(self, at: int | None, number: int) -> None:
        self.at = at
        self.number = number
        self.calls = 0
        self.failed = ""

    @contextmanager
    def patched(self, calls: tuple[str, ...] = CHANGES) -> Iterator[None]:
        """The calls while they are counted."""
        with pytest.MonkeyPatch.context() as patch:
            for name in calls:
                patch.setattr(os, name, self.counted(name, getattr(os, name)))
            yield

    def counted(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        """A call that counts itself, and fails if it is its turn."""

        def call(*arguments: object, **keywords: object) -> object:
            self.calls += 1
            if self.calls - 1 == self.at:
                self.failed = name
                raise OSError(self.number, os.strerror(self.number))
            return real(*arguments, **keywords)

        return call


def save(root: Path) -> None:
    """Save as a job of one process does: with the lock, and abandoning the draft of a failure."""
    folder = CheckpointFolder(root=str(root))
    with folder.lock():
        draft = begin(folder.next_path(2))
        try:
            tensors = [tensor_to_write("flat.master", "f32", bytes(24))]
            tensors.append(tensor_to_write("flat.exp_avg", "bf16", bytes(12)))
            file = write_file(open_storage(draft.folder), draft.folder, draft.file_name(0), tensors)
            draft.publish(flat_manifest([file], step=2, numel=6, metrics={}))
        except UserError:
            draft.abandon()
            raise


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.EDQUOT]
)
def test_any_failing_call_is_one_sentence_and_leaves_nothing(tmp_path: Path, number: int) -> None:
    counted = Failing(None, number)
    with counted.patched():
        save(tmp_path / "all")
    assert counted.calls > 15
    failed = set()
    for at in range(counted.calls):
        root = tmp_path / f"{at}"
        save_checkpoint(str(root / "step-00000001"), step=1)
        failing = Failing(at, number)
        before = descriptors()
        message = None
        with failing.patched():
            try:
                save(root)
            except UserError as error:
                message = str(error)
        assert descriptors() == before
        entries = {entry.name for entry in root.iterdir()} - {".lock"}
        if message is None:
            # The library of locks tries again, or does without.
            assert "step-00000002" in entries
        else:
            assert re.fullmatch(rf"'{root}\S*' cannot be written: .*\.", message)
            failed.add(failing.failed)
        assert entries - {"step-00000002"} == {"step-00000001"}
        for name in entries:
            verify_all(str(root / name), read_manifest(str(root / name)))
    assert failed == set(CHANGES)


def test_what_cannot_be_removed_now_is_removed_by_the_next_job(tmp_path: Path) -> None:
    with (
        Failing(0, errno.EACCES).patched(("write",)),
        Failing(0, errno.EACCES).patched(("unlink",)),
        pytest.raises(UserError, match=r"rank-00000.safetensors' cannot be written: you may not"),
    ):
        save(tmp_path)
    save(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {".lock", "step-00000002"}


def test_a_checkpoint_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for target in (before := sorted(tmp_path.iterdir())):
        with pytest.raises(UserError, match=f"'{target}' cannot be written: it exists"):
            begin(str(target))
    assert sorted(tmp_path.iterdir()) == before


def test_what_appears_at_the_target_meanwhile_stays(tmp_path: Path) -> None:
    draft = begin(str(tmp_path / "a"))
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match=r"'.*/a' cannot be written: it exists"):
        draft.publish(
            flat_manifest([], step=1, numel=1, metrics={}).model_copy(update={"flats": ()})
        )
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert not list((tmp_path / "a").iterdir())


def test_a_file_in_the_way_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    in_the_way = pytest.raises(UserError, match=r"runs' cannot be written: .* is a file, not a")
    with in_the_way:
        begin(str(tmp_path / "runs" / "a" / "step-00000001"))
    with in_the_way, CheckpointFolder(root=str(tmp_path / "runs")).lock():
        pass


def test_names_that_are_too_long_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="' cannot be written: the name is too long"):
        begin(str(tmp_path / ("x" * 250)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "lacks rank-00003.safetensors, which another rank has written"),
        (lambda path: path.write_bytes(b"x"), "rank-00003.safetensors' has 1 bytes instead of"),
    ],
)
def test_files_that_this_machine_does_not_see_are_named(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    draft = begin(str(tmp_path / "a"))
    tensors = [tensor_to_write("flat.master", "f32", bytes(8))]
    tensors.append(tensor_to_write("flat.exp_avg", "bf16", bytes(4)))
    file = write_file(open_storage(draft.folder), draft.folder, draft.file_name(3), tensors)
    damage(Path(draft.folder) / file.name)
    with pytest.raises(UserError, match=message):
        draft.publish(flat_manifest([file], step=1, numel=2, metrics={}))
    assert not list(tmp_path.iterdir())


def test_a_manifest_that_contradicts_itself_is_not_published(tmp_path: Path) -> None:
    draft = begin(str(tmp_path / "a"))
    manifest = flat_manifest([], step=1, numel=2, metrics={})
    (flat,) = manifest.flats
    parameter = flat.parameters[0].model_copy(update={"shape": (1,)})
    flat = flat.model_copy(update={"parameters": (parameter,)})
    with pytest.raises(InternalError, match="no tensor has element"):
        draft.publish(manifest.model_copy(update={"flats": (flat,)}))
    assert not list(tmp_path.iterdir())


def test_paths_are_relative_to_where_the_job_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manifest = save_checkpoint("a", step=1)
    assert read_manifest("a/") == read_manifest("./a") == manifest
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
