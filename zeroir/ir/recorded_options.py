"""The options that code asks of a program, which keeps those of its compilation as texts.

The verifier reads the texts itself.
"""

from __future__ import annotations

from zeroir.ir.byte_sizes import parse_bytes
from zeroir.ir.program import Program


def micro_steps(program: Program) -> int:
    """Return the micro-batches of a step."""
    return int(program.option.get("micro_steps", "1"))


def schedule(program: Program) -> str | None:
    """Return the learning-rate schedule; None without one."""
    return program.option.get("schedule")


def shapes(program: Program) -> str:
    """Return the shapes of batches of a program with dims."""
    return program.option["shapes"]


def memory_budget_bytes(program: Program) -> int | None:
    """Return the device memory of a rank that the program had to fit; None without a limit."""
    amount = program.option.get("memory_budget")
    return None if amount is None else parse_bytes(amount)


def why_not_evaluate(program: Program) -> str:
    """Return why a program has no section ``evaluate``, in one sentence."""
    if program.option.get("evaluate") == "false":
        return "The program cannot evaluate: it was compiled with --no-evaluate, so compile it without that."
    if "evaluate" not in program.option:
        return "The program cannot evaluate: it was made without a section `evaluate`, so compile it again."
    return (
        "The program cannot evaluate, because its model could not be captured under eval(): compiling it again says "
        "why in a note."
    )
