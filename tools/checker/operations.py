"""What each op must be by itself: sizes, dtypes and spaces of its operands, and elements that it touches once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

from tools.checker.program import COLLECTIVES, GATHERS, TRANSFERS, Declarations, changes, reads
from tools.checker.reading import FileRecord

PIECE: Final = 64
"""The elements that kernels of optimizers take at a time, and the bytes between places of buffers."""
_BLOCK: Final = 256
_WHOLE: Final = ("muon", "adafactor", "shampoo")
_SCALARS: Final = {
    "step": ("f32", 1), "gradient_divisor": ("f32", 1), "skip": ("f32", 1), "overflow": ("f32", 1), "norm": ("f32", 1),
    "loss_scale": ("f32", 1), "weight": ("f32", 1), "guess": ("f32", 1), "redo": ("f32", 1), "next_step": ("f32", 1),
    "lr": ("f64", 1), "by": ("f32", 1),
}  # fmt: skip


def region_problems(names: Declarations, region: FileRecord) -> Iterator[str]:
    """Yield what is wrong with the elements that a region names."""
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


def op_problems(names: Declarations, section: FileRecord, op: FileRecord) -> Iterator[str]:
    """Yield what is wrong with an op of a section, whatever the others do."""
    if op.kind in {"Alloc", "Release"} and names.buffers[op.buffer].holds is not None:
        yield f"begins or ends %{op.buffer}, which is persistent"
    if op.kind in {"Wait", "Alloc", "Release"}:
        return
    used, changed = reads(op), changes(op)
    outside = [
        text
        for region in (*used, *(r for r, _ in changed))
        for text in region_problems(names, region)
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
    block = _BLOCK if scales else PIECE
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
