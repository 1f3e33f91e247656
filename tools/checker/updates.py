"""The ops of the optimizer's step, as functions of which nothing is known but what they read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from tools.checker.machine import SymbolicRanks, spans
from tools.checker.program import settings, slot_numel
from tools.checker.reading import FileRecord
from tools.checker.terms import UNDEFINED, ZERO, Operand, Piece, Pieces, common, merged

_BLOCK: Final = 256
"""The elements of an 8-bit state that share a scale."""
_WHOLE: Final = ("muon", "adafactor", "shampoo")
"""Optimizers that work on whole parameters."""
Key = tuple[Any, ...]


def update(machine: SymbolicRanks, op: FileRecord, rank: int) -> None:
    """Run an op of the optimizer's step on one rank."""
    match op.kind:
        case "GradNorm" | "CheckFinite":
            _statistic(machine, op, rank)
        case "Decide" | "Guess":
            _decision(machine, op, rank)
        case "OptimizerStep" if op.algorithm in _WHOLE:
            _whole_step(machine, op, rank)
        case "Direction" | "OptimizerStep" | "SpeculativeStep" | "CommitStep":
            _step(machine, op, rank)
        case "Average":
            _average(machine, op, rank)
        case "UpdateScale":
            weight = None if op.weight is None else _total(machine, 1, op.weight, rank)[1]
            attributes = op.window, op.factor, op.hysteresis, op.minimum, op.refill
            state, skip = machine.read(op.state, rank), machine.read(op.skip, rank)
            _scalar(machine, op.state, rank, ("scale", attributes, state, skip, weight))
        case _:
            raise AssertionError(op.kind)


def _scalar(machine: SymbolicRanks, region: FileRecord, rank: int, row: Key) -> None:
    term = machine.terms.make(*row, dtype=machine.names.buffers[region.buffer].dtype)
    machine.write(region, rank, ((0, machine.names.numel(region), term, 0),))


def _statistic(machine: SymbolicRanks, op: FileRecord, rank: int) -> None:
    sources: list[tuple[tuple[int, int, int], ...]] = []
    for region in op.sources:
        pieces = machine.gradient(region, rank)
        sources.append(spans([(t, a + s, b + s) for a, b, t, s in pieces if t != ZERO]))
    before: tuple[Any, ...] = ()
    if op.mode == "accumulate":
        ((_, _, term, _),) = machine.read(op.destination, rank)
        if term != ZERO:
            row = machine.terms.rows[term]
            before = {"norm": row[1:], "finite": row[1]}.get(row[0], ((term, 0, 1),))
    if op.kind == "GradNorm":
        _scalar(machine, op.destination, rank, ("norm", *before, *sources))
    else:
        found: set[Any] = {*before, *(span for source in sources for span in source)}
        _scalar(machine, op.destination, rank, ("finite", spans([*found], unite=True)))


def _total(
    machine: SymbolicRanks, divisor: int, weight: FileRecord | None, rank: int
) -> tuple[int, object]:
    """The divisor of a gradient as a factor and a sum of weights; weights that are alike on all ranks are counted."""
    terms, names = machine.terms, machine.names
    if weight is None:
        return divisor * (names.ranks if names.is_logical else 1), None
    ((_, _, term, shift),) = machine.gradient(weight, rank)
    if names.is_logical and not terms.parts(term):
        return divisor * names.ranks, (term, shift)
    shares = {(t, s) for _, t, s in terms.parts(term)}
    if len(shares) == 1:
        ((own, _),) = shares
        return divisor * len(terms.parts(term)), (own, shift)
    return divisor, (term, shift)


