"""Numbers that are computed of sizes survive texts, files and instances, with the bits of Python's arithmetic."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace

import pytest

from tests.support.programs import mlp
from zeroir.artifact.schema import SchemaError, pack, unpack
from zeroir.errors import UserError
from zeroir.ir.analysis.instances import instance, narrowed, sizes_in
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Node, Ref, Segment, TensorType
from zeroir.ir.segments.size_numbers import FUNCTIONS, SizeNumber
from zeroir.ir.sizes import Dim
from zeroir.ir.text import parse, print_program

LENGTH = Dim(name="length", minimum=2, maximum=40)
NUMBER = SizeNumber(
    "mul", (0.1, SizeNumber("div", (3, SizeNumber("sqrt", (LENGTH.size * 2 - 1,)))))
)


def with_number(number: float) -> Program:
    """A program with a segment that multiplies by a number, and has one dim."""
    kind = next(iter(mlp(blocks=1).segments)).inputs[0]
    kind = TensorType(dtype=kind.dtype, shape=(LENGTH.size,), stride=(1,))
    node = Node(op="aten.mul.Tensor", args=(Ref(0), number), results=(kind,))
    segment = Segment(name="scaled", inputs=(kind,), nodes=(node,), outputs=(1,))
    program = mlp(blocks=1)
    return replace(program, dims=(LENGTH,), segments=(*program.segments, segment))


def number_of(program: Program) -> object:
    return program.segments[-1].nodes[0].args[1]


def test_a_number_is_a_float_at_the_bound_and_one_for_each_batch() -> None:
    assert float.__eq__(NUMBER, 0.1 * (3 / math.sqrt(79)))
    for length in (2, 7, 40):
        plain = number_of(instance(with_number(NUMBER), {"length": length}))
        assert type(plain) is float
        assert plain == NUMBER.at({"length": length}) == 0.1 * (3 / math.sqrt(2 * length - 1))
    few = number_of(narrowed(with_number(NUMBER), {"length": 7}))
    assert isinstance(few, SizeNumber)
    assert few.plain == NUMBER.at({"length": 7})
    assert few != NUMBER
    assert sizes_in(NUMBER) == (LENGTH.size * 2 - 1,)


def test_a_number_survives_text_file_and_copy() -> None:
    program = with_number(NUMBER)
    text = print_program(program)
    assert "mul(0.1, div(3, sqrt(length*2-1)))" in text
    assert number_of(parse(text)) == NUMBER
    assert unpack(Program, pack(program)) == program
    assert deepcopy(NUMBER) == NUMBER
    assert hash(NUMBER) == hash(SizeNumber("mul", NUMBER.operands))


@pytest.mark.parametrize("damaged", ["sqrt(length, 2)", "sqrt(none)", "div($0, 2)", "sqrt(true)"])
def test_damaged_numbers_are_refused(damaged: str) -> None:
    text = print_program(with_number(NUMBER))
    with pytest.raises(UserError, match=r"expected [12] numbers in"):
        parse(text.replace("mul(0.1, div(3, sqrt(length*2-1)))", damaged))


def test_a_file_with_an_unknown_function_is_refused() -> None:
    data = pack(with_number(NUMBER))
    with pytest.raises(SchemaError, match="'sqqt' is no function of 1 numbers"):
        unpack(Program, data.replace(b"sqrt", b"sqqt"))
    deep = NUMBER
    for _ in range(70):
        deep = SizeNumber("neg", (deep,))
    with pytest.raises(SchemaError, match="nest"):
        unpack(Program, pack(with_number(deep)))
    with pytest.raises(UserError, match="at most 64 deep"):
        parse(print_program(with_number(deep)))


def test_what_has_no_value_at_the_bound_is_not_a_number() -> None:
    assert math.isnan(SizeNumber("log", (LENGTH.size - 40,)))
    assert SizeNumber("log", (LENGTH.size - 40,)).replaced({LENGTH: 41}) == 0.0
    assert {count for count, _ in FUNCTIONS.values()} == {1, 2}
