"""The laws of the text: what is printed parses back to the same, and printing is canonical."""

from __future__ import annotations

import dataclasses
import math
import time
import typing
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.support.arbitrary import NODE_ARGS, arbitrary, op_types, programs
from tests.support.examples import examples
from tests.support.programs import mlp
from tests.support.spelled import spelled
from zeroir.errors import UserError
from zeroir.ir.buffers import Buffer, Region, Role, Space, View
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.ops import Argument, Compute, Destination, Fill, Mode, Op
from zeroir.ir.program import Program, Section
from zeroir.ir.segments.segment import Node, NodeArg, Ref, Segment, TensorType
from zeroir.ir.text import ParseError, parse, print_op, print_program

MESH = Mesh(axes=(Axis(name="dp", size=4),))


def assert_round_trips(program: Program) -> None:
    text = print_program(program)
    parsed = parse(text)
    assert print_program(parsed) == text
    assert spelled(parsed) == spelled(program)


@given(programs())
@examples(60, suppress_health_check=[HealthCheck.too_slow])
def test_any_program_round_trips(program: Program) -> None:
    assert_round_trips(program)
    assert parse(print_program(program)) == program


@pytest.mark.parametrize("kind", op_types(), ids=lambda kind: kind.__name__)
def test_any_op_round_trips(kind: type) -> None:
    buffers = st.lists(typing.cast(st.SearchStrategy[Buffer], arbitrary(Buffer)), max_size=2)
    operation = typing.cast(st.SearchStrategy[Op], arbitrary(kind))

    @given(operation, buffers)
    @examples(30, suppress_health_check=[HealthCheck.too_slow])
    def law(op: Op, declared: list[Buffer]) -> None:
        section = Section(name="update", body=(op, op))
        program = Program(mesh=MESH, buffers=tuple(declared), sections=(section,))
        assert_round_trips(program)

    law()


@given(NODE_ARGS)
@examples(200)
def test_any_node_argument_round_trips(arg: NodeArg) -> None:
    node = Node(op="aten.relu.default", args=(arg,), kwargs=(("key", arg),), results=())
    program = Program(
        mesh=MESH, segments=(Segment(name="s", inputs=(), nodes=(node,), outputs=()),)
    )
    assert_round_trips(program)


