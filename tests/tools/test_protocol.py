"""The search over states visits what it must, finds what is broken, and agrees with the verifier."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.artifacts import artifact_of
from tests.support.subjects import subject
from tools.checker.program import Declarations
from tools.checker.reading import FileRecord
from tools.protocol.damages import OUTCOMES, damages
from tools.protocol.programs import KINDS, compiled, declarations, runs
from tools.protocol.report import searched
from tools.protocol.search import first_finding, races, visit
from tools.protocol.system import Queue, QueuedTask, System, Touch, system_of
from zeroir.artifact.file import save
from zeroir.ir import ops
from zeroir.ir.program import Program

SMALLEST = ("nothing; fp16, clipped", 1)
"""A program whose ranks have few states together."""
QUICK = (("nothing", 3), ("the same, speculative", 2), ("parameters", 3))


def declared(kind: str, stage: int) -> Declarations:
    return declarations(*compiled(kind, stage))


def system(kind: str, stage: int) -> System:
    names = declared(kind, stage)
    return system_of([names] * names.ranks, next(runs(names)))


def two_queues(needs: Sequence[tuple[tuple[int, int], ...]]) -> System:
    """A writer of two elements, and a reader of one of them, whose step needs what is given."""
    return System(
        queues=[
            Queue(0, "one", [QueuedTask("write", (Touch("b", 0, 2, writes=True),))], [(), ()]),
            Queue(0, "two", [QueuedTask("read", (Touch("b", 1, 2, writes=False),))], list(needs)),
        ]
    )


def test_all_orders_of_independent_steps_are_visited() -> None:
    made = two_queues([(), ()])
    found = visit(made, [0, 1])
    assert found.states == 9
    assert list(races(made, found)) == ["race: write and read use %b at once"]


def test_a_need_orders_steps() -> None:
    made = two_queues([((0, 2),), ()])
    found = visit(made, [0, 1])
    assert (found.states, found.pairs, found.stop) == (5, set(), "")


def test_a_need_that_nothing_meets_is_a_deadlock() -> None:
    assert visit(two_queues([((0, 3),), ()]), [0, 1]).stop.startswith("deadlock")


@pytest.mark.parametrize(("kind", "stage"), QUICK)
def test_valid_programs_have_no_race_and_no_deadlock(kind: str, stage: int) -> None:
    names = declared(kind, stage)
    for run in runs(names):
        assert first_finding(system_of([names] * 2, run)) is None


def test_every_state_of_both_ranks_is_visited() -> None:
    found = searched(declared(*SMALLEST))
    assert found.findings == []
    assert found.states > 0
    assert found.together > 0


def test_watching_few_queues_shows_what_the_whole_search_shows() -> None:
    made = system(*SMALLEST)
    everything = range(len(made.queues))
    whole = visit(made, everything)
    of_ranks = [visit(made, made.queues_of(rank)) for rank in (0, 1)]
    of_pairs = [
        visit(made, (one, other))
        for rank in (0, 1)
        for one in made.queues_of(rank)
        for other in made.queues_of(rank)
        if one < other
    ]
    assert whole.states > 10 * max(found.states for found in of_ranks)
    assert whole.pairs
    for reduced in (of_ranks, of_pairs):
        assert set().union(*(found.pairs for found in reduced)) == whole.pairs
        assert {found.stop for found in reduced} == {whole.stop} == {""}


def test_ranks_that_stop_do_so_in_every_search() -> None:
    programs = [declared(*SMALLEST)] * 2
    made = system_of([programs[0], reordered(*SMALLEST)], next(runs(programs[0])))
    stops = {
        visit(made, watched).stop
        for watched in ((), made.queues_of(0), made.queues_of(1), range(len(made.queues)))
    }
    (stop,) = stops
    assert "meets another collective" in stop


def reordered(kind: str, stage: int) -> Declarations:
    """The program with two collectives of the last micro-step in each other's place."""
    names = declared(kind, stage)
    section = names.sections["last_micro_step"]
    body = list(section.body)
    first, second = [i for i, op in enumerate(body) if op.kind == "ReduceScatter"][:2]
    body[first], body[second] = body[second], body[first]
    names.sections[section.name] = FileRecord("Section", {**vars(section), "body": tuple(body)})
    return names


@pytest.mark.parametrize(("kind", "stage"), QUICK[:2])
def test_the_verifier_agrees_about_each_damage(kind: str, stage: int) -> None:
    judged = list(damages(*compiled(kind, stage)))
    assert {each.kind for each in judged} == {"a wait left out", "a collective moved"}
    assert not [each for each in judged if each.is_unknown]
    assert sum(each.outcome == OUTCOMES[0] for each in judged) > len(judged) / 2


def without_waits(program: Program, of: str) -> Program:
    sections = (
        replace(s, body=tuple(op for op in s.body if not isinstance(op, ops.Wait)))
        if s.name == of
        else s
        for s in program.sections
    )
    return replace(program, sections=tuple(sections))


@pytest.mark.parametrize("name", ["paged", "offload", "stage 3, parameters on the host"])
def test_programs_of_other_tests_have_no_race_either(name: str) -> None:
    made = subject(name)
    names = declarations(made.scheduled, made.logical)
    broken = declarations(without_waits(made.scheduled, "last_micro_step"), made.logical)
    for run in runs(names):
        assert first_finding(system_of([names] * names.ranks, run)) is None
        found = first_finding(system_of([broken] * names.ranks, run))
        assert found is not None
        assert found.startswith("race: ")


def test_the_command_reads_files(tmp_path: Path) -> None:
    scheduled, logical = compiled(*SMALLEST)
    valid, broken = tmp_path / "valid.zir", tmp_path / "broken.zir"
    save(artifact_of(scheduled, logical), valid)
    save(artifact_of(without_waits(scheduled, "update"), logical), broken)
    command = [sys.executable, "-m", "tools.protocol", str(valid), str(broken)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 1
    assert f"{valid}: race" not in ran.stdout
    assert f"{broken}: race" in ran.stdout


def test_every_kind_has_options_of_its_own() -> None:
    assert len({tuple(options.items()) for options in KINDS.values()}) == len(KINDS)
