"""The changes of each pass to a program, from running the passes again on the logical program of the artefact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zeroir.errors import UserError
from zeroir.ir.analysis.traffic import collective_bytes, on_the_wire
from zeroir.ir.ops import op_name
from zeroir.ir.program import STEP_SECTIONS, Program
from zeroir.memory.curve import peak
from zeroir.passes.catalogue import parse_spec
from zeroir.passes.manager import apply
from zeroir.workspace.segments import corrected


@dataclass(frozen=True, slots=True, kw_only=True)
class PassRow:
    """A program after a pass, and its differences from the program before.

    Number 0 is the logical program, with an empty ``spec``. ``added`` and ``removed`` count ops by keyword; an op that
    only moves counts in neither. ``wire_bytes`` are those of the full buffers that collectives handle in a step, twice
    for an all_reduce; ``peak_bytes`` are those of the buffers on the device of one rank.
    """

    number: int
    spec: str
    ops: int
    added: dict[str, int]
    removed: dict[str, int]
    wire_bytes: int
    peak_bytes: int


def programs_after_passes(logical: Program, scheduled: Program) -> list[Program]:
    """Return the logical program and the program after each pass, the last of which is the scheduled one.

    Raises:
        UserError: if the passes of this version of zeroir produce a different program.
    """
    programs = [replace(logical, options=scheduled.options)]
    for spec in scheduled.passes:
        programs.append(apply(parse_spec(spec), programs[-1]))
    # An older version may have declared other workspaces for its segments.
    if programs[-1] != corrected(scheduled):
        raise UserError(
            "The passes of this version of zeroir make another program of the same model, so their changes cannot be "
            "shown; compile the model again."
        )
    return programs


def pass_rows(programs: Sequence[Program]) -> list[PassRow]:
    """Return a row for each of ``programs_after_passes``."""
    counts = [Counter(op_name(type(op)) for op in program.step_ops()) for program in programs]
    before = [counts[0], *counts]
    return [
        PassRow(
            number=number,
            spec=program.passes[-1] if program.passes else "",
            ops=own.total(),
            added=dict(sorted((own - earlier).items())),
            removed=dict(sorted((earlier - own).items())),
            wire_bytes=sum(on_the_wire(collective_bytes(program)).values()),
            peak_bytes=peak(program, sections=STEP_SECTIONS).total_bytes,
        )
        for number, (program, own, earlier) in enumerate(
            zip(programs, counts, before, strict=False)
        )
    ]