@pytest.mark.parametrize(
    "value", [math.nan, -math.nan, math.inf, -math.inf, -0.0, 0.1, 5e-324, 1.7976931348623157e308]
)
def test_special_floats_round_trip(value: float) -> None:
    region = Region(buffer="b", offset=0, numel=1)
    fill = Fill(destination=region, value=value, stream="compute")
    node = Node(op="aten.relu.default", args=(value, (value,)), results=())
    assert_round_trips(
        Program(
            mesh=MESH,
            segments=(Segment(name="s", inputs=(), nodes=(node,), outputs=()),),
            sections=(Section(name="update", body=(fill,)),),
        )
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_real_programs_round_trip(precision: str, micro_steps: int) -> None:
    program = mlp(precision=precision, micro_steps=micro_steps, clip=1.0, tied=True)
    assert_round_trips(program)
    assert parse(print_program(program)) == program


def small(op: Op | None = None) -> Program:
    """A program with one buffer, one segment and at most one op."""
    matrix = TensorType(dtype=DType.F32, shape=(2, 3), stride=(3, 1))
    node = Node(op="aten.relu.default", args=(Ref(0),), results=(matrix,), source="model.py:7")
    return Program(
        mesh=MESH,
        buffers=(Buffer(name="b", dtype=DType.F32, numel=64, space=Space.DEVICE, role=Role.GRAD),),
        segments=(Segment(name="s", inputs=(matrix,), nodes=(node,), outputs=(1,)),),
        sections=(Section(name="update", body=() if op is None else (op,)),),
    )


def view(start: int, stop: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> View:
    region = Region(buffer="b", offset=start, numel=stop - start)
    return View(region=region, shape=shape, stride=stride)


@pytest.mark.parametrize(
    ("argument", "destination", "expected"),
    [
        (
            Argument(view=view(0, 6, (2, 3), (3, 1))),
            Destination(view=view(0, 64, (2, 3), (3, 1))),
            "compute @s(%b[0:6]) -> (%b)",
        ),
        (
            Argument(view=view(0, 6, (6,), (1,)), parameter="w"),
            Destination(view=view(6, 12, (2, 3), (3, 1)), gradient="w", mode=Mode.ACCUMULATE),
            "compute @s(w: %b[0:6]{6}) -> (grad w: += %b[6:12])",
        ),
        (Argument(view=view(0, 6, (2, 3), (1, 2))), None, "compute @s(%b[0:6]{2,3;1,2}) -> (_)"),
        (Argument(view=view(0, 1, (), ())), None, "compute @s(%b[0:1]{}) -> (_)"),
    ],
)
def test_a_view_shows_its_shape_only_where_the_segment_declares_another(
    argument: Argument, destination: Destination | None, expected: str
) -> None:
    op = Compute(
        segment="s", arguments=(argument,), destinations=(destination,), unit="u", stream="compute"
    )
    text = print_op(op, small())
    assert text.split("  ")[0] == expected
    assert_round_trips(small(op))


def test_what_is_derived_is_not_read() -> None:
    program = mlp(blocks=2)
    text = print_program(program)
    renumbered = "\n".join(
        line.replace("  0: ", " 77: ").replace("  1: ", "") for line in text.splitlines()
    )
    commented = "// a comment\n\n" + renumbered.replace("\n}", "  // here too\n\n   // and here\n}")
    assert parse(commented) == program


def edit(old: str, new: str) -> Callable[[str], str]:
    def edited(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return edited


@pytest.mark.parametrize(
    ("change", "marked", "expected"),
    [
        (edit("zeroir 1", "zerior 1"), "zerior 1", "begins with 'zeroir 1'"),
        (edit("zeroir 1", "zeroir 2"), "2", "upgrade zeroir"),
        (edit("mesh dp=4\n", ""), "", "'mesh AXIS=SIZE …'"),
        (edit("mesh dp=4", "mesh dp=four"), "four", "an integer"),
        (edit("mesh dp=4\n", "mesh dp=4\nmesh dp=4\n"), "mesh dp=4", "only one 'mesh'"),
        (edit("buffer %b", "bufer %b"), "bufer %b", "found 'bufer'"),
        (edit(": f32[64]", ": f31[64]"), "f31[64]", "an element type, one of f64"),
        (edit("device grad", "device gard"), "gard", "the buffer's role, one of param"),
        (edit("$1 = aten", "$2 = aten"), "$2 = aten", "expected $1: values are numbered"),
        (edit(" : f32[2,3]  at", " : (f32[2,3])  at"), "(f32[2,3])", "an element type"),
        (edit("($0)", "(€)"), "€)", "an argument: a value such as '$0'"),
        (edit('"model.py:7"', '"model.py:7'), '"model.py:7', "a string"),
        (edit("0: fill", "0: file"), "file %b", "one of alloc, release"),
        (edit("fill %b ", "fill %c "), "%c = ", "a 'buffer %c' line above"),
        (edit("fill %b ", "fill %b[0;64] "), "[0;64]", "a range such as '[0:64]'"),
        (edit("fill %b ", "fill %b[0:64]@ "), " = 1.5", "a mesh axis"),
        (edit("= 1.5", "= one"), "one", "a number"),
        (edit("stream=compute", "steam=compute"), "steam=compute", "'stream=…'"),
        (edit("stream=compute", "stream=compute on"), "on", "the end of the line"),
        (edit("stream=compute", "stream="), "", "expected the name of a stream"),
        (edit("  return ($1)\n", ""), "}", "or 'return'"),
        (edit("\n}\n", "\n"), "section", "'}'"),
    ],
)
def test_an_error_points_at_its_place(
    change: Callable[[str], str], marked: str, expected: str
) -> None:
    fill = Fill(destination=Region(buffer="b", offset=0, numel=64), value=1.5, stream="compute")
    text = change(print_program(small(fill)))
    with pytest.raises(ParseError) as caught:
        parse(text)
    error = caught.value
    message, line, caret = str(error).split("\n")
    assert isinstance(error, UserError)
    assert expected in message
    assert message.startswith(f"line {error.line}, column {error.column}: expected") or (
        "this text is version" in message
    )
    if marked:
        assert text.splitlines()[error.line - 1] == line
        assert line[error.column - 1 :].startswith(marked)
    assert caret == " " * (error.column - 1) + "^"


@given(st.data())
@examples(150)
def test_a_damaged_text_is_refused_or_read_but_never_crashes(data: st.DataObject) -> None:
    text = print_program(mlp(blocks=1, precision="fp16"))
    position = data.draw(st.integers(0, len(text) - 1))
    length = data.draw(st.integers(0, 3))
    inserted = data.draw(st.text('%@!$"{}[]():,=\n9ax. ', max_size=3))
    damaged = text[:position] + inserted + text[position + length :]
    try:
        program = parse(damaged)
    except ParseError:
        return
    assert_round_trips(program)


def test_text_with_the_line_ends_of_windows_is_read() -> None:
    program = mlp(blocks=1)
    assert parse(print_program(program).replace("\n", "\r\n")) == program


@pytest.mark.parametrize("before", [0, 50, 400])
@pytest.mark.parametrize("after", [0, 50, 400])
def test_a_long_line_is_shown_around_the_caret(before: int, after: int) -> None:
    text = f"zeroir 1  {'a=1 ' * before}b=? {'c=1 ' * after}\nmesh dp=1\n"
    with pytest.raises(ParseError) as caught:
        parse(text)
    _, line, caret = str(caught.value).split("\n")
    assert line[len(caret) - 1] == "?"
    assert len(line) <= 162


def test_deeply_nested_lists_are_refused() -> None:
    text = print_program(small()).replace("($0)", "(" + "[" * 5000 + ")")
    with pytest.raises(ParseError, match="nest at most"):
        parse(text)


@pytest.mark.slow
def test_ten_thousand_ops_print_and_parse_in_about_a_second() -> None:
    program = mlp(blocks=2)
    body = program.sections[0].body
    body = body * (10_000 // len(body) + 1)
    large = dataclasses.replace(
        program, sections=(dataclasses.replace(program.sections[0], body=body),)
    )
    start = time.process_time()
    text = print_program(large)
    printed = time.process_time()
    assert parse(text) == large
    parsed = time.process_time()
    # Three times what is expected of an idle machine, so that a busy one does not fail.
    assert printed - start < 3
    assert parsed - printed < 3
