"""The states of a program at the two ends of a section: what its header and its entry and exit promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tools.certificates.spans import Spans, require
from tools.certificates.values import ALL, CURRENT, PAST, UNDEFINED, ZERO, Key, Value, moved, parts
from tools.checker.program import Declarations
from tools.checker.reading import FileRecord


class States:
    """What a section begins and ends with, on each rank."""

    def __init__(self, names: Declarations, section: FileRecord) -> None:
        self.names, self.section, self.ranks = names, section, range(names.ranks)
        axes = {axis.name: axis.size for axis in names.program.mesh.axes}
        self.axes = tuple(name for name, size in reversed(axes.items()) if size > 1)
        """Those over which gradients are summed, in that order."""
        self.groups: dict[str, list[tuple[int, int, str]]] = {}
        """The elements of each flat that groups train."""
        for group in names.program.groups:
            for flat, first, stop in group.intervals:
                self.groups.setdefault(flat, []).append((first, stop, group.name))
        self.contributions: list[dict[str, Counter[int]]] = [{} for _ in self.ranks]
        """What the section adds to the gradient of each parameter, and how often, on each rank."""

    def promised(self, state: FileRecord, rank: int, *, is_exit: bool = False) -> dict[str, Spans]:
        """Return what buffers hold by a state; at an exit, what the section must have made of them."""
        names, found = self.names, dict[str, Spans]()
        for buffer in names.program.buffers:
            found[buffer.name] = Spans(buffer.numel, UNDEFINED)
            if buffer.holds is not None:
                self._lay(found[buffer.name], 0, buffer.numel, buffer.holds, rank, is_exit)
        for holding in state.holdings:
            name, content = holding.region.buffer, holding.content
            is_present = content.kind == "WeightContent" and content.micro == "current"
            is_own = not is_present or names.buffers[name].holds == content
            require(is_own, f"%{name} is said to hold the weight of the present micro-batch")
        whole = {
            (r.buffer, r.offset, r.numel)
            for r in (h.region for h in state.holdings)
            if r.shard is None
        }
        for holding in sorted(state.holdings, key=lambda h: h.region.shard is not None):
            region, content, memory = holding.region, holding.content, found[holding.region.buffer]
            is_part = names.axes.get(region.shard, 1) > 1
            is_alone = (region.buffer, region.offset, region.numel) not in whole
            is_grad = getattr(content, "quantity", "") == "grad" and content.shard == region.shard
            if is_part and is_alone and is_grad and names.buffers[region.buffer].holds is not None:
                fields = {**vars(content), "shard": None, "micro": "stale"}
                stale = FileRecord("FlatContent", fields)
                self._lay(memory, region.offset, region.numel, stale, rank, is_exit)
            start, stop = names.span(region, rank)
            self._lay(memory, start, stop - start, content, rank, is_exit)
        return found

    def _lay(
        self, memory: Spans, at: int, numel: int, content: FileRecord, rank: int, is_exit: bool
    ) -> None:
        for start, stop, value in self._declared(content, numel, rank, is_exit):
            memory.write(at + start, at + stop, moved(value, -at))

    def _declared(
        self, content: FileRecord, numel: int, rank: int, is_exit: bool
    ) -> Iterator[tuple[int, int, Value]]:
        """Yield the elements that a content stands for."""
        match content.kind:
            case "Zeros":
                yield 0, numel, ZERO
            case "SnapshotContent":
                yield 0, numel, UNDEFINED
            case "NamedContent":
                yield 0, numel, (("value", f"{content.name} {content.version}", ()), 0)
            case "WeightContent" if content.micro == "current":
                for j in range(numel):
                    yield j, j + 1, self._sum(("weight",), {CURRENT - j: 1}, content, 0, is_exit)
            case "WeightContent":
                own = {CURRENT - j: 1 for j in range(self.names.program.interleaved)}
                yield 0, numel, self._sum(("weight",), own, content, 0, is_exit)
            case _:
                yield from self._of_flat(content, numel, rank, is_exit)

    def _of_flat(
        self, content: FileRecord, numel: int, rank: int, is_exit: bool
    ) -> Iterator[tuple[int, int, Value]]:
        flat, first = self.names.flats[content.flat], self.names.held(content, numel, rank)
        if content.quantity != "grad":
            is_updated = is_exit and self.section.name == "update" and flat.is_trainable
            version, guess = content.version + is_updated, -1 if content.guessed else None
            yield 0, numel, (("flat", content.quantity, flat.name, version, guess), first)
            return
        for low, high, slot in parts(flat, first, first + numel):
            value = ZERO
            if slot is not None:
                own: dict[int, int] = {}
                if is_exit:
                    own = self.contributions[rank].get(slot.name, own)
                value = self._sum(("gradient", flat.name), own, content, first, is_exit)
            yield low - first, high - first, value

    def _sum(
        self, of: Key, own: dict[int, int], content: FileRecord, shift: int, is_exit: bool
    ) -> Value:
        """Return the sum of some micro-steps; ``own`` are the contributions of this one."""
        micro, name = content.micro, self.section.name
        if micro in {None, "stale"}:
            return UNDEFINED
        axes = tuple(a for a in self.axes if a in content.reduced)
        sources: dict[int, int] = {}
        if micro == "current":
            sources = dict(own)
        elif micro == "all" and (not is_exit or name == "update"):
            sources = {ALL: 1}
        elif not (is_exit and name == "update"):
            sources = {PAST: 1} if "micro_step" in self.names.sections else {}
            sources |= own if is_exit and (micro == "all" or name == "micro_step") else {}
        terms = tuple(sorted((source, axes, n) for source, n in sources.items()))
        return ((*of, terms), shift) if terms else ZERO
