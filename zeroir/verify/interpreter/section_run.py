"""The state of the abstract interpreter within one section: memory, sums, decisions, and findings."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, whole
from zeroir.ir.contents import PARAM, FlatContent, NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.program import Program, Section
from zeroir.ir.reports import Quantity
from zeroir.verify.context import Findings, last_touch, page_names, spell, title
from zeroir.verify.interpreter import (
    algebra,
)
from zeroir.verify.interpreter.abstract_memory import AbstractMemory
from zeroir.verify.interpreter.descriptions import ADVICE, CAUSES
from zeroir.verify.interpreter.domain import (
    ALL_TERM,
    PAST_TERM,
    POISON,
    Decision,
    Elements,
    FlatKey,
    Gradient,
    Numbering,
    PieceList,
    Statistic,
    Undefined,
    Value,
    Zero,
    current_micro_batch,
)
from zeroir.verify.interpreter.flat_layout import FlatLayout
from zeroir.verify.interpreter.value_numbers import Segments


class Stepped(NamedTuple):
    """Elements ``[start, stop)`` of a parameter that an optimizer step updates, with its settings and its line."""

    parameter: str
    start: int
    stop: int
    setting: Hashable
    line: int


Contributions = dict[str, list[int]]
"""For each parameter, the value numbers that contribute to its gradient, in the order in which they are added."""


class Shared:
    """The data shared by the runs over a program's sections.

    With ``by_node`` values are numbered node by node instead of segment by segment. With ``may_repeat`` a repeated call
    with the same operands contributes again, as where a model adds a module's result to itself; without it the call
    counts once, and a gradient that includes it twice is wrong.
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
        self.counters = _counters(program)
        self.more_counts = tuple(
            region.buffer
            for op in program.ops()
            if isinstance(op, ops.Decide)
            for region in op.counts
        )
        self.may_repeat = may_repeat
        self.pages = page_names(program)
        self.staging = [b for b in program.buffers if b.role is Role.STAGING and self.pages]
        self.resting: dict[tuple[str, str], list[tuple[Buffer, FlatContent]]] = {}
        for buffer in program.buffers:
            if isinstance(buffer.holds, FlatContent):
                key = buffer.holds.quantity, buffer.holds.flat
                self.resting.setdefault(key, []).append((buffer, buffer.holds))


def _counters(program: Program) -> frozenset[str]:
    """Return the reported scalars that a step advances: the step count, and a loss scale that changes."""
    reported = {
        program.report_of[quantity].buffer
        for quantity in (Quantity.STEP, Quantity.LOSS_SCALE)
        if quantity in program.report_of
    }
    advanced = {
        (op.step if isinstance(op, ops.Decide) else op.state).buffer
        for op in program.ops()
        if isinstance(op, ops.Decide | ops.UpdateScale)
    }
    return frozenset(reported & advanced)


class SectionRun:
    """The results so far of the interpretation of one section.

    ``settings`` are the arguments of decisions and of loss scaling, ``steps`` the effects of optimizer steps,
    ``directions`` and ``averages`` the effects of those ops, and ``sums`` the additions of contributions. ``held`` are
    the sums of contributions that are in memory, with their dtypes, ``roundings`` those that a conversion rounded, and
    ``reductions`` those that ranks added. Each comes with the line of its op.

    ``decided`` are the decisions so far, and whether each may skip the update. ``guesses`` has for each of them the
    guess that it was compared with. ``reported`` are the values that the engine reports of the step's decision: the
    norm and the weight that it read, whether it skips, and whether it undoes a guess. ``slices`` are the contents of
    buffers of micro-batches after each of them, where the section is repeated.
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
        self.calls: set[tuple[int, Hashable]] = set()
        self.lines: dict[int, int] = {}
        self._enter(before)

    def fail(self, code: str, sentence: str, *buffers: str, advice: str = "") -> None:
        """Report a finding at the current op."""
        self.findings.add(
            code, sentence, section=self.section, line=self.line, buffers=buffers, advice=advice
        )

    def fail_at_exit(self, code: str, region: Region, sentence: str, advice: str = "") -> None:
        """Report the content of a region at the end of the section, at the last op that wrote its buffer."""
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
        """Return a contribution's name for messages."""
        if source == PAST_TERM:
            return "the sum of the micro-steps before"
        if source == ALL_TERM:
            return "the sum of the step's micro-steps"
        micro_batch = current_micro_batch(source)
        if micro_batch is not None:
            is_one = self.program.interleaved == 1
            return "the weight of this micro-step" if is_one else f"weight {micro_batch}"
        line = self.lines.get(source)
        return "a contribution" if line is None else f"the contribution of op {line}"

    def note_rounding(self, pieces: PieceList, target: DType) -> None:
        """Record which sums of contributions this op rounds to ``target``."""
        for _, _, value in pieces:
            for rounded in algebra.held_sums(value, target):
                self.roundings.setdefault(rounded, self.line)

    def note_reduction(self, region: Region, pieces: PieceList) -> None:
        """Record which sums of contributions this op adds over ranks, in the dtype of the region."""
        dtype = self.program.buffer_by_name[region.buffer].dtype
        for _, _, value in pieces:
            for reduced in algebra.held_sums(value, dtype):
                self.reductions.setdefault(reduced, self.line)

    def note_held(self, region: Region, pieces: PieceList) -> None:
        """Record which sums of contributions a region holds from now on."""
        dtype = self.program.buffer_by_name[region.buffer].dtype
        for _, _, value in pieces:
            self.held.update(algebra.held_sums(value, dtype))

    # ------------------------------------------------------------------------------------------------- entry state

    def _enter(self, before: SectionRun | None) -> None:
        for buffer in self.program.buffers:
            if buffer.holds is not None:
                pieces = self.layout.pieces(buffer.holds, buffer.numel)
                self.note_held(whole(buffer), pieces)
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
            self.note_held(region, pieces)
            self.memory.write(region, pieces)
        if before is not None:
            self._carry(before)

    def _carry(self, before: SectionRun) -> None:
        """Keep statistics, decisions and guesses of the previous section, which the entry state only names."""
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
            # Between the sections, the weight that an early decision has read has no declared content.
            region = whole(self.program.buffer_by_name[weight.buffer])
            self.memory.write(region, before.memory.read(region))

    # ------------------------------------------------------------------------------------------------------- reads

    def take(self, region: Region, code: str = "Z103") -> PieceList:
        """Read a region in which every element must be defined; report undefined ones and replace them by poison."""
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