def _decision(machine: SymbolicRanks, op: FileRecord, rank: int) -> None:
    def read(region: FileRecord | None) -> Pieces | None:
        return None if region is None else machine.terms.tidy(machine.read(region, rank))

    total = _total(machine, op.divisor, op.weight, rank)
    divisor: Key = ("divisor", total, read(op.loss_scale))
    step = read(op.step)
    if op.kind == "Guess":
        _scalar(machine, op.gradient_divisor, rank, divisor)
        _scalar(machine, op.next_step, rank, ("next step", step, None))
        return
    norm, overflow, guess = read(op.norm), read(op.overflow), read(op.guess)
    if op.max_norm is not None:
        divisor = ("clipped", divisor, norm, op.max_norm)
    counts = [read(count) for count in op.counts]
    skip: Pieces | None = None
    _scalar(machine, op.gradient_divisor, rank, divisor)
    if op.skip is not None:
        _scalar(machine, op.skip, rank, ("skip", overflow, None if op.weight is None else total[1]))
        skip = read(op.skip)
    for region, old in zip((op.step, *op.counts), (step, *counts), strict=True):
        _scalar(machine, region, rank, ("next step", old, skip))
    if op.redo is not None:
        _scalar(machine, op.redo, rank, ("redo", guess, read(op.gradient_divisor), skip))


def _groups(
    machine: SymbolicRanks, op: FileRecord, flat: str | None, start: int, stop: int
) -> Iterator[tuple[int, int, str | None]]:
    """Yield the parts of a range of a flat by the group whose settings they take; None where the op has none for it."""
    program = machine.names.program
    named = {name for name, _, _ in settings(op)}
    if flat is None or not program.groups:
        yield start, stop, op.group
        return
    edges = {start, stop}
    owners: list[tuple[int, int, str]] = []
    for group in program.groups:
        for name, first, last in group.intervals:
            if name == flat:
                owners.append((first, last, group.name))
                edges |= {e for e in (first, last) if start < e < stop}
    ordered = sorted(edges)
    for a, b in itertools.pairwise(ordered):
        owner = next((g for first, last, g in owners if first <= a and b <= last), None)
        yield a, b, owner if owner in named else None


def _settings(machine: SymbolicRanks, op: FileRecord, group: str, rank: int) -> Key:
    for name, lr, hyper in settings(op):
        if name == group:
            return machine.read(lr, rank), machine.read(hyper, rank)
    return (None,)


def _scalars(machine: SymbolicRanks, op: FileRecord, rank: int) -> Key:
    skip = getattr(op, "skip", None)
    return (
        machine.read(op.step, rank),
        machine.read(op.gradient_divisor, rank),
        None if skip is None else machine.read(skip, rank),
    )


def _pieces_of(
    machine: SymbolicRanks, op: FileRecord, contents: Sequence[Pieces], index: int
) -> Iterator[tuple[int, int, str | None, list[Operand]]]:
    """Yield the common pieces of regions, cut where groups begin; content ``index`` says which flat they are of."""
    for a, b, operands in common(*contents):
        term, shift = operands[index]
        flat = machine.terms.flats.get(term)
        for first, last, group in _groups(machine, op, flat, a + shift, b + shift):
            start, stop = (a, b) if flat is None else (first - shift, last - shift)
            moved = [(t, s) for t, s in operands]
            yield start, stop, group, moved


