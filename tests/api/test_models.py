"""A program and its model file may move: where the file is looked for, and what is said where it is not found."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

import zeroir
from tests.support.programs import mlp
from zeroir import artifact as artifacts
from zeroir.api import CompiledProgram, load_program
from zeroir.api.model_of_program import find_model
from zeroir.api.running.engines import lowered_again_note
from zeroir.artifact import Artifact
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.memory.curve import peak_text
from zeroir.passes.pipelines import lower
from zeroir.report.render import render_text, summary_html
from zeroir.runtime.engine.engine import Engine

SOURCE = b"# a model\n"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``project/build/gpt.zir``, compiled in ``project`` from ``examples/gpt.py``; nobody is in ``project`` now."""
    options = make_options({"stage": 2, "world_size": 2})
    artifact = Artifact(
        logical=dataclasses.replace(mlp(), options=options),
        scheduled=lower(mlp(), options),
        model_path="examples/gpt.py",
        model_sha256=hashlib.sha256(SOURCE).hexdigest(),
        torch_version="2.13.0",
        zeroir_version=zeroir.__version__,
    )
    for folder in ("project/build", "project/examples", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    path = tmp_path / "project" / "build" / "gpt.zir"
    artifacts.save(artifact, path)
    (tmp_path / "project" / "examples" / "gpt.py").write_bytes(SOURCE)
    monkeypatch.chdir(tmp_path / "elsewhere")
    return path


def moved(path: Path, target: Path) -> Path:
    return path.rename(target)


def found_model(path: Path) -> Path:
    program = load_program(path)
    return find_model(program.artifact, program.path)


def found(path: Path) -> Path:
    return found_model(path).resolve()


def test_from_any_folder(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = program.parents[1] / "examples" / "gpt.py"
    assert found(program) == expected
    monkeypatch.chdir(program.parent)
    assert found(Path("gpt.zir")) == expected
    monkeypatch.chdir(program.parents[1])
    assert found(Path("build/gpt.zir")) == expected


def test_a_program_that_moved_alone_still_works_where_it_was_compiled(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "project")
    assert found(moved(program, tmp_path / "gpt.zir")).parent.name == "examples"


def test_beside_the_program(program: Path, tmp_path: Path) -> None:
    model = moved(tmp_path / "project" / "examples" / "gpt.py", tmp_path / "elsewhere" / "gpt.py")
    assert found(moved(program, tmp_path / "elsewhere" / "other.zir")) == model


def test_the_right_one_of_several(program: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "examples").mkdir()
    (tmp_path / "elsewhere" / "examples" / "gpt.py").write_text("# another model\n")
    assert found(program) == tmp_path / "project" / "examples" / "gpt.py"


def test_where_it_is_gone(program: Path, tmp_path: Path) -> None:
    (tmp_path / "project" / "examples" / "gpt.py").unlink()
    with pytest.raises(UserError, match=r"examples/gpt\.py.*gpt\.zir.*--model"):
        found_model(program)


@pytest.mark.parametrize("leads", ["{folder}/examples/gpt.py", "../project/examples/gpt.py"])
def test_a_path_that_leads_away_is_followed_only_beside_the_program(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leads: str
) -> None:
    named = leads.format(folder=tmp_path / "project")
    artifact = dataclasses.replace(artifacts.load(program), model_path=named)
    artifacts.save(artifact, program)
    monkeypatch.chdir(program.parents[1])
    with pytest.raises(UserError, match=r"not followed unless you name it.*--model .*gpt\.py"):
        found_model(program)
    (program.parent / "gpt.py").write_bytes(SOURCE)
    assert found(program) == program.parent / "gpt.py"


def test_lowering_anew_is_said_in_a_line(program: Path) -> None:
    compiled = load_program(program)
    assert compiled.specialise(world_size=2) == compiled
    assert lowered_again_note(compiled.program, 2) is None
    other = compiled.specialise(world_size=1)
    assert lowered_again_note(compiled.program, 1) == "Compiled for 2 ranks, lowered again for 1."
    assert other.path == program
    assert other.program.mesh.world_size == 1
    assert lowered_again_note(other.program, 3) == "Compiled for 1 rank, lowered again for 3."


def cells(html: str) -> dict[str, str]:
    """The facts of a table for notebooks."""
    rows = ElementTree.fromstring(html).findall("tr")
    return {str(name.text): str(fact.text) for name, fact in rows}


def test_a_notebook_shows_what_show_begins_with(program: Path) -> None:
    compiled = load_program(program)
    weight = "of a batch is the number of labels < 3 & > 0"
    facts = cells(summary_html({**compiled.summary(), "weight": weight}))
    shown = render_text(compiled.summary(), compiled.program)
    for name, fact in cells(compiled._repr_html_()).items():
        assert re.search(rf"^{name} +{re.escape(fact)}$", shown, re.M)
        assert name == "weight" or facts[name] == fact
    assert facts["weight"] == weight


def test_a_program_says_in_a_line_what_it_is(program: Path) -> None:
    compiled: CompiledProgram = load_program(program)
    sections = {section.name: len(section.body) for section in compiled.program.sections}
    op_counts = ", ".join(f"{name} {count}" for name, count in sections.items())
    outline = f"stage 2, fp32, mesh dp=2, {len(compiled.units)} units; ops in {op_counts}"
    assert re.fullmatch(
        rf"<CompiledProgram of examples/gpt.py: {outline}; peak buffers \d+\.\d kB per rank; "
        r"text\(\) is the whole program>",
        repr(compiled),
    )
    assert repr(compiled.program) == f"<Program: {outline}>"
    named = dataclasses.replace(compiled.program, fingerprint="0123456789abcdef")
    assert repr(named) == f"<Program 0123456789ab: {outline}>"
    engine = Engine(compiled.specialise(world_size=1).program)
    try:
        memory = peak_text(engine.program)
        assert re.fullmatch(r"peak buffers \d+\.\d kB per rank", memory)
        outline = engine.program.outline
        assert repr(engine) == (f"<Engine of rank 0 of 1 on cpu after step 0: {outline}; {memory}>")
        assert cells(engine._repr_html_()) == {
            "engine": "rank 0 of 1 on cpu after step 0",
            "program": outline,
            "memory": memory,
        }
    finally:
        engine.close()
