"""Constants of a batch are part of a program: each has one path, and no pass changes one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.edits import retyped
from tests.support.examples import examples
from tests.support.lowering import codes
from tests.support.programs import mlp
from tests.support.subjects import subject
from zeroir.artifact.schema import pack, unpack
from zeroir.ir.dtypes import DType
from zeroir.ir.limits import obeyed_character
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.program import Constant, ConstantBinding, Program
from zeroir.ir.text import parse, print_program
from zeroir.verify import verify

PLAIN_TEXT = st.text(max_size=8).filter(lambda text: obeyed_character(text) is None)


def with_constants(*constants: tuple[str, Constant]) -> Program:
    bindings = tuple(ConstantBinding(path=path, value=value) for path, value in constants)
    return replace(mlp(blocks=1), batch_constants=bindings)


@given(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), PLAIN_TEXT)
)
@examples(100)
def test_any_constant_survives_as_text_and_in_a_file(value: Constant) -> None:
    binding = ConstantBinding(path="a.b", value=value)
    program = Program(mesh=Mesh(axes=(Axis(name="dp", size=1),)), batch_constants=(binding,))
    for found in (parse(print_program(program)), unpack(Program, pack(program))):
        assert isinstance(found, Program)
        assert repr(found.batch_constants) == repr(program.batch_constants)


def test_constants_have_lines_of_their_own() -> None:
    program = with_constants(("smoothing", 0.1), ("mask", None), ("mode", "a b"), ("flag", True))
    lines = [line for line in print_program(program).splitlines() if "batch_constant" in line]
    assert lines == [
        "batch_constant smoothing = 0.1",
        "batch_constant mask = none",
        'batch_constant mode = "a b"',
        "batch_constant flag = true",
    ]
    assert verify(program).is_valid


@pytest.mark.parametrize("path", ["x", "a"])
def test_a_path_has_one_meaning(path: str) -> None:
    report = verify(with_constants(("a", 1), (path, 2)))
    assert [finding.code for finding in report.findings] == ["Z002"]
    assert f"input {path} is bound twice" in str(report.findings[0])


@pytest.mark.parametrize(
    "constants", [(), (("a", True),), (("a", 1.0),), (("a", 2),), (("a", 1), ("b", None))]
)
def test_a_program_with_other_constants_is_not_equivalent(
    constants: tuple[tuple[str, Constant], ...],
) -> None:
    reference = with_constants(("a", 1))
    assert verify(reference, reference).is_valid
    report = verify(with_constants(*constants), reference)
    assert codes(report) == {"Z406"}
    assert "is bound to another value than in the logical program" in str(report.findings[0])


@pytest.mark.parametrize(
    ("dtype", "is_constant"),
    [
        (DType.I32, True),
        (DType.F16, False),
        pytest.param(DType.I32, False, marks=pytest.mark.slow),
        pytest.param(DType.F16, True, marks=pytest.mark.slow),
    ],
)
def test_values_from_outside_keep_their_dtype(dtype: DType, is_constant: bool) -> None:
    """The bytes of a constant, and the elements of a module's buffer, would be read as other numbers."""
    made = subject("captured, stage 3")
    name = next(
        binding.buffer
        for binding in made.scheduled.module_buffers
        if (binding.data is not None) is is_constant
        and made.scheduled.buffer_by_name[binding.buffer].dtype is DType.F32
    )
    report = verify(retyped(made.scheduled, name, dtype), made.logical)
    assert not report.is_valid
    if dtype.itemsize_bytes == DType.F32.itemsize_bytes:
        assert codes(report) == {"Z406"}
        assert f"%{name} holds the value" in report.findings[0].sentence
