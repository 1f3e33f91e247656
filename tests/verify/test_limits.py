"""Programs beyond the limits are rejected at once, and a logical program is proved like a scheduled one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.edits import put, the
from tests.support.lowering import codes
from tests.support.programs import mlp
from zeroir.ir.bounds import AheadBound, BoundKind
from zeroir.ir.mesh import STREAMS, Axis, Mesh
from zeroir.ir.ops import OptimizerStep
from zeroir.ir.program import Program
from zeroir.verify import Reference, verify

PROGRAM = mlp(blocks=1)


def with_buffer(**changes: object) -> Program:
    """The program with its last buffer, a temporary one, changed."""
    *others, last = PROGRAM.buffers
    return replace(PROGRAM, buffers=(*others, replace(last, **changes)))  # type: ignore[arg-type]


def with_slot(**changes: object) -> Program:
    """The program with its first parameter changed."""
    first, *others = PROGRAM.flats
    slot, *slots = first.slots
    slot = replace(slot, **changes)  # type: ignore[arg-type]
    return replace(PROGRAM, flats=(replace(first, slots=(slot, *slots)), *others))


def with_result(**changes: object) -> Program:
    """The program with the first result of its first segment changed."""
    first, *others = PROGRAM.segments
    node, *nodes = first.nodes
    (result, *results) = node.results
    assert result is not None
    node = replace(node, results=(replace(result, **changes), *results))  # type: ignore[arg-type]
    return replace(PROGRAM, segments=(replace(first, nodes=(node, *nodes)), *others))


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        (lambda: replace(PROGRAM, streams=STREAMS * 3000), "21,000 streams, more than 64"),
        (
            lambda: replace(PROGRAM, mesh=Mesh(axes=(Axis(name="dp", size=2**21),))),
            "more than 1,048,576 ranks",
        ),
        (
            lambda: replace(PROGRAM, mesh=Mesh(axes=(Axis(name="dp", size=1),) * 2000)),
            "2,000 axes, more than 8",
        ),
        (lambda: with_buffer(numel=2**62), "4,611,686,018,427,387,904 elements, more than"),
        (lambda: with_buffer(offset=2**60), "stands at byte 1,152,921,504,606,846,976, beyond"),
        (lambda: with_buffer(name="x" * 5000), "the name of a buffer has 5,000 characters"),
        (lambda: with_slot(shape=(2,) * 5000), "5,000 dimensions, more than 64"),
        (lambda: with_slot(shape=(-1,)), "a size below 0"),
        (lambda: with_result(shape=(2**40, 2**40), stride=(1, 1)), "more than 281,474,976,710,656"),
        (lambda: with_result(stride=()), "2 sizes and 0 strides"),
        (lambda: with_result(stride=(-1, 1)), "a stride below 0"),
        (
            lambda: replace(
                PROGRAM, bounds=(AheadBound(kind=BoundKind.FULL_GRADIENTS, ahead=2**70),)
            ),
            "the bound on full_gradients lets more than",
        ),
    ],
)
def test_what_is_beyond_a_limit_is_refused(spoilt: Callable[[], Program], words: str) -> None:
    report = verify(spoilt())
    assert codes(report) == {"Z011"}
    assert any(words in finding.sentence for finding in report.findings)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda program: replace(program, buffers=program.buffers[:-1]),
        lambda program: replace(program, segments=program.segments[1:]),
        lambda program: replace(program, flats=program.flats[1:]),
        lambda program: replace(program, sections=program.sections[1:] * 2),
    ],
)
def test_a_logical_program_is_proved_too(spoil: Callable[[Program], Program]) -> None:
    broken = spoil(PROGRAM)
    report = verify(PROGRAM, broken)
    assert not report.is_valid
    assert all(f.sentence.startswith("in the logical program, ") for f in report.findings)
    assert report.laws["Z406"] == "not examined: the logical program is broken"


def test_a_reference_is_proved_once_and_is_its_own_proof() -> None:
    reference = Reference(PROGRAM)
    assert verify(PROGRAM, reference) is reference.report
    assert reference.report.is_valid
    assert "Z406" in reference.report.laws


@pytest.mark.slow
def test_an_op_of_very_many_operands_is_told_of_quickly() -> None:
    place, step = the(PROGRAM, OptimizerStep)
    unknown = replace(step.grad, buffer="nobody")
    long = replace(step, states=(unknown,) * 200_000)
    assert codes(put(PROGRAM, place, long)) == {"Z001"}
