"""What the tests of conversions share."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.support.zygote import DEADLINE_S, Forked, compiling_zygote
from zeroir.convert import torch_files


def forked(
    kind: str, paths: Sequence[str], *, module: str = torch_files.MODULE
) -> subprocess.CompletedProcess[bytes]:
    """Read files of torch in a process that has torch already, which takes seconds to import."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        arguments = (kind, *(str(Path(path).resolve()) for path in paths))
        reader = Forked(compiling_zygote(), module, arguments, {}, Path(folder) / "log", out=out)
        code = reader.wait(time.monotonic() + DEADLINE_S)
        assert code is not None
        error = (Path(folder) / "log.err").read_bytes()
        return subprocess.CompletedProcess(arguments, code, out.read_bytes(), error)


@pytest.fixture(autouse=True)
def _readers_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_files, "_run", forked)


@pytest.fixture
def limited_readers(_readers_are_forked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that read files of torch have low limits."""
    monkeypatch.setattr(torch_files, "_run", partial(forked, module="tests.convert.limited_reader"))
