"""The abstract interpreter: one run over a section covers every rank, every interleaving and every value.

It assumes the section's entry state and lets each op change the abstract memory; ``exits`` then compares that memory
with the exit state. The ordering is proved before, so every interleaving gives the same values as program order.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, whole
from zeroir.ir.contents import GRAD, PARAM, FlatContent, NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.ops import Mode, Op
from zeroir.ir.program import Program, Section
from zeroir.ir.reports import Quantity
from zeroir.verify.context import Findings, last_touch, spell, title
from zeroir.verify.interpreter import (
    algebra,
    averages,
    decisions,
    optimizer_steps,
    pages,
    speculation,
    statistics,
    transfers,
)
from zeroir.verify.interpreter.abstract_memory import AbstractMemory
from zeroir.verify.interpreter.descriptions import ADVICE, CAUSES, describe
from zeroir.verify.interpreter.domain import (
    ALL_TERM,
    PAST_TERM,
    POISON,
    ZERO,
    Decision,
    Elements,
    FlatKey,
    Gradient,
    Numbering,
    PieceList,
    Statistic,
    Term,
    Undefined,
    Value,
    Zero,
    aligned,
    current_micro_batch,
)
from zeroir.verify.interpreter.flat_layout import FlatLayout
from zeroir.verify.interpreter.step_operands import Stepped
from zeroir.verify.interpreter.value_numbers import CallOperand, Segments

Contributions = dict[str, list[int]]
"""Per parameter, the value numbers that contribute to its gradient, in the order in which they are added."""


class Shared:
    """The data that the runs over a program's sections share.

    With ``by_node`` values are numbered node by node instead of segment by segment. With ``may_repeat`` a repeated call
    with the same operands contributes again, as where a model adds a module's result to itself; without it the call
    counts once, and a gradient that holds it twice is wrong.
    """

    def __init__(
        self,
        program: Program,
        numbering: Numbering,
        *,
        by_node: bool = False,
        may_repeat: bool = True,
    ) -> None:
        self.program = program
        self.layout = FlatLayout(program)
        self.numbering = numbering
        self.segments = Segments(program, numbering, by_node=by_node)
        self.parameters = {
            name: (Elements(FlatKey(PARAM, flat.name, 0), slot.offset), slot.numel)
            for name, (flat, slot) in program.parameter_by_name.items()
        }
        self.groups = {group.name: group for group in program.groups}
        self.counters = decisions.counters(program)
        self.may_repeat = may_repeat
        self.pages = pages.page_names(program)
        self.staging = [b for b in program.buffers if b.role is Role.STAGING and self.pages]
        self.resting: dict[tuple[str, str], list[tuple[Buffer, FlatContent]]] = {}
        for buffer in program.buffers:
            if isinstance(buffer.holds, FlatContent):
                key = buffer.holds.quantity, buffer.holds.flat
                self.resting.setdefault(key, []).append((buffer, buffer.holds))


class SectionRun:
    """The interpretation of one section: its computations.

    ``settings`` is what decisions and the loss scaling are given, ``steps`` what each optimizer step does,
    ``directions`` and ``averages`` what each of those does, and ``sums`` which contributions were added to which.
    ``held`` are the sums of contributions that stand in memory, with their dtypes, ``roundings`` those that a
    conversion rounded, and ``reductions`` those that ranks added up. Each comes with the line of its op.

    ``decided`` are the decisions so far, and whether each may skip the update. ``guesses`` is the guess that each of
    them compared itself with. ``reported`` are the values that the engine reports of the step's decision: the norm and
    the weight that it read, whether it skips, and whether it undoes a guess. ``slices`` are the contents of buffers of
    micro-batches after each of them, where the section is repeated.
    """

    def __init__(
        self,
        shared: Shared,
        section: Section,
        findings: Findings,
        before: SectionRun | None = None,
    ) -> None:
        self.shared = shared
        self.program = shared.program
        self.layout = shared.layout
        self.numbering = shared.numbering
        self.section = section
        self.findings = findings
        self.memory = AbstractMemory(self.program.buffer_by_name, self.program.mesh)
        self.sizes = shared.layout.sizes
        self.line = 0
        self.contributions: Contributions = {}
        self.consumed: set[str] = set()
        self.settings: dict[tuple[Hashable, ...], int] = {}
        self.steps: list[Stepped] = []
        self.directions: list[Stepped] = []
        self.averages: list[Stepped] = []
        self.held: set[algebra.HeldSum] = set()
        self.roundings: dict[algebra.HeldSum, int] = {}
        self.reductions: dict[algebra.HeldSum, int] = {}
        self.sums: dict[algebra.Sum, int] = {}
        self.decided: dict[int, bool] = {} if before is None else dict(before.decided)
        self.reported: dict[Quantity, PieceList] = {} if before is None else dict(before.reported)
        self.guesses: dict[int, int] = {} if before is None else dict(before.guesses)
        self.slices: dict[str, list[PieceList]] = {}
        self._calls: set[tuple[int, Hashable]] = set()
        self._lines: dict[int, int] = {}
        self._enter(before)

    def interpret(self, start: int = 0, stop: int | None = None) -> None:
        """Let every op of the body, or those of some lines, change the abstract memory."""
        for line, op in enumerate(self.section.body[start:stop], start):
            self.line = line
            self._step(op)

    def fail(self, code: str, sentence: str, *buffers: str, advice: str = "") -> None:
        """Report a finding at the current op."""
        self.findings.add(
            code, sentence, section=self.section, line=self.line, buffers=buffers, advice=advice
        )

    def fail_at_exit(self, code: str, region: Region, sentence: str, advice: str = "") -> None:
        """Report what a region holds at the end of the section, at the last op that wrote its buffer."""
        self.findings.add(
            code,
            f"at the exit of {self.section.name} {spell(region, self.program)} {sentence}",
            section=self.section,
            line=last_touch(self.section, region.buffer, is_write=True),
            buffers=(region.buffer,),
            advice=advice,
            is_of_exit=True,
        )

    def term_name(self, source: int) -> str:
        """A contribution in a sentence."""
        if source == PAST_TERM:
            return "the sum of the micro-steps before"
        if source == ALL_TERM:
            return "the sum of the step's micro-steps"
        micro_batch = current_micro_batch(source)
        if micro_batch is not None:
            is_one = self.program.interleaved == 1
            return "the weight of this micro-step" if is_one else f"weight {micro_batch}"
        line = self._lines.get(source)
        return "a contribution" if line is None else f"the contribution of op {line}"

    def note_rounding(self, pieces: PieceList, target: DType) -> None:
        """Remember which sums of contributions this op rounds to ``target``."""
        for _, _, value in pieces:
            for rounded in algebra.held_sums(value, target):
                self.roundings.setdefault(rounded, self.line)

    def note_reduction(self, region: Region, pieces: PieceList) -> None:
        """Remember which sums of contributions this op adds up over ranks, in the dtype of the region."""
        dtype = self.program.buffer_by_name[region.buffer].dtype
        for _, _, value in pieces:
            for reduced in algebra.held_sums(value, dtype):
                self.reductions.setdefault(reduced, self.line)

    def _note_held(self, region: Region, pieces: PieceList) -> None:
        dtype = self.program.buffer_by_name[region.buffer].dtype
        for _, _, value in pieces:
            self.held.update(algebra.held_sums(value, dtype))

    # ------------------------------------------------------------------------------------------------- entry state

    def _enter(self, before: SectionRun | None) -> None:
        for buffer in self.program.buffers:
            if buffer.holds is not None:
                pieces = self.layout.pieces(buffer.holds, buffer.numel)
                self._note_held(whole(buffer), pieces)
                self.memory.write(whole(buffer), pieces)
        described = {holding.region for holding in self.section.entry.holdings}
        for holding in self.section.entry.holdings:
            region = holding.region
            resting = self.program.buffer_by_name[region.buffer].holds
            is_described = replace(region, shard=None) in described
            if region.shard is not None and resting is not None and not is_described:
                rest = self.layout.beside(holding, resting)
                if rest is not resting:
                    full = Region(buffer=region.buffer, offset=region.offset, numel=region.numel)
                    self.memory.write(full, self.layout.pieces(rest, region.numel))
            numel = self.memory.numel(region)
            pieces = self.layout.pieces(holding.content, numel)
            self._note_held(region, pieces)
            self.memory.write(region, pieces)
        if before is not None:
            self._carry(before)

    def _carry(self, before: SectionRun) -> None:
        """Keep statistics, decisions and guesses of the section before, of which the entry state gives only names."""
        for buffer in self.program.buffers:
            if isinstance(buffer.holds, NamedContent):
                pieces = before.memory.read(whole(buffer))
                if any(isinstance(value, Statistic | Decision) for _, _, value in pieces):
                    self.memory.write(whole(buffer), pieces)
        for holding in self.section.entry.holdings:
            if isinstance(holding.content, FlatContent) and holding.content.guessed:
                self.memory.write(holding.region, before.memory.read(holding.region))
        weight = self.program.report_of.get(Quantity.SUMMED_WEIGHT)
        if weight is not None and before.decided:
            # Between the sections, the weight that an early decision has read rests with no content.
            region = whole(self.program.buffer_by_name[weight.buffer])
            self.memory.write(region, before.memory.read(region))

    # -------------------------------------------------------------------------------------------------- operations

    def _step(self, op: Op) -> None:
        if self.shared.pages:
            pages.check_dropped(self, op)
        match op:
            case ops.Wait():
                pass
            case ops.Memory():
                self.memory.forget(op.buffer)
            case ops.Collective():
                transfers.collective(self, op)
            case ops.Compute():
                self._compute(op)
            case ops.Cast():
                self._cast(op)
            case ops.Fill():
                number = self.numbering.of(("fill", op.value))
                value: Value = ZERO if op.value == 0 else Elements(number)
                self.memory.write(op.destination, [(0, self.memory.numel(op.destination), value)])
            case ops.Scale():
                self._scale(op)
            case ops.GradNorm() | ops.CheckFinite():
                statistics.statistic(self, op)
            case ops.Guess():
                decisions.guess(self, op)
            case ops.Decide():
                decisions.decide(self, op)
            case ops.Direction():
                optimizer_steps.direction(self, op)
            case ops.OptimizerStep():
                optimizer_steps.optimizer_step(self, op)
            case ops.SpeculativeStep():
                speculation.speculative_step(self, op)
            case ops.CommitStep():
                speculation.commit_step(self, op)
            case ops.Average():
                averages.average(self, op)
            case ops.UpdateScale():
                decisions.update_scale(self, op)
            case ops.Transfer():
                self.memory.write(op.destination, self.take(op.source))
            case _:
                assert_never(op)

    def take(self, region: Region, code: str = "Z103") -> PieceList:
        """Read a region of which every element must be defined; undefined ones are reported and become poison."""
        pieces = self.memory.read(region)
        checked: list[tuple[int, int, Value]] | None = None
        for i, (a, b, value) in enumerate(pieces):
            if isinstance(value, Elements | Gradient | Zero):
                continue
            hole = algebra.undefined_in(value)
            if hole is None:
                continue
            self._complain(region, a, b, hole, code)
            checked = list(pieces) if checked is None else checked
            checked[i] = (a, b, POISON)
        return pieces if checked is None else checked

    def _complain(self, region: Region, start: int, stop: int, hole: Undefined, code: str) -> None:
        """Report a read of undefined elements ``[start, stop)`` of a region."""
        where = spell(region, self.program)
        part = "" if (start, stop) == (0, self.memory.numel(region)) else f" [{start}:{stop}] of"
        self.fail(
            "Z501" if region.buffer in self.shared.pages else code,
            f"{title(self.section.body[self.line])} reads{part} {where}, which has {CAUSES[hole.cause]}",
            region.buffer,
            advice=ADVICE[hole.cause],
        )

    # ----------------------------------------------------------------------------------------------------- compute

    def _compute(self, op: ops.Compute) -> None:
        operands: list[CallOperand] = []
        is_poisoned = False
        for argument in op.arguments:
            region = argument.view.region
            name = argument.parameter
            if name is not None:
                if not self._is_parameter(name, region):
                    is_poisoned = True
                slot = self.program.parameter_by_name[name][1]
                operands.append(CallOperand(("parameter", slot.name)))
                continue
            pieces = self.take(region)
            if len(pieces) == 1:
                value = pieces[0][2]
                if isinstance(value, Elements) and not value.strides:
                    key = (value.key, value.summed) if value.summed else value.key
                    operands.append(CallOperand(key, value.shift))
                    continue
            if any(algebra.is_poisoned(value) for _, _, value in pieces):
                is_poisoned = True
            operands.append(CallOperand(tuple(pieces)))
        results = self.shared.segments.results(op.segment, tuple(operands))
        for destination, (number, key, shift) in zip(op.destinations, results, strict=True):
            if destination is None:
                continue
            if destination.gradient is not None:
                self._contribute(op, destination, destination.gradient, number, is_poisoned)
                continue
            region = destination.view.region
            numel = self.memory.numel(region)
            result: Value = POISON if is_poisoned else Elements(key, shift)
            if destination.mode is Mode.WRITE:
                self.memory.write(region, [(0, numel, result)])
            else:
                self.memory.write(
                    region, self._added(self.take(region), [(0, numel, result)], region)
                )

    def _is_parameter(self, name: str, region: Region) -> bool:
        expected, numel = self.shared.parameters[name]
        pieces = self.memory.read(region)
        if not pieces or (len(pieces) == 1 and pieces[0][2] == expected and region.numel == numel):
            return True
        if any(algebra.is_poisoned(value) for _, _, value in pieces):
            return False
        wrong = next((value for _, _, value in pieces if value != expected), pieces[0][2])
        self.fail(
            "Z401",
            f"{title(self.section.body[self.line])} needs parameter {name} in "
            f"{spell(region, self.program)}, which holds {describe(wrong)}",
            region.buffer,
        )
        return False

    def _contribute(
        self,
        op: ops.Compute,
        destination: ops.Destination,
        name: str,
        number: int,
        is_poisoned: bool,
    ) -> None:
        flat, slot = self.program.parameter_by_name[name]
        region = destination.view.region
        value: Value = Gradient(flat.name, (Term(number, (), 1),), slot.offset)
        if is_poisoned:
            value = POISON
        if slot.name in self.consumed:
            self.fail(
                "Z405",
                f"{title(op)} contributes to the gradient of {name} after a statistic or an "
                "update has read it",
                region.buffer,
            )
        call = (number, (op.arguments, name))
        added = self.contributions.setdefault(slot.name, [])
        self._lines.setdefault(number, self.line)
        if self.shared.may_repeat or call not in self._calls:
            self._calls.add(call)
            added.append(number)
        pieces: PieceList = [(0, region.numel, value)]
        if destination.mode is Mode.ACCUMULATE:
            pieces = self._added(self.memory.read(region), pieces, region)
        self._note_held(region, pieces)
        self.memory.write(region, pieces)

    def _added(self, left: PieceList, right: PieceList, region: Region) -> PieceList:
        def fail(code: str, sentence: str) -> None:
            self.fail(code, f"{sentence}, in {spell(region, self.program)}", region.buffer)

        def note(added: algebra.Sum) -> None:
            self.sums.setdefault(added, self.line)

        dtype = self.program.buffer_by_name[region.buffer].dtype
        how = algebra.Addition(dtype, self.numbering, fail, note)
        if len(left) != 1 or len(right) != 1:
            return [(a, b, algebra.add(x, y, how)) for a, b, x, y in aligned(left, right)]
        return [(left[0][0], left[0][1], algebra.add(left[0][2], right[0][2], how))]

    # ----------------------------------------------------------------------------------------- casts, copies, scales

    def _cast(self, op: ops.Cast) -> None:
        buffers = self.program.buffer_by_name
        source, target = buffers[op.source.buffer].dtype, buffers[op.destination.buffer].dtype
        is_sum = op.mode is Mode.ACCUMULATE
        code = "Z402" if is_sum or self._is_gradient(op.source) else "Z103"
        pieces = self.take(op.source, code)
        if not algebra.represents(target, source):
            self.note_rounding(pieces, target)
        if target is not source:
            pieces = [
                (a, b, algebra.cast(v, target, self.program.flat_by_name, self.numbering))
                for a, b, v in pieces
            ]
        if is_sum:
            pieces = self._added(self.memory.read(op.destination), pieces, op.destination)
        self._note_held(op.destination, pieces)
        self.memory.write(op.destination, pieces)

    def _is_gradient(self, region: Region) -> bool:
        holds = self.program.buffer_by_name[region.buffer].holds
        return getattr(holds, "quantity", None) == GRAD

    def _scale(self, op: ops.Scale) -> None:
        by = self.numbering.of(("by", tuple(self.take(op.by))))
        self.memory.write(
            op.region,
            [(a, b, algebra.scaled(v, by, self.numbering)) for a, b, v in self.take(op.region)],
        )
