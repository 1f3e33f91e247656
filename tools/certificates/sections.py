"""Sections: each op leaves in memory what the certificate claims, and the section what its exit state promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from tools.certificates.spans import Pieces, RefusedError, Spans, aligned, merged, require
from tools.certificates.speculation import commit_step, guess, speculative_step
from tools.certificates.states import States
from tools.certificates.updates import DECIDED, DECISIONS, RULES, check_reports, constants
from tools.certificates.values import (
    ALL,
    PAST,
    UNDEFINED,
    ZERO,
    Claims,
    Key,
    Value,
    changed,
    converted,
    is_own,
    made,
    moved,
    parts,
    received,
    represents,
    sent,
    text,
    total,
    without_axes,
)
from tools.checker.program import (
    COLLECTIVES,
    GATHERS,
    TRANSFERS,
    Declarations,
    changes,
    regions,
    slot_numel,
)
from tools.checker.reading import FileRecord

_RULES = {
    **RULES,
    "Guess": guess,
    "SpeculativeStep": speculative_step,
    "CommitStep": commit_step,
}
KINDS = ("held", "rounded", "reduced", "added")
"""What happens to sums of contributions."""
Left = list[tuple[FileRecord, Pieces]]
"""What an op leaves in regions of one rank."""


class SectionCheck(States):
    """The memory of every rank while a section runs; ``before`` is the section that ran before an update."""

    def __init__(
        self, names: Declarations, section: FileRecord, claims: Claims, before: SectionCheck | None
    ) -> None:
        super().__init__(names, section)
        self.claims, self.rank = claims, 0
        self.used: set[str] = set()
        self.guess: FileRecord | None = None
        self.decision: FileRecord | None = None if before is None else before.decision
        self.reported: dict[tuple[str, int], Pieces] = {} if before is None else before.reported
        """What the decision read and left, by the quantity that the engine reports, and the rank."""
        self.slices: dict[tuple[str, int], list[Pieces]] = {}
        """What buffers of micro-batches held after each of them, where there are several."""
        self.told: dict[tuple[str, int], Pieces] = {}
        self.sums: dict[str, set[Any]] = {kind: set() for kind in KINDS}
        """Sums of contributions that stand in memory, are rounded, added over ranks, or added, with their dtypes."""
        self.settings: set[Any] = set()
        self.kept, self.counters = constants(names)
        self.memory = [self.promised(section.entry, rank) for rank in self.ranks]
        self.meanings = claims.of_section = {}
        for rank in self.ranks:
            if before is not None:
                self._carry(before, rank)
            for memory in self.memory[rank].values():
                for key, _ in memory.values[:-1]:
                    if key[0] == "value" and claims.meaning(key, rank) == ("nothing",):
                        self.meanings[key, -1] = ("entry",)
            for name, memory in self.memory[rank].items():
                self._note(
                    "held", names.buffers[name].dtype, memory.read(0, names.buffers[name].numel)
                )

    def _carry(self, before: SectionCheck, rank: int) -> None:
        """The update finds what decisions and statistics of the last micro-step have left, and its guesses."""
        told = {"GradNorm": "destination", "CheckFinite": "destination", **DECISIONS}
        names = {r.buffer for op in before.section.body for r in regions(op, told.get(op.kind, ""))}
        weight = self.names.report("summed_weight")
        names |= {weight} if before.decision is not None and weight is not None else set()
        for holding in self.section.entry.holdings:
            if getattr(holding.content, "guessed", False):
                start, stop = self.names.span(holding.region, rank)
                for a, b, value in before.memory[rank][holding.region.buffer].read(start, stop):
                    self.memory[rank][holding.region.buffer].write(a, b, value)
        for name in names:
            self.memory[rank][name] = memory = before.memory[rank][name]
            for key, _ in memory.values[:-1]:
                if (key, -1) in before.meanings:
                    self.meanings[key, -1] = before.meanings[key, -1]

    def _note(self, what: str, dtype: str, pieces: Pieces) -> None:
        """Note the sums of contributions in some pieces, over whatever ranks."""
        for _, _, (key, _) in pieces:
            if key[0] == "gradient":
                self.sums[what].add((key[1], without_axes(key[2]), dtype))

    def leave(self) -> None:
        """Check that the memory of each rank is as the exit state promises, and the engine's reports."""
        self.end()
        for rank in self.ranks:
            for name, memory in self.promised(self.section.exit, rank, is_exit=True).items():
                buffer = self.names.buffers[name]
                both = memory.read(0, buffer.numel), self.memory[rank][name].read(0, buffer.numel)
                for start, stop, (want, have) in aligned(*both):
                    is_left = self._is_left(buffer, want, have, start, stop)
                    where = f"exit of {self.section.name}: %{name}"
                    require(is_left, f"{where} should hold {text(want)}, not {text(have)}")
                if getattr(buffer.holds, "kind", "") == "SnapshotContent":
                    self._check_snapshot(buffer, rank)
            if self.section.name == "update":
                check_reports(self, rank)

    def _is_left(self, buffer: FileRecord, want: Value, have: Value, start: int, stop: int) -> bool:
        if want[0][-1] == -1 and have[0][0] == "flat" and have[0][-1] is not None:
            have = (*have[0][:-1], -1), have[1]
        if want[0][0] == "flat" and have == ZERO and not is_own(want[0][1]):
            places = parts(self.names.flats[want[0][2]], start + want[1], stop + want[1])
            return all(slot is None for _, _, slot in places)
        if want[0][0] == "value":
            name, is_counter = buffer.name, buffer.name in self.counters
            if is_counter and self.section.name == "update":
                return have == ((want[0][0], want[0][1][:-1] + "1", ()), want[1])
            is_kept = buffer.name in self.kept or is_counter or not want[0][1].endswith(" 0")
            if self.section.name == "evaluate" and name != self.names.report("eval_loss"):
                is_kept |= buffer.role in {"scalar", "module_buffer"}
            if buffer.role == "output":
                stored = next(o.stored for o in self.names.program.outputs if o.buffer == name)
                written = {"micro_step", "last_micro_step"} if stored == "step" else {"evaluate"}
                is_kept |= self.section.name not in written
            return have == want if is_kept else have != UNDEFINED
        return want in (UNDEFINED, have)

    def end(self) -> None:
        """Keep what buffers hold at the end, for the comparison with the other program."""
        for rank in self.ranks:
            self.told |= {(name, rank): self.tell(name, rank) for name in self.names.buffers}

    def tell(self, name: str, rank: int) -> Pieces:
        """Return what a buffer holds in a form that is the same in both programs."""
        held = self.memory[rank][name].read(0, self.names.buffers[name].numel)
        is_summed = name == self.names.report("summed_loss")
        found: Pieces = []
        for a, b, (key, shift) in held:
            meaning: Key = ("nothing",)
            own = key
            while own[0] == "value":
                meaning = self.claims.meaning(own, rank)
                if meaning[0] not in {"sum", "max"}:
                    break
                own = meaning[2] if meaning[0] == "sum" else meaning[2][0]
            told = (
                ((meaning[0],), 0) if meaning[0] in DECIDED else (own if is_summed else key, shift)
            )
            found.append((a, b, told))
        return merged(found)

    def _check_snapshot(self, buffer: FileRecord, rank: int) -> None:
        """A save leaves in each snapshot what its source holds."""
        if self.section.name == "save":
            of = {**vars(buffer.holds), "part": None}
            source = self.read(FileRecord("Region", of), rank)
            copied = self.memory[rank][buffer.name].read(0, buffer.numel)
            require(merged(copied) == source, f"%{buffer.name} is no copy of %{of['buffer']}")

    # ------------------------------------------------------------------------------------------------------ the ops

    def run(self, claims: list[Any]) -> None:
        """Check the claims about what each op leaves, on every rank."""
        require(len(claims) == len(self.section.body), f"{self.section.name} has other ops")
        for line, (op, claim) in enumerate(zip(self.section.body, claims, strict=True)):
            try:
                if op.kind in {"Alloc", "Release"}:
                    for memory in self.memory:
                        memory[op.buffer] = Spans(self.names.buffers[op.buffer].numel, UNDEFINED)
                elif op.kind != "Wait":
                    self._op(op, claim)
            except RefusedError as error:
                where = f"op {line} of {self.section.name}, {op.kind},"
                raise RefusedError(f"{where} {error}") from error

    def _op(self, op: FileRecord, claim: list[Any]) -> None:
        written = sorted((region for region, _ in changes(op)), key=_place)
        require(len(claim) == len(written), "has claims for other regions")
        claimed = [
            {
                _place(region): self.claims.pieces(self.names, pieces, rank)
                for region, pieces in zip(written, claim, strict=True)
            }
            for rank in self.ranks
        ]
        for rank, left in self._left(op, claimed):
            require(len(left) == len(written), "leaves something in other regions")
            for region, pieces in left:
                for _, _, (own, value) in aligned(claimed[rank][_place(region)], pieces):
                    self.claims.agree(own, value, rank)
        for rank in self.ranks:
            for region in written:
                start, stop = self.names.span(region, rank)
                pieces = claimed[rank][_place(region)]
                require(
                    (pieces[-1][1] if pieces else 0) == stop - start, "has a claim of another size"
                )
                for a, b, value in pieces:
                    memory = self.memory[rank][region.buffer]
                    memory.write(start + a, start + b, moved(value, -start))
            for name in ("skip", "redo") if op.kind == "Decide" else ():
                for region in regions(op, name):
                    self.reported[name, rank] = self.read(region, rank)

    def _left(self, op: FileRecord, claimed: list[Any]) -> Iterator[tuple[int, Left]]:
        """Yield for each rank what an op leaves."""
        if op.kind in COLLECTIVES:
            for group in self.names.groups(op.comm):
                yield from self._collective(op, self.names.comms[op.comm].axis, group)
            return
        results: list[tuple[int, tuple[int, int]]] = []
        if op.kind == "Compute":
            results = self.claims.numbers.call(self.names, op.segment, self._operands(op))
        for rank in self.ranks:
            self.rank = rank
            if op.kind == "Compute":
                yield rank, self._compute(op, results, claimed[rank])
            elif op.kind == "Cast":
                yield rank, self._cast(op)
            elif op.kind in TRANSFERS:
                yield rank, [(op.destination, self.read(op.source))]
            elif op.kind == "Fill":
                value = ZERO if op.value == 0 else made(("fill", repr(op.value)))
                yield rank, [(op.destination, [(0, self.names.numel(op.destination), value)])]
            elif op.kind == "Scale":
                by, pieces = tuple(self.read(op.by)), self.read(op.region)
                yield rank, [(op.region, [(a, b, changed(v, "scale", by)) for a, b, v in pieces])]
            else:
                require(op.kind in _RULES, "of which certificates say nothing")
                told = {"Direction": "direction", "SpeculativeStep": "param"}.get(op.kind, "")
                own = [p for r in regions(op, told) for p in claimed[rank][_place(r)]]
                yield rank, _RULES[op.kind](self, op, own)

    def read(self, region: FileRecord, rank: int | None = None) -> Pieces:
        """Return what a region holds, all of which something must have written."""
        rank = self.rank if rank is None else rank
        pieces = self.held(region, rank)
        is_whole = all(value != UNDEFINED for *_, value in pieces)
        require(is_whole, f"reads what nothing wrote in %{region.buffer}")
        return pieces

    def held(self, region: FileRecord, rank: int) -> Pieces:
        start, stop = self.names.span(region, rank)
        held = self.memory[rank][region.buffer].read(start, stop)
        return merged([(a - start, b - start, moved(v, start)) for a, b, v in held])

    def _cast(self, op: FileRecord) -> Left:
        source, target = (self.names.buffers[r.buffer].dtype for r in (op.source, op.destination))
        pieces, flats = self.read(op.source), self.names.flats
        if not represents(target, source):
            self._note("rounded", target, pieces)
        if source != target:
            pieces = [(a, b, converted(v, target, flats)) for a, b, v in pieces]
        pieces = self._added(op, op.destination, pieces)
        self._note("held", target, pieces)
        return [(op.destination, pieces)]

    def _added(self, of: FileRecord, region: FileRecord, pieces: Pieces) -> Pieces:
        if of.mode != "accumulate":
            return pieces
        dtype = self.names.buffers[region.buffer].dtype
        both = list(aligned(self.read(region), pieces))
        for _, _, ((left, _), (right, _)) in both:
            if left[0] == right[0] == "gradient":
                sides = left[2], right[2]
                if any(source in {PAST, ALL} for terms in sides for source, _, _ in terms):
                    sides = without_axes(left[2]), without_axes(right[2])
                self.sums["added"].add((left[1], tuple(sorted(sides)), dtype))
        return [(a, b, total(old, new, dtype)) for a, b, (old, new) in both]

    def _operands(self, op: FileRecord) -> list[tuple[int, int]]:
        """Return the numbers of what a segment is called on, which are the same on all ranks."""
        numbers, found = self.claims.numbers, list[tuple[int, int]]()
        for argument in op.arguments:
            name, every = (
                argument.parameter,
                [self.read(argument.view.region, r) for r in self.ranks],
            )
            pieces, is_alike = every[0], all(of_rank == every[0] for of_rank in every)
            if name is not None:
                flat, slot = self.names.slots[name]
                value = ("flat", "param", flat.name, 0, None), slot.offset
                is_read = is_alike and pieces in ([], [(0, slot_numel(slot), value)])
                require(is_read, f"does not read parameter {name}")
                found.append((numbers.of("parameter", slot.name), 0))
            elif is_alike and len(pieces) == 1 and pieces[0][2][0][0] == "value":
                key, shift = pieces[0][2]
                known = self.claims.meaning(key)
                found.append((known[1] if known[0] == "computed" else numbers.of(key), shift))
            else:
                found.append((numbers.of(tuple(map(tuple, [pieces] if is_alike else every))), 0))
        return found

    def _compute(
        self, op: FileRecord, results: list[tuple[int, tuple[int, int]]], claimed: dict[Any, Pieces]
    ) -> Left:
        left: Left = []
        for result, (number, (base, shift)) in zip(op.destinations, results, strict=True):
            if result is not None:
                region = result.view.region
                if result.gradient is not None:
                    pieces = self._contributed(result, number, claimed[_place(region)])
                else:
                    new = [(0, self.names.numel(region), made(("computed", base), shift))]
                    pieces = self._added(result, region, new)
                left.append((region, pieces))
        return left

    def _contributed(self, result: FileRecord, number: int, claimed: Pieces) -> Pieces:
        """Return the gradient with what a result adds to it; the claim tells its number."""
        flat, slot = self.names.slots[result.gradient]
        require(slot.name not in self.used, f"adds to the gradient of {slot.name}, which was read")
        region, numel = result.view.region, self.names.numel(result.view.region)
        require(claimed and claimed[0][2][0][0] == "gradient", "leaves no gradient")
        sources = [s for s, axes, _ in claimed[0][2][0][2] if axes == () and s >= 0]
        for source in sources:
            own = ("gradient", flat.name, ((source, (), 1),)), slot.offset
            left = self._added(result, region, [(0, numel, own)])
            if merged(left) == claimed:
                self.claims.mean(("value", source, ()), self.rank, ("computed", number))
                counts = self.contributions[self.rank].setdefault(slot.name, Counter())
                counts[source] += 1
                self._note("held", self.names.buffers[region.buffer].dtype, left)
                return left
        raise RefusedError("adds to a gradient what its claim does not say")

    def _sent(self, op: FileRecord, pair: FileRecord, dtype: str, rank: int) -> Pieces:
        """Return what a rank sends of a pair of regions."""
        pieces, is_sum = self.read(pair.source, rank), op.kind in {"ReduceScatter", "AllReduce"}
        wire = op.wire_dtype
        is_finer = is_sum and wire == "f64" and dtype != "f64"
        if wire is not None and (is_finer or not represents(wire, dtype)):
            self._note("rounded", wire, pieces)
            pieces = [(a, b, sent(v, wire)) for a, b, v in pieces]
        if is_sum and len(self.ranks) > 1:
            self._note("reduced", self.names.buffers[pair.destination.buffer].dtype, pieces)
        return pieces

    def _collective(
        self, op: FileRecord, axis: str, group: list[int]
    ) -> Iterator[tuple[int, Left]]:
        left: list[Left] = [[] for _ in group]
        for pair in op.pairs:
            dtype = self.names.buffers[pair.source.buffer].dtype
            sources = [self._sent(op, pair, dtype, rank) for rank in group]
            for place in range(len(group)):
                got = sources[0] if len(group) == 1 else received(op, axis, sources, place)
                left[place].append((pair.destination, got))
        if op.kind in GATHERS and len(group) > 1:
            every = [(rank, *item) for rank, of in zip(group, left, strict=True) for item in of]
            is_new = any(self.held(region, rank) != got for rank, region, got in every)
            require(is_new, "gathers what is there already")
        for place, rank in enumerate(group):
            if op.staging is not None:
                left[place].append((op.staging, [(0, self.names.numel(op.staging), UNDEFINED)]))
            yield rank, left[place]


def _place(region: FileRecord) -> tuple[Any, ...]:
    return region.buffer, region.offset, region.numel, region.shard or "", region.part or ()
