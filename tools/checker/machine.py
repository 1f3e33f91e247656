"""Runs a program symbolically on all of its ranks, op after op in the order of the lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tools.checker.program import (
    COLLECTIVES,
    GATHERS,
    MICRO_STEPS,
    TRANSFERS,
    Declarations,
    PlacedSection,
    gaps,
    slot_numel,
)
from tools.checker.reading import FileRecord
from tools.checker.segments import SymbolicSegments, stored, viewed
from tools.checker.terms import (
    UNDEFINED,
    ZERO,
    Operand,
    Piece,
    PieceMemory,
    Pieces,
    Terms,
    common,
    is_exact,
    merged,
    narrower,
)

Report = Callable[[str], None]


class SymbolicRanks:
    """The memory of each rank. A program for one device runs as replicas, whose gradients are summed when read."""

    def __init__(self, names: Declarations, terms: Terms, report: Report) -> None:
        self.names, self.terms, self.report = names, terms, report
        self.segments = SymbolicSegments(terms, names.segments)
        self.where = ""
        self._gradients: dict[int, Pieces] = {}
        self.memory = [
            {b.name: PieceMemory(b.numel, terms.uniform) for b in names.program.buffers}
            for _ in range(names.ranks)
        ]
        self.everyone = list(enumerate(self.memory))
        for rank, memory in self.everyone:
            for buffer in names.program.buffers:
                if buffer.holds is not None:
                    memory[buffer.name].write(0, self._initial(buffer, rank))

    def begin(self, visit: PlacedSection) -> None:
        """Make true what the first section begins with: the engine gathers what its live buffers hold."""
        for holding in self.names.sections[visit.section].entry.holdings:
            region, content = holding.region, holding.content
            for rank, _ in self.everyone:
                if (
                    content.kind in {"FlatContent", "Zeros"}
                    and self.names.buffers[region.buffer].holds is None
                ):
                    numel = self.names.numel(region)
                    pieces: Pieces = ((0, numel, ZERO, 0),)
                    if content.kind == "FlatContent":
                        pieces = self._initial_flat(content, numel, rank)
                    self.write(region, rank, pieces)

    # ------------------------------------------------------------------------------------------- the host's writes

    def _initial(self, buffer: FileRecord, rank: int) -> Pieces:
        terms, program, content = self.terms, self.names.program, buffer.holds
        n = buffer.numel
        if content.kind == "FlatContent":
            return self._initial_flat(content, n, rank)
        if content.kind == "SnapshotContent":
            return ((0, n, UNDEFINED, 0),)
        if content.kind == "Zeros":
            return ((0, n, ZERO, 0),)
        if buffer.name == program.rank:
            return ((0, n, terms.make("rank", rank), 0),)
        if buffer.role in {"input", "rng"}:
            return ((0, n, terms.make("no batch yet", buffer.name), 0),)
        for binding in program.module_buffers:
            if binding.buffer == buffer.name:
                data = None if binding.data is None else binding.data.hex()
                term = terms.make("module buffer", binding.name, data)
                terms.types[term] = (buffer.dtype, binding.shape, None)
                return ((0, n, term, 0),)
        for scalar in program.scalars:
            if scalar.buffer == buffer.name:
                return tuple((i, i + 1, terms.constant(v), 0) for i, v in enumerate(scalar.values))
        if content.kind == "WeightContent" and content.micro == "stale":
            return ((0, n, UNDEFINED, 0),)
        return ((0, n, ZERO, 0),)

    def _initial_flat(self, content: FileRecord, numel: int, rank: int) -> Pieces:
        """Parameters and master weights come from the module; gradients are stale or zero, states are zero."""
        terms, flat = self.terms, self.names.flats[content.flat]
        if content.quantity in {"param", "master"}:
            value = terms.make("initial", flat.name, dtype="f32"), 0
            if content.quantity == "param":
                value = terms.cast(value, flat.dtype)
            terms.flats[value[0]] = flat.name
        elif content.quantity == "grad" and content.micro == "stale":
            value = UNDEFINED, 0
        else:
            return ((0, numel, ZERO, 0),)
        whole = PieceMemory(flat.padded_numel, terms.uniform)
        whole.write(0, ((0, flat.padded_numel, *value),))
        for start, stop in gaps(flat, flat.padded_numel):
            whole.write(start, ((0, stop - start, ZERO, 0),))
        first = self.names.held(content, numel, rank)
        return whole.read(first, first + numel)

    def fill(self, visit: PlacedSection) -> None:
        """Write what the host writes before a section: inputs, seeds, weights of batches, settings of groups."""
        program, terms = self.names.program, self.terms
        is_step = visit.section in MICRO_STEPS
        paths = {binding.buffer: binding.path for binding in program.inputs}
        settings = {name for g in program.groups for name in (g.lr, g.hyper)}
        for rank, memory in self.everyone if is_step or visit.section == "evaluate" else ():
            for name, buffer in self.names.buffers.items():
                own = memory[name]
                is_weight = is_step and getattr(buffer.holds, "micro", None) == "current"
                if buffer.role in {"input", "rng"} or is_weight:
                    n = buffer.numel // program.interleaved
                    kind = (
                        "weight"
                        if is_weight
                        else paths.get(name, f"seed {getattr(buffer.holds, 'name', name)}")
                    )
                    # Without weights by the host each micro-batch counts as one, on all ranks alike.
                    of = 0 if is_weight and name != program.weight else rank
                    for j in range(program.interleaved if is_step else 1):
                        batch = (visit.section == "evaluate", of, visit.step, visit.micro + j)
                        term = terms.make("input", kind, *batch, dtype=buffer.dtype)
                        own.write(j * n, ((0, n, term, 0),))
                if name in settings and is_step and visit.micro == 0:
                    term = terms.make("setting", buffer.holds.name, visit.step, dtype="f64")
                    own.write(0, ((0, buffer.numel, term, 0),))

    def forget(self, visit: PlacedSection) -> None:
        """Forget at the end of a section what its exit state does not claim: gradients that are stale, live buffers."""
        state = self.names.sections[visit.section].exit
        claims = [h for h in state.holdings if getattr(h.content, "micro", None) != "stale"]
        named = {h.region.buffer for h in state.holdings}
        for rank, memory in self.everyone:
            for name, buffer in self.names.buffers.items():
                is_stale = getattr(buffer.holds, "micro", None) == "stale" or name in named
                if name not in state.live and not (buffer.role == "grad" and is_stale):
                    continue
                spans = [self.names.span(h.region, rank) for h in claims if h.region.buffer == name]
                kept = [(memory[name].read(a, b), a) for a, b in spans]
                pieces = memory[name].read(0, buffer.numel)
                spoiled = [(a, b, t if t == ZERO else UNDEFINED, 0) for a, b, t, _ in pieces]
                memory[name].write(0, spoiled)
                for of_claim, start in kept:
                    memory[name].write(start, of_claim)

    # ---------------------------------------------------------------------------------------------------- memory

    def read(self, region: FileRecord, rank: int) -> Pieces:
        """Return the content of a region on a rank; undefined elements are reported."""
        pieces = self.memory[rank][region.buffer].read(*self.names.span(region, rank))
        if any(piece[2] == UNDEFINED for piece in pieces):
            self.report(f"{self.where} reads elements of %{region.buffer} that nothing has written")
        return pieces

    def write(self, region: FileRecord, rank: int, pieces: Sequence[Piece]) -> None:
        """Replace the content of a region on a rank."""
        start, _ = self.names.span(region, rank)
        self.memory[rank][region.buffer].write(start, pieces)
        if self.names.is_logical:
            dtype = self.names.buffers[region.buffer].dtype
            for _, _, term, _ in pieces:
                if term in self.terms.sums:
                    self.terms.held.setdefault(term, set()).add(dtype)

    def put(
        self, region: FileRecord, rank: int, pieces: Sequence[Piece], *, adds: bool = False
    ) -> None:
        """Write values rounded to the dtype of a region, or add them to its elements."""
        dtype, terms = self.names.buffers[region.buffer].dtype, self.terms
        if not adds:
            self.write(region, rank, [(a, b, *terms.cast((t, s), dtype)) for a, b, t, s in pieces])
            return
        old = self.read(region, rank)
        new = [(a, b, *terms.add(x, y, dtype)) for a, b, (x, y) in common(old, tuple(pieces))]
        self.write(region, rank, list(merged(new)))

    def spoil(self, region: FileRecord, rank: int) -> None:
        """Forget a region, but for its padding."""
        pieces = self.memory[rank][region.buffer].read(*self.names.span(region, rank))
        self.write(
            region, rank, [(a, b, t if t == ZERO else UNDEFINED, 0) for a, b, t, _ in pieces]
        )

    def gradient(self, region: FileRecord, rank: int) -> Pieces:
        """Return a gradient; in a program for one device it is the sum over all replicas."""
        if not self.names.is_logical:
            return self.read(region, rank)
        if id(region) not in self._gradients:
            contents = [self.read(region, r) for r in range(self.names.ranks)]
            self._gradients[id(region)] = tuple(
                merged(
                    (a, b, *self.terms.over_ranks(list(enumerate(operands)), None, "sum"))
                    for a, b, operands in common(*contents)
                )
            )
        return self._gradients[id(region)]

    # ------------------------------------------------------------------------------------------------------- ops

    def run(
        self, visit: PlacedSection, update: Callable[[SymbolicRanks, FileRecord, int], None]
    ) -> None:
        """Run the ops of a section; ``update`` runs those of the optimizer's step on a rank."""
        for index, op in enumerate(self.names.sections[visit.section].body):
            self.where = f"{visit.section} {index} ({op.kind})"
            self._gradients.clear()
            if op.kind in COLLECTIVES:
                self._collective(op)
                continue
            for rank, memory in self.everyone:
                match op.kind:
                    case "Wait":
                        pass
                    case "Alloc" | "Release":
                        memory[op.buffer].write(0, ((0, memory[op.buffer].numel, UNDEFINED, 0),))
                    case "Compute":
                        self._compute(op, rank)
                    case "Cast":
                        self.put(
                            op.destination,
                            rank,
                            self.read(op.source, rank),
                            adds=op.mode == "accumulate",
                        )
                    case "Fill":
                        term = self.terms.constant(op.value)
                        self.write(
                            op.destination, rank, ((0, self.names.numel(op.destination), term, 0),)
                        )
                    case "Scale":
                        by = self.read(op.by, rank)
                        pieces = self.read(op.region, rank)
                        self.write(op.region, rank, [self._scaled(piece, by) for piece in pieces])
                    case kind if kind in TRANSFERS:
                        self.write(op.destination, rank, self.read(op.source, rank))
                    case _:
                        update(self, op, rank)

    def _scaled(self, piece: Piece, by: Pieces) -> Piece:
        a, b, term, shift = piece
        if term in (ZERO, UNDEFINED):
            return piece
        return (
            a,
            b,
            *self.terms.elementwise(("times", by), [(term, shift)], self.terms.dtypes.get(term)),
        )

    def _compute(self, op: FileRecord, rank: int) -> None:
        names, terms = self.names, self.terms
        segment = names.segments[op.segment]
        operands: list[int] = []
        for argument, kind in zip(op.arguments, segment.inputs, strict=True):
            view = argument.view
            pieces = self.read(view.region, rank)
            if argument.parameter is not None:
                self._check_parameter(argument.parameter, pieces)
            operands.append(viewed(terms, pieces, kind.dtype, view.shape, view.stride))
        outputs = self.segments.call(op.segment, tuple(operands))
        for destination, term in zip(op.destinations, outputs, strict=True):
            if destination is None:
                continue
            view = destination.view
            pieces = stored(terms, term, names.numel(view.region), view.shape, view.stride)
            if destination.gradient is not None:
                pieces = tuple(self._contribution(piece, destination.gradient) for piece in pieces)
            self.put(view.region, rank, pieces, adds=destination.mode == "accumulate")

    def _contribution(self, piece: Piece, parameter: str) -> Piece:
        a, b, term, shift = piece
        name = self.names.slots[parameter][1].name
        own = self.terms.make("gradient", name, term, dtype=self.terms.dtypes.get(term))
        self.terms.sums.add(own)
        return a, b, own, shift

    def _check_parameter(self, name: str, pieces: Pieces) -> None:
        flat, slot = self.names.slots[name]
        wanted = slot.offset, slot_numel(slot)
        found = {(self.terms.flats.get(t), s, b) for a, b, t, s in pieces}
        if found != {(flat.name, *wanted)} and wanted[1]:
            self.report(f"{self.where} reads something else than parameter {name}")

    def _collective(self, op: FileRecord) -> None:
        names, results = self.names, list[tuple[FileRecord, int, list[Piece]]]()
        for group in names.groups(op.comm):
            for pair in op.pairs:
                contents = [self.read(pair.source, rank) for rank in group]
                dtype = names.buffers[pair.destination.buffer].dtype
                wire = dtype if op.wire_dtype is None else narrower(dtype, op.wire_dtype)
                wire = "f64" if op.wire_dtype == "f64" else wire
                if op.wire_dtype is not None:
                    contents = [
                        tuple((a, b, *self._sent((t, s), op.wire_dtype)) for a, b, t, s in pieces)
                        for pieces in contents
                    ]
                for place, rank in enumerate(group):
                    results.append(
                        (pair.destination, rank, self._result(op, contents, group, place, wire))
                    )
        if op.kind in GATHERS and all(
            list(self.memory[rank][d.buffer].read(*names.span(d, rank))) == list(merged(p))
            for d, rank, p in results
        ):
            self.report(f"{self.where} gathers what its destinations hold already")
        for destination, rank, pieces in results:
            self.put(destination, rank, list(merged(pieces)))
        if op.staging is not None:
            for rank in range(names.ranks):
                self.write(op.staging, rank, ((0, names.numel(op.staging), UNDEFINED, 0),))

    def _sent(self, operand: Operand, wire: str) -> Operand:
        """A value as it travels; one that the wire's dtype holds exactly arrives unchanged."""
        return (
            operand
            if is_exact(self.terms.dtypes.get(operand[0]), wire)
            else self.terms.cast(operand, wire)
        )

    def _result(
        self, op: FileRecord, contents: list[Pieces], group: list[int], place: int, wire: str
    ) -> list[Piece]:
        """The elements that a rank receives, from the sources of its group."""
        if op.kind == "Broadcast":
            return list(contents[op.root])
        numel = contents[0][-1][1] if contents[0] else 0
        if op.kind in GATHERS:
            uniform = self.terms.uniform
            return [
                (a + k * numel, b + k * numel, t, 0 if t in uniform else s - k * numel)
                for k, pieces in enumerate(contents)
                for a, b, t, s in pieces
            ]
        start, stop = 0, numel
        if op.kind == "ReduceScatter":
            start, stop = place * numel // len(group), (place + 1) * numel // len(group)
        found: list[Piece] = []
        for a, b, operands in common(*contents):
            if a < stop and b > start:
                term, shift = self._reduced(
                    list(zip(group, operands, strict=True)), wire, op.reduction
                )
                shift = 0 if term in self.terms.uniform else shift + start
                found.append((max(a, start) - start, min(b, stop) - start, term, shift))
        return found

    def _reduced(self, operands: list[tuple[int, Operand]], wire: str, reduction: str) -> Operand:
        rows = [self.terms.rows[term] for _, (term, _) in operands]
        if (
            all(row[0] == "norm" for row in rows)
            and reduction == "sum"
            and len({len(row) for row in rows}) == 1
        ):
            joined = zip(*(row[1:] for row in rows), strict=True)
            return self.terms.make("norm", *(spans(sum(of_source, ())) for of_source in joined)), 0
        if all(row[0] == "finite" for row in rows):
            united = {span for row in rows for span in row[1]}
            return self.terms.make("finite", spans(list(united), unite=True)), 0
        return self.terms.over_ranks(operands, wire, reduction)


def spans(
    found: Sequence[tuple[int, int, int]], *, unite: bool = False
) -> tuple[tuple[int, int, int], ...]:
    """Return ranges of elements of terms in order, with neighbours joined; ``unite`` joins what overlaps, too."""
    joined: list[tuple[int, int, int]] = []
    for term, start, stop in sorted(found):
        last = joined[-1] if joined else (-1, 0, 0)
        if last[0] == term and (last[2] == start or (unite and start < last[2])):
            joined[-1] = (term, last[1], max(stop, last[2]))
        else:
            joined.append((term, start, stop))
    return tuple(joined)
