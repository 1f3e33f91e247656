"""The ops of the update: statistics of gradients, the decision, and the steps of optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from tools.certificates.spans import Pieces, Spans, aligned, merged, require
from tools.certificates.values import ALL, CURRENT, PAST, UNDEFINED, ZERO, Key, Value, made, parts
from tools.checker.program import Declarations, regions, settings
from tools.checker.reading import FileRecord

if TYPE_CHECKING:
    from tools.certificates.sections import Left, SectionCheck

DECIDED: Final = {"GradNorm", "CheckFinite", "gradient_divisor", "skip", "redo", "next_step"}
"""What statistics and decisions are; their numbers are those of ops."""
DECISIONS: Final = {"Decide": "gradient_divisor skip redo", "Guess": "gradient_divisor next_step"}
"""Ops that decide, and where they say what."""
_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
STATES: Final[Mapping[str, tuple[str, ...]]] = {
    "momentum": ("momentum_buffer",), "adam": _MOMENTS, "adamw": _MOMENTS, "lion": _MOMENTS[:1],
    "muon": ("momentum_buffer",),
}  # fmt: skip
_BLOCK: Final = 256
"""The elements of a state of 8 bits that share a scale."""
_WHOLE: Final = {"muon": (), "adafactor": ("factors",), "shampoo": ("preconditioners",)}
"""Optimizers that step whole parameters, by a direction; each with what else it keeps."""


def final(section: SectionCheck, flat: str, pieces: Pieces) -> None:
    """Require that elements of a flat are its whole gradient, to which nothing is added any more."""
    names, rank = section.names, section.rank
    for start, stop, (key, shift) in pieces:
        for _, _, slot in parts(names.flats[flat], start + shift, stop + shift):
            if slot is None:
                continue
            section.used.add(slot.name)
            own: dict[int, int] = dict(section.contributions[rank].get(slot.name, {}))
            if section.section.name == "update":
                own = {ALL: 1}
            elif "micro_step" in names.sections:
                own[PAST] = 1
            terms = tuple(sorted((source, section.axes, n) for source, n in own.items()))
            require(
                key == (("gradient", flat, terms) if terms else ZERO[0]),
                f"reads a gradient of {slot.name} that is not summed over all ranks and micro-steps",
            )


def _gradient(section: SectionCheck, region: FileRecord) -> Pieces:
    """Return a gradient that an op reads, which must be final."""
    pieces = section.read(region)
    for a, b, value in pieces:
        require(value == ZERO or value[0][0] == "gradient", f"%{region.buffer} holds no gradient")
        if value != ZERO:
            final(section, value[0][1], [(a, b, value)])
    return pieces


def _statistic(section: SectionCheck, op: FileRecord, _: Pieces) -> Left:
    sources = [tuple(p for p in _gradient(section, r) if p[2] != ZERO) for r in op.sources]
    old = tuple(section.read(op.destination)) if op.mode == "accumulate" else ()
    require(all(k[0] == "value" for _, _, (k, _) in old), "adds to no statistic")
    return [(op.destination, [(0, 1, made((op.kind, old, *sources)))])]


def _check_statistic(section: SectionCheck, region: FileRecord, kind: str) -> None:
    """Require that a statistic is of all gradients, of each element once; a maximum, at least once."""
    names = section.names
    counts = {f.name: Spans(f.padded_numel, 0) for f in names.program.flats if f.is_trainable}
    ((_, _, (key, _)),) = section.read(region)
    axes: list[str] = []
    while key[0] == "value":
        axes += key[-1]
        meaning = section.claims.meaning(key := (*key[:-1], ()), section.rank)
        if meaning[0] == kind:
            break
        is_max = meaning[0] == "max" and kind == "CheckFinite"
        require(is_max or meaning[0] == "wire", f"%{region.buffer} is no statistic of gradients")
        axes += meaning[1:2] if is_max else []
        key = meaning[2][0] if is_max else meaning[2]
    require(len(axes) == len(set(axes)), f"%{region.buffer} is combined twice over an axis")
    others = [axis for axis in names.axes if axis not in axes]
    order: list[dict[str, tuple[int, int]]] = []
    for rank in section.ranks:
        if any(names.coordinate(rank, a) != names.coordinate(section.rank, a) for a in others):
            continue
        for index, source in enumerate(_read_by(section, key, rank, kind)):
            order += [{}] if index == len(order) else []
            for start, stop, ((_, flat, _), shift) in source:
                for low, high, count in counts[flat].read(start + shift, stop + shift):
                    counts[flat].write(low, high, count + 1)
                for low, high, slot in parts(names.flats[flat], start + shift, stop + shift):
                    if slot is not None:
                        first, last = order[index].get(flat, (low, high))
                        order[index][flat] = min(first, low), max(last, high)
    if kind == "GradNorm":
        section.settings.add(("norm", str([item for of in order for item in of.items()])))
    for flat in names.program.flats:
        for start, stop, slot in parts(flat, 0, flat.padded_numel) if flat.is_trainable else ():
            if slot is not None:
                for _, _, count in counts[flat.name].read(start, stop):
                    is_once = count == 1 or (count > 1 and kind == "CheckFinite")
                    require(is_once, f"counts the gradient of {slot.name} {count} times")


def _read_by(section: SectionCheck, key: Key, rank: int, kind: str) -> list[Pieces]:
    """Return the gradients that a statistic has read on a rank, source by source."""
    meaning = section.claims.meaning(key, rank)
    require(meaning[0] == kind, "adds to another statistic")
    before = [of for _, _, (old, _) in meaning[1] for of in _read_by(section, old, rank, kind)]
    return [*before, *meaning[2:]]


def _scalars(section: SectionCheck, op: FileRecord, *names: str) -> tuple[Any, ...]:
    return tuple((name, *section.read(r)) for name in names for r in regions(op, name))


def _advanced(section: SectionCheck, region: FileRecord, *why: object) -> tuple[FileRecord, Pieces]:
    """Return a counter of steps, or a loss scale, after the change of this step, which is the first."""
    is_first = all(k[0] == "value" and k[1].endswith(" 0") for *_, (k, _) in section.read(region))
    require(is_first, f"changes %{region.buffer} again")
    return region, [(a, b, made((*why, k), s)) for a, b, (k, s) in section.read(region)]


def constants(names: Declarations) -> tuple[set[str], set[str]]:
    """Return the buffers that no op may change, and the counters, which the update advances."""
    kept = {name for group in names.program.groups for name in (group.lr, group.hyper)}
    kept |= {b.name for b in names.program.buffers if b.role == "constant"}
    changed, advanced = set[str](), set[str]()
    for op in (op for s in names.program.sections for op in s.body):
        if op.kind == "Compute":
            changed |= {d.view.region.buffer for d in op.destinations if d is not None}
            read = {a.view.region.buffer for a in op.arguments}
            kept |= {name for name in read if names.buffers[name].role == "scalar"}
        elif op.kind in {"Decide", "UpdateScale"}:
            advanced.add((op.step if op.kind == "Decide" else op.state).buffer)
    counters = advanced & {names.report("step"), names.report("loss_scale")}
    return kept - changed - counters, counters


def check_divisor(section: SectionCheck, op: FileRecord) -> None:
    """Require that gradients are divided by how many micro-batches, or what weights, they are summed over."""
    program = section.names.program
    sizes = {axis.name: axis.size for axis in program.mesh.axes}
    if op.weight is None:
        is_fixed = program.weight is None and "micro_step" not in section.names.sections
        count = math.prod(sizes.values()) * program.interleaved
        require(is_fixed and op.divisor == count, f"divides by {op.divisor}")
        return
    ((_, _, (key, _)),) = section.read(op.weight)
    require(key[0] == "weight" and key[1], "divides by no weight")
    axes = tuple(axis for axis in section.axes if axis in key[1][0][1])
    own = {CURRENT - j: 1 for j in range(program.interleaved)}
    own |= {PAST: 1} if "micro_step" in section.names.sections else {}
    own = {ALL: 1} if section.section.name == "update" else own
    terms = tuple(sorted((source, axes, n) for source, n in own.items()))
    missing = math.prod(sizes[axis] for axis in section.axes if axis not in axes)
    is_whole = (
        key[1] == terms and op.divisor == missing and (program.weight is None or missing == 1)
    )
    require(is_whole, "divides by another weight than that of the micro-batches")


def named(section: SectionCheck, region: FileRecord, *buffers: str | None) -> None:
    """Require that a region holds what rests in one of some buffers."""
    held = [section.names.buffers[name].holds for name in buffers if name is not None]
    wanted = [("value", f"{content.name} 0", ()) for content in held]
    is_so = all(k in wanted for *_, (k, _) in section.read(region))
    require(is_so, f"reads %{region.buffer}, which is not what it began with")


def check_scale(section: SectionCheck, op: FileRecord) -> None:
    """Require that gradients are divided by the loss scale that the backward has used."""
    report, program = section.names.report("loss_scale"), section.names.program
    if op.loss_scale is not None and report is not None:
        named(section, op.loss_scale, report)
    is_scaled = any(other.kind == "UpdateScale" for s in program.sections for other in s.body)
    require(op.loss_scale is not None or not is_scaled, "ignores the loss scale")


def _decide(section: SectionCheck, op: FileRecord, _: Pieces) -> Left:
    report = section.names.report
    require(section.decision in (None, op), "decides again")
    section.decision = op
    check_divisor(section, op)
    for region, kind in ((op.overflow, "CheckFinite"), (op.norm, "GradNorm")):
        if region is not None:
            _check_statistic(section, region, kind)
    for region in (op.step, *op.counts):
        named(section, region, report("step"), *(count.buffer for count in op.counts))
    check_scale(section, op)
    for region in regions(op, "guess"):
        told = [section.claims.meaning(k, section.rank)[0] for *_, (k, _) in section.read(region)]
        require(told == ["guessed"], "compares itself with what is no guess")
    for quantity, name in (("squared_norm", "norm"), ("summed_weight", "weight")):
        for region in regions(op, name):
            section.reported[quantity, section.rank] = section.read(region)
    counts = [section.read(region) for region in (op.step, *op.counts)]
    has = [bool(regions(op, name)) for name in ("overflow", "skip", "loss_scale", "weight")]
    section.settings.add(("decide", op.max_norm, str(counts), *has))
    read = _scalars(section, op, "overflow", "norm", "loss_scale", "weight", "guess", "step")
    why = (op.divisor, op.max_norm, read)
    left = [_advanced(section, region, "advanced", *why) for region in (op.step, *op.counts)]
    for name in ("gradient_divisor", "skip", "redo"):
        left += [(r, [(0, 1, made((name, *why)))]) for r in regions(op, name)]
    return left


def check_reports(section: SectionCheck, rank: int) -> None:
    """Require that the engine finds after an update what it reports of it."""
    names, program = section.names, section.names.program
    require(program.weight is None or names.report("summed_weight"), "no report names the weight")
    is_decided = section.decision is not None
    decides = any(op.kind == "Decide" for s in program.sections for op in s.body)
    require(is_decided or not decides, "the update takes no decision")
    for report in program.reports:
        if report.quantity in {"summed_weight", "squared_norm", "skip", "redo"}:
            wanted = section.reported.get((report.quantity, rank))
        elif report.quantity == "summed_loss":
            loss = names.buffers[names.report("loss") or ""].holds.name
            wanted = [(0, 1, (("value", f"{loss} 0", section.axes), 0))]
        else:
            continue
        numel = names.buffers[report.buffer].numel
        held = section.memory[rank][report.buffer].read(0, numel)
        is_so = wanted is not None and merged(held) == wanted
        require(is_so, f"%{report.buffer} is not the {report.quantity} after the update")


def follows(section: SectionCheck, op: FileRecord, *names: str) -> None:
    """Require that an op reads what the decision left, and skips if the decision may say so."""
    decision = section.decision
    require(decision is not None, "comes before a decision")
    assert decision is not None
    for name in names:
        found, wanted = regions(op, name), regions(decision, name)
        require(len(found) == len(wanted), f"has another {name} than the decision")
        for region in found:
            for _, _, (key, _) in section.read(region):
                meaning = section.claims.meaning(key, section.rank)[0]
                was_early = meaning == "entry" and name == "step" and key[1].endswith(" 1")
                is_own = meaning == ("advanced" if name == "step" else name) or was_early
                require(is_own, f"reads in %{region.buffer} what the decision did not leave")


def own_settings(section: SectionCheck, op: FileRecord) -> set[str]:
    """Return the groups whose settings an op names, which must be those that the groups declare."""
    groups = {group.name: group for group in section.names.program.groups}
    for name, *given in settings(op):
        require(name in groups and groups[name].algorithm == op.algorithm, f"has no group {name}")
        for region, declared in zip(given, (groups[name].lr, groups[name].hyper), strict=True):
            content = section.names.buffers[declared].holds
            wanted = [(("value", f"{content.name} {content.version}", ()), 0)]
            require([v for *_, v in section.read(region)] == wanted, f"has no setting of {name}")
    return {name for name, _, _ in settings(op)}


def stepped(section: SectionCheck, op: FileRecord, key: Key, start: int, stop: int) -> None:
    """Require that elements are trained, by the settings of their groups."""
    flat, own = section.names.flats[key[2]], own_settings(section, op)
    require(flat.is_trainable, f"trains {flat.name}")
    for low, high, slot in parts(flat, start, stop):
        covered = 0
        for first, last, group in section.groups.get(flat.name, ()) if slot is not None else ():
            if first < high and low < last:
                covered += min(last, high) - max(first, low)
                require(group in own, f"has no settings of {group}")
        require(slot is None or covered == high - low, "trains what is in no group")


def _next(value: Value, quantity: str | None = None) -> Value:
    (kind, own, flat, version, guess), shift = value
    return (kind, quantity or own, flat, version + 1, guess), shift


def _step(section: SectionCheck, op: FileRecord, _: Pieces) -> Left:
    follows(section, op, "gradient_divisor", "skip", "step")
    if op.algorithm in _WHOLE:
        return _whole_step(section, op, _)
    names = [f"{n}{'_codes' if op.scales else ''}" for n in STATES.get(op.algorithm, ())]
    require(len(names) == len(op.states), "has other states than its optimizer")
    fields = [op.param, op.grad, *op.states]
    left: list[Pieces] = [[] for _ in fields]
    for a, b, values in aligned(*map(section.read, fields)):
        (key, shift), grad, *states = values
        require(key[0] == "flat" and key[1] in {"param", "master"}, "updates no parameters")
        require(key[3:] == (0, None), "updates parameters again")
        stepped(section, op, key, a + shift, b + shift)
        for name, state in zip(names, states, strict=True):
            require(state == ((key[0], name, *key[2:]), shift), f"takes other elements as {name}")
        if grad == ZERO:
            grad = (grad[0], shift)
        require(grad[1] == shift, "takes the gradient of other elements")
        final(section, key[2], [(a, b, grad)])
        spent = ZERO if grad[0] == ZERO[0] else UNDEFINED
        for pieces, value in zip(left, (values[0], spent, *states), strict=True):
            pieces.append((a, b, _next(value) if value[0][0] == "flat" else value))
    scales: Left = []
    for name, region in zip(STATES.get(op.algorithm, ()), op.scales, strict=False):
        held = section.read(region)
        for a, _end, (key, shift) in section.read(op.param):
            wanted = ("flat", f"{name}_absmax", *key[2:]), shift // _BLOCK
            is_so = all(piece[2] == wanted for piece in held) and (a + shift) % _BLOCK == 0
            require(is_so, f"takes the scales of other elements for {name}")
        scales.append((region, [(a, b, _next(v)) for a, b, v in held]))
    return [*zip(fields, left, strict=True), *scales]


def _whole_step(section: SectionCheck, op: FileRecord, _: Pieces) -> Left:
    param, grad = section.read(op.param), section.read(op.grad)
    for a, b, (key, shift) in param:
        require(key[0] == "flat" and key[1] in {"param", "master"}, "updates no parameters")
        require(key[3:] == (0, None), "updates parameters again")
        stepped(section, op, key, a + shift, b + shift)
        numel = section.names.flats[key[2]].padded_numel
        direction = (("flat", "direction", key[2], 1, None), 0)
        require(grad == [(0, numel, direction)], "does not read the directions of all elements")
        if op.whole is not None and op.algorithm == "adafactor":
            whole = [(0, numel, (key, 0))]
            require(section.read(op.whole) == whole, "does not read all parameters")
    left: Left = [(op.param, [(a, b, _next(v)) for a, b, v in param])]
    left.append((op.grad, [(start, stop, UNDEFINED) for start, stop, *_rest in grad]))
    if op.factors is not None:
        for piece in section.read(op.factors):
            key = piece[2][0]
            is_so = key[1:2] == _WHOLE[op.algorithm] and key[2] == param[0][2][0][2]
            require(is_so and key[3] == 0, "changes what is not the state of its optimizer")
        left.append((op.factors, [(a, b, _next(v)) for a, b, v in section.read(op.factors)]))
    return left


def _direction(section: SectionCheck, op: FileRecord, claimed: Pieces) -> Left:
    """A direction is of the elements that its claim says, whose gradient it must read; others are padding."""
    follows(section, op, "gradient_divisor", "skip", "step")
    require(claimed and claimed[0][2][0][0] == "flat", "leaves no direction")
    (_, _, flat, _, _), shift = claimed[0][2]
    grad = section.read(op.grad)
    for a, b, (key, there) in grad:
        require(key == ZERO[0] or there == shift, "takes the gradient of other elements")
        final(section, flat, [(a, b, (key, shift))])
    stepped(section, op, ("flat", "", flat), shift, shift + section.names.numel(op.grad))
    left: Left = [(op.grad, [(a, b, ZERO if v == ZERO else UNDEFINED) for a, b, v in grad])]
    for name, region in zip(STATES.get(op.algorithm, ()), op.states, strict=True):
        pieces, wanted = section.read(region), (("flat", name, flat, 0, None), shift)
        require(all(v == wanted for *_, v in pieces), f"takes other elements as {name}")
        left.append((region, [(a, b, _next(v)) for a, b, v in pieces]))
    new = ("flat", "direction", flat, 1, None), shift
    return [*left, (op.direction, [(0, section.names.numel(op.direction), new)])]


def _average(section: SectionCheck, op: FileRecord, _: Pieces) -> Left:
    follows(section, op, "skip")
    found: Pieces = []
    for a, b, (param, old) in aligned(section.read(op.param), section.read(op.average)):
        key, shift = param
        is_new = key[0] == "flat" and key[1] in {"param", "master"} and key[3:] == (1, None)
        require(is_new, "reads parameters that are not updated")
        require(old == (("flat", "ema", key[2], 0, None), shift), "adds to other elements")
        found.append((a, b, _next(old)))
        section.settings.add(("average", key[1], key[2], op.decay))
    return [(op.average, found)]


def _update_scale(section: SectionCheck, op: FileRecord, _: Pieces) -> Left:
    follows(section, op, "skip")
    read = _scalars(section, op, "skip", "weight")
    attributes = op.window, op.factor, op.hysteresis, op.minimum, op.refill
    section.settings.add(("scale", *attributes, op.weight is not None))
    named(section, op.state, section.names.report("loss_scale"))
    return [_advanced(section, op.state, "update_scale", attributes, read)]


RULES: Final[Mapping[str, Callable[[SectionCheck, FileRecord, Pieces], Left]]] = {
    "GradNorm": _statistic,
    "CheckFinite": _statistic,
    "Decide": _decide,
    "OptimizerStep": _step,
    "Direction": _direction,
    "Average": _average,
    "UpdateScale": _update_scale,
}
