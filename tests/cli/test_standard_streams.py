"""Standard streams that are closed or cannot be written: no traceback, and the right exit code."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_run import command, environment
from tests.support.stored_program import STORED

NOT_WRITTEN = "Error: Not everything could be written: "


def shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "streams", "code", "expected"),
    [
        (["--version"], ">&-", 0, ""),
        (["--version"], ">&- 2>&- <&-", 0, ""),
        (["--version"], ">/dev/full", 2, f"{NOT_WRITTEN}No space left on device.\n"),
        (["--version"], "1</dev/null", 2, f"{NOT_WRITTEN}Bad file descriptor.\n"),
        (["show", "none.zir"], "2>&-", 2, ""),
        (["show", "none.zir"], "2>/dev/full", 2, ""),
    ],
)
def test_a_stream_that_cannot_be_written(
    tmp_path: Path, arguments: list[str], streams: str, code: int, expected: str
) -> None:
    made = shell(f"exec {shlex.join(command(*arguments))} {streams}", tmp_path)
    assert (made.returncode, made.stderr, made.stdout) == (code, expected, "")


@pytest.mark.slow
def test_a_machine_without_loopback_starts_no_ranks(tmp_path: Path) -> None:
    """In a network of its own, whose loopback is down; torchrun's agent would wait for ever."""
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode:
        pytest.skip("This machine lets nobody make a network of their own.")
    made = shell(
        f"exec unshare -rn {shlex.join(command('run', str(STORED), '--nproc', '2'))}", tmp_path
    )
    assert made.returncode == 2
    assert made.stderr.startswith(
        "Error: The ranks of this machine cannot reach each other at localhost: "
    )
    assert made.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_wrong_environment_is_a_sentence(tmp_path: Path) -> None:
    made = shell(f"RANK=abc WORLD_SIZE=1 exec {shlex.join(command('run', 'none.zir'))}", tmp_path)
    assert made.returncode == 2
    assert made.stderr.startswith("Error: RANK is 'abc', but must be a number from ")
    assert made.stderr.count("\n") == 1
