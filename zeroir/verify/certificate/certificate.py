"""Writes a certificate: the order of ops, and what each op leaves in the regions that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region
from zeroir.ir.program import (
    LAST_MICRO_STEP,
    MICRO_STEP,
    SECTION_NAMES,
    UPDATE,
    Program,
    Section,
)
from zeroir.verify.certificate.values import Claim, Contents, Plain
from zeroir.verify.context import Findings
from zeroir.verify.equivalence.repeated import Repetition, give, grouped
from zeroir.verify.interpreter.domain import Numbering
from zeroir.verify.interpreter.interpreter import interpret
from zeroir.verify.interpreter.section_run import SectionRun, Shared
from zeroir.verify.order.happens_before import HappensBefore
from zeroir.verify.order.pending_events import pending_ops_at_entry

FORMAT: Final = "zeroir certificate"
VERSION: Final = 1


def certificate(scheduled: Program, logical: Program, digest: bytes) -> Mapping[str, object]:
    """Return the certificate of a program file with this SHA-256, as plain data.

    It says what the proof says, whether or not it is true: nothing here is checked.

    Raises:
        UserError: if the program has something that no certificate can say.
    """
    problem = unsayable(scheduled)
    if problem is not None:
        raise UserError(f"No certificate can be written for this program: it has {problem}.")
    numbering = Numbering()
    contents = Contents(numbering)
    programs = {
        name: _claims(program, numbering, contents)
        for name, program in (("logical", logical), ("scheduled", scheduled))
    }
    repetition = Repetition.of(scheduled, logical)
    if repetition.micro_batches > 1:
        programs["repeated"] = _repeated(logical, repetition, numbering, contents)
    head = {"format": FORMAT, "version": VERSION, "program": digest}
    return {**head, "contents": contents.plain, **programs}


def unsayable(program: Program) -> str | None:
    """Return what a program has for which there are no certificates."""
    if program.dims:
        return "sizes that depend on dims"
    return None


def _claims(program: Program, numbering: Numbering, contents: Contents) -> Plain:
    """Return for each section the ops that may be pending at its entry, the clocks and the writes of its ops."""
    ways = pending_ops_at_entry(program)
    shared = Shared(program, numbering, by_node=True)
    runs: dict[str, SectionRun] = {}
    claimed: list[Plain] = []
    for section in sorted(program.sections, key=lambda s: SECTION_NAMES.index(s.name)):
        before = runs.get(LAST_MICRO_STEP) if section.name == UPDATE else None
        run = runs[section.name] = SectionRun(shared, section, Findings(program), before)
        pending: list[Plain] = [
            [[event, op.section, op.line] for event, op in sorted(way.items())]
            for way in ways[section.name]
        ]
        claimed.append([section.name, pending, _clocks(program, section), _writes(run, contents)])
    return claimed


def _repeated(
    logical: Program, repetition: Repetition, numbering: Numbering, contents: Contents
) -> Plain:
    """Return the writes of the logical program where its micro-steps run several micro-batches, one after another."""
    shared = Shared(grouped(logical, repetition), numbering, by_node=True)
    earlier = logical.section_by_name[MICRO_STEP].body
    runs: dict[str, SectionRun] = {}
    claimed: list[Plain] = []
    for section in sorted(shared.program.sections, key=lambda s: SECTION_NAMES.index(s.name)):
        before = runs.get(LAST_MICRO_STEP) if section.name == UPDATE else None
        is_step = section.name in (MICRO_STEP, LAST_MICRO_STEP)
        count = repetition.micro_batches if is_step else 1
        body = (*earlier * (count - 1), *section.body)
        several, findings = replace(section, body=body), Findings(shared.program)
        run = runs[section.name] = SectionRun(shared, several, findings, before)
        writes: list[Plain] = []
        for micro_batch in range(count):
            start = micro_batch * len(earlier)
            stop = len(body) if micro_batch == count - 1 else start + len(earlier)
            if is_step:
                give(run, micro_batch, dict(repetition.slices))
            writes += _writes(run, contents, start, stop)
        claimed.append([section.name, writes])
    return claimed


def _clocks(program: Program, section: Section) -> list[Plain]:
    """Return for each op how many ops of each stream are surely done when it starts."""
    order = HappensBefore(program, section)
    clocks: list[Plain] = []
    for line, op in enumerate(section.body):
        if isinstance(op, ops.Wait):
            order.wait(op)
            clocks.append(None)
        else:
            clocks.append(list(order.clock(order.streams[op.stream])))
            order.issue(line, op)
    return clocks


def _writes(
    run: SectionRun, contents: Contents, start: int = 0, stop: int | None = None
) -> list[Plain]:
    """Return for each op what it leaves in each region that it changes, in the order of the regions."""
    claims: list[Plain] = []
    for line, op in enumerate(run.section.body[start:stop], start):
        interpret(run, line, line + 1)
        claims.append([_claim(run, contents, region) for region in changed_regions(op)])
    return claims


def changed_regions(op: ops.Op) -> list[Region]:
    """Return the regions that an op changes, in an order that does not depend on its fields."""
    op_effects = effects(op)
    regions = {*op_effects.writes, *op_effects.accumulates}
    return sorted(regions, key=lambda r: (r.buffer, r.offset, r.numel, r.shard or "", r.part or ()))


def _claim(run: SectionRun, contents: Contents, region: Region) -> Plain:
    claim: Claim = contents.claim(run.memory.read(region))
    return [[stop, number] for stop, number in claim]
