"""What the fields of a program mean together: names, ranks, the elements of regions, and the uses of each op."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tools.checker.reading import ITEM_BYTES, FileRecord

HOST: Final = "host"
COLLECTIVES: Final = ("AllGather", "Prefetch", "ReduceScatter", "AllReduce", "Broadcast")
GATHERS: Final = ("AllGather", "Prefetch")
TRANSFERS: Final = {
    "ToHost": ("device", "host"), "ToDevice": ("host", "device"),
    "Load": ("disk", "host"), "Store": ("host", "disk"),
}  # fmt: skip
MICRO_STEPS: Final = ("micro_step", "last_micro_step")

_READ: Final = {
    "Scale": "by",
    "GradNorm": "sources",
    "CheckFinite": "sources",
    "Decide": "overflow norm loss_scale weight guess",
    "Guess": "step loss_scale weight",
    "Direction": "step lr hyper gradient_divisor skip",
    "OptimizerStep": "step lr hyper gradient_divisor skip whole",
    "SpeculativeStep": "grad step lr hyper gradient_divisor",
    "CommitStep": "grad kept redo step lr hyper gradient_divisor skip",
    "Average": "param skip",
    "UpdateScale": "skip weight",
}
_CHANGED: Final = {
    "Fill": "destination",
    "Scale": "region",
    "GradNorm": "destination",
    "CheckFinite": "destination",
    "Decide": "step counts gradient_divisor skip redo",
    "Guess": "next_step gradient_divisor",
    "Direction": "grad states direction",
    "OptimizerStep": "param grad states factors scales",
    "SpeculativeStep": "param states kept rounded",
    "CommitStep": "param states rounded",
    "Average": "average",
    "UpdateScale": "state",
}
_FRESH: Final = {
    "Fill": "destination",
    "Decide": "gradient_divisor skip redo",
    "Guess": "next_step gradient_divisor",
    "Direction": "direction",
    "SpeculativeStep": "kept rounded",
}
"""Of these, the fields whose old elements the op does not read."""


def regions(op: FileRecord, names: str) -> list[FileRecord]:
    """Return the regions in the fields of an op, in order."""
    found: list[FileRecord] = []
    for name in names.split():
        value = getattr(op, name)
        found += value if isinstance(value, tuple) else [] if value is None else [value]
    return found


def settings(op: FileRecord) -> list[tuple[str, FileRecord, FileRecord]]:
    """Return group, learning rate and hyper-parameters of each optimizer group that an op names."""
    return [(op.group, op.lr, op.hyper), *((o.group, o.lr, o.hyper) for o in op.others)]


def reads(op: FileRecord) -> list[FileRecord]:
    """Return the regions that an op reads without changing them."""
    if op.kind in COLLECTIVES:
        return [pair.source for pair in op.pairs]
    if op.kind == "Compute":
        return [argument.view.region for argument in op.arguments]
    if op.kind in TRANSFERS or op.kind == "Cast":
        return [op.source]
    found = regions(op, _READ.get(op.kind, ""))
    for other in getattr(op, "others", ()):
        found += [other.lr, other.hyper]
    return found


def changes(op: FileRecord) -> list[tuple[FileRecord, bool]]:
    """Return the regions that an op changes, each with whether it also reads the old elements."""
    if op.kind in COLLECTIVES:
        staging = [] if op.staging is None else [(op.staging, False)]
        return [(pair.destination, False) for pair in op.pairs] + staging
    if op.kind == "Compute":
        return [(d.view.region, d.mode == "accumulate") for d in op.destinations if d is not None]
    if op.kind in TRANSFERS:
        return [(op.destination, False)]
    if op.kind == "Cast":
        return [(op.destination, op.mode == "accumulate")]
    fresh = regions(op, _FRESH.get(op.kind, ""))
    if op.kind in {"GradNorm", "CheckFinite"} and op.mode == "write":
        fresh = [op.destination]
    return [(r, all(r is not f for f in fresh)) for r in regions(op, _CHANGED.get(op.kind, ""))]


@dataclass
class Declarations:
    """A program with its declarations by name; with ``ranks``, so many replicas of a program for one device."""

    program: FileRecord
    ranks: int = 0
    buffers: dict[str, FileRecord] = field(init=False)
    flats: dict[str, FileRecord] = field(init=False)
    segments: dict[str, FileRecord] = field(init=False)
    sections: dict[str, FileRecord] = field(init=False)
    axes: dict[str, int] = field(init=False)
    comms: dict[str, FileRecord] = field(init=False)

    def __post_init__(self) -> None:
        program = self.program
        self.buffers = {b.name: b for b in program.buffers}
        self.flats = {f.name: f for f in program.flats}
        self.segments = {s.name: s for s in program.segments}
        self.sections = {s.name: s for s in program.sections}
        self.axes = {a.name: a.size for a in program.mesh.axes}
        self.comms = {c.name: c for c in program.comms}
        self.is_logical = bool(self.ranks)
        self.ranks = self.ranks or math.prod(self.axes.values())
        self.slots = {
            name: (flat, slot)
            for flat in program.flats
            for slot in flat.slots
            for name in (slot.name, *slot.aliases)
        }

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the place of a rank along an axis; the last axis varies fastest."""
        if self.is_logical:
            return 0
        for name in reversed(self.axes):
            rank, at = divmod(rank, self.axes[name])
            if name == axis:
                return at
        raise KeyError(axis)

    def groups(self, comm: str) -> list[list[int]]:
        """Return the groups of ranks that a communicator joins, each in the order of its axis."""
        if self.is_logical:
            return [list(range(self.ranks))]
        axis, found = self.comms[comm].axis, dict[tuple[int, ...], list[int]]()
        for rank in range(self.ranks):
            key = tuple(self.coordinate(rank, name) for name in self.axes if name != axis)
            found.setdefault(key, []).append(rank)
        return list(found.values())

    def numel(self, region: FileRecord) -> int:
        """Return the number of elements that one rank names by a region."""
        if region.part is not None:
            return int(region.part[1] - region.part[0])
        return int(region.numel // (1 if region.shard is None else self.axes[region.shard]))

    def span(self, region: FileRecord, rank: int) -> tuple[int, int]:
        """Return the first element of a region on a rank, and the one after the last."""
        start, numel = region.offset, region.numel
        if region.shard is not None:
            numel //= self.axes[region.shard]
            start += self.coordinate(rank, region.shard) * numel
        first, stop = region.part or (0, numel)
        return start + first, start + stop

    def held(self, content: FileRecord, numel: int, rank: int) -> int:
        """Return the first element of a flat that a region of so many elements holds on a rank."""
        if content.shard is None:
            return int(content.offset)
        stride = numel if content.stride is None else content.stride
        return int(content.offset + self.coordinate(rank, content.shard) * stride)

    def size_bytes(self, name: str) -> int:
        """Return the bytes of a buffer on one rank."""
        buffer = self.buffers[name]
        return int(buffer.numel * ITEM_BYTES[buffer.dtype])

    def report(self, quantity: str) -> str | None:
        """Return the buffer that the engine reads a quantity from."""
        return next((r.buffer for r in self.program.reports if r.quantity == quantity), None)


def all_ops(names: Declarations) -> Iterator[FileRecord]:
    """Yield the ops of all sections."""
    for section in names.program.sections:
        yield from section.body


def slot_numel(slot: FileRecord) -> int:
    """Return the number of elements of a parameter."""
    return math.prod(slot.shape)


def gaps(flat: FileRecord, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a flat that belong to no parameter."""
    edges = [0, *itertools.chain(*((s.offset, s.offset + slot_numel(s)) for s in flat.slots)), stop]
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        if start < end:
            yield start, end


@dataclass(frozen=True)
class PlacedSection:
    """A section that runs, at its place in a run of several steps."""

    section: str
    step: int
    micro: int
    """The number of micro-batches of the step that came before."""


def visits(names: Declarations, saves: bool, counts: tuple[int, ...]) -> list[PlacedSection]:
    """Return a run of steps with so many micro-step sections each; with evaluations and saves where they may be."""
    have, group = names.sections, names.program.interleaved

    def between(step: int, micro: int) -> list[PlacedSection]:
        wanted = ("evaluate", "save") if micro == 0 else ("save",)
        return [PlacedSection(name, step, micro) for name in wanted if saves and name in have]

    run = between(0, 0)
    for step, count in enumerate(counts):
        last = count - 1 if "micro_step" in have else 0
        for index in range(last + 1):
            name = "last_micro_step" if index == last else "micro_step"
            run += [PlacedSection(name, step, index * group)]
            if name == "micro_step":
                run += between(step, (index + 1) * group)
        run += [PlacedSection("update", step, (last + 1) * group)] if "update" in have else []
        run += reversed(between(step + 1, 0))
    return run
