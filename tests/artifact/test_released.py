"""Files of every released schema are always readable, with the same contents.

``tests/data/schema_MAJOR_MINOR.zir`` was written by that schema, and ``.txt`` beside it is the text
of its scheduled program. ``--update-golden`` writes those of the present schema and leaves the
others alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import mlp
from zeroir import artifact as artifacts
from zeroir.artifact import SCHEMA_VERSION, Artifact
from zeroir.config import make_options
from zeroir.ir.text import parse, print_program
from zeroir.passes.pipelines import lower
from zeroir.verify import verify

DATA = Path(__file__).parents[1] / "data"
PRESENT = DATA / f"schema_{SCHEMA_VERSION[0]}_{SCHEMA_VERSION[1]}.zir"


def make() -> Artifact:
    """Most features of a program: stage 3, fp16, clipping, two micro-steps, a tied parameter."""
    options = make_options(
        {
            "stage": 3,
            "world_size": 2,
            "precision": "fp16",
            "optimizer": "adamw",
            "clip": 1.0,
            "micro_steps": 2,
        }
    )
    logical = mlp(blocks=2, precision="fp16", clip=1.0, micro_steps=2, tied=True)
    return Artifact(
        logical=logical,
        scheduled=lower(logical, options),
        model_path="model.py",
        model_sha256="0" * 64,
        torch_version="2.13.0",
        zeroir_version="0.1.0",
    )


def released() -> list[Path]:
    return sorted({PRESENT, *DATA.glob("schema_*_*.zir")})


@pytest.mark.parametrize("path", released(), ids=lambda path: path.stem)
def test_a_released_schema_is_read_as_it_was_meant(path: Path, update_golden: bool) -> None:
    text = path.with_suffix(".txt")
    if update_golden and path == PRESENT:
        artifacts.save(make(), path)
        text.write_text(print_program(make().scheduled), "utf-8")
    artifact = artifacts.load(path)
    assert print_program(artifact.scheduled) == text.read_text("utf-8")
    assert parse(text.read_text("utf-8")) == artifact.scheduled
    assert verify(artifact.scheduled, reference=artifact.logical).is_valid


def test_the_present_schema_has_its_file() -> None:
    assert PRESENT.exists(), "run this file with --update-golden"
    data = PRESENT.read_bytes()
    assert artifacts.to_bytes(artifacts.from_bytes(data)) == data
