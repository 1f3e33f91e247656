"""Samples of the proofs of checkpoints, and that each of them can fail; ``tools`` runs them whole."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

import zeroir
from tools import flip_checkpoint, kill_checkpoint, power_cut
from tools.checkpoints import model as tiny_model
from tools.checkpoints import recorder
from tools.checkpoints.forgetful_disk import Loss
from tools.checkpoints.recorder import FileOperation, OperationKind
from tools.checkpoints.saving_job import saved_checkpoints

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.dist]

needs_compiler = pytest.mark.skipif(not recorder.has_compiler(), reason="no C compiler here")


def run_tool(name: str, *arguments: str, **environment: str) -> str:
    """Run a tool, which must find nothing wrong."""
    made = subprocess.run(
        [sys.executable, "-m", name, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


@pytest.mark.parametrize(
    ("victims", "count"),
    [(tuple(kill_checkpoint.Victim), 4), ((kill_checkpoint.Victim.FOLDER,), 2)],
    ids=["any", "the folder"],
)
def test_killed_jobs_lose_nothing(victims: tuple[kill_checkpoint.Victim, ...], count: int) -> None:
    cycles, differences = kill_checkpoint.kill(range(count), world_size=3, seed=0, victims=victims)
    assert [problem for cycle in cycles for problem in cycle.problems] == differences == []
    *_, of_all = kill_checkpoint.table(cycles)
    assert of_all[:2] == ["sum", str(count)]


@needs_compiler
def test_a_disk_that_fails_at_any_operation_loses_nothing(tmp_path: Path) -> None:
    library = str(recorder.build(tmp_path))
    folder = tmp_path / "disk"
    folder.mkdir()
    printed = run_tool("tools.checkpoints.failing_disk", str(folder), LD_PRELOAD=library)
    count, word = printed.split()
    assert int(count) >= 30
    assert word == "failures"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of three ranks, and beside them a program of one rank."""
    folder = tmp_path_factory.mktemp("saved")
    saved_checkpoints(folder / "checkpoints", world_size=3, steps=2)
    zeroir.compile(tiny_model.__file__, stage=3, world_size=1).save(folder / "alone.zir")
    return folder


@pytest.mark.parametrize("kind", ["", *flip_checkpoint.OTHER_KINDS])
def test_every_damage_is_named(saved: Path, kind: str) -> None:
    newest, previous = (saved / "checkpoints" / f"step-0000000{step}" for step in (2, 1))
    chance = Random(kind)
    for _ in range(3):
        content = {path: path.read_bytes() for path in newest.iterdir()}
        damage = (
            flip_checkpoint.damage_otherwise(newest, previous, kind, chance)
            if kind
            else flip_checkpoint.flip(newest, chance)
        )
        problems = flip_checkpoint.problems(saved / "checkpoints", saved / "alone.zir", damage)
        try:
            assert not list(problems)
        finally:
            for path, data in content.items():
                path.write_bytes(data)


def test_without_damage_the_proof_of_flips_fails(saved: Path) -> None:
    none = flip_checkpoint.CheckpointDamage(kind="none", file="rank-00000.safetensors", names=())
    problems = flip_checkpoint.problems(saved / "checkpoints", saved / "alone.zir", none)
    assert len(list(problems)) == 2


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sequence[FileOperation]]:
    """The folder where a job saved, and its operations."""
    return power_cut.record_jobs(tmp_path_factory.mktemp("recorded"), (4, 6))


def problems_of_cuts(root: Path, operations: Sequence[FileOperation]) -> Iterator[str]:
    """What is wrong after cuts at every few operations."""
    for until in range(0, len(operations) + 1, 11):
        for loss in Loss:
            yield from power_cut.cut_problems(root, operations[:until], loss, Random(until))


@needs_compiler
def test_cuts_of_the_power_lose_nothing(recorded: tuple[Path, Sequence[FileOperation]]) -> None:
    root, operations = recorded
    assert not list(problems_of_cuts(root, operations))


@needs_compiler
@pytest.mark.parametrize("forgotten", ["files", "folders"])
def test_cuts_lose_what_was_not_synchronised(
    recorded: tuple[Path, Sequence[FileOperation]], forgotten: str
) -> None:
    root, operations = recorded
    folders = {op.inode for op in operations if op.kind is OperationKind.MAKE_FOLDER}
    folders.add(root.stat().st_ino)
    kept = [
        op
        for op in operations
        if op.kind is not OperationKind.SYNC or (op.inode in folders) != (forgotten == "folders")
    ]
    assert len(kept) < len(operations)
    assert next(problems_of_cuts(root, kept), None) is not None
