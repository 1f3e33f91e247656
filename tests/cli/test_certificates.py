"""``zeroir verify --certificate`` writes what ``python -m tools.certificates`` accepts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import msgpack

from tests.cli.conftest import Zeroir
from tests.support.subjects import subject
from tools.damage_certificates import damaged, file_of


def run(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.certificates", *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_the_commands_write_and_check_a_certificate(
    zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path
) -> None:
    path, other = tmp_path / "gpt.certificate", tmp_path / "other.certificate"
    assert zeroir("verify", programs[3], "--certificate", path).exit_code == 0
    made = run(programs[3], path)
    assert (made.returncode, made.stdout) == (0, "ok\n")
    claims = msgpack.unpackb(path.read_bytes())
    claims["contents"] = claims["contents"][:-1]
    other.write_bytes(msgpack.packb(claims))
    refused = run(programs[3], other)
    assert refused.returncode == 1
    assert refused.stdout.startswith("refused: ")
    assert refused.stdout.count("\n") == 1
    other.write_text("nothing")
    assert run(programs[3], other).returncode == 2
    assert run(tmp_path / "missing.zir", path).returncode == 2


def test_a_broken_program_gets_no_certificate(zeroir: Zeroir, tmp_path: Path) -> None:
    made = subject("stage 3")
    found = damaged("stage 3", Random(0))
    assert found is not None
    broken = tmp_path / "broken.zir"
    broken.write_bytes(file_of(made.logical, found[1]))
    assert zeroir("verify", broken, "--certificate", tmp_path / "c").exit_code == 1
    assert not (tmp_path / "c").exists()
