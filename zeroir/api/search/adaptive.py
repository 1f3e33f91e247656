"""``--offload adaptive``: the least that a program must keep outside device memory to fit a budget.

Kinds are offloaded one after the other, in an order of preference, and of each kind unit after unit, until the program
fits. Then what the last kind made unnecessary is moved back. If a machine is known, several orders are tried, and the
one with the shortest simulated step wins. Otherwise optimizer states go first, which are used once in a step, then
gradients, activations, which are copied once each way, and last parameters, which forward and backward use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from zeroir.api.search.candidates import Candidate, CandidateMeasurer
from zeroir.api.search.search_space import unit_ranges
from zeroir.config import CompileOptions, changed, replaced
from zeroir.config.offload_places import (
    ACTIVATIONS,
    ADAPTIVE,
    GRADIENTS,
    HOST,
    KEPT_ON_DISK,
    OFFLOADED,
    OPTIMIZER,
    PARAMETERS,
)
from zeroir.config.searched import Value
from zeroir.cost.machine import Machine
from zeroir.cost.search import SearchOutcome
from zeroir.errors import InternalError, UserError
from zeroir.ir import ops
from zeroir.ir.program import Program

Measure = Callable[[Mapping[str, Value]], tuple[Candidate, SearchOutcome]]
"""Returns the memory, and with a machine the time, of a program with settings that differ from its options."""

Counts = Mapping[str, int]
"""How many units of each kind are offloaded."""

_ORDERS: Final = (
    (OPTIMIZER, GRADIENTS, ACTIVATIONS, PARAMETERS),
    (ACTIVATIONS, OPTIMIZER, GRADIENTS, PARAMETERS),
    (PARAMETERS, OPTIMIZER, GRADIENTS, ACTIVATIONS),
)
"""Orders in which kinds are offloaded; without a machine only the first is used."""


def settled(
    logical: Program, options: CompileOptions, machine: Machine | None = None
) -> CompileOptions:
    """Replace ``adaptive`` in options by its choice for this program.

    If nothing is enough for the budget, everything is offloaded, and the verifier reports what is missing.
    """
    if ADAPTIVE not in options.offload.what:
        return options
    budget_bytes = options.offload.memory_budget_bytes
    if budget_bytes is None:
        raise InternalError("Options without a memory budget ask for adaptive offloading.")
    plain = replaced(options, offload=(), offload_to=HOST, host_cache=None)
    measurer = CandidateMeasurer(logical, plain, budget_bytes, machine)
    units = movable_units(logical)

    def placed(settings: Mapping[str, Value]) -> Mapping[str, Value]:
        kinds = settings.get("offload")
        is_placed = isinstance(kinds, tuple) and not set(kinds).isdisjoint(KEPT_ON_DISK)
        place = {"offload_to": options.offload.to, "host_cache": options.offload.host_cache}
        return {**settings, **place} if is_placed else settings

    def measure(settings: Mapping[str, Value]) -> tuple[Candidate, SearchOutcome]:
        return measurer.measure(placed(settings))

    movable = {kind: units[kind] for kind in possible_kinds(measure, units)}
    chosen = least_offload(measure, movable, is_timed=machine is not None)
    return changed(plain, **placed(chosen))


def chosen_in_words(options: CompileOptions) -> str:
    """Return a sentence on the choice of ``adaptive``, such as ``Offloaded: optimizer, activations of blocks.0-3.``."""
    if not options.offload.what:
        return "Nothing is offloaded: the program fits its budget without."
    said: list[str] = []
    for kind in options.offload.what:
        units = options.offload.units_of(kind)
        ranges = unit_ranges(sorted(units, key=_by_number))
        said.append(f"{kind} of {ranges}" if units else kind)
    return f"Offloaded: {', '.join(said)}."


def _by_number(unit: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that puts ``blocks.9`` before ``blocks.10``."""
    return tuple((int(part) if part.isdecimal() else -1, part) for part in unit.split("."))


def movable_units(logical: Program) -> Mapping[str, tuple[str, ...]]:
    """Return the units of each kind that can be offloaded, in the order of offloading.

    The states of the last units go first: their gradients come first in the backward, so their copies have most time.
    The activations of the first units have the longest time until their use.
    """
    computed = tuple(
        dict.fromkeys(op.unit for op in logical.step_ops() if isinstance(op, ops.Compute))
    )
    trained = {flat.unit for flat in logical.flats if flat.is_trainable}
    owners = {flat.unit for flat in logical.flats}
    states = tuple(unit for unit in reversed(computed) if unit in trained)
    return {
        OPTIMIZER: states,
        GRADIENTS: states,
        ACTIVATIONS: computed,
        PARAMETERS: tuple(unit for unit in computed if unit in owners),
    }


def possible_kinds(measure: Measure, kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds that this program can keep outside device memory; a pass refuses the others."""

    def is_possible(kind: str) -> bool:
        try:
            measure({"offload": (kind,)})
        except UserError:
            return False
        return True

    return tuple(filter(is_possible, kinds))


def least_offload(
    measure: Measure, units: Mapping[str, tuple[str, ...]], *, is_timed: bool
) -> Mapping[str, Value]:
    """Return the settings of a program that fits with the least offloading; empty if it fits without.

    With ``is_timed`` measurements have times, and the fastest of several choices wins. If nothing fits, all is
    offloaded.
    """
    _, outcome = measure({})
    if outcome.fits:
        return {}
    best: tuple[int, Mapping[str, Value]] | None = None
    for order in _ORDERS if is_timed else _ORDERS[:1]:
        counts = _moved_until_it_fits(measure, units, order)
        if counts is None:
            # Everything is offloaded then, in any order.
            break
        settings = offload_settings(units, counts)
        _, outcome = measure(settings)
        if best is None or outcome.step_ns < best[0]:
            best = outcome.step_ns, settings
    if best is not None:
        return best[1]
    return offload_settings(units, {kind: len(units[kind]) for kind in units})


def offload_settings(units: Mapping[str, tuple[str, ...]], counts: Counts) -> Mapping[str, Value]:
    """Return the options that offload the first units of each kind; a kind that is offloaded as a whole names none."""
    kinds = tuple(kind for kind in OFFLOADED if counts.get(kind))
    if not kinds:
        return {}
    named = (
        f"{kind}:{unit}"
        for kind in kinds
        if counts[kind] < len(units[kind])
        for unit in units[kind][: counts[kind]]
    )
    return {"offload": kinds, "offload_units": tuple(named)}


def _moved_until_it_fits(
    measure: Measure, units: Mapping[str, tuple[str, ...]], order: tuple[str, ...]
) -> Counts | None:
    """Return the number of units of each kind to offload until the program fits; None if it never does.

    Memory is assumed to fall with every offloaded unit. Where it does not, more than necessary is offloaded.
    """

    def fits(counts: Counts) -> bool:
        return measure(offload_settings(units, counts))[1].fits

    counts: dict[str, int] = {}
    for kind in order:
        if kind not in units:
            continue
        counts[kind] = len(units[kind])
        if fits(counts):
            break
    else:
        return None
    last = next(reversed(counts))
    for kind in reversed(counts):
        # Of all kinds before the last, little is moved back, which growing strides find out quickly.
        low, stride = 0, counts[kind] if kind == last else 1
        while low < counts[kind]:
            tried = max((low + counts[kind]) // 2, counts[kind] - stride)
            stride *= 2
            if fits({**counts, kind: tried}):
                counts[kind] = tried
            else:
                low = tried + 1
    return counts
