"""Disks that the system itself makes refuse: a full one, a limit of file sizes, and a folder of somebody else."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

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
