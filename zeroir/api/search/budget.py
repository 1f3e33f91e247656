"""Options that fit a memory budget: a search of the planner's candidates for the cheapest ones.

The space is small: the options of a program that can still free memory, in the order of their cost in a step. If a
machine is known, the candidates that fit are sorted by their simulated steps. Otherwise they keep that order. Programs
are measured, not verified.
"""

from __future__ import annotations

from typing import Final

from zeroir.api.search.adaptive import possible_kinds
from zeroir.api.search.candidates import Candidate, CandidateMeasurer
from zeroir.api.search.search_space import leaner_settings
from zeroir.config import CompileOptions
from zeroir.config.offload_places import OFFLOADED
from zeroir.config.searched import Value
from zeroir.cost.machine import Machine
from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.program import Program
from zeroir.report.costs import format_seconds

_MOST_PROPOSED: Final = 3


def alternatives(
    logical: Program,
    options: CompileOptions,
    budget_bytes: int,
    machine: Machine | None = None,
) -> tuple[Candidate, ...]:
    """Return up to three candidates that fit, cheapest first.

    If none fits, the result is the one with the least memory, if that is less than now. Their settings are the
    differences from ``options``. More ranks are proposed only if nothing else fits. With a ``machine`` they are sorted
    by their simulated steps, and use the workspaces that were measured on it.
    """
    measurer = CandidateMeasurer(logical, options, budget_bytes, machine)

    def offloadable() -> tuple[str, ...]:
        return possible_kinds(measurer.measure, OFFLOADED)

    fitting: list[Candidate] = []
    least: Candidate | None = None
    for settings in leaner_settings(options, logical, offloadable):
        world_size = measurer.options(settings).world_size
        if fitting and world_size != options.world_size:
            break
        if machine is not None and machine.network is None and world_size > machine.node_ranks:
            break
        candidate, evaluation = measurer.measure(settings)
        if evaluation.fits:
            fitting.append(candidate)
        if least is None or candidate.needed_bytes < least.needed_bytes:
            least = candidate
        if len(fitting) == _MOST_PROPOSED or (fitting and "world_size" in settings):
            break
    if fitting or least is None:
        return tuple(sorted(fitting, key=lambda candidate: candidate.step_ns or 0))
    # If little is sharded, its padding for more ranks may add memory.
    present, _ = measurer.measure({})
    return (least,) if least.needed_bytes < present.needed_bytes else ()


def advice(
    logical: Program,
    options: CompileOptions,
    budget_bytes: int,
    machine: Machine | None = None,
) -> str:
    """Return a sentence with the remedy for a program that does not fit; see ``alternatives``."""
    proposed = alternatives(logical, options, budget_bytes, machine)
    if not proposed:
        return "Use more ranks, a lower precision or a smaller batch."
    if proposed[0].needed_bytes > budget_bytes:
        return f"No other options fit: the closest, {_words(proposed[0])}. Use a lower precision or a smaller batch."
    where = "" if machine is None else f" (steps simulated on {machine.name})"
    return f"Compile with other options{where}: {'; '.join(map(_words, proposed))}."


def _words(candidate: Candidate) -> str:
    """Return a candidate as flags of the command line, with its memory and its step."""
    flags = " ".join(
        _flag(name.replace("_", "-"), value) for name, value in candidate.settings.items()
    )
    text = f"{flags} needs {format_bytes(candidate.needed_bytes)}"
    if candidate.step_ns is not None:
        text += f" and takes {format_seconds(candidate.step_ns / 1e9)} a step"
    return text


def _flag(name: str, value: Value) -> str:
    match value:
        case bool():
            return f"--{'' if value else 'no-'}{name}"
        case tuple():
            return f"--{name} '{','.join(value)}'"
        case _:
            return f"--{name} {value}"
