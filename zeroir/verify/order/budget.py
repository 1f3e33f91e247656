"""The memory that a rank's device must have, and where the program needs the most."""

from __future__ import annotations

from zeroir.ir.program import Program
from zeroir.memory.footprint import footprint
from zeroir.verify.context import Findings


def check_budget(program: Program, findings: Findings, budget_bytes: int) -> None:
    """Prove that persistent buffers, the arena of temporary buffers and the workspaces fit a budget (Z301)."""
    needed = footprint(program)
    if needed.total_bytes <= budget_bytes:
        return
    fullest = needed.fullest
    section = program.section_by_name.get(fullest.section)
    roles = ", ".join(f"{role} {size:,}" for role, size in fullest.role_bytes.items())
    culprit = f" in unit {fullest.unit}" if fullest.unit else ""
    culprit += f" ({fullest.source})" if fullest.source else ""
    findings.add(
        "Z301",
        f"the device needs {needed.total_bytes:,} bytes, the budget is {budget_bytes:,}: "
        f"{needed.resting_bytes:,} rest there, temporary buffers take {needed.arena_bytes:,} and workspaces "
        f"{needed.scratch_bytes:,}; it is fullest{culprit} with {roles}",
        section=section,
        line=fullest.index if section is not None and fullest.index >= 0 else None,
    )
