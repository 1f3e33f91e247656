"""The verifier: proves that a program trains as the unsharded one would, or says which law it breaks and where.

Three stages, each resting on the one before: the *structure* of every op by itself, the *ordering* of accesses by
vector clocks, and the *values* that memory holds by one abstract interpreter. A stage runs once the ones before found
nothing, so a report speaks of causes and not of their consequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroir.ir.buffers import whole
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, SECTION_NAMES, UPDATE, Program
from zeroir.ir.verify.arenas import check_arenas
from zeroir.ir.verify.budget import check_budget
from zeroir.ir.verify.codes import CODES, LAWS, STRUCTURE, Law
from zeroir.ir.verify.collectives import check_collectives, compare_jobs
from zeroir.ir.verify.context import Findings, last_touch
from zeroir.ir.verify.declarations import check_declarations
from zeroir.ir.verify.domain import Numbering
from zeroir.ir.verify.exits import check_exit
from zeroir.ir.verify.interpreter import Outcome, Run, Shared
from zeroir.ir.verify.ordering import check_ordering
from zeroir.ir.verify.reference import content, contributor, differences
from zeroir.ir.verify.report import PROVED, Finding, Report, VerificationError
from zeroir.ir.verify.structure import check_structure

__all__ = [
    "CODES",
    "LAWS",
    "PROVED",
    "STRUCTURE",
    "Finding",
    "Law",
    "Reference",
    "Report",
    "VerificationError",
    "check",
    "verify",
    "verify_job",
]

_ORDER_LAWS = ("Z101", "Z103", "Z104", "Z105", "Z106", "Z201", "Z202")
_VALUE_LAWS = ("Z102", "Z401", "Z402", "Z403", "Z404", "Z405", "Z406")


class Reference:
    """A logical program that several programs are verified against; what it computes is worked out once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.numbering = Numbering()
        """Of the values of this program and of those that are compared with it."""
        self._outcomes: dict[bool, dict[str, Outcome]] = {}

    def outcomes(self, *, by_node: bool) -> dict[str, Outcome]:
        """What its sections compute, with values numbered node by node or segment by segment."""
        if by_node not in self._outcomes:
            shared = Shared.of(self.program, self.numbering, by_node=by_node)
            findings = Findings(self.program)
            self._outcomes[by_node] = _outcomes(shared, findings, is_checked=False)
        return self._outcomes[by_node]


def verify(
    program: Program,
    reference: Program | Reference | None = None,
    budget_bytes: int | None = None,
) -> Report:
    """Examine a program.

    ``reference`` is the logical program that it came from: then Z406 proves that every gradient contribution, the loss
    and the settings of the update are those of the reference. ``budget_bytes`` is the device memory of one rank: then
    Z301 proves that what rests there, the arena of temporary buffers and the declared workspaces of segments fit it.
    """
    unasked = {"Z406"} if reference is None else set()
    unasked |= {"Z301"} if budget_bytes is None else set()
    unasked |= {"Z106"} if all(buffer.offset is None for buffer in program.buffers) else set()
    asked = tuple(code for code in LAWS if code not in unasked)
    unexamined: dict[str, str] = {}
    findings = Findings(program)
    check_declarations(program, findings)
    if not findings.found:
        check_structure(program, findings)
    if findings.found:
        why = "not examined: the structure is broken"
        unexamined |= dict.fromkeys((*_ORDER_LAWS, *_VALUE_LAWS, "Z301"), why)
        return Report(findings=tuple(findings.found), asked=asked, unexamined=unexamined)
    check_collectives(program, findings)
    if not findings.found:
        check_ordering(program, findings)
    if not findings.found:
        check_arenas(program, findings)
    if budget_bytes is not None and not findings.found:
        check_budget(program, findings, budget_bytes)
    if any(finding.code != "Z301" for finding in findings.found):
        why = "not examined: the order of ops is broken"
        unexamined |= dict.fromkeys((*_VALUE_LAWS, "Z301"), why)
        return Report(findings=tuple(findings.found), asked=asked, unexamined=unexamined)
    if isinstance(reference, Program):
        reference = Reference(reference)
    _check_values(program, reference, findings)
    return Report(findings=tuple(findings.found), asked=asked, unexamined=unexamined)


def check(
    program: Program,
    reference: Program | Reference | None = None,
    budget_bytes: int | None = None,
) -> None:
    """Raise what ``verify`` finds.

    Raises:
        VerificationError: where the program breaks a law.
    """
    report = verify(program, reference, budget_bytes)
    if not report.is_valid:
        raise VerificationError(report)


def verify_job(programs: Sequence[Program]) -> Report:
    """Whether programs that run as one job, one per rank, issue the same collectives (Z201)."""
    if not programs:
        return Report()
    findings = Findings(programs[0])
    compare_jobs(programs, findings)
    return Report(findings=tuple(findings.found), asked=("Z201",))


def _outcomes(shared: Shared, findings: Findings, *, is_checked: bool) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for section in sorted(shared.program.sections, key=lambda s: SECTION_NAMES.index(s.name)):
        before = found.get(LAST_MICRO_STEP) if section.name == UPDATE else None
        run = Run(shared, section, findings, before)
        found[section.name] = run.run()
        if is_checked:
            check_exit(run, found[section.name])
    return found


def _check_values(program: Program, reference: Reference | None, findings: Findings) -> None:
    # A pass may have cut segments anew: then only what is inside them can be compared.
    is_recut = reference is not None and _digests(program) != _digests(reference.program)
    numbering = Numbering() if reference is None else reference.numbering
    # A program for one rank, and a logical program, say themselves what contributes how often.
    may_repeat = reference is not None or program.mesh.world_size == 1
    shared = Shared.of(program, numbering, by_node=is_recut, may_repeat=may_repeat)
    outcomes = _outcomes(shared, findings, is_checked=True)
    _check_micro_steps(program, outcomes, findings)
    if reference is None or findings.found:
        return
    wanted = reference.outcomes(by_node=is_recut)
    found = differences(program, outcomes, reference.program, wanted)
    for sentence, name, line, advice in found:
        section = None if name is None else program.section_by_name[name]
        findings.add("Z406", sentence, section=section, line=line, advice=advice)


def _digests(program: Program) -> set[str]:
    return {segment.digest() for segment in program.segments}


def _check_micro_steps(program: Program, outcomes: dict[str, Outcome], findings: Findings) -> None:
    """Every micro-step makes the same contributions."""
    if MICRO_STEP not in outcomes or LAST_MICRO_STEP not in outcomes:
        return
    first, last = outcomes[MICRO_STEP].contributions, outcomes[LAST_MICRO_STEP].contributions
    for name in sorted({*first, *last}):
        if sorted(first.get(name, [])) != sorted(last.get(name, [])):
            findings.add(
                "Z402",
                f"the gradient of {name} has other contributions in the last micro-step than before",
                section=program.section_by_name[LAST_MICRO_STEP],
                line=contributor(program, LAST_MICRO_STEP, name),
                advice="Let micro_step and last_micro_step make the same contributions.",
            )
    if program.loss is None:
        return
    loss = whole(program.buffer_by_name[program.loss])
    if content(outcomes[MICRO_STEP], loss) != content(outcomes[LAST_MICRO_STEP], loss):
        findings.add(
            "Z402",
            "the last micro-step adds something else to the loss than those before",
            section=program.section_by_name[LAST_MICRO_STEP],
            line=last_touch(program.section_by_name[LAST_MICRO_STEP], program.loss, is_write=True),
            advice="Let micro_step and last_micro_step add the same loss.",
        )
