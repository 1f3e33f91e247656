"""Frozen parameters and units called twice, through every stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from tests.passes import happens
from tests.passes.numbers import assert_equal, inputs, run
from tests.passes.variants import called_twice, frozen
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from zeroir.ir import ops
from zeroir.ir.analysis.traffic import collective_bytes
from zeroir.ir.layout import padded_numel
from zeroir.ir.mesh import Axis
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.passes import manager
from zeroir.passes.common.resize import resize
from zeroir.verify import verify


@pytest.mark.parametrize(
    ("make", "world_size", "elide"),
    [
        (frozen, 3, True),
        (called_twice, 3, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (frozen, 3, False),
                (called_twice, 3, True),
                *product((frozen, called_twice), (1,), (True, False)),
            )
        ),
    ],
)
def test_every_stage_computes_the_same(
    make: Callable[[], Program], world_size: int, elide: bool
) -> None:
    logical = make()
    assert verify(logical).findings == ()
    batches = inputs(logical, world_size, 1)
    passes = for_stage(3, world_size, elide=elide)
    programs = [program for _, program in manager.steps(logical, passes)]
    expected = run(programs[0], batches)
    for program in programs[1:]:
        result = run(program, batches, schedule_seed=7)
        assert_equal(result, expected, range(world_size), program.passes[-1])


def test_a_frozen_flat_is_sharded_and_gathered_but_never_reduced() -> None:
    program = applied(frozen(), for_stage(3, 2))
    assert program.buffer_by_name["a.param"].numel == program.flat_by_name["a"].padded_numel // 2
    body = program.section_by_name[LAST_MICRO_STEP].body
    assert [life.buffer for life in happens.lives(body, program)] == ["a.full", "b.full"]
    reduced = [op.pairs[0].destination.buffer for op in body if isinstance(op, ops.ReduceScatter)]
    assert reduced == ["b.grad"]
    update = program.section_by_name[UPDATE].body
    assert [op.param.buffer for op in update if isinstance(op, ops.OptimizerStep)] == ["b.param"]


def test_a_frozen_unit_without_backward_is_still_gathered_twice_when_nothing_is_elided() -> None:
    program = applied(frozen(), for_stage(3, 2, elide=False))
    psi_bytes = sum(4 * flat.padded_numel for flat in program.flats)
    sent = collective_bytes(program)
    assert sent["all_gather"] == 2 * psi_bytes


def test_a_unit_called_twice_is_gathered_for_each_run_and_reduced_once() -> None:
    program = applied(called_twice(), for_stage(3, 2))
    body = program.section_by_name[LAST_MICRO_STEP].body
    found = [life.buffer.removesuffix(".full") for life in happens.lives(body, program)]
    assert found == [
        *("root.pre", "blocks.0", "blocks.1", "blocks.0", "root.post"),
        *("blocks.0", "blocks.1", "blocks.0"),
    ]
    reduced = [op.pairs[0].destination.buffer for op in body if isinstance(op, ops.ReduceScatter)]
    assert reduced == ["root.post.grad", "blocks.1.grad", "blocks.0.grad", "root.pre.grad"]
    assert max(happens.groups_live(body, program)) <= 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 64, 1000])
def test_resizing_moves_no_parameter(world_size: int) -> None:
    logical = called_twice()
    program = resize(logical, Axis(name="dp", size=world_size))
    for old, new in zip(logical.flats, program.flats, strict=True):
        numel = padded_numel(old.slots[-1].offset + old.slots[-1].numel, world_size)
        assert new == replace(old, padded_numel=numel)