def _step(machine: SymbolicRanks, op: FileRecord, rank: int) -> None:
    """An update of each element by its gradient and its states."""
    terms, scalars = machine.terms, _scalars(machine, op, rank)
    is_direction = op.kind == "Direction"
    changed = [*op.states] if is_direction else [op.param, *op.states]
    scales = list(getattr(op, "scales", ()))
    gradient = machine.gradient(op.grad, rank)
    olds = [machine.read(region, rank) for region in changed]
    kept = [machine.read(region, rank) for region in op.kept] if op.kind == "CommitStep" else olds
    scale_olds = [machine.read(region, rank) for region in scales]
    stretched = [_stretched(old, machine.names.numel(op.param)) for old in scale_olds]
    results: list[list[Piece]] = [[] for _ in changed]
    new_scales: list[list[Piece]] = [list(old) for old in scale_olds]
    direction: list[Piece] = []
    for a, b, group, operands in _pieces_of(machine, op, [*kept, gradient, *olds, *stretched], 0):
        count = len(kept)
        of_blocks = operands[2 * count + 1 :]
        del operands[2 * count + 1 :]
        values = [*operands[: count + 1]]
        if all(t == ZERO for t, _ in values):
            for result in results:
                result.append((a, b, ZERO, 0))
            direction.append((a, b, ZERO, 0))
        elif any(t == UNDEFINED for t, _ in operands):
            for result in results:
                result.append((a, b, UNDEFINED, 0))
            direction.append((a, b, UNDEFINED, 0))
        elif group is None and not is_direction:
            for result, old in zip(results, operands[count + 1 :], strict=True):
                result.append((a, b, *old))
            continue
        else:
            if is_direction:
                values = [values[-1], *values[:-1]]
                of: Key = tuple(_settings(machine, op, name, rank) for name, _, _ in settings(op))
            else:
                of = _settings(machine, op, group or "", rank)
            base = values[0][1]
            blocks = [(t, None if t in terms.uniform else s - base // _BLOCK) for t, s in of_blocks]
            key: Key = ("step", op.algorithm, is_direction, of, *scalars, tuple(blocks))
            if op.kind == "CommitStep":
                _check_guess(machine, op, rank, key, values, operands[count + 1 :])
            for k, result in enumerate(results):
                term, shift = terms.elementwise((*key, k), values, "u8" if scales and k else "f32")
                terms.sums.discard(term)
                if values[0][0] in terms.flats:
                    terms.flats[term] = terms.flats[values[0][0]]
                result.append((a, b, term, shift))
            if is_direction:
                dtype = machine.names.buffers[op.direction.buffer].dtype
                term, shift = terms.elementwise((*key, "direction"), values, dtype)
                direction.append((a, b, term, shift))
            for k, new in enumerate(new_scales):
                term, _ = terms.elementwise((*key, "scale", k), values, "f32")
                first, last = a // _BLOCK, -(-b // _BLOCK)
                new[:] = sorted([*_cut(new, first, last), (first, last, term, base // _BLOCK)])
    for region, new in zip([*changed, *scales], [*results, *new_scales], strict=True):
        machine.write(region, rank, list(merged(new)))
    if is_direction:
        machine.write(op.direction, rank, list(merged(direction)))
    if op.kind == "SpeculativeStep":
        for region, kept_pieces in zip(op.kept, olds, strict=True):
            machine.write(region, rank, kept_pieces)
    if getattr(op, "rounded", None) is not None:
        machine.put(op.rounded, rank, list(merged(results[0])))
    if op.kind in {"OptimizerStep", "Direction"}:
        machine.spoil(op.grad, rank)


def _stretched(pieces: Pieces, numel: int) -> Pieces:
    """The scales of blocks as pieces of elements; shifts still count blocks."""
    return tuple((a * _BLOCK, min(b * _BLOCK, numel), t, s) for a, b, t, s in pieces)


def _check_guess(
    machine: SymbolicRanks,
    op: FileRecord,
    rank: int,
    key: Key,
    values: list[Operand],
    present: Sequence[Operand],
) -> None:
    """What a commit finds must be what a speculative step of the same gradient made of the kept elements."""
    terms = machine.terms
    ((_, _, redo, _),) = machine.read(op.redo, rank)
    row = terms.rows[redo]
    guess = row[1] if row[0] == "redo" else None
    is_right = row[0] == "redo" and row[2:] == (key[5], key[6])
    guessed_step = machine.terms.rows[key[4][0][2]]
    step = terms.make("next step", guessed_step[1], None, dtype="f32")
    spoken = (*key[:4], ((0, 1, step, 0),), guess, None, *key[7:])
    for k, found in enumerate(present):
        is_right = is_right and terms.elementwise((*spoken, k), values, "f32") == found
    if not is_right:
        machine.report(f"{machine.where} does not commit what a speculative step guessed")


def _average(machine: SymbolicRanks, op: FileRecord, rank: int) -> None:
    terms, found = machine.terms, list[Piece]()
    skip = None if op.skip is None else machine.read(op.skip, rank)
    for a, b, operands in common(machine.read(op.param, rank), machine.read(op.average, rank)):
        if all(t == ZERO for t, _ in operands):
            found.append((a, b, ZERO, 0))
            continue
        term, shift = terms.elementwise(("average", op.decay, skip), operands, "f32")
        if operands[0][0] in terms.flats:
            terms.flats[term] = terms.flats[operands[0][0]]
        found.append((a, b, term, shift))
    machine.write(op.average, rank, list(merged(found)))


# ---------------------------------------------------------------------------------------------- whole parameters


def own_numel(algorithm: str, shape: Sequence[int]) -> int:
    """Return how many numbers an optimizer keeps for a whole parameter of a shape."""
    if algorithm == "adafactor":
        if len(shape) < 2:
            return math.prod(shape)
        return math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]
    return sum(side * side for side in shape) if algorithm == "shampoo" and len(shape) == 2 else 0


def _whole_step(machine: SymbolicRanks, op: FileRecord, rank: int) -> None:
    """An update by the directions of whole parameters; ``param`` may be a part of the flat."""
    terms, names, scalars = machine.terms, machine.names, _scalars(machine, op, rank)
    directions, old = machine.read(op.grad, rank), machine.read(op.param, rank)
    held = [names.buffers[r.buffer].holds for r in (op.factors, op.param) if r is not None]
    flat = next((terms.flats[t] for _, _, t, _ in old if t in terms.flats), None)
    flat = flat or next((c.flat for c in held if c is not None and c.kind == "FlatContent"), None)
    if flat is None:
        if any(t != ZERO for _, _, t, _ in old):
            machine.report(f"{machine.where} updates elements of no flat")
        return
    reads_parameters = op.algorithm == "adafactor"
    has_own = op.factors is not None
    whole = (
        machine.read(op.whole, rank) if op.whole is not None else old if reads_parameters else ()
    )
    factors = machine.read(op.factors, rank) if has_own else ()
    whole_factors = whole if has_own and not reads_parameters and op.whole is not None else factors
    own_start = 0
    if has_own:
        content = names.buffers[op.factors.buffer].holds
        own_start = 0 if content is None else names.held(content, names.numel(op.factors), rank)
    new_factors: list[Piece] = list(factors)
    results: list[Piece] = []
    offset = 0
    steps: dict[int, tuple[int, int, int]] = {}
    for slot in names.flats[flat].slots:
        numel, own = slot_numel(slot), own_numel(op.algorithm, slot.shape)
        first, last = slot.offset, slot.offset + numel
        of = [
            _settings(machine, op, g or "", rank)
            for _, _, g in _groups(machine, op, flat, first, last)
        ]
        parameter = _part(terms.uniform, whole, first, last) if reads_parameters else None
        numbers = _part(terms.uniform, whole_factors, offset, offset + own)
        row = (
            op.algorithm,
            tuple(of),
            *scalars,
            slot.shape,
            _part(terms.uniform, directions, first, last),
        )
        term = terms.make("whole step", *row, parameter, numbers, dtype="f32")
        steps[first] = (first, last, term)
        if own and has_own:
            state = terms.make("own state", term, dtype="f32")
            low, high = (
                max(offset - own_start, 0),
                min(offset + own - own_start, names.numel(op.factors)),
            )
            new_factors = list(_cut(new_factors, low, high))
            if low < high:
                new_factors.append((low, high, state, own_start - offset))
        offset += own
    for a, b, t, s in old:
        edges = sorted(
            {
                a,
                b,
                *(
                    e - s
                    for low, high, _ in steps.values()
                    for e in (low, high)
                    if t in terms.flats and a < e - s < b
                ),
            }
        )
        for x, y in itertools.pairwise(edges):
            found = next(
                (st for st in steps.values() if t in terms.flats and st[0] <= x + s < st[1]), None
            )
            if found is None:
                results.append((x, y, t, s))
                continue
            term, shift = terms.elementwise(
                ("apply", op.algorithm), [(t, s), (found[2], s - found[0])], "f32"
            )
            terms.flats[term] = flat
            results.append((x, y, term, shift))
    machine.write(op.param, rank, list(merged(results)))
    if has_own:
        machine.write(op.factors, rank, sorted(new_factors))
    machine.spoil(op.grad, rank)


def _part(uniform: set[int], pieces: Sequence[Piece], start: int, stop: int) -> Pieces:
    return tuple(
        (max(a, start) - start, min(b, stop) - start, t, 0 if t in uniform else s + start)
        for a, b, t, s in pieces
        if a < stop and b > start
    )


def _cut(pieces: Sequence[Piece], start: int, stop: int) -> Iterator[Piece]:
    for a, b, t, s in pieces:
        if a < min(b, start):
            yield a, min(b, start), t, s
        if max(a, stop) < b:
            yield max(a, stop), b, t, s
