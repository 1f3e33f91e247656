"""Disks that the system itself makes refuse: a full one, a limit of file sizes, and a folder of somebody else."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.checkpoint_files import save_checkpoint
from tests.support.faulty_store import NEWEST, Fault, Kind, count_requests, trial
from tests.support.power import Journal, recorded, write_images
from tools.fault_checkpoint import draw
from zeroir.checkpoint.folder import CheckpointFolder
from zeroir.checkpoint.reading import read_manifest, verify_all
from zeroir.errors import UserError

NOBODY = 65534


def saves(
    root: Path,
    *,
    before: Sequence[str] = (),
    user: int | None = None,
    prepare: Callable[[], None] | None = None,
) -> tuple[list[str], str]:
    """What is in a folder after the first refusal, and the refusal."""
    command = [sys.executable, "-m", "tests.support.save_until_refused", str(root)]
    command.append(str(os.getuid() if user is None else user))
    done = subprocess.run(
        [*before, *command], capture_output=True, text=True, check=False, preexec_fn=prepare
    )
    assert done.returncode == 0, done.stderr
    *names, refusal = done.stdout.splitlines()
    return [name for name in names if name != ".lock"], refusal


def test_a_full_disk(tmp_path: Path) -> None:
    """A disk of 1 MB in memory, which only this process and its children see."""
    mount = f"mount -t tmpfs -o size=1M none {tmp_path} && exec "
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{mount} "$@"', "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this user may not mount anything")
    names, refusal = saves(tmp_path, before=inside)
    assert names == ["step-00000001", "step-00000002"]
    assert refusal.startswith(f"'{tmp_path}/.step-00000003.saving-")
    assert "its disk is full" in refusal


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    names, refusal = saves(tmp_path, prepare=limit)
    assert names == []
    assert "the file is larger than its file system or your limits allow" in refusal


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    root = tmp_path / "runs"
    names, refusal = saves(root, user=NOBODY)
    assert names == ["step-00000001"]
    assert refusal.startswith(f"'{root}/")
    assert "you may not write there" in refusal


# ---- Whenever the power fails, a checkpoint is whole or not there, and whatever was reported as saved is there


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
    return {0: set(), one: {"step-00000001"}, two: {"step-00000002"}}


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


# ---- Whatever goes wrong while a checkpoint is saved to a store: none is lost, and none is seen by halves


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_nothing_is_lost_and_nothing_half_visible(
    number: int, s3_bucket: str, s3_environment: Mapping[str, str]
) -> None:
    faults = draw(count_requests(s3_bucket), count=2 * len(Kind), seed=7)
    for place, fault in enumerate(faults[number::2]):
        outcome = trial(s3_bucket, f"trial-{place}", fault, s3_environment)
        assert not outcome.is_lost, (fault, outcome)
        assert not outcome.is_half_visible, (fault, outcome)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.LATE, Kind.KILL_BEFORE, Kind.OUTAGE_AFTER])
def test_a_manifest_on_its_way(
    kind: Kind, s3_bucket: str, s3_environment: Mapping[str, str]
) -> None:
    """The request with the manifest is that at which most can go wrong."""
    methods = count_requests(s3_bucket)
    # The files of both ranks come before, the second by one request.
    manifest = [place for place, method in enumerate(methods) if method == "put_object"][-1]
    outcome = trial(s3_bucket, "trial", Fault(request=manifest, kind=kind), s3_environment)
    assert not outcome.is_lost
    assert not outcome.is_half_visible
    assert (outcome.ended, outcome.whole) == {
        # It appears after its save has failed, and is whole: nobody has removed its files.
        Kind.LATE: ("refused", frozenset({1, 2, NEWEST})),
        Kind.KILL_BEFORE: ("killed", frozenset({1, 2})),
        Kind.OUTAGE_AFTER: ("refused", frozenset({1, 2, NEWEST})),
    }[kind]
