"""The sections of one training step."""

from __future__ import annotations

from zeroir.ir.program import EVALUATE, MICRO_STEP, Program, Section


def step_sections(program: Program) -> list[Section]:
    """The sections of one step in the order in which they run, ``micro_step`` once for each of its runs."""
    repeats = max(int(program.option.get("micro_steps", "1")) - 1, 0)
    sections: list[Section] = []
    for section in program.sections:
        if section.name == MICRO_STEP:
            sections += [section] * repeats
        elif section.name != EVALUATE:
            sections.append(section)
    return sections
