"""The options of a program, and what these say of it."""

from __future__ import annotations

from zeroir.config.options import CompileOptions
from zeroir.ir.program import Program


def options_of(program: Program) -> CompileOptions:
    """Return the options that a program was lowered with.

    Raises:
        UserError: where the program was not compiled, but written by hand, and has wrong ones.
    """
    options = program.options
    if isinstance(options, CompileOptions):
        return options
    return CompileOptions.from_pairs(options.pairs, world_size=program.mesh.world_size)


def why_not_evaluate(program: Program) -> str:
    """Return why a program has no section ``evaluate``, in one sentence."""
    if "evaluate" not in program.options.texts:
        return "The program cannot evaluate: it was made without a section `evaluate`, so compile it again."
    if not options_of(program).evaluate.is_on:
        return "The program cannot evaluate: it was compiled with --no-evaluate, so compile it without that."
    return (
        "The program cannot evaluate, because its model could not be captured under eval(): compiling it again says "
        "why in a note."
    )
