"""The computations of a logical program when each section runs several micro-batches, one after the other.

This defines ``Program.interleaved``: a schedule may run the ops of its micro-batches in any order, but must compute
what the logical program does with micro-batch 0, then 1, and so on. Micro-batch j differs from the others only in its
inputs, seeds and weight, which are in slice j of their buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zeroir.ir import ops
from zeroir.ir.buffers import Role, whole
from zeroir.ir.contents import NamedContent, WeightContent
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, SECTION_NAMES, UPDATE, Program
from zeroir.verify.context import Findings
from zeroir.verify.equivalence.slices import is_sliced, slice_numel
from zeroir.verify.interpreter.domain import Elements, NamedKey, Term, Weight, current_term
from zeroir.verify.interpreter.interpreter import interpret
from zeroir.verify.interpreter.section_run import SectionRun, Shared


@dataclass(frozen=True, slots=True)
class Repetition:
    """How a schedule groups the micro-batches of its logical program.

    A section runs ``micro_batches``. ``slices`` are the lengths of the slices of its inputs and seeds, by the name of
    their content. With ``is_whole_step`` a step is one such group, and there is no section ``micro_step``.
    """

    micro_batches: int = 1
    slices: tuple[tuple[str, int], ...] = ()
    is_whole_step: bool = False

    @classmethod
    def of(cls, program: Program, logical: Program) -> Repetition:
        """Return the repetition of a schedule and its logical program.

        The default one where both have the same groups.
        """
        if program.interleaved == logical.interleaved:
            return cls()
        return cls(
            micro_batches=program.interleaved,
            slices=tuple(
                (buffer.holds.name, slice_numel(program, buffer.name))
                for buffer in program.buffers
                if buffer.role in (Role.INPUT, Role.RNG) and isinstance(buffer.holds, NamedContent)
            ),
            is_whole_step=MICRO_STEP not in program.section_by_name,
        )


def repetition_problem(program: Program, logical: Program) -> str | None:
    """Return why a program cannot run the micro-batches of its logical program in the groups that it declares."""
    count = program.interleaved
    if count == logical.interleaved:
        return None
    if logical.interleaved != 1:
        return f"a section of the logical program runs {logical.interleaved} micro-batches"
    if MICRO_STEP not in logical.section_by_name:
        return f"a section runs {count} micro-batches, but a step of the logical program has one"
    steps = program.options.texts.get("micro_steps", "1")
    if not steps.isdecimal() or int(steps) % count:
        return f"a section runs {count} micro-batches, which do not divide the {steps} of a step"
    if MICRO_STEP not in program.section_by_name and int(steps) != count:
        return f"a step runs {count} micro-batches, and not the {steps} that it has"
    # Each contribution needs its own op, so the cost of checking a false claim is linear in the program's length.
    if count * _contributors(logical) > _contributors(program):
        return f"a section says that it runs {count} micro-batches, but has too few ops for them"
    return None


def _contributors(program: Program) -> int:
    """Return the number of ops of the last micro-step that contribute to gradients."""
    return sum(
        isinstance(op, ops.Compute)
        and any(d is not None and d.gradient is not None for d in op.destinations)
        for op in program.section_by_name[LAST_MICRO_STEP].body
    )


def repeated_runs(
    logical: Program, repetition: Repetition, shared: Shared
) -> dict[str, SectionRun]:
    """Return the runs of the sections of a logical program, without checking them.

    ``shared`` must belong to ``grouped(logical, repetition)``.
    """
    findings = Findings(shared.program)
    runs: dict[str, SectionRun] = {}
    for section in sorted(shared.program.sections, key=lambda s: SECTION_NAMES.index(s.name)):
        before = runs.get(LAST_MICRO_STEP) if section.name == UPDATE else None
        if section.name not in (MICRO_STEP, LAST_MICRO_STEP) or repetition.micro_batches == 1:
            run = runs[section.name] = SectionRun(shared, section, findings, before)
            interpret(run)
            continue
        earlier = logical.section_by_name[MICRO_STEP].body
        body = (*earlier * (repetition.micro_batches - 1), *section.body)
        run = SectionRun(shared, replace(section, body=body), findings, before)
        runs[section.name] = run
        for micro_batch in range(repetition.micro_batches):
            start = micro_batch * len(earlier)
            is_last = micro_batch == repetition.micro_batches - 1
            give(run, micro_batch, dict(repetition.slices))
            interpret(run, start, len(body) if is_last else start + len(earlier))
            for buffer in shared.program.buffers:
                if is_sliced(shared.program, buffer):
                    run.slices.setdefault(buffer.name, []).append(run.memory.read(whole(buffer)))
    return runs


def grouped(logical: Program, repetition: Repetition) -> Program:
    """Return the logical program with the sections that the schedule has."""
    if not repetition.is_whole_step:
        return logical
    sections = tuple(s for s in logical.sections if s.name != MICRO_STEP)
    return replace(logical, sections=sections)


def give(run: SectionRun, micro_batch: int, slices: Mapping[str, int]) -> None:
    """Set inputs, seeds and weights to those of a micro-batch."""
    for buffer in run.program.buffers:
        if not is_sliced(run.program, buffer):
            continue
        holds = buffer.holds
        if isinstance(holds, WeightContent):
            weight = Weight((Term(current_term(micro_batch), (), 1),))
            run.memory.write(whole(buffer), [(0, buffer.numel, weight)])
        elif isinstance(holds, NamedContent) and holds.name in slices:
            given = Elements(NamedKey(holds.name, 0), micro_batch * slices[holds.name])
            run.memory.write(whole(buffer), [(0, buffer.numel, given)])
