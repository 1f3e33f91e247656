"""Schedules that are written as text, apart from the passes that make such schedules.

Each parses, prints, is proved equivalent to its logical program, needs every one of its waits, and computes on
lockstep what it should.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.passes.example_programs import LOGICAL
from tests.passes.numbers import assert_equal, assert_same, initial, inputs, run
from tests.support.edits import is_of, without_each
from tests.support.evaluations import with_evaluation
from tests.support.lowering import applied, codes
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir import ops
from zeroir.ir.program import Program
from zeroir.ir.text import parse, print_program
from zeroir.passes import manager
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.verify import verify

GATES = Path(__file__).parents[1] / "data" / "gates"
NAMES = ("hybrid", "paged", "offload", "evaluate")
OFFLOADED = mlp(blocks=1, precision="bf16", optimizer="momentum")


def gate(name: str) -> Program:
    return parse((GATES / f"{name}.zir").read_text())


def gate_logical(name: str) -> Program:
    if name == "offload":
        return OFFLOADED
    if name == "evaluate":
        return with_evaluation(LOGICAL)
    return LOGICAL


@pytest.mark.parametrize("name", NAMES)
def test_it_prints_parses_and_is_proved_equivalent(name: str) -> None:
    program = gate(name)
    assert parse(print_program(program)) == program
    assert verify(program, gate_logical(name)).findings == ()


@pytest.mark.parametrize("name", NAMES)
def test_no_wait_can_be_left_out(name: str) -> None:
    for where, mutant in without_each(gate(name), is_of(ops.Wait)):
        assert codes(mutant, gate_logical(name)), where


def test_hybrid_sharding_computes_what_one_device_does() -> None:
    """Four ranks, one batch: sums of four equal gradients, divided by four, are exact in any order."""
    program = gate("hybrid")
    alone = run(LOGICAL, inputs(LOGICAL, 1, 1))
    same = inputs(LOGICAL, 4, 1, is_same=True)
    for schedule_seed in range(4):
        assert_equal(run(program, same, schedule_seed), alone, [0] * 4, "hybrid")


@pytest.mark.parametrize(
    ("name", "logical", "stage"), [("paged", LOGICAL, 3), ("offload", OFFLOADED, 2)]
)
def test_paging_and_updating_on_the_host_change_no_bit(
    name: str, logical: Program, stage: int
) -> None:
    assert_same(gate(name), applied(logical, for_stage(stage, 2)), seeds=range(4))


def test_evaluation_gives_the_loss_and_leaves_no_trace() -> None:
    program = gate("evaluate")
    batches = inputs(LOGICAL, 2, 1)
    expected = run(applied(LOGICAL, for_stage(3, 2)), batches)
    lockstep = Lockstep(program, schedule_seed=5)
    lockstep.initialise_flats(initial(program))
    for step, of_ranks in enumerate(batches):
        losses = [float(x.loss) for x in lockstep.evaluate([of_rank[0] for of_rank in of_ranks])]
        assert losses == expected.losses[step]
        lockstep.step(of_ranks)
    for key, value in lockstep.full_state().items():
        assert torch.equal(value, expected.state[key]), key


def test_the_passes_gather_for_an_evaluation_too() -> None:
    program = manager.run(gate_logical("evaluate"), for_stage(3, 2))
    assert replace(program, passes=()) == replace(gate("evaluate"), passes=())
