"""The streams that a program declares."""

from __future__ import annotations

from dataclasses import replace

from zeroir.ir.effects import effects
from zeroir.ir.mesh import STREAMS
from zeroir.ir.program import Program


def with_streams(program: Program) -> Program:
    """The program with those of the usual streams that its ops run on and that it does not declare yet."""
    declared = {stream.name for stream in program.streams}
    used = {effects(op).stream for op in program.ops()}
    missing = tuple(stream for stream in STREAMS if stream.name in used - declared)
    return replace(program, streams=(*program.streams, *missing)) if missing else program
