"""The verifier: proves that a program trains as the unsharded one would, or says which law it breaks and where.

It has three stages: the *structure* of each declaration and each op on its own, the *ordering* of accesses by vector
clocks, and the *values* in memory, by abstract interpretation. A stage runs only if the previous ones found nothing,
so a report names causes and not their consequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from zeroir.ir.analysis.instances import instance, smallest
from zeroir.ir.buffers import Role, whole
from zeroir.ir.program import (
    LAST_MICRO_STEP,
    MICRO_STEP,
    SAVE,
    SECTION_NAMES,
    UPDATE,
    Program,
)
from zeroir.verify.context import Findings, last_touch
from zeroir.verify.equivalence.reference import content, contributor, mismatches
from zeroir.verify.equivalence.repeated import (
    Repetition,
    grouped,
    repeated_runs,
    repetition_problem,
)
from zeroir.verify.interpreter.domain import Numbering
from zeroir.verify.interpreter.exits import check_exit
from zeroir.verify.interpreter.interpreter import interpret
from zeroir.verify.interpreter.section_run import SectionRun, Shared
from zeroir.verify.interpreter.snapshots import check_snapshots
from zeroir.verify.laws import CODES, LAWS, Law, Stage
from zeroir.verify.order.arenas import check_arenas
from zeroir.verify.order.bounds import check_bounds
from zeroir.verify.order.budget import check_budget
from zeroir.verify.order.collectives import check_collectives
from zeroir.verify.order.races import check_ordering
from zeroir.verify.report import PROVED, Finding, Report, VerificationError
from zeroir.verify.structure.declarations import check_declarations
from zeroir.verify.structure.dims import check_dims
from zeroir.verify.structure.limits import check_limits
from zeroir.verify.structure.ops import check_structure

__all__ = [
    "CODES",
    "LAWS",
    "PROVED",
    "Finding",
    "Law",
    "Reference",
    "Report",
    "VerificationError",
    "check",
    "verify",
    "verify_at_largest",
]

_STRUCTURE_CHECKS = (check_limits, check_dims, check_declarations, check_structure, check_snapshots)
"""Checks of each declaration and each op on its own, on which all other checks rely."""
_ORDER_CHECKS = (check_collectives, check_ordering, check_arenas, check_bounds)
"""Checks that every interleaving of the streams is safe; values are then checked in program order only."""


class Reference:
    """A logical program against which several programs are verified: it is proved and interpreted once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.numbering = Numbering()
        """Shared with the programs that are compared with this one, so that equal values have equal numbers."""
        self._runs: dict[tuple[bool, Repetition], dict[str, SectionRun]] = {}

    @cached_property
    def report(self) -> Report:
        """The proof of the logical program itself: no program is compared with one that breaks a law."""
        return _examined(self.program, self, None)

    @cached_property
    def at_smallest(self) -> Reference:
        """The program where each dim has its smallest value."""
        return Reference(instance(self.program, smallest(self.program)))

    def remember(self, runs: dict[str, SectionRun]) -> None:
        """Keep the runs of the program's own proof, whose values are numbered segment by segment."""
        self._runs[False, Repetition()] = runs

    def runs(self, repetition: Repetition, *, by_node: bool) -> dict[str, SectionRun]:
        """Return the runs of its sections; values are numbered node by node, or segment by segment."""
        key = by_node, repetition
        if key not in self._runs:
            program = grouped(self.program, repetition)
            shared = Shared(program, self.numbering, by_node=by_node)
            self._runs[key] = repeated_runs(self.program, repetition, shared)
        return self._runs[key]


def verify(
    program: Program,
    reference: Program | Reference | None = None,
    budget_bytes: int | None = None,
) -> Report:
    """Verify a program.

    ``reference`` is the logical program that it was lowered from, which is verified first. With it, Z406 proves that
    every gradient contribution, the loss and the settings of the update are those of the reference. ``budget_bytes`` is
    the device memory of one rank. With it, Z301 proves that persistent buffers, the arena of temporary buffers and the
    workspaces that segments declare fit into it.
    """
    if isinstance(reference, Program):
        reference = Reference(reference)
    report = verify_at_largest(program, reference, budget_bytes)
    if not program.dims or not report.is_valid:
        return report
    values = smallest(program)
    logical = None if reference is None else reference.at_smallest
    is_reference = reference is not None and program is reference.program
    at_smallest = verify_at_largest(
        logical.program if is_reference and logical else instance(program, values), logical
    )
    sizes = ", ".join(f"{name} is {value}" for name, value in values.items())
    findings = tuple(
        replace(finding, sentence=f"if {sizes}, {finding.sentence}")
        for finding in at_smallest.findings
    )
    return replace(report, findings=findings)


def verify_at_largest(
    program: Program, reference: Reference | None = None, budget_bytes: int | None = None
) -> Report:
    """Verify a program as ``verify`` does, but not where dims are smallest.

    Sizes are compared as polynomials, and at the largest dims where one must be less than another.
    """
    if reference is not None and program is reference.program and budget_bytes is None:
        return reference.report
    if reference is None or program is reference.program or reference.report.is_valid:
        return _examined(program, reference, budget_bytes)
    asked = _asked(program, reference, budget_bytes)
    findings = tuple(
        replace(finding, sentence=f"in the logical program, {finding.sentence}")
        for finding in reference.report.findings
    )
    unexamined = dict.fromkeys(asked, "not examined: the logical program is broken")
    return Report(findings=findings, asked=asked, unexamined=unexamined)


