"""Schedules of model files for many stages, each file traced once: a trace takes longer than all passes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.support.eager import traced
from zeroir.config import make_options
from zeroir.ir.program import Program
from zeroir.passes.pipelines import lower


@cache
def logical(path: Path) -> Program:
    """The model file's logical program, with the default options."""
    return traced(path)


@cache
def scheduled(path: Path, stage: int, world_size: int) -> Program:
    """What compiling the file for that stage makes, verified after every pass."""
    return lower(logical(path), make_options({"stage": stage, "world_size": world_size}))
