"""Which other options would fit a memory budget, cheapest first: the logical program lowered anew and measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from zeroir.api.unit_classes import repeated_units
from zeroir.config import CompileOptions
from zeroir.cost.machine import Machine
from zeroir.cost.measured_workspaces import with_measured_workspaces
from zeroir.ir.program import Program
from zeroir.memory.footprint import Footprint, footprint
from zeroir.report.names import format_bytes

_ENOUGH = 3
_MOST_TIMES = 64

Value = int | bool | tuple[str, ...]
"""Of an option that is proposed: a number, a switch, or patterns of units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Options that differ from those of a program, by name, and what a rank's device must hold with them."""

    changes: Mapping[str, Value]
    footprint: Footprint

    def __str__(self) -> str:
        flags = " ".join(_flag(name.replace("_", "-"), v) for name, v in self.changes.items())
        return f"{flags} needs {format_bytes(self.footprint.total_bytes)}"


def _flag(name: str, value: Value) -> str:
    match value:
        case bool():
            return f"--{'' if value else 'no-'}{name}"
        case tuple():
            return f"--{name} '{','.join(value)}'"
        case _:
            return f"--{name} {value}"


def alternatives(
    logical: Program,
    options: CompileOptions,
    budget_bytes: int,
    machine: Machine | None = None,
) -> tuple[Alternative, ...]:
    """Up to three that fit, cheapest first; if none does, the one that needs least, where that is less than now.

    What costs no communication comes first: fewer full gradients at once, saving less for the backward, stages up to 2.
    Then what exposes or adds some: no prefetch, stage 3; then computing every unit's forward twice. More ranks come
    last. Programs are measured, not verified. Of ``machine`` the workspaces count that a profile has seen.
    """

    def needed(changes: Mapping[str, Value]) -> Footprint:
        program = _lowered(logical, options, changes)
        return footprint(program if machine is None else with_measured_workspaces(program, machine))

    fitting: list[Alternative] = []
    least: Alternative | None = None
    for changes in _candidates(options, has_blocks=bool(repeated_units(logical))):
        found = Alternative(changes=changes, footprint=needed(changes))
        if found.footprint.total_bytes <= budget_bytes:
            fitting.append(found)
        if least is None or found.footprint.total_bytes < least.footprint.total_bytes:
            least = found
        if len(fitting) == _ENOUGH or (fitting and "world_size" in changes):
            break
    if fitting or least is None:
        return tuple(fitting)
    # Where little is sharded, padding may make more of it for more ranks.
    return (least,) if least.footprint.total_bytes < needed({}).total_bytes else ()


def advice(
    logical: Program,
    options: CompileOptions,
    budget_bytes: int,
    machine: Machine | None = None,
) -> str:
    """What to do about a program that does not fit, in a sentence; see ``alternatives``."""
    found = alternatives(logical, options, budget_bytes, machine)
    if not found:
        return "Use more ranks, a lower precision or a smaller batch."
    if found[0].footprint.total_bytes > budget_bytes:
        return f"No other options fit: the closest, {found[0]}. Use a lower precision or a smaller batch."
    return f"Compile with other options: {'; '.join(map(str, found))}."


def _candidates(options: CompileOptions, *, has_blocks: bool) -> Iterator[Mapping[str, Value]]:
    stage = options.stage
    lean: dict[str, Value] = {}
    if not options.select_saved:
        lean["select_saved"] = True
        yield dict(lean)
    if stage >= 2 and options.live_gradients > 1:
        yield {**lean, "live_gradients": 1}
    for higher in range(stage + 1, 3):
        yield {**lean, "stage": higher}
    if stage < 2:
        yield {**lean, "stage": 2, "live_gradients": 1}
    if stage < 3:
        yield {**lean, "stage": 3}
    bare = {**lean, **({"stage": 3} if stage < 3 else {})}
    if options.live_gradients > 1:
        bare["live_gradients"] = 1
    # A budget of its own says how early parameters are gathered, whatever the distance is.
    if options.prefetch and options.prefetch_budget is None:
        if stage == 3:
            yield {**lean, "prefetch": 0}
        bare["prefetch"] = 0
    if bare:
        yield dict(bare)
    if has_blocks and not options.recompute:
        yield {**lean, "recompute": ("*",)}
        bare["recompute"] = ("*",)
        yield dict(bare)
    times = 2
    while options.mesh is None and times <= _MOST_TIMES:
        yield {**bare, "world_size": options.world_size * times}
        times *= 2


def _lowered(logical: Program, options: CompileOptions, changes: Mapping[str, Value]) -> Program:
    from zeroir.passes.manager import apply
    from zeroir.passes.pipelines import for_options

    chosen = options.model_copy(update=dict(changes))
    program = replace(logical, options=chosen.to_pairs())
    for step in for_options(chosen):
        program = apply(step, program)
    return program
