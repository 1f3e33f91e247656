"""A plan gives every temporary buffer a place, changes nothing else, and never outlives the ops that it is for."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given

from tests.passes.strategies import Case, cases
from tests.support.examples import examples
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from tests.support.schedules import Case as Schedule
from tests.support.schedules import is_same, run
from zeroir.artifact.schema import pack, unpack
from zeroir.ir.program import Program
from zeroir.ir.text import parse, print_program
from zeroir.memory.placement import place_all, places_to_run, planned, unplanned
from zeroir.passes import manager
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.overlap_update import OverlapUpdate
from zeroir.verify import verify


def offsets(program: Program) -> dict[str, int | None]:
    return {buffer.name: buffer.offset for buffer in program.buffers}


@given(cases())
@examples(15)
def test_a_plan_is_whole_proved_and_says_itself(case: Case) -> None:
    program = case.scheduled()
    after = PlanMemory()(program)
    assert unplanned(after) == program
    assert all((b.offset is None) is b.is_persistent for b in after.buffers)
    report = verify(after)
    assert report.is_valid
    assert report.laws["Z106"] == "proved"
    assert PlanMemory()(after) == after
    assert parse(print_program(after)) == after
    assert unpack(Program, pack(after)) == after


def test_the_runtime_takes_the_places_that_the_program_says() -> None:
    program = Schedule(stage=3).scheduled
    after = PlanMemory()(program)
    moved = (b if b.offset is None else replace(b, offset=b.offset + 4096) for b in after.buffers)
    far = replace(after, buffers=tuple(moved))
    assert planned(program) is None
    for space, placement in places_to_run(far).items():
        assert placement.offsets == {
            b.name: b.offset for b in far.buffers if b.offset is not None and b.space is space
        }
        assert placement.size_bytes == place_all(program)[space].size_bytes + 4096
    assert is_same(run(far), run(program))


def test_the_next_pass_is_handed_the_program_without_its_plan() -> None:
    logical = mlp(blocks=2)
    passes = for_stage(2, 2)
    early = manager.run(logical, (*passes, PlanMemory()))
    assert any(offsets(early).values())
    late = manager.run(early, [OverlapUpdate()], reference=logical)
    assert not any(offsets(late).values())
    again = manager.run(late, [PlanMemory()], reference=logical)
    assert any(offsets(again).values())
    assert again.passes[-3:] == ("plan-memory", "overlap-update", "plan-memory")
