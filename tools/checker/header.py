"""What a save must copy, and what a schedule must have in common with its logical program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from tools.checker.program import Declarations, all_ops, changes, slot_numel
from tools.checker.reading import FileRecord

Report = Callable[[str], None]


def saving_problems(names: Declarations) -> Iterator[str]:
    """A save copies each buffer of the state to a snapshot of its own, once, and does nothing else."""
    section = names.sections.get("save")
    if section is None:
        return
    copied = Counter(r.buffer for op in section.body if op.kind != "Wait" for r, _ in changes(op))
    pending = {p.event: p for p in section.exit.pending}
    for op in section.body:
        if op.kind not in {"Wait", "Cast", "ToHost", "Load"}:
            yield f"section save has an op {op.kind}"
    signalled = {op.event: op for op in section.body if getattr(op, "event", None) is not None}
    sources: dict[str, FileRecord] = {}
    for buffer in names.program.buffers:
        if buffer.role != "snapshot" or getattr(buffer.holds, "kind", None) != "SnapshotContent":
            continue
        content = buffer.holds
        sources[content.buffer] = content
        if copied[buffer.name] != 1 or buffer.space != "host":
            yield f"section save writes %{buffer.name} {copied[buffer.name]} times"
        writer = signalled.get(content.event)
        if content.event is not None and (
            content.event not in pending
            or writer is None
            or changes(writer)[0][0].buffer != buffer.name
        ):
            yield f"%{buffer.name} is whole after {content.event}, which is not pending after save"
        if content.event is None and any(
            op.event is not None and op.event in pending and changes(op)[0][0].buffer == buffer.name
            for op in section.body
            if op.kind != "Wait"
        ):
            yield f"%{buffer.name} does not say after which event it is whole"
        of = names.buffers[content.buffer].holds
        if (
            of is None
            or content.offset < 0
            or content.offset + content.numel > names.buffers[content.buffer].numel
        ):
            yield f"%{buffer.name} is a snapshot of elements that %{content.buffer} does not have"
        elif (content.shard is None) != (content.numel == buffer.numel):
            yield f"%{buffer.name} has another size than what it is a copy of"
        elif content.numel != names.buffers[content.buffer].numel:
            yield f"%{buffer.name} is a copy of a part of %{content.buffer}"
        elif content.shard is not None and getattr(of, "shard", content.shard) == content.shard:
            yield f"%{buffer.name} is a copy of a slice of a slice along {content.shard}"
    for what, candidates in _state_of_training(names):
        if not any(name in sources for name in candidates):
            yield f"no snapshot is a copy of {what}"


def _state_of_training(names: Declarations) -> Iterator[tuple[str, list[str]]]:
    """Yield what training goes on from, each with the buffers that hold it."""
    held: dict[tuple[str, str, int, int | None], list[str]] = {}
    masters = {
        b.holds.flat
        for b in names.program.buffers
        if b.role == "master" and getattr(b.holds, "kind", None) == "FlatContent"
    }
    for buffer in names.program.buffers:
        content = buffer.holds
        if content is None or content.kind != "FlatContent" or content.quantity == "grad":
            continue  # a gradient is none of the state of training
        if content.quantity != "param" or content.flat not in masters:
            key = (content.quantity, content.flat, content.offset, content.stride)
            held.setdefault(key, []).append(buffer.name)
    for (quantity, flat, _, _), candidates in held.items():
        if names.flats[flat].is_trainable:
            yield f"{quantity} of flat {flat}", candidates
    written = {
        r.buffer
        for s in names.program.sections
        for op in s.body
        if op.kind != "Wait"
        for r, _ in changes(op)
    }
    for binding in names.program.module_buffers:
        if binding.buffer in written and names.buffers[binding.buffer].role == "module_buffer":
            yield f"module buffer {binding.name}", [binding.buffer]
    scalars = [op.step.buffer for op in all_ops(names) if op.kind == "Decide"]
    scalars += [op.state.buffer for op in all_ops(names) if op.kind == "UpdateScale"]
    yield from ((f"scalar %{name}", [name]) for name in scalars)


def check_header(names: Declarations, logical: Declarations, report: Report) -> None:
    """Report bindings that differ from those of the logical program."""
    one, other = names.program, logical.program
    if logical.ranks != 1:
        report("the logical program is for several ranks")
    for what in ("inputs", "outputs", "module_buffers", "batch_constants", "weighing", "operators"):
        if _bindings(names, getattr(one, what)) != _bindings(logical, getattr(other, what)):
            report(f"the {what.replace('_', ' ')} are not those of the logical program")
    if (one.weight is None, one.rank is None) != (other.weight is None, other.rank is None):
        report("the weight or the rank is bound otherwise than in the logical program")
    values = {_value(logical, s.buffer): s.values for s in other.scalars}
    own = {_value(names, s.buffer): s.values for s in one.scalars}
    group = one.interleaved
    if values.keys() - own.keys() or any(
        v not in {own[k], own[k][::group]} for k, v in values.items()
    ):
        report("a scalar begins with another value than in the logical program")
    if [_flat(f) for f in one.flats] != [_flat(f) for f in other.flats]:
        report("the flats are not those of the logical program")
    if _owners(names) != _owners(logical):
        report("the groups are not those of the logical program")
    seeds = [{b.holds: b.numel for b in of.buffers if b.role == "rng"} for of in (other, one)]
    if seeds[0].keys() != seeds[1].keys() or any(
        seeds[1][of] < count * group or (group == 1 and seeds[1][of] != count)
        for of, count in seeds[0].items()
    ):
        report("the places that draw random numbers are not those of the logical program")
    counts = [dict(of.options).get("micro_steps", "1") for of in (one, other)]
    if counts[0] != counts[1]:
        report(f"a step has {counts[0]} micro-steps, and {counts[1]} in the logical program")
    if {r.quantity for r in other.reports} - {r.quantity for r in one.reports}:
        report("a report of the logical program is missing")


def _bindings(names: Declarations, value: object) -> list[object]:
    """The fields of bindings, with the value that a buffer holds in the place of its name."""
    if value is None:
        return [None]
    items = value if isinstance(value, tuple) else (value,)
    return [
        [_value(names, v) if k == "buffer" else v for k, v in vars(item).items()] for item in items
    ]


def _value(names: Declarations, buffer: str) -> str:
    content = names.buffers[buffer].holds
    return str(content.name if content is not None and content.kind == "NamedContent" else buffer)


def _flat(flat: FileRecord) -> tuple[object, ...]:
    return flat.name, flat.unit, flat.dtype, flat.is_trainable, flat.slots


def _owners(names: Declarations) -> dict[str, tuple[object, ...]]:
    """The group of each parameter: name, optimizer, and the values of its settings."""
    found: dict[str, tuple[object, ...]] = {}
    for flat in names.program.flats:
        for slot in flat.slots:
            for group in names.program.groups:
                for name, start, stop in group.intervals:
                    if (
                        name == flat.name
                        and start <= slot.offset
                        and slot.offset + slot_numel(slot) <= stop
                    ):
                        values = _value(names, group.lr), _value(names, group.hyper)
                        found[slot.name] = group.name, group.algorithm, *values
    return found
