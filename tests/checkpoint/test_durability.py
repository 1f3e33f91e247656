"""Whenever the power fails, a checkpoint is whole or not there, and whatever was reported as saved is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checkpoint_files import save_checkpoint
from tests.support.power import Journal, recorded, write_images
from zeroir.checkpoint.folder import CheckpointFolder
from zeroir.checkpoint.reading import read_manifest, verify_all
from zeroir.errors import UserError


def no_refusal(error: UserError) -> None:
    raise error


Promise = dict[int, set[str]]
"""The names of the checkpoints that must be there, from a number of calls on."""


def save_two_and_keep_one(root: Path, journal: Journal) -> Promise:
    """What a job does with a folder, and what it may rely on."""
    folder = CheckpointFolder(root=str(root / "runs" / "a"))
    with folder.lock() as held:
        save_checkpoint(held.next_path(1), step=1, numel=2)
        one = len(journal.events)
        save_checkpoint(held.next_path(2), step=2, numel=2)
        two = len(journal.events)
        held.retain(1, verified=folder.list()[0].path, refused=no_refusal)
    return {
        0: set(),
        one: {"step-00000001"},
        two: {"step-00000002"},
    }


def broken_promises(
    journal: Journal, promised: Promise, target: Path, *, count: int
) -> Iterator[str]:
    """What a reader finds wrong after a power cut at any moment."""
    for cut in range(len(journal.events) + 1):
        expected = promised[max(number for number in promised if number <= cut)]
        for image in write_images(journal.disk(cut), target, seed=cut, count=count):
            folder = CheckpointFolder(root=str(image / "runs" / "a"))
            visible = {Path(listed.path).name for listed in folder.list()}
            if not expected <= visible:
                yield f"after call {cut}, {expected - visible} is lost"
            for name in visible:
                path = str(image / "runs" / "a" / name)
                try:
                    verify_all(path, read_manifest(path))
                except UserError as error:
                    yield f"after call {cut}, {name} is not whole: {error}"
            with folder.lock():
                left = {entry.name for entry in (image / "runs" / "a").iterdir()}
                if left != visible | {".lock"}:
                    yield f"after call {cut}, {left} are left"


def record(root: Path, forgotten: int | None = None) -> tuple[Journal, Promise]:
    root.mkdir()
    with recorded(root, forgotten) as journal:
        return journal, save_two_and_keep_one(root, journal)


def test_a_power_cut_loses_nothing_at_any_moment(tmp_path: Path) -> None:
    journal, promised = record(tmp_path / "live")
    (tmp_path / "images").mkdir()
    assert list(broken_promises(journal, promised, tmp_path / "images", count=6)) == []
    assert len(journal.events) > 50


@pytest.mark.slow
def test_every_sync_is_needed(tmp_path: Path) -> None:
    """The law above notices each sync that is left out."""
    syncs = record(tmp_path / "live")[0].syncs
    unnoticed = []
    for forgotten in range(syncs):
        journal, promised = record(tmp_path / f"live{forgotten}", forgotten)
        target = tmp_path / f"images{forgotten}"
        target.mkdir()
        if next(broken_promises(journal, promised, target, count=2), None) is None:
            unnoticed.append(forgotten)
    assert unnoticed == []
    assert syncs >= 12
