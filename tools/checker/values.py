"""Compares what a scheduled program computes with its logical program, at each boundary of a run of several steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tools.checker.machine import SymbolicRanks
from tools.checker.program import MICRO_STEPS, Declarations, PlacedSection, visits
from tools.checker.reading import FileRecord
from tools.checker.terms import UNDEFINED, ZERO, Operand, PieceMemory, Pieces, Terms, common, merged
from tools.checker.updates import update

Report = Callable[[str], None]
COUNTS = (4, 2)
"""The micro-step sections of each step of the run; the third is the first that begins with a sum of two."""


@dataclass
class Moment:
    """What the logical program holds at a boundary, on each of its replicas."""

    flats: list[dict[tuple[str, str], Pieces]] = field(default_factory=list)
    """By quantity and flat."""
    weights: list[Pieces] = field(default_factory=list)
    reports: list[dict[str, Pieces]] = field(default_factory=list)
    buffers: list[dict[str, Pieces]] = field(default_factory=list)
    """Module buffers by name, outputs by path, settings by the name of their value."""
    scalars: list[dict[str, Pieces]] = field(default_factory=list)


class LogicalRun:
    """A run of the logical program: its moments, after each section and in the middle of none."""

    def __init__(self, logical: FileRecord, scheduled: Declarations, report: Report) -> None:
        self.names = Declarations(logical, ranks=scheduled.ranks)
        self.terms = Terms()
        self.machine = SymbolicRanks(self.names, self.terms, report)
        self.moments: dict[PlacedSection, Moment] = {}
        self.currents: dict[PlacedSection, Moment] = {}
        self.batch_losses: dict[tuple[int, int], list[Pieces]] = {}
        group = scheduled.program.interleaved
        for visit in visits(scheduled, saves=True, counts=COUNTS):
            if visit.section == "save":
                self.moments[visit] = _moment(self.machine, visit)
                continue
            for part in self._parts(visit, group):
                self.machine.fill(part)
                self.machine.run(part, update)
                name = self.names.report("batch_loss")
                if part.section in MICRO_STEPS and name is not None:
                    self.batch_losses[part.step, part.micro] = [
                        m[name].read(0, self.names.buffers[name].numel) for m in self.machine.memory
                    ]
            self.moments[visit] = _moment(self.machine, visit)

    def _parts(self, visit: PlacedSection, group: int) -> list[PlacedSection]:
        """The sections of the logical program that a section of the schedule stands for."""
        if visit.section not in MICRO_STEPS:
            return [visit] if visit.section in self.names.sections else []
        found = [PlacedSection("micro_step", visit.step, visit.micro + j) for j in range(group)]
        if visit.section == "last_micro_step":
            found[-1] = PlacedSection("last_micro_step", visit.step, visit.micro + group - 1)
        return found


def _moment(machine: SymbolicRanks, visit: PlacedSection) -> Moment:
    names, moment = machine.names, Moment()
    section = names.sections.get(visit.section)
    for memory in machine.memory:
        flats: dict[tuple[str, str], Pieces] = {}
        for name, buffer in names.buffers.items():
            content = buffer.holds
            if content is not None and content.kind == "FlatContent":
                flats[content.quantity, content.flat] = memory[name].read(0, buffer.numel)
        for holding in section.exit.holdings if section is not None else ():
            if holding.content.kind == "FlatContent":
                key = holding.content.quantity, holding.content.flat
                flats[key] = memory[holding.region.buffer].read(*names.span(holding.region, 0))
        moment.flats.append(flats)
        moment.reports.append(
            {
                r.quantity: memory[r.buffer].read(0, names.buffers[r.buffer].numel)
                for r in names.program.reports
            }
        )
        moment.buffers.append(_named(names, memory))
        moment.scalars.append(
            {
                b.name: memory[b.name].read(0, b.numel)
                for b in names.program.buffers
                if b.role == "scalar"
            }
        )
        held = [
            b
            for b in names.program.buffers
            if b.holds is not None and b.holds.kind == "WeightContent"
        ]
        sums = [b.name for b in held if b.holds.micro == "past"]
        moment.weights.append(memory[sums[0]].read(0, 1) if sums else ())
    return moment


def _named(names: Declarations, memory: dict[str, PieceMemory]) -> dict[str, Pieces]:
    """Contents by what the header binds them to."""
    program, found = names.program, dict[str, str]()
    found |= {f"module buffer {b.name}": b.buffer for b in program.module_buffers}
    found |= {f"output {b.path}": b.buffer for b in program.outputs}
    found |= {f"setting {g.name} lr": g.lr for g in program.groups}
    found |= {f"setting {g.name} hyper": g.hyper for g in program.groups}
    return {what: memory[name].read(0, names.buffers[name].numel) for what, name in found.items()}


def check_values(names: Declarations, logical: FileRecord, report: Report) -> None:
    """Report each place where the schedule computes something else."""
    found: set[str] = set()

    def once(text: str) -> None:
        if text not in found:
            found.add(text)
            report(text)

    truth = LogicalRun(logical, names, once)
    machine = SymbolicRanks(names, truth.terms, once)
    run = visits(names, saves=True, counts=COUNTS)
    machine.begin(run[0])
    for visit in run:
        machine.fill(visit)
        before = _state_of(machine)
        machine.run(visit, update)
        _check_unchanged(machine, visit, before, once)
        _check_boundary(machine, truth, visit, once)
        if found:
            return
        machine.forget(visit)


def _state_of(machine: SymbolicRanks) -> list[dict[str, list[tuple[int, int, int, int]]]]:
    return [{name: list(memory.pieces) for name, memory in of.items()} for of in machine.memory]


def _check_unchanged(
    machine: SymbolicRanks,
    visit: PlacedSection,
    before: list[dict[str, list[tuple[int, int, int, int]]]],
    report: Report,
) -> None:
    """A save changes snapshots alone, an evaluation its loss, outputs and gradients; nothing changes a batch."""
    names = machine.names
    if visit.section not in {"save", "evaluate"}:
        for rank, memory in machine.everyone:
            for name, buffer in names.buffers.items():
                is_given = (
                    buffer.role in {"input", "rng", "constant"}
                    or getattr(buffer.holds, "micro", None) == "current"
                )
                if (
                    buffer.holds is not None
                    and is_given
                    and memory[name].pieces != before[rank][name]
                ):
                    report(f"section {visit.section} changes %{name}")
        return
    program = names.program
    free = {names.report("eval_loss")} if visit.section == "evaluate" else set()
    free |= (
        {o.buffer for o in program.outputs if o.stored != "step"}
        if visit.section == "evaluate"
        else set()
    )
    for rank, memory in machine.everyone:
        for name, buffer in names.buffers.items():
            is_made_anew = visit.section == "evaluate" and buffer.role == "grad"
            if buffer.holds is None or name in free or is_made_anew:
                continue
            if buffer.role == "snapshot" and visit.section == "save":
                copied = buffer.holds
                region = FileRecord(
                    "Region", {**_fields(copied, "buffer offset numel shard"), "part": None}
                )
                if memory[name].read(0, buffer.numel) != machine.memory[rank][copied.buffer].read(
                    *names.span(region, rank)
                ):
                    report(
                        f"section save leaves %{name} with something else than a copy of %{copied.buffer}"
                    )
            elif memory[name].pieces != before[rank][name]:
                report(f"section {visit.section} changes %{name}")


def _fields(record: FileRecord, names: str) -> dict[str, object]:
    return {name: getattr(record, name) for name in names.split()}


def _check_boundary(
    machine: SymbolicRanks, truth: LogicalRun, visit: PlacedSection, report: Report
) -> None:
    names, section = machine.names, machine.names.sections[visit.section]
    moment = truth.moments[visit]
    for rank, memory in machine.everyone:
        elsewhere: dict[str, list[tuple[int, int]]] = {}
        for holding in section.exit.holdings:
            start, stop = names.span(holding.region, rank)
            elsewhere.setdefault(holding.region.buffer, []).append((start, stop))
            wanted = _wanted(machine, truth, visit, holding.content, stop - start, rank)
            where = f"exit of {visit.section}: %{holding.region.buffer}"
            _compare(memory[holding.region.buffer].read(start, stop), wanted, where, report)
        for name, buffer in names.buffers.items():
            if buffer.holds is None or name in elsewhere or buffer.role == "snapshot":
                continue
            wanted = _wanted(machine, truth, visit, buffer.holds, buffer.numel, rank)
            _compare(
                memory[name].read(0, buffer.numel),
                wanted,
                f"after {visit.section}: %{name}",
                report,
            )
        own = _named(names, memory)
        for what, pieces in moment.buffers[rank].items():
            if own.get(what) != pieces and not _is_unread(what, names, visit):
                report(f"after {visit.section}: {what} is not what the logical program has")
    _check_reports(machine, truth, visit, report)
    _check_scalars(machine, truth, visit, report)


def _check_scalars(
    machine: SymbolicRanks, truth: LogicalRun, visit: PlacedSection, report: Report
) -> None:
    """A scalar that the logical program has too must have its value, but where a step may be ahead of it."""
    names, one, other = machine.names, {}, truth.names
    other_sizes = ("summed", "batch") if names.program.interleaved > 1 else ("summed",)
    reported = {r.buffer for r in names.program.reports if r.quantity.startswith(other_sizes)}
    is_ahead = visit.section == "last_micro_step"
    for name, buffer in other.buffers.items():
        if (
            buffer.role == "scalar"
            and buffer.holds is not None
            and buffer.holds.kind == "NamedContent"
        ):
            one[buffer.holds.name] = name
    for name, buffer in names.buffers.items():
        if buffer.role != "scalar" or buffer.holds is None or buffer.holds.kind != "NamedContent":
            continue
        same = one.get(buffer.holds.name)
        for rank, memory in machine.everyone:
            pieces = memory[name].read(0, buffer.numel)
            if any(t == UNDEFINED for _, _, t, _ in pieces):
                report(f"after {visit.section}: %{name} holds elements that nothing has written")
            elif same is not None and not is_ahead and name not in reported:
                wanted = truth.moments[visit].scalars[rank][same]
                if truth.terms.tidy(pieces) != truth.terms.tidy(wanted):
                    report(
                        f"after {visit.section}: %{name} is not the {buffer.holds.name} of the logical program"
                    )


def _is_unread(what: str, names: Declarations, visit: PlacedSection) -> bool:
    if not what.startswith("output "):
        return False
    stored = next((o.stored for o in names.program.outputs if f"output {o.path}" == what), None)
    if stored == "step":
        return visit.section not in MICRO_STEPS
    return visit.section != "evaluate"


_NEVER = -1
"""A term that no region holds."""
Wanted = tuple[Pieces, bool] | None
"""The content that a region must have, and whether undefined elements may stand for others than zero."""


def _wanted(
    machine: SymbolicRanks,
    truth: LogicalRun,
    visit: PlacedSection,
    content: FileRecord,
    numel: int,
    rank: int,
) -> Wanted:
    names, terms = machine.names, truth.terms
    micro = getattr(content, "micro", None)
    is_last = visit.section == "last_micro_step"
    if micro == "past" and (is_last or (visit.section != "micro_step" and not _is_within(visit))):
        micro = None if is_last and "micro_step" in names.sections else "none"
    if content.kind == "Zeros" or micro == "none":
        return ((0, numel, ZERO, 0),), False
    if micro == "all" and not is_last:
        micro = "current"
    if content.kind == "FlatContent" and content.quantity == "grad" and micro in {None, "current"}:
        return ((0, numel, _NEVER, 0),), False
    if content.kind == "WeightContent" and micro in {"past", "all"}:
        return _weights(truth, visit, content, names, rank), False
    if content.kind != "FlatContent":
        return None
    if content.quantity == "direction":
        return None
    moment = truth.moments[visit]
    if content.version == 1 and content.quantity != "grad":
        moment = truth.moments[_update_of(truth, visit)]
    key = content.quantity, content.flat
    if key not in moment.flats[rank]:
        return None
    first = names.held(content, numel, rank)
    if content.micro == "stale":
        flat = names.flats[content.flat]
        whole = PieceMemory(max(flat.padded_numel, first + numel), terms.uniform)
        whole.write(0, ((0, whole.numel, ZERO, 0),))
        for slot in flat.slots:
            size = max(_size(slot), 0)
            whole.write(slot.offset, ((0, size, UNDEFINED, 0),))
        return whole.read(first, first + numel), True
    if content.quantity == "grad":
        over = [r for r in range(names.ranks) if _joins(names, rank, r, content.reduced)]
        contents = [_whole(moment.flats[r][key], first + numel, terms) for r in over]
        pieces = tuple(
            merged(
                (a, b, *terms.over_ranks(list(zip(over, operands, strict=True)), None, "sum"))
                for a, b, operands in common(*contents)
            )
        )
    else:
        pieces = _whole(moment.flats[rank][key], first + numel, terms)
        if content.guessed:
            return None
    memory = PieceMemory(max(first + numel, pieces[-1][1] if pieces else 0), terms.uniform)
    memory.write(0, pieces)
    return memory.read(first, first + numel), False


def _is_within(visit: PlacedSection) -> bool:
    """Whether a section other than a micro-step runs between two micro-steps."""
    return visit.section in {"evaluate", "save"} and visit.micro > 0


def _size(slot: FileRecord) -> int:
    size = 1
    for side in slot.shape:
        size *= side
    return size


def _joins(names: Declarations, rank: int, other: int, axes: tuple[str, ...]) -> bool:
    return all(
        names.coordinate(rank, axis) == names.coordinate(other, axis)
        for axis in names.axes
        if axis not in axes
    )


def _whole(pieces: Pieces, numel: int, terms: Terms) -> Pieces:
    """The content of a flat, which is longer in the schedule: the rest is padding."""
    memory = PieceMemory(max(numel, pieces[-1][1] if pieces else 0), terms.uniform)
    memory.write(0, ((0, memory.numel, ZERO, 0),))
    memory.write(0, pieces)
    return tuple(memory.pieces)


def _weights(
    truth: LogicalRun, visit: PlacedSection, content: FileRecord, names: Declarations, rank: int
) -> Pieces:
    moment = truth.moments[visit]
    over = [r for r in range(names.ranks) if _joins(names, rank, r, content.reduced)]
    operands: list[tuple[int, Operand]] = [
        (r, moment.weights[r][0][2:]) for r in over if moment.weights[r]
    ]
    if not operands:
        return ()
    return ((0, 1, *truth.terms.over_ranks(operands, None, "sum")),)


def _update_of(truth: LogicalRun, visit: PlacedSection) -> PlacedSection:
    return next(v for v in truth.moments if v.section == "update" and v.step == visit.step)


def _compare(pieces: Pieces, wanted: Wanted, where: str, report: Report) -> None:
    if wanted is None:
        return
    expected, may_be_anything = wanted
    if not expected:
        return
    for _, _, (own, other) in common(pieces, expected):
        if own != other and not (may_be_anything and other[0] == UNDEFINED):
            report(f"{where} holds something else than the logical program computes")
            return


def _check_reports(
    machine: SymbolicRanks, truth: LogicalRun, visit: PlacedSection, report: Report
) -> None:
    names, terms, moment = machine.names, truth.terms, truth.moments[visit]
    is_update = visit.section == ("update" if "update" in names.sections else "last_micro_step")
    due = {
        "batch_loss": visit.section in MICRO_STEPS,
        "loss": visit.section == "last_micro_step",
        "summed_loss": is_update,
        "summed_weight": is_update,
        "squared_norm": is_update,
        "skip": is_update,
        "eval_loss": visit.section == "evaluate",
        "step": is_update or visit.section in {"save", "evaluate"},
        "loss_scale": is_update or visit.section in {"save", "evaluate"},
    }
    if is_update and names.report("redo") is not None:
        _check_redo(machine, visit, report)
    for rank, memory in machine.everyone:
        for quantity, is_due in due.items():
            buffer, wanted = names.report(quantity), moment.reports[rank].get(quantity)
            if buffer is None or not is_due:
                if buffer is None and wanted is not None:
                    report(f"no buffer reports {quantity}")
                continue
            pieces = memory[buffer].read(0, names.buffers[buffer].numel)
            if wanted is None:
                report(f"{quantity} is reported, but not by the logical program")
                continue
            if quantity.startswith("summed"):
                shares = [(r, moment.reports[r][quantity][0][2:]) for r in range(names.ranks)]
                wanted = ((0, 1, *terms.over_ranks(shares, None, "sum")),)
            if quantity == "batch_loss":
                parts = [
                    truth.batch_losses[visit.step, visit.micro + j][rank]
                    for j in range(names.program.interleaved)
                ]
                wanted = tuple((j, j + 1, t, s - j) for j, ((_, _, t, s),) in enumerate(parts))
            if terms.tidy(pieces) != terms.tidy(wanted):
                report(
                    f"after {visit.section}: %{buffer} is not the {quantity} of the logical program"
                )


def _check_redo(machine: SymbolicRanks, visit: PlacedSection, report: Report) -> None:
    """The report ``redo`` must say what the last decision said."""
    names = machine.names
    (op,) = [
        o
        for s in names.program.sections
        for o in s.body
        if o.kind == "Decide" and o.redo is not None
    ][:1]
    for rank, memory in machine.everyone:
        ((_, _, term, _),) = memory[names.report("redo") or ""].read(0, 1)
        skip = None if op.skip is None else machine.read(op.skip, rank)
        if machine.terms.rows[term][2:] != (machine.read(op.gradient_divisor, rank), skip):
            report(f"after {visit.section}: redo is not what the decision says")
