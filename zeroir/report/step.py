"""What one training step is made of, section by section."""

from __future__ import annotations

from zeroir.ir.program import EVALUATE, MICRO_STEP, Program, Section


def step_sections(program: Program) -> list[Section]:
    """The sections of one step in the order in which they run, the micro-step as often as it does."""
    repeats = max(int(program.option.get("micro_steps", "1")) - 1, 0)
    found: list[Section] = []
    for section in program.sections:
        if section.name == MICRO_STEP:
            found += [section] * repeats
        elif section.name != EVALUATE:
            found.append(section)
    return found
