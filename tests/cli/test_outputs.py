"""No command replaces a file of another kind than it writes, and each replaces its own."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.cli.conftest import GPT, Zeroir, assert_refused

WRITING: dict[str, tuple[list[str], str]] = {
    "run": (["run", "PROGRAM", "--steps", "1", "--trace"], "a timeline"),
    "run on ranks": (["run", "PROGRAM", "--nproc", "2", "--trace"], "a timeline"),
    "simulate": (["simulate", "PROGRAM", "--trace"], "a timeline"),
    "chrome": (["export", "PROGRAM", "--format", "chrome", "-o"], "a timeline"),
    "snapshot": (["export", "PROGRAM", "--format", "memory-snapshot", "-o"], "a memory snapshot"),
    "graph": (["export", "PROGRAM", "--format", "graphviz", "-o"], "a graph"),
    "report": (["report", "PROGRAM", "-o"], "a report"),
    "certificate": (["verify", "PROGRAM", "--certificate"], "a certificate"),
    "profile": (["profile", "PROGRAM", "-o"], "a machine file"),
    "compile": (["compile", GPT, "-o"], "a compiled program"),
    "plan": (["plan", GPT, "-o"], "a compiled program"),
}


CONTENTS = (
    "import torch\n\n\ndef model():\n    ...\n",
    '{"weights": 1}',
    '[project]\nname = "mine"\n',
    "<!DOCTYPE html>\n<title>mine</title>\n",
    "digraph mine {}\n",
)
FILES = [
    *product(("compile", "simulate", "report", "graph", "profile"), CONTENTS),
    *zip(("run", "run on ranks", "chrome", "snapshot", "plan"), CONTENTS, strict=True),
    ("certificate", CONTENTS[0]),
]
"""Each kind of output with each content, and each other command that writes such a kind once."""


@pytest.mark.parametrize(("name", "content"), FILES)
def test_a_file_of_another_kind_stays(
    zeroir: Zeroir, tmp_path: Path, name: str, content: str
) -> None:
    command, noun = WRITING[name]
    path = tmp_path / "mine.toml"
    path.write_text(content)
    # There is no such program: that nobody says so shows that the output is looked at first.
    missing = str(tmp_path / "missing.zir")
    assert_refused(
        zeroir(*[missing if word == "PROGRAM" else word for word in command], path),
        f"mine.toml' exists and is not {noun}: name another file",
    )
    assert path.read_text() == content
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["simulate", "chrome", "snapshot", "graph", "report", "certificate"]
)
def test_a_file_of_its_own_kind_is_written_anew(
    zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path, name: str
) -> None:
    if name == "report":
        pytest.importorskip("bokeh")
    command, _ = WRITING[name]
    path = tmp_path / "output"
    path.touch()  # an empty file has nothing to lose
    for _ in range(2):
        words = [str(programs[3]) if word == "PROGRAM" else word for word in command]
        assert zeroir(*words, path).exit_code == 0
        assert path.stat().st_size


def test_every_machine_file_is_known_as_one() -> None:
    from zeroir.artifact.outputs import MACHINE

    folder = Path(__file__).parents[2] / "zeroir" / "cost" / "machines"
    for path in folder.glob("*.toml"):
        assert MACHINE.head.match(path.read_bytes()[:4096])
