"""A model file runs only once it is known to be the one that was compiled, with all of the user's modules in it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import zeroir
from tests.support.zygote import run_forked
from zeroir.errors import UserError

MODEL = """
from pathlib import Path
import torch
from blocks import Block

def model():
    return Block()

def batch():
    return (torch.ones(2, 4),)
"""
RUN = ["run", "model.zir", "--steps", "1"]
TRACE = "\nfrom pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"
BLOCKS = "from .parts import make\n\nclass Block(make()):\n    pass\n"
PARTS = """
from torch import nn

def make():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x).square().mean()

    return Part
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model.zir`` beside its model, which imports a package, which imports a module of its own."""
    path = tmp_path_factory.mktemp("changes")
    (path / "blocks").mkdir()
    (path / "model.py").write_text(MODEL)
    (path / "blocks" / "__init__.py").write_text(BLOCKS)
    (path / "blocks" / "parts.py").write_text(PARTS)
    made = run_forked("zeroir", ["compile", "model.py", "--world-size", "1"], path)
    assert made.returncode == 0, made.stderr
    return path


@pytest.fixture
def folder(compiled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled, tmp_path / "copy"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("model.py", "model.py changed since the program was compiled from it"),
        ("blocks/__init__.py", "The module blocks, which model.py imports, changed since"),
        ("blocks/parts.py", "The module blocks.parts, which model.py imports, changed since"),
    ],
)
def test_what_changed_is_named_and_not_run(folder: Path, name: str, sentence: str) -> None:
    changed = folder / name
    changed.write_text(changed.read_text() + TRACE)
    made = run_forked("zeroir", RUN, folder)
    assert made.returncode == 2
    assert sentence in made.stderr
    assert not changed.with_suffix(".ran").exists()


@pytest.mark.slow
def test_a_change_is_run_where_that_is_allowed(folder: Path) -> None:
    changed = folder / "model.py"
    changed.write_text(changed.read_text() + TRACE)
    profile = ["profile", "model.zir", "-o", "here.toml", "--rounds", "1"]
    assert "model.py changed since" in run_forked("zeroir", profile, folder).stderr
    assert not changed.with_suffix(".ran").exists()
    assert run_forked("zeroir", [*RUN, "--allow-model-change"], folder).returncode == 0
    assert changed.with_suffix(".ran").exists()


@pytest.mark.slow
def test_what_changed_is_imported_anew_in_one_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("blocks", "blocks.parts"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = zeroir.compile(folder / "model.py", world_size=1, evaluate=False)
    parts = folder / "blocks" / "parts.py"
    parts.write_text(parts.read_text().replace("square()", "square().square()"))
    after = zeroir.compile(folder / "model.py", world_size=1, evaluate=False)
    assert before.program.fingerprint != after.program.fingerprint
    assert before.artifact.model_imports != after.artifact.model_imports


@pytest.mark.slow
def test_modules_that_went_are_named(folder: Path) -> None:
    (folder / "blocks" / "parts.py").rename(folder / "blocks" / "others.py")
    made = run_forked("zeroir", RUN, folder)
    assert made.returncode == 2
    assert "The module blocks.parts, which model.py imports, was removed since" in made.stderr


@pytest.mark.slow
def test_a_program_from_elsewhere_does_not_choose_what_is_run(folder: Path) -> None:
    (folder / "away").mkdir()
    for named in (folder / "model.py", Path("../model.py")):
        compile_there = ["compile", str(named), "--world-size", "1", "-o", "up.zir"]
        assert run_forked("zeroir", compile_there, folder / "away").returncode == 0
        made = run_forked("zeroir", ["run", "up.zir", "--steps", "1"], folder / "away")
        assert made.returncode == 2
        assert f"pass --model {named} if you trust that file" in made.stderr
        followed = ["run", "up.zir", "--steps", "1", "--model", str(named)]
        assert run_forked("zeroir", followed, folder / "away").returncode == 0


def test_a_path_that_was_given_in_this_process_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        PARTS + "import torch\nmodel = make()\ndef batch():\n    return torch.ones(2, 4)\n"
    )
    compiled = zeroir.compile(path, world_size=1, evaluate=False)
    compiled.engine().close()
    compiled.save(tmp_path / "one.zir")
    monkeypatch.chdir(tmp_path.parent)
    zeroir.load(tmp_path / "one.zir").engine().close()  # beside the program
    (tmp_path / "away").mkdir()
    compiled.save(tmp_path / "away" / "one.zir")
    with pytest.raises(UserError, match="absolute or leads up"):
        zeroir.load(tmp_path / "away" / "one.zir").engine()
