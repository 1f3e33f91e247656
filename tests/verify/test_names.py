"""What fields declare about names is checked: each is declared once, is not too long, and refers to a declared one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.stored_program import STORED
from zeroir.artifact import load
from zeroir.ir.bounds import BehindBound, BoundKind
from zeroir.ir.fields import Declares, NameKind, Refers, declared_fields
from zeroir.ir.limits import LONGEST_NAME
from zeroir.ir.program import Program
from zeroir.ir.sizes import Dim
from zeroir.verify import verify

STORED_PROGRAM = load(STORED).scheduled
PROGRAM = replace(
    STORED_PROGRAM,
    # One record of each kind, also of those that this program has not.
    bounds=(BehindBound(kind=BoundKind.ACTIVATIONS, behind="compute"),),
    weight=next(buffer.name for buffer in STORED_PROGRAM.buffers if buffer.name == "batch_weight"),
)


def codes(program: Program) -> dict[str, str]:
    return {finding.code: finding.sentence for finding in verify(program).findings}


def with_records(field: str, records: object) -> Program:
    """The program with other records in a field."""
    fields: dict[str, Any] = {field: records}
    return replace(PROGRAM, **fields)


def changed(field: str, name: str, value: object) -> Program:
    """The program with another value in a field of the first record, or the only one, that stands in a field of it."""
    records = getattr(PROGRAM, field)
    if name == "arguments":
        value = (value,)
    if not isinstance(records, tuple):
        return with_records(field, replace(records, **{name: value}))
    first, *others = records
    return with_records(field, (replace(first, **{name: value}), *others))


def references() -> Iterator[tuple[str, str, str]]:
    """Each field that refers to a name, the field of the program where its record stands, and the kind."""
    for field in declared_fields(Program):
        for kind in field.records:
            for part in declared_fields(kind):
                refers = part.mark(Refers)
                if refers is not None and refers.who and getattr(PROGRAM, field.name):
                    yield field.name, part.name, refers.kind


def test_every_kind_of_reference_is_there() -> None:
    assert {field for field, *_ in references()} == {
        *("comms", "bounds", "inputs", "outputs", "module_buffers", "scalars", "groups"),
        *("reports", "weighing"),
    }


@pytest.mark.parametrize(("field", "name", "kind"), list(references()))
def test_a_record_refers_to_what_is_declared(field: str, name: str, kind: str) -> None:
    sentence = codes(changed(field, name, "nowhere"))["Z001"]
    assert re.search(rf" the undeclared {kind} [%@]?nowhere$", sentence), sentence


def test_the_weight_is_declared() -> None:
    assert codes(replace(PROGRAM, weight="nowhere"))["Z001"] == (
        "the weight is bound to the undeclared buffer %nowhere"
    )


def declarations(kind: NameKind) -> str:
    """The field of a program in whose records such names are declared."""
    return next(
        field.name
        for field in declared_fields(Program)
        for record in field.records
        for part in declared_fields(record)
        if part.mark(Declares) == Declares(kind)
    )


@pytest.mark.parametrize(
    "kind",
    [
        *(NameKind.STREAM, NameKind.COMMUNICATOR, NameKind.FLAT, NameKind.BUFFER, NameKind.SEGMENT),
        *(NameKind.SECTION, NameKind.GROUP, NameKind.BOUND),
    ],
)
def test_a_name_is_declared_once(kind: NameKind) -> None:
    field = declarations(kind)
    first, *others = getattr(PROGRAM, field)
    twice = with_records(field, (first, first, *others))
    findings = [f.sentence for f in verify(twice).findings if f.code == "Z002"]
    assert any(re.fullmatch(rf"{kind} \S+ is declared twice", each) for each in findings), findings


@pytest.mark.parametrize(
    "kind",
    [kind for kind in NameKind if kind not in (NameKind.EVENT, NameKind.VALUE, NameKind.BOUND)],
)
def test_a_name_has_a_limit(kind: NameKind) -> None:
    long = "x" * (LONGEST_NAME + 1)
    match kind:
        case NameKind.AXIS:
            mesh = replace(PROGRAM.mesh, axes=(replace(PROGRAM.mesh.axes[0], name=long),))
            program = replace(PROGRAM, mesh=mesh)
        case NameKind.DIM:
            program = replace(PROGRAM, dims=(Dim(name=long, minimum=1, maximum=2),))
        case NameKind.PARAMETER:
            flat, *flats = PROGRAM.flats
            slots = (replace(flat.slots[0], aliases=(long,)), *flat.slots[1:])
            program = replace(PROGRAM, flats=(replace(flat, slots=slots), *flats))
        case NameKind.CONSTANT:
            constants = (replace(PROGRAM.batch_constants[0], path=long),)
            program = replace(PROGRAM, batch_constants=constants)
        case _:
            field = declarations(kind)
            (name,) = {
                part.name
                for declared in declared_fields(Program)
                if declared.name == field
                for record in declared.records
                for part in declared_fields(record)
                if part.mark(Declares) == Declares(kind)
            }
            program = changed(field, name, long)
    assert re.fullmatch(
        rf"the name of an? {kind} has 1,001 characters, more than 1,000", codes(program)["Z011"]
    )
