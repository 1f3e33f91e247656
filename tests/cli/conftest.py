from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.support.lowering import applied
from zeroir import artifact
from zeroir.cli.app import run_command
from zeroir.config import make_options
from zeroir.passes.pipelines import for_options

GPT = str(Path(__file__).parents[2] / "examples" / "gpt.py")


@dataclass(frozen=True)
class Answer:
    exit_code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.out)
        return document


Zeroir = Callable[..., Answer]


def assert_refused(answer: Answer, *words: str) -> None:
    """One sentence and nothing else, with these words, however it is broken into lines."""
    assert (answer.exit_code, answer.out) == (2, ""), answer
    assert answer.err.startswith("Error: ")
    assert answer.err.count("\nError: ") == 0
    assert "Traceback" not in answer.err
    for word in words:
        assert word in answer.err or word in " ".join(answer.err.split())


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
def programs(run_folder: Path) -> dict[int, Path]:
    """The example compiled for stage 3 on 4 ranks, and lowered for stage 2, by the first worker that asks for it.

    Beside the program of stage 3 stands what the command said of it, ``.json``.
    """
    paths = {stage: run_folder / f"gpt{stage}.zir" for stage in (2, 3)}
    with FileLock(run_folder / "programs.lock"):
        if not paths[3].exists():
            options = ["--stage", "3", "--world-size", "4", "--json"]
            with redirect_stdout(StringIO()) as out:
                assert run_command(["compile", GPT, *options, "-o", str(paths[3])]) == 0
            paths[3].with_suffix(".json").write_text(out.getvalue())
        if not paths[2].exists():
            whole, made = artifact.load(paths[3]), make_options({"stage": 2, "world_size": 4})
            logical = replace(whole.logical, options=made)
            scheduled = applied(logical, for_options(made))
            artifact.save(replace(whole, logical=logical, scheduled=scheduled), paths[2])
    return paths
