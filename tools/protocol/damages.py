"""Damages the order of a program, and asks the search and ``zeroir verify`` whether they notice.

Each wait is left out, one at a time. Each collective is moved ahead of the one before it on its communicator, on rank 1
alone; no program can say that, so the verifier judges it moved on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from tools.checker.program import Declarations
from tools.protocol.programs import declarations, runs
from tools.protocol.search import first_finding, visit
from tools.protocol.system import system_of
from zeroir.ir import ops
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.verify import Reference, verify

OUTCOMES: Final = (
    "both refuse",
    "both accept",
    "zeroir alone: more memory",
    "zeroir alone: bound of memory",
    "zeroir alone: earlier section",
    "zeroir alone: other reasons",
    "the search alone refuses",
)


class Damaged(NamedTuple):
    """What was done to which line, what the search found, if anything, and which laws of zeroir are broken.

    ``memory`` names the kinds of buffers of which more bytes live at once than before, in some state.
    """

    kind: str
    place: str
    search: str
    laws: str
    memory: str = ""
    is_of_entry: bool = False
    """The damage is to a wait for an op that is pending when the section begins, which may have been waited for."""

    @property
    def outcome(self) -> str:
        """Whether both agree, or why they differ."""
        if bool(self.search) == bool(self.laws):
            return OUTCOMES[0 if self.search else 1]
        if self.search:
            return OUTCOMES[6]
        if set(self.laws.split()) <= {"Z302", "Z503"}:
            return OUTCOMES[2 if self.memory else 3]
        return OUTCOMES[4 if self.is_of_entry else 5]

    @property
    def is_unknown(self) -> bool:
        """Whether both differ, and nothing says why."""
        return self.outcome in OUTCOMES[5:]


def damages(program: Program, logical: Program) -> Iterator[Damaged]:
    """Yield each damage, judged."""
    reference, whole = Reference(logical), declarations(program, logical)
    for section in program.sections:
        for line, op in enumerate(section.body):
            at, rest = f"{section.name} {line}", (*section.body[:line], *section.body[line + 1 :])
            if isinstance(op, ops.Wait):
                mutant = _with_body(program, section, rest)
                names = declarations(mutant, logical)
                found = _found([names, names])
                laws = _laws(mutant, reference)
                memory = _more_memory(whole, names) if laws and not found else ""
                is_of_entry = _is_of_entry(section, line, op.waited)
                yield Damaged("a wait left out", at, found, laws, memory, is_of_entry)
            elif isinstance(op, ops.Collective):
                earlier = [i for i in range(line) if getattr(rest[i], "comm", None) == op.comm]
                if earlier:
                    body = (*rest[: earlier[-1]], op, *rest[earlier[-1] :])
                    mutant = _with_body(program, section, body)
                    programs = [whole, declarations(mutant, logical)]
                    found = _found(programs)
                    yield Damaged("a collective moved", at, found, _laws(mutant, reference))


def _with_body(program: Program, section: Section, body: tuple[Op, ...]) -> Program:
    changed = replace(section, body=body)
    sections = tuple(changed if each is section else each for each in program.sections)
    return replace(program, sections=sections)


def _found(programs: Sequence[Declarations]) -> str:
    for run in runs(programs[0]):
        found = first_finding(system_of(programs, run))
        if found is not None:
            return found
    return ""


def _laws(program: Program, reference: Reference) -> str:
    return " ".join(sorted({finding.code for finding in verify(program, reference).findings}))


def _is_of_entry(section: Section, line: int, event: str) -> bool:
    signalled = {op.event for op in section.body[:line] if not isinstance(op, ops.Wait)}
    return event not in signalled and event in {p.event for p in section.entry.pending}


def _more_memory(whole: Declarations, damaged: Declarations) -> str:
    """Name the kinds of buffers of which more bytes live at once than in any state of the whole program."""
    peaks = []
    for names in (whole, damaged):
        system = system_of([names] * names.ranks, next(runs(names)))
        peaks.append(visit(system, system.queues_of(0)).peaks)
    return ", ".join(kind for kind in peaks[1] if peaks[1][kind] > peaks[0].get(kind, 0))
