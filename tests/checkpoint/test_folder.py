"""A folder of checkpoints: which is the newest whole one, which are kept, and who may write to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checkpoint_files import flat_manifest, save_checkpoint
from zeroir.checkpoint.folder import Best, CheckpointFolder
from zeroir.checkpoint.manifest import MANIFEST_NAME
from zeroir.checkpoint.publish import begin
from zeroir.checkpoint.reading import verify_all
from zeroir.errors import UserError


def names(folder: CheckpointFolder) -> list[str]:
    return [Path(listed.path).name for listed in folder.list()]


def no_refusal(path: str, error: UserError) -> None:
    raise AssertionError(f"{path}: {error}")


def retain(
    folder: CheckpointFolder, count: int, *, verified: str, best: Best | None = None
) -> tuple[str, ...]:
    """The names of the checkpoints that a job removes."""
    with folder.lock() as held:
        removed = held.retain(count, verified=verified, best=best, refused=lambda _: None)
    return tuple(Path(path).name for path in removed)


def save_empty(folder: CheckpointFolder, step: int, **metrics: float) -> str:
    """Save a checkpoint without files."""
    manifest = flat_manifest([], step=step, numel=0, metrics=metrics)
    return begin(folder.next_path(step)).publish(manifest.model_copy(update={"flats": ()}))


def test_checkpoints_are_listed_newest_first(tmp_path: Path) -> None:
    folder = CheckpointFolder(root=str(tmp_path))
    for step in (9, 100, 99_999_999, 100_000_000, 100, 100, 9):
        save_empty(folder, step)
    for name in ("step-7", "step-00000007-1", "step-000000007", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / ".step-00000008.saving-000000000000").mkdir()
    (tmp_path / "step-00000008").touch()
    newest = ["100000000", "99999999", "00000100-3", "00000100-2", "00000100", "00000009-2"]
    assert names(folder) == [f"step-{name}" for name in (*newest, "00000009")]


def test_a_folder_that_is_missing_has_no_checkpoints(tmp_path: Path) -> None:
    folder = CheckpointFolder(root=str(tmp_path / "none"))
    assert folder.list() == ()
    assert folder.newest_whole(verify_all, no_refusal) is None
    assert folder.next_path(3) == str(tmp_path / "none" / "step-00000003")


def test_the_newest_whole_checkpoint_is_found_and_the_others_are_told(tmp_path: Path) -> None:
    folder = CheckpointFolder(root=str(tmp_path))
    for step in range(1, 6):
        save_checkpoint(str(tmp_path / f"step-{step:08}"), step=step)
    (tmp_path / "step-00000005" / MANIFEST_NAME).unlink()
    (tmp_path / "step-00000004" / "rank-00001.safetensors").unlink()
    flipped = tmp_path / "step-00000003" / "rank-00000.safetensors"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xff")
    refused: list[tuple[str, str]] = []
    newest = folder.newest_whole(verify_all, lambda p, error: refused.append((p, str(error))))
    assert newest is not None
    assert (Path(newest[0]).name, newest[1].step) == ("step-00000002", 2)
    assert [Path(path).name for path, _ in refused] == [f"step-0000000{n}" for n in (5, 4, 3)]
    parts = ("no manifest.json", "rank-00001.safetensors", "flat.exp_avg")
    assert all(part in message for (_, message), part in zip(refused, parts, strict=True))


def test_the_newest_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(root=str(tmp_path))
    for step in (1, 2, 3):
        save_empty(folder, step)
    path = save_empty(folder, 3)
    assert retain(folder, 2, verified=path) == ("step-00000001", "step-00000002")
    assert names(folder) == ["step-00000003-2", "step-00000003"]
    assert {entry.name for entry in tmp_path.iterdir()} == {".lock", *names(folder)}


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("values", "best", "kept"),
    [
        ([0.5, 0.1, NAN, 0.1, 0.9, INF], Best(metric="loss"), 4),
        ([0.5, 0.7, 0.6], Best(metric="loss", is_highest=True), 2),
        ([0.5, 0.1], Best(metric="none"), None),
    ],
)
def test_the_best_is_kept_too(
    tmp_path: Path, values: list[float], best: Best, kept: int | None
) -> None:
    folder = CheckpointFolder(root=str(tmp_path))
    for step, loss in enumerate(values, 1):
        save_empty(folder, step, loss=loss)
    retain(folder, 1, verified=save_empty(folder, 9), best=best)
    best_of_all = [] if kept is None else [f"step-0000000{kept}"]
    assert names(folder) == ["step-00000009", *best_of_all]


@given(
    st.lists(st.tuples(st.integers(1, 4), st.floats()), min_size=1, max_size=6),
    st.integers(1, 3),
    st.data(),
)
def test_the_verified_checkpoint_always_remains(
    tmp_path_factory: pytest.TempPathFactory,
    saves: list[tuple[int, float]],
    count: int,
    data: st.DataObject,
) -> None:
    folder = CheckpointFolder(root=str(tmp_path_factory.mktemp("folder")))
    paths = [save_empty(folder, step, loss=loss) for step, loss in saves]
    verified = data.draw(st.sampled_from(paths))
    others = [path for path in paths if path != verified]
    damaged = data.draw(st.lists(st.sampled_from(others)) if others else st.just([]))
    for path in damaged:
        (Path(path) / MANIFEST_NAME).write_bytes(b"")
    before = names(folder)
    removed = retain(folder, count, verified=verified, best=Best(metric="loss"))
    after = names(folder)
    assert Path(verified).name in after
    assert {Path(path).name for path in damaged} <= set(after)
    assert set(before) - set(after) == set(removed)
    whole = [name for name in before if name not in {Path(path).name for path in damaged}]
    assert set(whole[:count]) <= set(after)
    assert len(set(after) & set(whole)) <= count + 2


def test_a_checkpoint_that_is_a_link_is_removed_as_a_link(tmp_path: Path) -> None:
    elsewhere = CheckpointFolder(root=str(tmp_path / "elsewhere"))
    save_empty(elsewhere, 1)
    folder = CheckpointFolder(root=str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "step-00000001").symlink_to(tmp_path / "elsewhere" / "step-00000001")
    path = save_empty(folder, 2)
    retain(folder, 1, verified=path)
    assert names(folder) == ["step-00000002"]
    assert names(elsewhere) == ["step-00000001"]
