"""Gradients that the update reads, which must be final, and the statistics that decisions depend on."""

from __future__ import annotations

from zeroir.ir import ops
from zeroir.ir.buffers import Region
from zeroir.ir.contents import Micro
from zeroir.ir.ops import Mode
from zeroir.verify.context import spell, title
from zeroir.verify.interpreter import algebra
from zeroir.verify.interpreter.domain import (
    POISON,
    Cover,
    PieceList,
    Poison,
    Statistic,
    Value,
    moved,
)
from zeroir.verify.interpreter.gradients import Problem, is_zero, locate, measure
from zeroir.verify.interpreter.section_run import SectionRun

NORM = "norm"
OVERFLOW = "overflow"

_NO_GRADIENT = "it reads a value that is no gradient"


def use_gradient(run: SectionRun, flat: str, pieces: PieceList) -> Problem | None:
    """Return why these pieces of a flat's gradient are not final; nothing may contribute to them afterwards."""
    for a, b, _ in pieces:
        for _, _, slot in run.layout.between(flat, a, b):
            if slot is not None:
                run.consumed.add(slot.name)
    return measure(run, pieces, flat, Micro.ALL, run.layout.axes)


def statistic(run: SectionRun, op: ops.GradNorm | ops.CheckFinite) -> None:
    """Compute a statistic, which covers the gradients that it reads; these must be final."""
    kind = NORM if isinstance(op, ops.GradNorm) else OVERFLOW
    covers: list[Cover] = []
    order: list[tuple[str, int, int]] = []
    is_reported = False
    if op.mode is Mode.ACCUMULATE:
        ((_, _, before),) = run.take(op.destination, "Z405")
        if isinstance(before, Statistic) and before.kind == kind and not before.summed:
            covers, order = list(before.covers), list(before.order)
        else:
            is_reported = True
            if not algebra.is_poisoned(before):
                where = spell(op.destination, run.program)
                run.fail(
                    "Z405",
                    f"{title(op)} adds to {where}, which is not this rank's {kind} of other gradients",
                    op.destination.buffer,
                )
    for source in op.sources:
        already = len(covers)
        for a, b, value in run.take(source, "Z405"):
            if algebra.is_poisoned(value):
                is_reported = True
                continue
            if is_zero(value):
                continue
            cover = _cover(run, a, b, value)
            if isinstance(cover, Cover):
                covers.append(cover)
                continue
            problem = f"{cover} in {spell(source, run.program)}"
            run.fail("Z405", f"a statistic on unfinished gradients: {problem}", source.buffer)
            is_reported = True
        order += _read(run, covers[already:])
    result: Value = POISON if is_reported else Statistic(kind, tuple(covers), tuple(order))
    run.memory.write(op.destination, [(0, 1, result)])


def _read(run: SectionRun, covers: list[Cover]) -> list[tuple[str, int, int]]:
    """Return the elements of each flat that all ranks read from one source, without the padding around parameters."""
    intervals: dict[str, tuple[int, int]] = {}
    for cover in covers:
        for a, b, _ in run.layout.covered(cover):
            low, high = intervals.get(cover.flat, (a, b))
            intervals[cover.flat] = min(low, a), max(high, b)
    return [(flat, *interval) for flat, interval in intervals.items()]


def _cover(run: SectionRun, start: int, stop: int, value: Value) -> Cover | str:
    """Return the flat elements whose gradient the value is, or why it is not a finished gradient."""
    place = locate(value)
    if place is None:
        return _NO_GRADIENT
    flat, shift, strides = place
    here = [(0, stop - start, moved(value, start))]
    on_flat = run.layout.on_flat(here, stop - start, shift + start, strides)
    if on_flat is None:
        return _NO_GRADIENT
    problem = use_gradient(run, flat, on_flat)
    if problem is not None:
        return problem.sentence
    return Cover(flat, shift + start, strides, stop - start)


def statistic_problem(run: SectionRun, region: Region, kind: str) -> str | None:
    """Return why a scalar is not the global statistic of that kind over all gradients."""
    (_, _, value), *rest = run.take(region, "Z405")
    if rest or isinstance(value, Poison):
        return None
    name = spell(region, run.program)
    if not isinstance(value, Statistic) or value.kind != kind:
        return f"{name} is not this step's {kind}"
    for axis in run.layout.axes:
        cuts = [any(a == axis for a, _ in cover.strides) for cover in value.covers]
        times = value.summed.count(axis)
        if times == 0 and any(cuts):
            return f"{name} is this rank's part of the {kind}: it is not combined over {axis}"
        if kind == NORM and times and (times > 1 or not all(cuts)):
            return f"{name} counts gradients more than once over {axis}"
    in_order = tuple(axis for axis in run.layout.axes if axis in value.summed)
    if kind == NORM and value.summed != in_order:
        return f"{name} is summed over {' and then '.join(value.summed)}, not innermost first"
    if kind == NORM and not value.is_sum:
        return f"{name} is combined by its maximum instead of its sum"
    return _coverage_problem(run, value, name)


def _coverage_problem(run: SectionRun, value: Statistic, name: str) -> str | None:
    intervals: dict[str, list[tuple[int, int]]] = {}
    for cover in value.covers:
        intervals.setdefault(cover.flat, []).extend(cover.intervals(run.layout.sizes))
    for flat in run.program.flats:
        if not flat.is_trainable:
            continue
        counts = sorted(intervals.get(flat.name, []))
        for start, stop, slot in run.layout.cuts(flat.name):
            if slot is None:
                continue
            at = start
            for low, high in counts:
                if high <= start or low >= stop:
                    continue
                if low < at and value.kind == NORM and max(low, start) < at:
                    return f"{name} counts the gradient of {slot.name} twice"
                if low > at:
                    break
                at = max(at, high)
            if at < stop:
                return f"{name} leaves out the gradient of {slot.name}"
    return None
