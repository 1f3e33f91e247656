"""Sections that run several micro-batches: each counts once, in its order, with its own inputs and weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.support.edits import at, edit, put, with_body
from tests.support.lowering import codes
from tests.support.schedules import Case
from tests.verify.test_rejects import find
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.ops import Op
from zeroir.ir.options import WrittenOptions
from zeroir.ir.program import LAST_MICRO_STEP, Program
from zeroir.passes.common.order import derive_waits, without_waits
from zeroir.passes.common.rewrite import map_regions
from zeroir.passes.communication.order_by_layer import OrderByLayer
from zeroir.passes.manager import apply
from zeroir.verify import verify

WHOLE = Case(
    stage=0, micro_steps=2, is_weighted=True, order=OrderByLayer(micro_batches=2, whole_step=True)
)
GROUPS = Case(stage=2, micro_steps=4, order=OrderByLayer(micro_batches=2))


def changed(
    program: Program, segment: str, nth: int, change: Mapping[str, Region | str]
) -> Program:
    """The program whose n-th call of a segment, in the last micro-step, uses other buffers or regions."""
    program = without_waits(program)

    def is_call(op: Op) -> bool:
        return isinstance(op, ops.Compute) and op.segment == segment

    def moved(region: Region) -> Region:
        other = change.get(region.buffer, region)
        return replace(region, buffer=other) if isinstance(other, str) else other

    place = find(program, LAST_MICRO_STEP, is_call, nth)
    return derive_waits(put(program, place, map_regions(at(program, place), moved)))


def x(start: int, stop: int) -> Mapping[str, Region]:
    return {"input.x": Region(buffer="input.x", offset=start, numel=stop - start)}


def test_both_kinds_are_proved() -> None:
    for case in (WHOLE, GROUPS):
        assert codes(case.scheduled, case.logical) == codes(case.scheduled) == set()


@pytest.mark.parametrize(
    ("segment", "nth", "change"),
    [
        # Micro-batch 0 is used twice, in the forward or in the backward, and micro-batch 1 never.
        ("pre.forward", 1, x(0, 8)),
        ("pre.backward", 1, x(0, 8)),
        ("post.forward", 1, x(0, 8)),
        # From the second unit on, the first forward goes on with the other micro-batch.
        ("block.forward", 0, {"h.0": "h.0.micro1"}),
        # Beside its slice.
        ("pre.forward", 0, x(1, 9)),
        ("pre.forward", 1, x(15, 23)),
    ],
)
def test_other_values_than_those_of_each_micro_batch_are_refused(
    segment: str, nth: int, change: Mapping[str, Region | str]
) -> None:
    mutant = changed(WHOLE.scheduled, segment, nth, change)
    assert codes(mutant, WHOLE.logical) == {"Z406"}


def test_two_micro_batches_that_change_places_between_two_units_are_refused() -> None:
    """Each counts once, but from the second unit of the backward on, each goes on with the gradient of the other."""
    program = without_waits(WHOLE.scheduled)
    names = {"d.2": "d.2.micro1", "d.2.micro1": "d.2"}

    def exchanged(op: Op) -> Op:
        if isinstance(op, ops.Memory):
            return replace(op, buffer=names.get(op.buffer, op.buffer))
        return map_regions(op, lambda r: replace(r, buffer=names.get(r.buffer, r.buffer)))

    def is_next(op: Op) -> bool:
        return isinstance(op, ops.Compute) and op.segment == "block.backward"

    section, index = find(program, LAST_MICRO_STEP, is_next)
    mutant = edit(
        program,
        section,
        lambda body: body.__setitem__(slice(index, None), map(exchanged, body[index:])),
    )
    assert codes(derive_waits(mutant), WHOLE.logical) == {"Z406"}


def test_a_slice_beyond_the_buffer_is_refused() -> None:
    mutant = changed(WHOLE.scheduled, "pre.forward", 1, x(25, 33))
    assert codes(mutant, WHOLE.logical) == {"Z003"}


@pytest.mark.parametrize("case", [WHOLE, GROUPS])
def test_a_gradient_that_is_left_out_or_added_twice_is_refused(case: Case) -> None:
    def adds(op: Op) -> bool:
        is_sum = isinstance(op, ops.Cast) and op.mode is ops.Mode.ACCUMULATE
        return is_sum and isinstance(op, ops.Cast) and op.destination.buffer.endswith("grad_sum")

    program = without_waits(case.scheduled)
    place = find(program, LAST_MICRO_STEP, adds, 1)
    for new in ((), (at(program, place),) * 2):
        report = verify(derive_waits(put(program, place, *new)))
        assert "Z402" in codes(report)


def test_the_weight_of_another_micro_batch_is_refused() -> None:
    program = without_waits(WHOLE.scheduled)

    def scales(op: Op) -> bool:
        return isinstance(op, ops.Scale) and op.region.buffer == "tangent"

    place = find(program, LAST_MICRO_STEP, scales, 1)
    scale = at(program, place)
    assert isinstance(scale, ops.Scale)
    mutant = put(program, place, replace(scale, by=replace(scale.by, offset=0)))
    assert codes(derive_waits(mutant), WHOLE.logical) == {"Z406"}


@pytest.mark.parametrize(
    ("options", "interleaved", "sentence"),
    [
        ({"micro_steps": "3"}, 2, "runs 2 micro-batches, which do not divide the 3 of a step"),
        ({"micro_steps": "two"}, 2, "runs 2 micro-batches, which do not divide the two of a step"),
        ({"micro_steps": "6"}, 2, "a step runs 2 micro-batches, and not the 6 that it has"),
    ],
)
def test_a_false_claim_of_the_number_is_refused(
    options: Mapping[str, str], interleaved: int, sentence: str
) -> None:
    claimed = WrittenOptions.of({**WHOLE.scheduled.options.texts, **options})
    mutant = replace(WHOLE.scheduled, interleaved=interleaved, options=claimed)
    (finding,) = verify(mutant, WHOLE.logical).findings
    assert (finding.code, sentence in finding.sentence) == ("Z406", True)


def test_a_number_that_no_section_could_run_costs_no_time() -> None:
    """The logical program is interpreted as often as the program says, if it has the ops for it."""
    count = 8 * 1024
    buffers = tuple(
        replace(b, numel=b.numel * count)
        if b.name in ("input.x", "batch_loss", "batch_weight")
        else b
        for b in GROUPS.logical.buffers
    )
    scalars = tuple(
        replace(s, values=s.values * count) if s.buffer == "batch_weight" else s
        for s in GROUPS.logical.scalars
    )
    claimed = replace(GROUPS.logical, interleaved=count, buffers=buffers, scalars=scalars)
    found = codes(claimed, GROUPS.logical)
    assert found
    assert found <= {"Z402", "Z406", "Z005", "Z008"}


def test_state_that_two_units_share_keeps_the_order_of_micro_batches() -> None:
    """What the first unit reads, a later one has changed for the micro-batch before."""
    logical = GROUPS.logical
    names = [op.unit for op in logical.step_ops() if isinstance(op, ops.Compute)]
    first = names[0]
    section = logical.section_by_name[LAST_MICRO_STEP]
    shared = ops.Fill(
        destination=Region(buffer="loss", offset=0, numel=1), value=0.0, stream="compute"
    )
    at_first = next(i for i, op in enumerate(section.body) if isinstance(op, ops.Compute))
    body = (*section.body[: at_first + 1], shared, *section.body[at_first + 1 :])
    with pytest.raises(UserError, match=f"%loss, .* in {first} and .*--order step"):
        apply(OrderByLayer(micro_batches=2), with_body(logical, LAST_MICRO_STEP, body))


def test_more_micro_batches_than_a_program_has_room_for_are_refused() -> None:
    with pytest.raises(UserError, match="ops of 100,000 micro-batches, more than 1,000,000"):
        apply(OrderByLayer(micro_batches=100_000), GROUPS.logical)
