"""Programs after passes, without the proof after each of them, which costs three times what the passes do.

Whoever asks what a schedule looks like, or what it computes, takes it from here. That each pass leaves a proved program
is what ``tests/passes/test_equivalence.py`` and ``test_replicate_shards.py`` say of pipelines, and whatever compiles a
model outside ``tests/api``, since compiling has no other way.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from zeroir.config import CompileOptions
from zeroir.ir.program import Program
from zeroir.passes import manager
from zeroir.passes.base import Pass
from zeroir.passes.pipelines import for_options
from zeroir.verify import Reference, Report, check, verify


@lru_cache(maxsize=64)
def applied(logical: Program, passes: tuple[Pass, ...]) -> Program:
    """What ``manager.run`` makes, unverified."""
    program = logical
    for step in passes:
        program = manager.apply(step, program)
    return program


def proved(logical: Program, passes: tuple[Pass, ...]) -> Program:
    """The same, verified once all passes have run."""
    manager.check_contracts(logical, passes)
    program = applied(logical, passes)
    check(program, reference=logical)
    return program


def proved_for(logical: Program, options: CompileOptions) -> Program:
    """The program that compiling makes for the options, verified once all passes have run."""
    return proved(replace(logical, options=options), for_options(options))


def codes(judged: Program | Report, reference: Program | Reference | None = None) -> set[str]:
    """The laws that a program breaks, or those of a report."""
    report = judged if isinstance(judged, Report) else verify(judged, reference)
    return {finding.code for finding in report.findings}
