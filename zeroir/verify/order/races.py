"""Races, lifetimes and events: ops that no wait orders must not access each other's elements.

Ops that happens-before does not order may run in any order, so none of them may write what another one reads or writes.
Each buffer records, per interval of elements, the op that wrote it last and the ops that have read it since. Effects
alone determine what an op reads and writes.
"""

from __future__ import annotations

from zeroir.ir import ops
from zeroir.ir.analysis.effects import Effects, effects
from zeroir.ir.buffers import Region, Role
from zeroir.ir.contents import SnapshotContent
from zeroir.ir.ops import Op
from zeroir.ir.program import EVALUATE, MICRO_STEP, UPDATE, Program, Section
from zeroir.verify.context import Findings, last_touch, page_names, spell, title
from zeroir.verify.interpreter.intervals import IntervalMap
from zeroir.verify.interpreter.pages import code_of_absence, code_of_conflict
from zeroir.verify.order.happens_before import ENTRY, HappensBefore
from zeroir.verify.order.pending_events import Carried, PendingOps, pending_ops_at_entry

Access = tuple[int, tuple[tuple[int, int], ...]]
"""The last writer, and per stream the last reader since: ``(writer, ((stream, reader), ...))``."""


class Ordering:
    """One pass over one section."""

    def __init__(
        self, program: Program, section: Section, findings: Findings, pending_ops: PendingOps
    ) -> None:
        self.program = program
        self.section = section
        self.findings = findings
        self.pending_ops = pending_ops
        self.order = HappensBefore(program, section)
        self.maps: dict[str, IntervalMap[Access]] = {}
        self.pages = page_names(program)
        self.live: set[str] = set(section.entry.live)
        self.released: dict[str, int] = {}
        self.last_collective: dict[str, int] = {}
        self.line = 0

    def run(self) -> None:
        """Check the whole section."""
        self._enter()
        for line, op in enumerate(self.section.body):
            self.line = line
            self._step(op)
        self._leave()

    # ------------------------------------------------------------------------------------------------- entry state

    def _enter(self) -> None:
        holdings = self.section.entry.holdings
        for pending in self.section.entry.pending:
            number = self.order.signallers[pending.event]
            stream = self.order.issued[number].stream
            for holding in holdings:
                if holding.after == pending.event:
                    self._mark_write(holding.region, number)
            carried = self.pending_ops.get(pending.event)
            if carried is None:
                continue
            op_effects = carried.effects
            for region in (*op_effects.writes, *op_effects.accumulates):
                self._mark_write(region, number)
            for region in op_effects.reads:
                self._mark_read(region, stream, number)
            for name in op_effects.allocs:
                numel = self.program.buffer_by_name[name].numel
                self.maps[name] = IntervalMap(numel, (number, ()))
            for name in op_effects.frees:
                self.released.setdefault(name, number)
            if op_effects.comm is not None:
                self.last_collective[op_effects.comm] = number

    # ------------------------------------------------------------------------------------------------------- the ops

    def _step(self, op: Op) -> None:
        if isinstance(op, ops.Wait):
            if not self.order.wait(op):
                self._fail("Z202", f"wait !{op.waited}: no op before it signals that event")
            return
        op_effects = effects(op)
        stream = self.order.streams[op_effects.stream]
        if op_effects.comm is not None:
            self._collective(op_effects.comm, stream)
        number = len(self.order.issued)
        for name in op_effects.allocs:
            self._alloc(name, stream, number)
        self._accesses(op, op_effects, stream, number)
        for name in op_effects.frees:
            self._release(name, op, stream)
        self.order.issue(self.line, op)
        if op_effects.comm is not None:
            self.last_collective[op_effects.comm] = number
        for name in op_effects.frees:
            self.released[name] = number

    def _accesses(self, op: Op, op_effects: Effects, stream: int, number: int) -> None:
        for region in op_effects.reads:
            if self._is_live(region, op):
                self._check(region, stream, op, is_read=True, is_write=False)
        for region in op_effects.writes:
            if self._is_live(region, op):
                self._check(region, stream, op, is_read=False, is_write=True)
        for region in op_effects.accumulates:
            if self._is_live(region, op):
                self._check(region, stream, op, is_read=True, is_write=True)
        for region in op_effects.reads:
            self._mark_read(region, stream, number)
        for region in (*op_effects.writes, *op_effects.accumulates):
            self._mark_write(region, number)

    def _is_live(self, region: Region, op: Op) -> bool:
        name = region.buffer
        if name in self.live or self.program.buffer_by_name[name].is_persistent:
            return True
        where = spell(region, self.program)
        if name in self.released:
            at = self._when(self.released[name])
            when = f"after its release{at}"
            advice = f"Move the release behind this op, or this op before the release{at}."
        else:
            when, advice = "before its alloc", f"Alloc %{name} before this op."
        code = code_of_absence(op) if name in self.pages else "Z101"
        self._fail(code, f"{title(op)} uses {where} {when}", name, advice=advice)
        return False

    def _when(self, issued: int) -> str:
        line = self.order.issued[issued].line
        return ", which is pending from before," if line < 0 else f" @{line}"

    def _alloc(self, name: str, stream: int, number: int) -> None:
        if name in self.live:
            self._fail(
                "Z503" if name in self.pages else "Z104",
                f"alloc %{name}, which is live already",
                name,
                advice=f"Release %{name} first, or drop this alloc.",
            )
        earlier = self.released.get(name, ENTRY)
        if not self.order.is_before(earlier, stream):
            at = self._when(earlier)
            self._fail(
                "Z503" if name in self.pages else "Z101",
                f"alloc %{name} may run before its release{at} on another stream",
                name,
                advice=self._order_advice(earlier),
            )
        self.live.add(name)
        numel = self.program.buffer_by_name[name].numel
        self.maps[name] = IntervalMap(numel, (number, ()))

    def _release(self, name: str, op: Op, stream: int) -> None:
        if name not in self.live:
            word = "a second time" if name in self.released else "without an alloc"
            self._fail(
                "Z101",
                f"release %{name} {word}",
                name,
                advice="Drop this release, or move the alloc.",
            )
            return
        self.live.discard(name)
        numel = self.program.buffer_by_name[name].numel
        for _, _, (writer, readers) in self._map(name).read(0, numel):
            for user in (writer, *(reader for _, reader in readers)):
                if not self.order.is_before(user, stream):
                    issued = self.order.issued[user]
                    code = "Z101"
                    if name in self.pages:
                        was_write = user == writer
                        code = code_of_conflict(code, issued.op, op, was_write=was_write)
                    who = (
                        "a pending op"
                        if issued.op is None
                        else f"{title(issued.op)} @{issued.line}"
                    )
                    self._fail(
                        code,
                        f"release %{name} may run before {who}, which still uses it",
                        name,
                        advice=self._order_advice(user),
                    )
                    return

    def _collective(self, comm: str, stream: int) -> None:
        axis = self.program.comm_by_name[comm].axis
        for last_comm, last in self.last_collective.items():
            if last_comm != comm and self.program.comm_by_name[last_comm].axis == axis:
                continue
            if not self.order.is_before(last, stream):
                line = self.order.issued[last].line
                at = "a pending one" if line < 0 else f"the one @{line}"
                self._fail(
                    "Z202",
                    f"the collective on {comm} and {at} on {last_comm} have no order: "
                    "ranks may start them in different orders",
                    advice=self._order_advice(last),
                )
                return

    # -------------------------------------------------------------------------------------------------- the accesses

    def _map(self, name: str) -> IntervalMap[Access]:
        accesses = self.maps.get(name)
        if accesses is None:
            numel = self.program.buffer_by_name[name].numel
            accesses = self.maps[name] = IntervalMap(numel, (ENTRY, ()))
        return accesses

    def _check(self, region: Region, stream: int, op: Op, *, is_read: bool, is_write: bool) -> None:
        """Report the first access that the op is not ordered after: a write, or, where the op writes, any access."""
        for _, _, (writer, readers) in self._map(region.buffer).read(region.offset, region.stop):
            if not self.order.is_before(writer, stream):
                self._conflict(writer, region, op, is_read=is_read, was_write=True)
                return
            for _, reader in readers if is_write else ():
                if not self.order.is_before(reader, stream):
                    self._conflict(reader, region, op, is_read=is_read, was_write=False)
                    return

    def _mark_write(self, region: Region, number: int) -> None:
        self._map(region.buffer).write(region.offset, region.stop, (number, ()))

    def _mark_read(self, region: Region, stream: int, number: int) -> None:
        accesses = self._map(region.buffer)
        for a, b, (writer, readers) in accesses.read(region.offset, region.stop):
            if readers:
                others = tuple(item for item in readers if item[0] != stream)
                accesses.write(a, b, (writer, (*others, (stream, number))))
            else:
                accesses.write(a, b, (writer, ((stream, number),)))

    def _conflict(
        self, earlier: int, region: Region, op: Op, *, is_read: bool, was_write: bool
    ) -> None:
        issued = self.order.issued[earlier]
        where = spell(region, self.program)
        who = "an op pending from before"
        if issued.op is not None:
            who = f"{title(issued.op)} @{issued.line}"
        is_late = issued.op is None or issued.op.is_asynchronous
        if isinstance(issued.op, ops.Alloc):
            code, what = "Z101", f"may use {where} before its alloc @{issued.line}"
        elif was_write and is_read and is_late:
            writes = f"{who}, which writes it on another stream"
            code, what = "Z103", f"reads {where} without waiting for {writes}"
        else:
            did = "writes" if was_write else "reads"
            does = "reads" if is_read else "writes"
            code, what = "Z105", f"{does} {where} while {who} {did} it on another stream"
        if region.buffer in self.pages:
            code = code_of_conflict(code, issued.op, op, was_write=was_write)
        advice = self._order_advice(earlier)
        self._fail(code, f"{title(op)} {what}", region.buffer, advice=advice)

    # --------------------------------------------------------------------------------------------------- exit state

    def _leave(self) -> None:
        state = self.section.exit
        section = self.section
        for name in sorted(self.live - set(state.live)):
            self.findings.add(
                "Z104",
                f"%{name} is not released: it is live at the exit of {section.name}, whose exit state does not "
                "say so",
                section=section,
                line=last_touch(section, name, is_write=False),
                buffers=(name,),
                advice=f"Release %{name} after this op, its last use, or name it in the exit state.",
                is_of_exit=True,
            )
        for name in state.live:
            if name not in self.live:
                self.findings.add(
                    "Z104",
                    f"the exit state of {section.name} says that %{name} is live, but it is not",
                    section=section,
                    buffers=(name,),
                )
        latest: dict[str, int] = {}
        for pending in state.pending:
            at = self._leave_pending(pending.event, pending.stream)
            if at is not None and at < latest.get(pending.stream, ENTRY):
                self.findings.add(
                    "Z202",
                    f"the exit state of {section.name} lists !{pending.event} after an event that is "
                    "signalled later: list the pending events of a stream in the order of their ops",
                    section=section,
                )
            if at is not None:
                latest[pending.stream] = at

    def _leave_pending(self, event: str, stream: str) -> int | None:
        """Check one pending event; return the op that signals it."""
        section = self.section
        at = self.order.signallers.get(event)
        if at is None or self.order.issued[at].stream != self.order.streams[stream]:
            self.findings.add(
                "Z202",
                f"the exit state of {section.name} says that !{event} is pending on {stream}, "
                "but no op there signals it",
                section=section,
            )
            return None
        issued = self.order.issued[at]
        if issued.op is not None:
            carried = Carried(section.name, issued.line, issued.op, effects(issued.op))
        elif event in self.pending_ops:
            carried = self.pending_ops[event]
        else:
            return at
        self._leave_host(carried)
        for region in (*carried.effects.writes, *carried.effects.accumulates):
            self._leave_write(event, region)
        return at

    def _leave_host(self, carried: Carried) -> None:
        """Check that pending ops at a boundary do not use buffers of the host, which does not wait for them.

        The host reads scalars and outputs. Before a micro-step it writes inputs, weights, seeds and the settings of
        optimizer groups, and between steps the user may change any scalar.
        """
        op_effects, name = carried.effects, self.section.name
        written = (*op_effects.writes, *op_effects.accumulates)
        touched = (*op_effects.reads, *written)
        hit: list[tuple[str, str]] = []
        if name in (MICRO_STEP, UPDATE, EVALUATE):
            anew = "which the host fills again for the next micro-step"
            hit += [
                (r.buffer, anew)
                for r in touched
                if self._role(r) in (Role.INPUT, Role.RNG) or r.buffer == self.program.weight
            ]
        reads = "which the host reads after the section"
        hit += [(r.buffer, reads) for r in written if self._role(r) in (Role.SCALAR, Role.OUTPUT)]
        if name in (UPDATE, EVALUATE):
            changes = "which the host may change between steps"
            hit += [(r.buffer, changes) for r in op_effects.reads if self._role(r) is Role.SCALAR]
        elif name == MICRO_STEP:
            changes = "which the host may change before the next micro-step"
            settings = {buffer for g in self.program.groups for buffer in (g.lr, g.hyper)}
            hit += [(r.buffer, changes) for r in op_effects.reads if r.buffer in settings]
        is_own = carried.section == name
        issuer = "" if is_own else f" of {carried.section}"
        for buffer, what in hit:
            self.findings.add(
                "Z105",
                f"{title(carried.op)}{issuer} is still under way at the exit of {name}, but uses %{buffer}, {what}",
                section=self.section,
                line=carried.line if is_own else None,
                buffers=(buffer,),
            )

    def _role(self, region: Region) -> Role:
        return self.program.buffer_by_name[region.buffer].role

    def _leave_write(self, event: str, region: Region) -> None:
        """Check that the exit state or snapshot says that a pending op's results are valid only after its event."""
        buffer = self.program.buffer_by_name[region.buffer]
        if isinstance(buffer.holds, SnapshotContent) and buffer.holds.event == event:
            return
        over = [h for h in self.section.exit.holdings if h.region.overlaps(region)]
        is_wrong = any(holding.after != event for holding in over)
        if buffer.is_persistent and not over:
            is_wrong = True
        if is_wrong:
            self.findings.add(
                "Z103",
                f"the exit state of {self.section.name} says what {spell(region, self.program)} holds, "
                f"but not that this is so only after !{event}",
                section=self.section,
                buffers=(region.buffer,),
            )

    def _order_advice(self, earlier: int) -> str:
        """Return advice on how to order the current op after an earlier one."""
        issued = self.order.issued[earlier]
        stream = effects(self.section.body[self.line]).stream
        event = next((e for e, at in self.order.signallers.items() if at == earlier), None)
        if event is not None:
            return f"Put `wait !{event} on={stream}` before this op."
        return f"Let op {issued.line} signal an event, and wait for it on {stream} before this op."

    def _fail(self, code: str, sentence: str, *buffers: str, advice: str = "") -> None:
        self.findings.add(
            code, sentence, section=self.section, line=self.line, buffers=buffers, advice=advice
        )


def check_ordering(program: Program, findings: Findings) -> None:
    """Check order, lifetimes and events of every section, for each set of ops that may be pending at its entry."""
    ways = pending_ops_at_entry(program)
    for section in program.sections:
        for pending_ops in ways[section.name]:
            Ordering(program, section, findings, pending_ops).run()
