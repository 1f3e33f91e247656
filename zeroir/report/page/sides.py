"""The content of a page: one program, or two to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from zeroir.cost.simulate import Simulation
from zeroir.cost.tasks import step_sections
from zeroir.ir.program import STEP_SECTIONS, Program
from zeroir.report.diff import AlignedOp, aligned_ops
from zeroir.report.page.facts import MemoryCurve, StepOp, memory_curve, step_ops
from zeroir.report.summary import Summary
from zeroir.verify import Report

LETTERS: Final = ("A", "B")
"""The letters in place of the names of two programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedProgram:
    """A program with its verification ``report`` and its ``simulation``.

    ``name`` is its name on the page; ``budget_bytes`` is the device memory of a rank, drawn as a line.
    """

    name: str
    program: Program
    report: Report
    summary: Summary
    simulation: Simulation
    budget_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A reported program with the ops and the memory of its step.

    ``letter`` replaces its name if there are two: A or B, otherwise empty.
    """

    reported: ReportedProgram
    letter: str
    ops: Sequence[StepOp]
    curve: MemoryCurve


def sides(programs: Sequence[ReportedProgram]) -> list[Side]:
    """Return one side for each of at most two programs."""
    letters = [""] if len(programs) == 1 else LETTERS
    return [
        Side(
            reported=reported,
            letter=letter,
            ops=step_ops(reported.program, reported.simulation),
            curve=memory_curve(reported.program, reported.simulation.micro_steps),
        )
        for reported, letter in zip(programs, letters, strict=True)
    ]


def aligned_steps(old: Side, new: Side) -> list[AlignedOp]:
    """Align the ops of both steps, by their numbers in each step.

    The first micro-step of one is aligned with the first of the other, the last one with the last.
    """
    old_starts, new_starts = _section_starts(old), _section_starts(new)
    by_section: dict[str, list[AlignedOp]] = {}
    rows: list[AlignedOp] = []
    for name in sorted({*old_starts, *new_starts}, key=_in_a_step):
        section, _ = name
        if section not in by_section:
            by_section[section] = aligned_ops(old.reported.program, new.reported.program, section)
        old_start, new_start = old_starts.get(name), new_starts.get(name)
        for pair in by_section[section]:
            row = AlignedOp(
                old=None if pair.old is None or old_start is None else old_start + pair.old,
                new=None if pair.new is None or new_start is None else new_start + pair.new,
                is_equal=pair.is_equal and old_start is not None and new_start is not None,
            )
            if row.old is not None or row.new is not None:
                rows.append(row)
    return rows


def _in_a_step(name: tuple[str, int]) -> tuple[int, int]:
    section, run = name
    return STEP_SECTIONS.index(section), run


def _section_starts(side: Side) -> dict[tuple[str, int], int]:
    """Return the number of the first op of each run of a section, by its name and the number of the run."""
    starts: dict[tuple[str, int], int] = {}
    number = 0
    runs: dict[str, int] = {}
    for section in step_sections(side.reported.program, side.reported.simulation.micro_steps):
        run = runs.get(section.name, 0)
        starts[section.name, run] = number
        runs[section.name] = run + 1
        number += len(section.body)
    return starts
