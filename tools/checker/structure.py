"""What each declaration must be by itself: names, types, places, roles that fit contents, and pure operators."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tools.checker.header import saving_problems
from tools.checker.operations import PIECE, op_problems, region_problems
from tools.checker.program import (
    HOST,
    Declarations,
    all_ops,
    slot_numel,
)
from tools.checker.reading import FileRecord

Report = Callable[[str], None]

_OPERATORS: Final = Path(__file__).parents[2] / "zeroir/ir/segments/aten_ops.txt"
_ROLES: Final = {
    "param": "FlatContent",
    "master": "FlatContent",
    "state": "FlatContent",
    "grad": "FlatContent Zeros",
    "input": "NamedContent",
    "rng": "NamedContent",
    "scalar": "NamedContent WeightContent",
    "module_buffer": "NamedContent",
    "constant": "NamedContent",
    "output": "NamedContent",
    "snapshot": "SnapshotContent",
}
_TEMPORARY: Final = [
    "activation",
    "gathered",
    "grad",
    "master",
    "page",
    "param",
    "saved",
    "staging",
    "state",
    "workspace",
]


def check_structure(names: Declarations, report: Report) -> None:
    """Report declarations and ops that are wrong by themselves; where names are missing, nothing else."""
    missing = [*_missing(names), *_nodes(names)]
    for text in missing:
        report(text)
    if missing:
        return
    for text in itertools.chain(_declarations(names), _states(names)):
        report(text)
    for section in names.program.sections:
        for index, op in enumerate(section.body):
            for text in op_problems(names, section, op):
                report(f"{section.name} {index} ({op.kind}) {text}")
    for text in saving_problems(names):
        report(text)


def _missing(names: Declarations) -> Iterator[str]:
    program = names.program
    streams = {s.name for s in program.streams}
    kinds = (
        ("buffer", [b.name for b in program.buffers]), ("flat", [f.name for f in program.flats]),
        ("segment", [s.name for s in program.segments]), ("section", [s.name for s in program.sections]),
        ("communicator", [c.name for c in program.comms]), ("stream", [s.name for s in program.streams]),
        ("axis", [a.name for a in program.mesh.axes]), ("group", [g.name for g in program.groups]),
        ("parameter", [n for f in program.flats for s in f.slots for n in (s.name, *s.aliases)]),
        ("report", [r.quantity for r in program.reports]), ("input", [i.path for i in program.inputs]),
        ("bound", [b.kind_ for b in program.bounds]), ("output", [o.path for o in program.outputs]),
        ("module buffer", [b.name for b in program.module_buffers]), ("operator", [o.name for o in program.operators]),
        ("initial value", [s.buffer for s in program.scalars]),
        ("value", [b.holds.name for b in program.buffers if b.holds is not None and b.holds.kind == "NamedContent"]),
    )  # fmt: skip
    for what, listed in kinds:
        yield from (
            f"{what} {name} is declared twice" for name, n in Counter(listed).items() if n > 1
        )
    known = {
        "buffer": names.buffers, "flat": names.flats, "segment": names.segments, "comm": names.comms,
        "stream": streams, "behind": streams, "shard": names.axes, "axis": names.axes, "lr": names.buffers,
        "hyper": names.buffers, "on": {*streams, HOST}, "group": {g.name for g in program.groups} | {"default"},
        "parameter": names.slots, "gradient": names.slots, "weight": names.buffers, "rank": names.buffers,
    }  # fmt: skip
    if any(size < 1 for size in names.axes.values()):
        yield "an axis has no ranks"
    for record in _records(program):
        for name, value in vars(record).items():
            if name in known and isinstance(value, str) and value not in known[name]:
                yield f"{record.kind} names the {name} {value}, which is not declared"
        if record.kind in {"Weighing"}:
            yield from (
                f"buffer {n} is not declared" for n in record.arguments if n not in names.buffers
            )
        if record.kind == "State":
            yield from (
                f"buffer {n} is not declared" for n in record.live if n not in names.buffers
            )
        if record.kind in {"FlatContent", "WeightContent"}:
            yield from (f"axis {n} is not declared" for n in record.reduced if n not in names.axes)
        if record.kind == "Group":
            yield from (
                f"flat {n} is not declared" for n, _, _ in record.intervals if n not in names.flats
            )
    for section in program.sections:
        events = Counter(op.event for op in section.body if getattr(op, "event", None) is not None)
        yield from (
            f"{section.name}: event {name} is signalled twice"
            for name, n in events.items()
            if n > 1
        )
    if "last_micro_step" not in names.sections:
        yield "the program has no section last_micro_step"


def _records(value: object) -> Iterator[FileRecord]:
    if isinstance(value, FileRecord):
        yield value
        for item in vars(value).values():
            yield from _records(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from _records(item)


def _declarations(names: Declarations) -> Iterator[str]:
    program = names.program
    bound = {
        "input": {b.buffer for b in program.inputs},
        "module": {b.buffer for b in program.module_buffers} | {program.rank},
        "output": {b.buffer for b in program.outputs},
        "scalar": {b.buffer for b in program.scalars},
    }
    offsets = {
        b.space: b.offset is not None
        for b in program.buffers
        if b.holds is None and b.offset is not None
    }
    for buffer in program.buffers:
        content, what = buffer.holds, f"buffer %{buffer.name}"
        if content is None:
            if buffer.role not in _TEMPORARY:
                yield f"{what} is temporary, but has the role {buffer.role}"
            if (buffer.offset is None) == offsets.get(buffer.space, False) or (
                buffer.offset or 0
            ) % PIECE:
                yield f"{what} has no place, or none at a multiple of {PIECE} bytes"
        elif buffer.role not in _ROLES or content.kind not in _ROLES[buffer.role].split():
            yield f"{what} has the role {buffer.role}, but rests with a {content.kind}"
        if content is None:
            bindings = [of for of in bound.values() if buffer.name in of]
        else:
            wanted = {"input": "input", "output": "output", "scalar": "scalar"}.get(
                buffer.role, "module"
            )
            bindings = [of for kind, of in bound.items() if buffer.name in of and kind != wanted]
            is_bound = buffer.name in bound[wanted]
            if buffer.role in {"input", "output", "module_buffer", "constant"} and not is_bound:
                yield f"{what} is bound to nothing"
            if buffer.role == "rng" and buffer.dtype != "i64":
                yield f"{what} has seeds that are no i64"
            if content.kind == "FlatContent":
                yield from _flat_content(names, buffer, content, what)
        if bindings:
            yield f"{what} has the role {buffer.role}, but is bound as something else"
    for binding in (*program.inputs, *program.outputs, *program.module_buffers):
        buffer = names.buffers[binding.buffer]
        count = (
            program.interleaved
            if buffer.role == "input" or getattr(binding, "stored", None) == "step"
            else 1
        )
        room, rest = divmod(buffer.numel, count)
        is_short = (
            room < math.prod(binding.shape) if count > 1 else room != math.prod(binding.shape)
        )
        if rest or is_short or getattr(binding, "dtype", buffer.dtype) != buffer.dtype:
            yield f"buffer %{buffer.name} has another type than what is bound to it"
    for scalar in program.scalars:
        content = names.buffers[scalar.buffer].holds
        if getattr(content, "micro", None) == "current" and set(scalar.values) != {1.0}:
            yield f"buffer %{scalar.buffer} has weights that are not 1"
        if len(scalar.values) != names.buffers[scalar.buffer].numel:
            yield f"buffer %{scalar.buffer} has another size than its initial value"
    decisions = {
        op.redo.buffer for op in all_ops(names) if op.kind == "Decide" and op.redo is not None
    }
    for report in program.reports:
        if report.quantity == "redo" and report.buffer not in decisions:
            yield f"no decision writes %{report.buffer}, from which redo is reported"
        if report.quantity == "eval_loss" and "evaluate" not in names.sections:
            yield "eval_loss is reported, but there is no section evaluate"
        buffer = names.buffers[report.buffer]
        count = {"loss_scale": 3, "batch_loss": program.interleaved}.get(report.quantity, 1)
        if (buffer.role, buffer.dtype, buffer.numel) != ("scalar", "f32", count):
            yield f"{report.quantity} is reported from %{buffer.name}, which is no scalar f32[{count}]"
    if program.weight is not None:
        buffer = names.buffers[program.weight]
        content = buffer.holds
        if content is None or content.kind != "WeightContent" or content.micro != "current":
            yield f"%{buffer.name} receives the weight of each micro-batch, but holds something else"
    yield from _group_claims(names)


def _flat_content(
    names: Declarations, buffer: FileRecord, content: FileRecord, what: str
) -> Iterator[str]:
    flat, quantity = names.flats[content.flat], content.quantity
    is_gradient = quantity == "grad"
    plain = {"param": "param", "master": "master", "grad": "grad"}.get(quantity, "state")
    if buffer.role != plain:
        yield f"{what} holds {quantity}, but has the role {buffer.role}"
    if quantity == "param" and buffer.dtype != flat.dtype:
        yield f"{what} has another dtype than flat {flat.name}"
    if is_gradient != (content.micro is not None) or content.version or content.guessed:
        yield f"{what} rests with what no boundary has"
    if content.micro not in {None, "stale", "past"} or (
        content.reduced and content.micro == "stale"
    ):
        yield f"{what} rests with a gradient of this step"
    if content.stride is not None and (plain != "state" or content.shard is None):
        yield f"{what} has a stride without slices"
    if plain != "state" and not quantity.endswith("absmax"):
        count = 1 if content.shard is None else names.axes[content.shard]
        if content.offset < 0 or content.offset + buffer.numel * count > flat.padded_numel:
            yield f"{what} holds elements beyond flat {flat.name}"
    if not flat.is_trainable and quantity != "param":
        yield f"{what} holds {quantity} of a frozen flat"


def _group_claims(names: Declarations) -> Iterator[str]:
    for flat in names.program.flats:
        places = [(s.offset, s.offset + slot_numel(s)) for s in flat.slots]
        if any(a % PIECE or b > flat.padded_numel for a, b in places) or any(
            b > c for (_, b), (c, _) in itertools.pairwise(sorted(places))
        ):
            yield f"the parameters of flat {flat.name} overlap, or stand at no multiple of {PIECE}"
    owned = sorted((f, a, b, g.name) for g in names.program.groups for f, a, b in g.intervals)
    for (one, _, stop, _), (other, start, _, name) in itertools.pairwise(owned):
        if one == other and start < stop:
            yield f"flat {one} from element {start} on is in two groups, one is {name}"
    for group in names.program.groups:
        for flat, start, stop in group.intervals:
            if not 0 <= start <= stop <= names.flats[flat].padded_numel:
                yield f"group {group.name} has elements beyond flat {flat}"
        lr, hyper = names.buffers[group.lr], names.buffers[group.hyper]
        if (lr.dtype, lr.numel, hyper.dtype, hyper.space) != (
            "f64",
            1,
            "f64",
            "host",
        ) or lr.role != "scalar":
            yield f"the settings of group {group.name} have another type"


def _states(names: Declarations) -> Iterator[str]:
    for section in names.program.sections:
        for side in (section.entry, section.exit):
            for name in side.live:
                if names.buffers[name].holds is not None:
                    yield f"section {section.name} lists %{name} as live, which is persistent"
            for holding in side.holdings:
                yield from (
                    f"state of {section.name}: {text}"
                    for text in region_problems(names, holding.region)
                )
                if getattr(holding.content, "version", 0) not in {0, 1}:
                    yield f"section {section.name} names a version that no step makes"
                buffer = names.buffers[holding.region.buffer]
                if buffer.holds is None and buffer.name not in side.live:
                    yield f"section {section.name} says what %{buffer.name} holds, which is not live"
                if holding.after is not None and holding.after not in {
                    p.event for p in side.pending
                }:
                    yield f"section {section.name} names event {holding.after}, which is not pending"
            events = Counter(p.event for p in side.pending)
            yield from (
                f"section {section.name} lists {e} twice" for e, n in events.items() if n > 1
            )


def _nodes(names: Declarations) -> Iterator[str]:
    pure = {o.name for o in names.program.operators}
    for line in _OPERATORS.read_text("utf-8").splitlines() if _OPERATORS.exists() else ():
        packet, _, overloads = line.partition(":")
        pure |= {f"{packet}.{overload}" for overload in overloads.split()}
    for segment in names.program.segments:
        count = len(segment.inputs)
        for node in segment.nodes:
            if node.op not in pure:
                yield f"segment {segment.name} calls {node.op}, which is not on the list of pure operators"
            if any(
                index >= count or index < 0
                for index in _references((*node.args, *(a for _, a in node.kwargs)))
            ):
                yield f"segment {segment.name} uses a value that is not there yet"
            count += len(node.results)
        if any(not 0 <= index < count for index in segment.outputs):
            yield f"segment {segment.name} returns a value that is not there"
        for kind in (*segment.inputs, *(r for node in segment.nodes for r in node.results)):
            if kind is not None and len(kind.shape) != len(kind.stride):
                yield f"segment {segment.name} has a type with more or fewer strides than dimensions"


def _references(arguments: tuple[object, ...]) -> Iterator[int]:
    for argument in arguments:
        match argument:
            case ("ref", int() as index):
                yield index
            case ("list", tuple() as items):
                yield from _references(items)
