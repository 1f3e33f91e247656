from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from zeroir.cli.app import run_command

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")


@dataclass(frozen=True)
class Answer:
    exit_code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


Zeroir = Callable[..., Answer]


@pytest.fixture
def zeroir(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Zeroir:
    """Run one command line in this process."""

    def run(*arguments: str | Path) -> Answer:
        capfd.readouterr()
        exit_code = run_command([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Answer(exit_code=exit_code, out=out, err=err)

    monkeypatch.delenv("RANK", raising=False)
    return run


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The example compiled for stages 2 and 3 on 4 ranks."""
    folder = tmp_path_factory.mktemp("programs")
    paths = {stage: folder / f"gpt{stage}.zir" for stage in (2, 3)}
    for stage, path in paths.items():
        arguments = ["compile", GPT, "--stage", str(stage), "--world-size", "4", "-o", str(path)]
        assert run_command(arguments) == 0
    return paths
