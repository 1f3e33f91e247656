"""The schema: any well-typed program survives, and no class changes without a version."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given

from tests.artifact.schema_description import described
from tests.support.arbitrary import programs
from tests.support.examples import examples
from tests.support.programs import mlp
from tests.support.spelled import spelled
from zeroir.artifact import SCHEMA_VERSION, Artifact, to_bytes
from zeroir.artifact.schema import pack, unpack
from zeroir.errors import InternalError
from zeroir.ir.limits import obeyed_character
from zeroir.ir.program import Program, Section
from zeroir.ir.segments.segment import Node, Segment

LOCK = Path(__file__).parents[1] / "data" / "schema_lock.json"


def printable(value: object) -> object:
    """The value with another character in the place of each that a terminal obeys: no file holds those."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: printable(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value)(**fields)
    if isinstance(value, tuple):
        return tuple(map(printable, value))
    if type(value) is str:
        return "".join("?" if obeyed_character(character) else character for character in value)
    return value


@given(programs().map(printable))
@examples(60, suppress_health_check=[HealthCheck.too_slow])
def test_any_program_survives(program: object) -> None:
    assert isinstance(program, Program)
    decoded = unpack(Program, pack(program))
    assert decoded == program
    assert spelled(decoded) == spelled(program)


def test_not_a_number_survives() -> None:
    node = Node(op="aten.full.default", args=((), math.nan), results=())
    segment = Segment(name="s", inputs=(), nodes=(node,), outputs=())
    program = dataclasses.replace(mlp(blocks=1), segments=(segment,))
    assert spelled(unpack(Program, pack(program))) == spelled(program)


def test_a_field_of_the_wrong_type_is_not_stored() -> None:
    section = Section(name=3, body=())  # type: ignore[arg-type]
    program = dataclasses.replace(mlp(blocks=1), sections=(section,))
    artifact = Artifact(
        logical=program,
        scheduled=program,
        model_path="model.py",
        model_sha256="0" * 64,
        torch_version="2.13.0",
        zeroir_version="0.1.0",
    )
    place = r"logical\.sections\[0\]\.name: expected 'str', got 'int'"
    with pytest.raises(InternalError, match=place):
        to_bytes(artifact)


def test_the_schema_is_the_locked_one(update_golden: bool) -> None:
    schema = {"version": list(SCHEMA_VERSION), "classes": described(Artifact)}
    if update_golden:
        LOCK.write_text(json.dumps(schema, indent=1) + "\n", "utf-8")
    locked = json.loads(LOCK.read_text("utf-8"))
    if locked == schema:
        return
    changed = sorted(
        name
        for name in {*locked["classes"], *described(Artifact)}
        if locked["classes"].get(name) != described(Artifact).get(name)
    )
    advice = (
        "run this test with --update-golden and name the change in CHANGELOG.md"
        if locked["version"] != schema["version"]
        else "raise SCHEMA_VERSION in zeroir/artifact/schema.py, by a minor version if old files "
        "mean the same, and run this test with --update-golden"
    )
    pytest.fail(f"The schema changed in {', '.join(changed) or 'its version'}: {advice}.")
