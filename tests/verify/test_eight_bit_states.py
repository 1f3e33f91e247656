"""The laws of states of 8 bits, each broken on purpose: codes and scales belong together, and no block is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.edits import mapped, put, the
from tests.support.lowering import codes
from tests.support.programs import mlp
from tests.support.schedules import Case
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.contents import FlatContent
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Op
from zeroir.ir.optimizers.forms import ABSMAX, CODES
from zeroir.ir.program import Flat, Program
from zeroir.verify import verify

CASE = Case(stage=1, ranks=2, has_codes=True)
GROUPED = Case(stage=1, ranks=2, has_codes=True, is_grouped=True)


def test_the_programs_are_proved() -> None:
    for case in (CASE, GROUPED):
        assert verify(case.scheduled, case.logical).is_valid


def half(region: Region) -> Region:
    return replace(region, numel=region.numel // 2)


Change = Callable[[ops.OptimizerStep], ops.OptimizerStep]
CHANGES: dict[str, tuple[Change, set[str], str]] = {
    "scales of another state": (
        lambda op: replace(op, scales=op.scales[::-1]),
        {"Z403"},
        "takes %root.pre.exp_avg_sq_absmax as its exp_avg_absmax",
    ),
    "codes of another state": (
        lambda op: replace(op, states=op.states[::-1]),
        {"Z403"},
        "as its exp_avg_codes",
    ),
    "codes without scales": (lambda op: replace(op, scales=()), {"Z004"}, "is f32"),
    "scales of one state alone": (
        lambda op: replace(op, scales=op.scales[:1]),
        {"Z005"},
        "has 2 states, but scales of 1",
    ),
    "scales of one block of two": (
        lambda op: replace(op, scales=tuple(map(half, op.scales))),
        {"Z005"},
        "in blocks of 256, but has 0 scales",
    ),
    "a half of a block": (
        lambda op: replace(
            op, param=half(op.param), grad=half(op.grad), states=tuple(map(half, op.states))
        ),
        {"Z003", "Z005"},
        "off the 256 elements that share a scale",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_step_with_wrong_operands_is_rejected(name: str) -> None:
    change, expected, words = CHANGES[name]
    program = CASE.scheduled
    place, op = the(program, ops.OptimizerStep)
    report = verify(put(program, place, change(op)), CASE.logical)
    assert codes(report) == expected
    assert any(words in finding.sentence for finding in report.findings), report.render()


def test_the_scales_of_another_flat_are_rejected() -> None:
    program = CASE.scheduled
    place, first = the(program, ops.OptimizerStep)
    _, second = the(program, ops.OptimizerStep, nth=-1)
    mutant = put(program, place, replace(first, scales=second.scales))
    assert codes(mutant, CASE.logical) == {"Z403"}


def test_states_of_other_bits_than_those_of_the_logical_program_are_rejected() -> None:
    """Both programs are valid, and their flats are alike, but the states round otherwise."""
    logical = CASE.logical
    wide_name = {codes: state for state, codes in CODES.items()}
    buffers = []
    for buffer in logical.buffers:
        holds = buffer.holds
        if isinstance(holds, FlatContent) and holds.quantity in wide_name:
            holds = replace(holds, quantity=wide_name[holds.quantity])
            buffers.append(replace(buffer, dtype=DType.F32, holds=holds))
        elif not (isinstance(holds, FlatContent) and holds.quantity in ABSMAX.values()):
            buffers.append(buffer)

    def without_scales(op: Op) -> tuple[Op, ...]:
        return (replace(op, scales=()) if isinstance(op, ops.OptimizerStep) else op,)

    wide = mapped(replace(logical, buffers=tuple(buffers)), without_scales)
    assert verify(wide).is_valid
    report = verify(wide, logical)
    assert any("updated by another algorithm" in finding.sentence for finding in report.findings)


def test_a_parameter_within_a_block_is_rejected() -> None:
    program = CASE.logical
    (flat, *_) = [flat for flat in program.flats if len(flat.slots) > 1]
    second = flat.slots[1]
    moved = replace(second, offset=second.offset - 64)
    flats = tuple(replace(f, slots=(f.slots[0], moved)) if f is flat else f for f in program.flats)
    report = verify(replace(program, flats=flats))
    assert any("within one of the blocks of 256" in f.sentence for f in report.findings)
    assert "Z008" in codes(report)


def test_a_group_that_cuts_a_block_is_rejected() -> None:
    program = GROUPED.logical
    own = program.groups[1]
    (flat, start, stop), *rest = own.intervals
    groups = (
        replace(
            program.groups[0],
            intervals=tuple(
                (f, a, b + 64 if (f, b) == (flat, start) else b)
                for f, a, b in program.groups[0].intervals
            ),
        ),
        replace(own, intervals=((flat, start + 64, stop), *rest)),
    )
    report = verify(replace(program, groups=groups))
    assert codes(report) >= {"Z003"}
    assert any("whose states share a scale" in finding.sentence for finding in report.findings)


def test_scales_that_are_not_one_for_each_block_cannot_rest() -> None:
    program = CASE.logical
    longer = tuple(
        replace(b, numel=b.numel + 1) if b.name.endswith("exp_avg_absmax") else b
        for b in program.buffers
    )
    report = verify(replace(program, buffers=longer))
    assert "Z008" in codes(report)


def test_zeros_in_the_place_of_scales_are_rejected() -> None:
    """Element 1 of this flat is padding, but scale 1 is that of the second parameter."""
    program = mlp(dim=1, has_codes=True)
    place, op = the(
        program, ops.OptimizerStep, is_wanted=lambda op: len(_flat_of(program, op).slots) > 1
    )
    second = Region(buffer=op.scales[0].buffer, offset=1, numel=1)
    fill = ops.Fill(destination=second, value=0.0, stream=op.stream)
    assert verify(program).is_valid
    assert codes(put(program, place, op, fill)) == {"Z403"}


def _flat_of(program: Program, op: ops.OptimizerStep) -> Flat:
    holds = program.buffer_by_name[op.param.buffer].holds
    assert isinstance(holds, FlatContent)
    return program.flat_by_name[holds.flat]
