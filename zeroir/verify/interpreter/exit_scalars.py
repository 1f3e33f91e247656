"""Checks scalars at the end of a section: ops may not change settings, and may change counters only once."""

from __future__ import annotations

from dataclasses import replace

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Role, whole
from zeroir.ir.contents import NamedContent
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE
from zeroir.verify.interpreter.descriptions import describe
from zeroir.verify.interpreter.domain import Elements, NamedKey, Poison, Zero
from zeroir.verify.interpreter.section_run import SectionRun


def check_exit_scalars(run: SectionRun) -> None:
    """Report each scalar that an op has changed without permission, and an update without a decision."""
    _check_kept(run)
    if run.section.name == UPDATE:
        _check_sum_of_losses(run)
        has_decision = any(isinstance(op, ops.Decide) for op in run.program.ops())
        if has_decision and not run.decided:
            run.findings.add(
                "Z405",
                "the update takes no decision: the step count does not advance",
                section=run.section,
            )


def _check_kept(run: SectionRun) -> None:
    """Check that no op changes settings and other scalars that calls read.

    Counters change in the update, or with a decision.
    """
    program = run.program
    kept = {name for group in program.groups for name in (group.lr, group.hyper)}
    written: set[str] = set()
    for op in program.ops():
        if not isinstance(op, ops.Compute):
            continue
        written |= {d.view.region.buffer for d in op.destinations if d is not None}
        kept |= {
            a.view.region.buffer
            for a in op.arguments
            if program.buffer_by_name[a.view.region.buffer].role is Role.SCALAR
        }
    counters = set(run.shared.counters)
    if run.section.name == UPDATE:
        kept -= counters  # reports of the engine, which are compared with the decision
        counters = set()
    for name in sorted((kept | counters) - written):
        buffer = program.buffer_by_name[name]
        if isinstance(buffer.holds, NamedContent):
            is_early = run.section.name == LAST_MICRO_STEP and name in counters
            version = _declared_version(run, buffer, buffer.holds) if is_early else 0
            _check_version(run, buffer, buffer.holds, version)


def _declared_version(run: SectionRun, buffer: Buffer, content: NamedContent) -> int:
    """Return the version of a counter by the exit state: 1 if the decision was taken early, otherwise 0."""
    advanced = replace(content, version=content.version + 1)
    holdings = run.section.exit.holdings
    return int(any(h.region == whole(buffer) and h.content == advanced for h in holdings))


def _check_version(run: SectionRun, buffer: Buffer, content: NamedContent, version: int) -> None:
    """Check that only the user, or the ops that own a scalar, change it."""
    expected = Elements(NamedKey(content.name, content.version + version))
    for _, _, value in run.memory.read(whole(buffer)):
        if isinstance(value, Poison) or value == expected:
            continue
        is_moved = isinstance(value, Elements) and value.key == NamedKey(content.name, 1)
        what = (
            "changes outside the update"
            if is_moved
            else f"was overwritten: it holds {describe(value)}"
        )
        run.fail_at_exit("Z405", whole(buffer), what)
        return


def _check_sum_of_losses(run: SectionRun) -> None:
    """Check that a loss to which micro-steps add starts the next step with 0."""
    program = run.program
    is_sum = MICRO_STEP in program.section_by_name or program.interleaved > 1
    if program.loss is None or not is_sum:
        return
    region = whole(program.buffer_by_name[program.loss])
    if any(not isinstance(value, Zero | Poison) for _, _, value in run.memory.read(region)):
        run.fail_at_exit("Z408", region, "should be 0 again: the next step adds its losses to it")
