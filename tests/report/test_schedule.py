"""The schedule for readers: the units of its rows, and the folding of equal blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.config import make_options
from zeroir.ir import ops
from zeroir.ir.analysis.traffic import collective_bytes
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.passes.pipelines import for_options
from zeroir.report.schedule import Fold, Row, fold, schedule


def lowered(
    stage: int,
    *,
    micro_steps: int = 1,
    blocks: int = 3,
    tied: bool = False,
    overlap_update: bool = True,
) -> Program:
    options = make_options(
        {
            "stage": stage,
            "world_size": 2,
            "micro_steps": micro_steps,
            "overlap_update": overlap_update,
        }
    )
    return applied(mlp(blocks=blocks, micro_steps=micro_steps, tied=tied), for_options(options))


def rows_of(program: Program) -> list[Row]:
    return [
        row
        for name in (LAST_MICRO_STEP, UPDATE)
        for row in schedule(program, program.section_by_name[name])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_a_move_of_a_flat_belongs_to_its_unit_alone(
    stage: int, micro_steps: int, tied: bool
) -> None:
    """A tied weight's gradient too, though another unit contributes to it first."""
    program = lowered(stage, micro_steps=micro_steps, tied=tied)
    section = program.section_by_name[LAST_MICRO_STEP]
    for row in schedule(program, section):
        op = section.body[row.line]
        if not isinstance(op, ops.Collective):
            continue
        (unit,) = row.units
        homes = {flat.unit for flat in program.flats if f"{flat.name}." in str(op)}
        assert homes == {unit}


@pytest.mark.parametrize("stage", range(4))
def test_payloads_add_up_to_the_bytes_of_the_summary(stage: int) -> None:
    program = lowered(stage)
    payload = sum(row.payload_bytes for row in rows_of(program))
    assert payload == sum(collective_bytes(program).values())


def test_a_unit_sees_its_rows_and_no_others() -> None:
    program = lowered(3)
    section = program.section_by_name[LAST_MICRO_STEP]
    rows = schedule(program, section)
    for unit in {flat.unit for flat in program.flats}:
        assert schedule(program, section, unit=unit) == [row for row in rows if unit in row.units]


def unfolded(items: Sequence[Row | Fold]) -> list[Row | None]:
    """The shown rows, and None for each folded row."""
    shown_rows: list[Row | None] = []
    for item in items:
        shown_rows += [item] if isinstance(item, Row) else [None] * (item.repeats * item.period)
    return shown_rows


ROWS = st.lists(
    st.builds(
        lambda unit, op, flops: Row(
            line=0, op=op, stream="s", units=(f"b.{unit}",), detail=f"@b.{unit}", flops=flops
        ),
        st.integers(0, 20),
        st.sampled_from(["compute", "release"]),
        st.integers(0, 1),
    ),
    max_size=40,
)


@given(rows=ROWS)
def test_folding_loses_no_row_and_changes_none(rows: list[Row]) -> None:
    numbered = [replace(row, line=line) for line, row in enumerate(rows)]
    shown = unfolded(list(fold(numbered)))
    assert len(shown) == len(numbered)
    assert all(row in (None, real) for row, real in zip(shown, numbered, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("overlap_update", [False, True])
def test_a_deep_model_is_as_short_as_a_shallow_one(overlap_update: bool) -> None:
    items = [
        list(fold(rows_of(lowered(3, blocks=blocks, overlap_update=overlap_update))))
        for blocks in (8, 12)
    ]
    assert len(items[0]) == len(items[1])
    forward, backward, *update = [item for item in items[1] if isinstance(item, Fold)]
    assert forward.units == tuple(f"blocks.{i}" for i in range(1, 11))
    assert backward.units == tuple(reversed(forward.units))
    expected = [] if overlap_update else [tuple(f"blocks.{i}" for i in range(1, 12))]
    assert [row.units for row in update] == expected


def test_a_block_of_another_size_is_not_folded() -> None:
    program = lowered(3, blocks=12, overlap_update=False)
    update = program.section_by_name[UPDATE]
    steps = [op for op in update.body if isinstance(op, ops.OptimizerStep)]
    middle = steps[len(steps) // 2]
    smaller = replace(middle, param=replace(middle.param, numel=middle.param.numel // 2))
    body = tuple(smaller if op is middle else op for op in update.body)
    items = fold(schedule(program, replace(update, body=body)))
    shown = {item.line for item in items if isinstance(item, Row)}
    assert update.body.index(middle) in shown
