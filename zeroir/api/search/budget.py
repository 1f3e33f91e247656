"""Options that fit a memory budget: a search of the planner's candidates for the cheapest ones.

The space is small: the options of a program that can still free memory, in the order of their cost in a step. If a
machine is known, the candidates that fit are sorted by their simulated steps. Otherwise they keep that order. Programs
are measured, not verified.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from zeroir.api.search.adaptive import possible_kinds
from zeroir.api.search.candidates import Candidate, CandidateMeasurer
from zeroir.api.search.search_space import offload_sets
from zeroir.api.search.unit_classes import repeated_units
from zeroir.config import CompileOptions, has_effect, replaced
from zeroir.config.offload_places import OFFLOADED
from zeroir.config.searched import Value
from zeroir.config.table import arguments_of
from zeroir.cost.machine import Machine
from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.mesh import VALUES_COMM
from zeroir.ir.program import Program
from zeroir.passes.common.units import ALL_REPEATED
from zeroir.report.costs import format_seconds

_MOST_PROPOSED: Final = 3
_MOST_TIMES: Final = 64
"""The largest factor by which a proposal raises the number of ranks."""


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


def leaner_settings(
    options: CompileOptions, logical: Program, kinds: Callable[[], Collection[str]]
) -> Iterator[Mapping[str, Value]]:
    """Yield changes to options that free memory, in the order of their cost in a step; the mesh stays.

    ``kinds`` returns what can be kept outside device memory.

    Changes without communication come first: fewer full gradients at once, fewer saved values, stages up to 2. Then
    come those that expose or add communication: no prefetch, stage 3; then the recomputation of every unit, and then
    offloading. More ranks come last.
    """

    def leanest_of(name: str) -> dict[str, Value]:
        """Return the option with its leanest value; empty if it has that, or another option determines it."""
        axis = CompileOptions.rows()[name].searched
        value = axis.values[axis.lean]
        is_possible = has_effect(replaced(options, stage=3, **{name: value}))
        return {name: value} if is_possible and options.value(name) != value else {}

    stage = options.stage
    lean = leanest_of("select_saved")
    if lean:
        yield dict(lean)
    live = leanest_of("live_gradients")
    if stage >= 2 and live:
        yield {**lean, **live}
    for higher in range(stage + 1, 3):
        yield {**lean, "stage": higher}
    if stage < 2:
        yield {**lean, "stage": 2, **live}
    if stage < 3:
        yield {**lean, "stage": 3}
    leanest = {**lean, **({"stage": 3} if stage < 3 else {}), **live}
    for name in ("prefetch", "order"):
        late = leanest_of(name)
        if late and stage >= CompileOptions.rows()[name].option.least_stage:
            yield {**lean, **late}
        leanest |= late
    if leanest:
        yield dict(leanest)
    if repeated_units(logical) and not options.recompute.units:
        again: Mapping[str, Value] = {"recompute": (ALL_REPEATED,)}
        yield {**lean, **again}
        leanest |= again
        yield dict(leanest)
    if not options.offload.what:
        for offloaded in (sets := offload_sets(kinds())[1:]):
            yield {**lean, "offload": offloaded}
        if sets:
            leanest["offload"] = sets[-1]
            yield dict(leanest)
    times = 2
    is_for_any_ranks = options.mesh is None and VALUES_COMM not in logical.comm_by_name
    while is_for_any_ranks and times <= _MOST_TIMES:
        yield {**leanest, "world_size": options.world_size * times}
        times *= 2


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
    flags = arguments_of(candidate.settings, CompileOptions.rows())
    text = f"{shlex.join(flags)} needs {format_bytes(candidate.needed_bytes)}"
    if candidate.step_ns is not None:
        text += f" and takes {format_seconds(candidate.step_ns / 1e9)} a step"
    return text
