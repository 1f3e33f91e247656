"""Programs compared by the text of every field, which tells -0.0 from 0.0 and True from 1, and calls every NaN nan."""

from __future__ import annotations

from dataclasses import fields

from zeroir.ir.program import Program


def spelled(program: Program) -> str:
    """The repr of every field."""
    return repr({field.name: getattr(program, field.name) for field in fields(program)})
