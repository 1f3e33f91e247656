"""Schedules of model files for many stages, each file traced once: a trace takes longer than all passes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.support.eager import traced
from tests.support.lowering import proved_for
from zeroir.config import make_options
from zeroir.ir.program import Program


@cache
def logical(path: Path) -> Program:
    """The model file's logical program, with the default options."""
    return traced(path)


@cache
def scheduled(path: Path, stage: int, world_size: int) -> Program:
    """What compiling the file for that stage makes, verified once all passes have run."""
    return proved_for(logical(path), make_options({"stage": stage, "world_size": world_size}))
