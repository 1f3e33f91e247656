"""A folder of checkpoints belongs to one job, which notices if it is moved, and counts only whole checkpoints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoint_files import save_checkpoint
from zeroir.checkpoint import folder as folder_module
from zeroir.checkpoint import local_lock
from zeroir.checkpoint.folder import Best, CheckpointFolder
from zeroir.checkpoint.manifest import MANIFEST_NAME, Manifest
from zeroir.checkpoint.publish import begin
from zeroir.checkpoint.reading import read_manifest, verify_all
from zeroir.errors import UserError

GONE = "was renamed, removed or replaced while this job saves checkpoints to it"


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if entry.name != ".lock")


def test_leftovers_of_killed_jobs_are_removed_under_the_lock(tmp_path: Path) -> None:
    folder = CheckpointFolder(root=str(tmp_path))
    for name in ("step-00000001", "step-00000002-2"):
        for state in ("saving", "deleting"):
            leftover = tmp_path / f".{name}.{state}-0123456789ab"
            (leftover / "deep").mkdir(parents=True)
            (leftover / "deep" / "file").touch()
    theirs = [".mine.saving-0123456789ab", ".step-00000001.saving-mine", "step-00000009", ".git"]
    for name in theirs:
        (tmp_path / name).mkdir()
    with folder.lock():
        assert {entry.name for entry in tmp_path.iterdir()} == {".lock", *theirs}


def test_a_second_job_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_lock, "LOCK_WAIT_S", 0.0)
    folder = CheckpointFolder(root=str(tmp_path))
    with folder.lock():
        draft = begin(folder.next_path(1))
        holder = rf"\(process {os.getpid()} on \S+\)"
        message = f"^Another job {holder} saves checkpoints to '{tmp_path}': end it first, or name"
        with pytest.raises(UserError, match=message), CheckpointFolder(root=str(tmp_path)).lock():
            pass
        assert Path(draft.folder).is_dir()
    with folder.lock():
        assert not Path(draft.folder).exists()


def test_the_lock_is_free_when_its_process_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from zeroir.checkpoint.folder import CheckpointFolder\n"
        "with CheckpointFolder(root=sys.argv[1]).lock():\n"
        "    print('locked', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_lock, "LOCK_WAIT_S", 0.0)
            with pytest.raises(UserError), CheckpointFolder(root=str(tmp_path)).lock():
                pass
        process.kill()
    with CheckpointFolder(root=str(tmp_path)).lock():
        pass


def replace_by_link(root: Path) -> None:
    root.rename(root.with_name("moved"))
    root.with_name("other").mkdir()
    root.symlink_to("other")


def make_anew(root: Path) -> None:
    shutil.rmtree(root)
    save_checkpoint(f"{root}/step-00000001", step=1)


@pytest.mark.parametrize(
    "move",
    [lambda root: root.rename(root.with_name("moved")), shutil.rmtree, replace_by_link, make_anew],
    ids=["renamed", "removed", "a link", "made anew"],
)
def test_a_folder_that_is_no_longer_there_is_neither_saved_to_nor_cleaned(
    tmp_path: Path, move: Callable[[Path], object]
) -> None:
    root = tmp_path / "runs"
    with CheckpointFolder(root=str(root)).lock() as held:
        for step in (1, 2):
            save_checkpoint(held.next_path(step), step=step)
        move(root)
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UserError, match=GONE):
            held.next_path(3)
        with pytest.raises(UserError, match=GONE):
            held.retain(1, verified=f"{root}/step-00000002", refused=refuse_nothing)
        assert sorted(tmp_path.rglob("*")) == before


def test_the_lock_goes_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_lock, "LOCK_WAIT_S", 0.0)
    root, moved = tmp_path / "runs", tmp_path / "moved"
    with CheckpointFolder(root=str(root)).lock() as held:
        root.rename(moved)
        with (
            pytest.raises(UserError, match=r"^Another job "),
            CheckpointFolder(root=str(moved)).lock(),
        ):
            pass
        moved.rename(root)
        held.next_path(1)


def test_a_lock_whose_file_was_removed_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_lock, "LOCK_WAIT_S", 0.0)
    folder = CheckpointFolder(root=str(tmp_path))
    with folder.lock() as held:
        (tmp_path / ".lock").unlink()
        held.next_path(1)
        with pytest.raises(UserError, match=r"^Another job "), folder.lock():
            pass
        (tmp_path / ".lock").unlink()
        with folder.lock(), pytest.raises(UserError, match=r"^Another job "):
            held.next_path(1)


def refuse_nothing(error: UserError) -> None:
    raise AssertionError(str(error))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "rank-00000.safetensors").unlink(),
        lambda path: os.truncate(path / "rank-00001.safetensors", 100),
        lambda path: flip_last_byte(path / "rank-00001.safetensors"),
        lambda path: flip_last_byte(path / MANIFEST_NAME),
        lambda path: (path / MANIFEST_NAME).unlink(),
    ],
    ids=["missing", "truncated", "flipped", "manifest flipped", "no manifest"],
)
def test_a_damaged_checkpoint_does_not_count(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """It stays until there are enough newer ones, unless its manifest tells nothing; it is named once."""
    refused: list[str] = []
    with CheckpointFolder(root=str(tmp_path)).lock() as held:
        paths = [held.next_path(step) for step in range(1, 7)]
        for step in (1, 2, 3):
            save_checkpoint(paths[step - 1], step=step)
        damage(tmp_path / "step-00000003")
        for step, kept in ((4, [2, 3, 4]), (5, [4, 5]), (6, [5, 6])):
            save_checkpoint(paths[step - 1], step=step)
            held.retain(
                2, verified=paths[step - 1], refused=lambda error: refused.append(str(error))
            )
            left = {f"step-{number:08}" for number in kept}
            assert left <= set(names(tmp_path)) <= left | {"step-00000003"}
    (sentence,) = refused
    assert "step-00000003" in sentence


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 4
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_not_the_best(tmp_path: Path) -> None:
    refused: list[UserError] = []
    with CheckpointFolder(root=str(tmp_path)).lock() as held:
        for step, loss in enumerate((0.3, 0.1, 0.2, 0.9), 1):
            save_checkpoint(held.next_path(step), step=step, metrics={"loss": loss})
        flip_last_byte(tmp_path / "step-00000002" / "rank-00000.safetensors")
        newest = str(tmp_path / "step-00000004")
        removed = held.retain(1, verified=newest, best=Best(metric="loss"), refused=refused.append)
    assert [Path(path).name for path in removed] == ["step-00000001", "step-00000002"]
    assert len(refused) == 1


def test_nothing_is_removed_if_the_newest_has_gone(tmp_path: Path) -> None:
    refused: list[str] = []
    with CheckpointFolder(root=str(tmp_path)).lock() as held:
        for step in (1, 2, 3):
            save_checkpoint(held.next_path(step), step=step)
        shutil.rmtree(tmp_path / "step-00000003")
        verified = str(tmp_path / "step-00000003")
        held.retain(1, verified=verified, refused=lambda error: refused.append(str(error)))
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    (sentence,) = refused
    assert verified in sentence


def test_what_the_job_has_saved_is_read_once_for_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, str]] = []

    def recorded(path: str) -> Manifest:
        read.append(("manifest", Path(path).name))
        return read_manifest(path)

    def verified(path: str, manifest: Manifest) -> None:
        read.append(("all", Path(path).name))
        verify_all(path, manifest)

    monkeypatch.setattr(folder_module, "read_manifest", recorded)
    monkeypatch.setattr(folder_module, "verify_all", verified)
    with CheckpointFolder(root=str(tmp_path)).lock() as held:
        for step in (1, 2, 3):
            path = held.next_path(step)
            save_checkpoint(path, step=step)
            held.retain(2, verified=path, refused=refuse_nothing)
    assert read == [("manifest", f"step-{step:08}") for step in (1, 2, 3)]
