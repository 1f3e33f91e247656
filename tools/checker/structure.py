"""What each declaration and each op must be by itself: names, sizes, dtypes, places, and roles that fit contents."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tools.checker.program import (
    COLLECTIVES,
    GATHERS,
    HOST,
    TRANSFERS,
    Declarations,
    changes,
    reads,
    slot_numel,
)
from tools.checker.reading import FileRecord

Report = Callable[[str], None]

_OPERATORS: Final = Path(__file__).parents[2] / "zeroir/ir/segments/aten_ops.txt"
_PIECE: Final = 64
_BLOCK: Final = 256
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
_BETWEEN_STEPS: Final = ("evaluate", "save")
_WHOLE: Final = ("muon", "adafactor", "shampoo")
_SCALARS: Final = {
    "step": ("f32", 1), "gradient_divisor": ("f32", 1), "skip": ("f32", 1), "overflow": ("f32", 1), "norm": ("f32", 1),
    "loss_scale": ("f32", 1), "weight": ("f32", 1), "guess": ("f32", 1), "redo": ("f32", 1), "next_step": ("f32", 1),
    "lr": ("f64", 1), "by": ("f32", 1),
}  # fmt: skip


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
            for text in _op(names, section, op):
                report(f"{section.name} {index} ({op.kind}) {text}")
    for text in _saving(names):
        report(text)


# ------------------------------------------------------------------------------------------------------------- names


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


# ------------------------------------------------------------------------------------------------------ declarations


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
            ) % _PIECE:
                yield f"{what} has no place, or none at a multiple of {_PIECE} bytes"
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
        op.redo.buffer for op in _all_ops(names) if op.kind == "Decide" and op.redo is not None
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


def _all_ops(names: Declarations) -> Iterator[FileRecord]:
    for section in names.program.sections:
        yield from section.body


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
        if any(a % _PIECE or b > flat.padded_numel for a, b in places) or any(
            b > c for (_, b), (c, _) in itertools.pairwise(sorted(places))
        ):
            yield f"the parameters of flat {flat.name} overlap, or stand at no multiple of {_PIECE}"
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
                    f"state of {section.name}: {text}" for text in _region(names, holding.region)
                )
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


# --------------------------------------------------------------------------------------------------------------- ops


def _region(names: Declarations, region: FileRecord) -> Iterator[str]:
    buffer = names.buffers[region.buffer]
    if region.offset < 0 or region.numel < 0 or region.offset + region.numel > buffer.numel:
        yield f"names elements outside %{region.buffer}"
    count = 1 if region.shard is None else names.axes[region.shard]
    if region.numel % count:
        yield f"cuts %{region.buffer} in slices of unequal length"
    if (
        region.part is not None
        and not 0 <= region.part[0] <= region.part[1] <= region.numel // count
    ):
        yield f"names a part outside the slice of %{region.buffer}"


def _op(names: Declarations, section: FileRecord, op: FileRecord) -> Iterator[str]:
    if op.kind in {"Alloc", "Release"} and names.buffers[op.buffer].holds is not None:
        yield f"begins or ends %{op.buffer}, which is persistent"
    if op.kind in {"Wait", "Alloc", "Release"}:
        return
    used, changed = reads(op), changes(op)
    outside = [
        text for region in (*used, *(r for r, _ in changed)) for text in _region(names, region)
    ]
    yield from outside
    if outside:
        return
    yield from _spaces(names, op, used, [r for r, _ in changed])
    yield from _touches_twice(names, op, used, [r for r, _ in changed])
    for region in (*used, *(r for r, _ in changed)):
        if names.buffers[region.buffer].role == "snapshot" and (
            section.name != "save" or region in used
        ):
            yield f"uses %{region.buffer}: only section save writes snapshots, and the host alone reads them"
    for name, (dtype, numel) in _SCALARS.items():
        taken = getattr(op, name, None)
        if isinstance(taken, FileRecord) and (
            names.buffers[taken.buffer].dtype,
            names.numel(taken),
        ) != (dtype, numel):
            yield f"takes a {name} that is no {dtype}[{numel}]"
    if op.kind in COLLECTIVES:
        yield from _collective(names, op)
    elif op.kind == "Compute":
        yield from _compute(names, op)
    elif op.kind == "Cast" or op.kind in TRANSFERS:
        if names.numel(op.source) != names.numel(op.destination):
            yield "has a source and a destination of different sizes"
        dtypes = names.buffers[op.source.buffer].dtype, names.buffers[op.destination.buffer].dtype
        if op.kind in TRANSFERS and dtypes[0] != dtypes[1]:
            yield f"copies {dtypes[0]} to {dtypes[1]}"
    elif hasattr(op, "grad"):
        yield from _step(names, op)
    elif op.kind == "Average" and names.numel(op.param) != names.numel(op.average):
        yield "has operands of different sizes"


def _spaces(
    names: Declarations, op: FileRecord, used: list[FileRecord], changed: list[FileRecord]
) -> Iterator[str]:
    executor = next(s.executor for s in names.program.streams if s.name == op.stream)
    spaces = {names.buffers[r.buffer].space for r in changed}
    of_host = [r.hyper for r in (op, *getattr(op, "others", ())) if hasattr(r, "hyper")]
    spaces_read = {
        names.buffers[r.buffer].space
        for r in used
        if r not in of_host and names.buffers[r.buffer].role != "rng"
    }
    if op.kind in TRANSFERS:
        source, target = TRANSFERS[op.kind]
        if (spaces_read, spaces) != ({source}, {target}):
            yield f"copies from {spaces_read} to {spaces}"
        if (executor == "disk") != ("disk" in (source, target)):
            yield f"is carried out by the {executor}"
    elif (spaces | spaces_read) - {executor if executor != "disk" else "host"}:
        yield f"works on {spaces | spaces_read}, but its stream is carried out by the {executor}"


def _touches_twice(
    names: Declarations, op: FileRecord, used: list[FileRecord], changed: list[FileRecord]
) -> Iterator[str]:
    in_place = op.kind in COLLECTIVES or op.kind in {"Cast", "Compute"}
    for rank in range(names.ranks):
        written = [(r.buffer, *names.span(r, rank)) for r in changed]
        for (a, b, c), (x, y, z) in itertools.combinations(written, 2):
            if a == x and b < z and y < c:
                yield f"writes elements of %{a} twice"
                return
        for i, region in enumerate(used):
            own = (region.buffer, *names.span(region, rank))
            for k, (x, y, z) in enumerate(written):
                is_pair = op.kind not in COLLECTIVES or i == k
                allowed = in_place and is_pair and (op.kind != "Cast" or own == (x, y, z))
                if own[0] == x and own[1] < z and y < own[2] and not allowed:
                    yield f"reads elements of %{x} that it writes"
                    return


def _collective(names: Declarations, op: FileRecord) -> Iterator[str]:
    size = names.comms[op.comm].ranks or len(names.groups(op.comm)[0])
    if op.kind == "Broadcast" and not 0 <= op.root < size:
        yield f"has a root outside its {size} ranks"
    for pair in op.pairs:
        source, target = names.numel(pair.source), names.numel(pair.destination)
        if op.kind in GATHERS:
            source *= size
        elif op.kind == "ReduceScatter":
            target *= size
        if source != target:
            yield f"has a source and a destination that do not fit: {source} and {target} elements"
        if names.buffers[pair.source.buffer].dtype != names.buffers[pair.destination.buffer].dtype:
            yield "has a source and a destination of different dtypes"
    if not op.pairs:
        yield "has no pairs"


def _compute(names: Declarations, op: FileRecord) -> Iterator[str]:
    segment = names.segments[op.segment]
    types = [*segment.inputs, *(r for node in segment.nodes for r in node.results)]
    outputs = [types[index] for index in segment.outputs]
    if len(op.arguments) != len(segment.inputs) or len(op.destinations) != len(outputs):
        yield "has another number of operands or results than its segment"
        return
    views = [(a.view, kind, True) for a, kind in zip(op.arguments, segment.inputs, strict=True)]
    views += [
        (d.view, kind, False)
        for d, kind in zip(op.destinations, outputs, strict=True)
        if d is not None
    ]
    for view, kind, is_read in views:
        buffer = names.buffers[view.region.buffer]
        if (
            kind is None
            or buffer.dtype != kind.dtype
            or view.shape != kind.shape
            or len(view.stride) != len(view.shape)
        ):
            yield f"has a view of %{buffer.name} of another type than its segment"
            continue
        span = (
            0
            if 0 in view.shape
            else 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True))
        )
        numel = names.numel(view.region)
        if (
            min(view.stride, default=0) < 0
            or span > numel
            or (not is_read and math.prod(view.shape) != numel)
        ):
            yield f"has a view that does not fit its region of %{buffer.name}"
        if is_read and layout_of(view) != layout_of(kind):
            yield f"reads %{buffer.name} with other strides than its segment has"


def layout_of(view: FileRecord) -> list[int]:
    """Return the strides that matter."""
    return [s for n, s in zip(view.shape, view.stride, strict=True) if n > 1]


def _step(names: Declarations, op: FileRecord) -> Iterator[str]:
    is_whole = op.kind == "OptimizerStep" and op.algorithm in _WHOLE
    param = getattr(op, "param", op.grad)
    alike = [*op.states, *getattr(op, "kept", ()), *([] if is_whole else [op.grad])]
    alike += [
        r for r in (getattr(op, "rounded", None), getattr(op, "direction", None)) if r is not None
    ]
    numel = names.numel(param)
    if any(names.numel(region) != numel for region in alike):
        yield "has operands of different sizes"
    scales = getattr(op, "scales", ())
    block = _BLOCK if scales else _PIECE
    if numel % block or any(names.span(param, rank)[0] % block for rank in range(names.ranks)):
        yield f"cuts %{param.buffer} off the {block} elements that its kernels take at a time"
    floats = [param, *([] if op.kind in {"SpeculativeStep", "CommitStep"} else [op.grad])]
    floats += [*scales] if scales else [*op.states]
    if not is_whole and any(names.buffers[r.buffer].dtype != "f32" for r in floats):
        yield "has operands that are not f32"
    states = {"sgd": 0, "adam": 2, "adamw": 2, "adafactor": 0, "shampoo": 0}.get(op.algorithm, 1)
    if len(op.states) != (0 if is_whole else states):
        yield f"has {len(op.states)} states"
    groups = {g.name: g for g in names.program.groups}
    for group, lr, hyper in [
        (op.group, op.lr, op.hyper),
        *((o.group, o.lr, o.hyper) for o in op.others),
    ]:
        if group in groups and groups[group].algorithm != op.algorithm:
            yield f"updates group {group} by {op.algorithm}"
        if names.buffers[hyper.buffer].numel != names.numel(hyper) or names.numel(lr) != 1:
            yield f"has settings of another size for group {group}"


# ------------------------------------------------------------------------------------------------------------ saving


def _saving(names: Declarations) -> Iterator[str]:
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
    scalars = [op.step.buffer for op in _all_ops(names) if op.kind == "Decide"]
    scalars += [op.state.buffer for op in _all_ops(names) if op.kind == "UpdateScale"]
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
