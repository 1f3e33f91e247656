"""Disks that fail under a training run: one clear sentence, no hang, no file left, and whole checkpoints."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.faulty_disk import Kind, calls_of_the_system, trial
from tools.fault_offload import draw

FAULTS = 12
"""One of each kind for each seed; ``tools/fault_offload.py`` tries more."""


@pytest.mark.slow
def test_a_call_that_goes_wrong(tmp_path: Path) -> None:
    calls, expected = calls_of_the_system(tmp_path / "undisturbed")
    faults = [fault for seed in range(2) for fault in draw(calls, FAULTS, seed)]
    assert {fault.kind for fault in faults} == set(Kind)
    for number, fault in enumerate(faults):
        outcome = trial(tmp_path / str(number), fault, expected)
        assert outcome.problems == (), (fault, calls[fault.call], outcome)
        is_transfer = calls[fault.call] in ("read", "write")
        if fault.kind in (Kind.HALF, Kind.ONE):
            assert outcome.ended == "finished"
        if fault.kind in (Kind.EIO, Kind.ENOSPC, Kind.OUTAGE) and is_transfer:
            assert outcome.ended == "refused"


_OPEN = """
import sys
from pathlib import Path
from zeroir.errors import UserError
from zeroir.runtime.disk.disk_buffers import DiskBuffers
try:
    DiskBuffers(Path(sys.argv[1]), 0).add({"a": 8 << 20})
except UserError as error:
    print(error)
"""


def refusal(folder: Path, *before: str, limit_bytes: int | None = None) -> str:
    """What 8 MiB on disk are refused with."""

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    command = [*before, sys.executable, "-c", _OPEN, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=limit)
    return done.stdout.strip()


def test_a_full_disk_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """A disk of 1 MB in memory, which only this process and its children see."""
    mount = f"mount -t tmpfs -o size=1M none {tmp_path} && exec "
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{mount} "$@"', "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this user may not mount anything")
    assert "is full (8.39 MB are needed, 1.05 MB are free)" in refusal(tmp_path, *inside)


@pytest.mark.slow
def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    sentence = refusal(tmp_path, limit_bytes=1 << 20)
    assert "the file is larger than its file system or your limits allow" in sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    as_nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    if shutil.which("setpriv") is None:
        pytest.skip("no program here becomes another user")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    assert "you may not write there" in refusal(tmp_path, *as_nobody)