def check(
    program: Program,
    reference: Program | Reference | None = None,
    budget_bytes: int | None = None,
) -> None:
    """Raise an error for what ``verify`` finds.

    Raises:
        VerificationError: if the program breaks a law.
    """
    report = verify(program, reference, budget_bytes)
    if not report.is_valid:
        raise VerificationError(report)


def _asked(
    program: Program, reference: Reference | None, budget_bytes: int | None
) -> tuple[str, ...]:
    unasked = {"Z406"} if reference is None else set()
    unasked |= {"Z301"} if budget_bytes is None else set()
    unasked |= {"Z106"} if all(buffer.offset is None for buffer in program.buffers) else set()
    unasked |= set() if program.bounds else {"Z302"}
    unasked |= set() if SAVE in program.section_by_name else {"Z407"}
    has_pages = any(buffer.role is Role.PAGE for buffer in program.buffers)
    unasked |= set() if has_pages else {"Z501", "Z502", "Z503"}
    return tuple(code for code in LAWS if code not in unasked)


def _examined(program: Program, reference: Reference | None, budget_bytes: int | None) -> Report:
    """Verify a program, and compare it with a reference that breaks no law or is the program itself."""
    findings = Findings(program)
    unexamined: dict[str, str] = {}
    if not _holds(_STRUCTURE_CHECKS, program, findings):
        why = "not examined: the structure is broken"
        unexamined = dict.fromkeys(LAWS, why)
    elif not _holds(_ORDER_CHECKS, program, findings):
        why = "not examined: the order of ops is broken"
        unexamined = {code: why for code, law in LAWS.items() if law.stage is Stage.VALUES}
    else:
        if budget_bytes is not None:
            check_budget(program, findings, budget_bytes)
        _check_values(program, reference, findings)
    asked = _asked(program, reference, budget_bytes)
    return Report(findings=tuple(findings.items), asked=asked, unexamined=unexamined)


def _holds(
    checks: Sequence[Callable[[Program, Findings], None]], program: Program, findings: Findings
) -> bool:
    """Return whether no check finds anything; each check relies on the previous ones."""
    for check_part in checks:
        check_part(program, findings)
        if findings.items:
            return False
    return True


def _checked_runs(shared: Shared, findings: Findings) -> dict[str, SectionRun]:
    runs: dict[str, SectionRun] = {}
    for section in sorted(shared.program.sections, key=lambda s: SECTION_NAMES.index(s.name)):
        before = runs.get(LAST_MICRO_STEP) if section.name == UPDATE else None
        run = runs[section.name] = SectionRun(shared, section, findings, before)
        interpret(run)
        check_exit(run)
    return runs


def _check_values(program: Program, reference: Reference | None, findings: Findings) -> None:
    # A pass may have changed the segments; then their nodes are compared.
    is_recut = reference is not None and _digests(program) != _digests(reference.program)
    numbering = Numbering() if reference is None else reference.numbering
    # A program for one rank, and a logical program, define how often each call contributes.
    may_repeat = reference is not None or program.mesh.world_size == 1
    shared = Shared(program, numbering, by_node=is_recut, may_repeat=may_repeat)
    runs = _checked_runs(shared, findings)
    _check_micro_steps(program, runs, findings)
    if reference is not None and program is reference.program:
        reference.remember(runs)
    elif reference is not None and not findings.items:
        problem = repetition_problem(program, reference.program)
        if problem is not None:
            findings.add("Z406", problem)
            return
        repetition = Repetition.of(program, reference.program)
        expected = reference.runs(repetition, by_node=is_recut)
        for mismatch in mismatches(program, runs, reference.program, expected):
            name = mismatch.section
            findings.add(
                "Z406",
                mismatch.sentence,
                section=program.section_by_name.get(name or ""),
                line=mismatch.line,
                advice=mismatch.advice,
            )


def _digests(program: Program) -> set[str]:
    return {segment.digest() for segment in program.segments}


def _check_micro_steps(program: Program, runs: dict[str, SectionRun], findings: Findings) -> None:
    """Compare the contributions and the loss of ``micro_step`` and ``last_micro_step``."""
    if MICRO_STEP not in runs or LAST_MICRO_STEP not in runs:
        return
    first, last = runs[MICRO_STEP], runs[LAST_MICRO_STEP]
    for name in sorted({*first.contributions, *last.contributions}):
        if sorted(first.contributions.get(name, [])) != sorted(last.contributions.get(name, [])):
            findings.add(
                "Z402",
                f"the gradient of {name} has other contributions in the last micro-step than before",
                section=last.section,
                line=contributor(program, LAST_MICRO_STEP, name),
                advice="Let micro_step and last_micro_step make the same contributions.",
            )
    if program.loss is None:
        return
    loss = whole(program.buffer_by_name[program.loss])
    if content(first, loss) != content(last, loss):
        findings.add(
            "Z402",
            "the last micro-step adds another value to the loss than the micro-steps before",
            section=last.section,
            line=last_touch(last.section, program.loss, is_write=True),
            advice="Let micro_step and last_micro_step add the same loss.",
        )
