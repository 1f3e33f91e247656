"""The scalars at the end of a section: who may change the loss, the settings, the step count and what is reported."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, whole
from zeroir.ir.contents import (
    NamedContent,
)
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE
from zeroir.verify import algebra
from zeroir.verify.descriptions import describe
from zeroir.verify.domain import (
    Elements,
    NamedKey,
    Poison,
    Statistic,
    Undefined,
    Zero,
)
from zeroir.verify.interpreter import SectionRun


def check_exit_scalars(run: SectionRun) -> None:
    """Report each scalar that an op has changed which may not, and an update without a decision."""
    program = run.program
    counts = {op.step.buffer for op in program.ops() if isinstance(op, ops.Decide)}
    _check_changes(run, counts)
    if program.loss is not None:
        _check_loss(run, whole(program.buffer_by_name[program.loss]))
    if run.section.name == UPDATE:
        if counts and not run.decisions and not _has_advanced(run, counts):
            run.findings.add(
                "Z405",
                "the update takes no decision: the step count does not advance",
                section=run.section,
            )
        _check_reported(run)


def _check_changes(run: SectionRun, counts: Set[str]) -> None:
    """Hyper-parameters do not change, and one decision advances the step count and the loss scale once."""
    program = run.program
    kept: set[str] = set()
    scales: set[str] = set()
    written: set[str] = set()
    for op in program.ops():
        match op:
            case ops.Direction() | ops.OptimizerStep() | ops.SpeculativeStep() | ops.CommitStep():
                kept.update(region.buffer for s in op.settings for region in (s.lr, s.hyper))
            case ops.UpdateScale():
                scales.add(op.state.buffer)
            case ops.Compute():
                written |= {d.view.region.buffer for d in op.destinations if d is not None}
                kept |= {
                    a.view.region.buffer
                    for a in op.arguments
                    if program.buffer_by_name[a.view.region.buffer].role is Role.SCALAR
                }
            case _:
                pass
    for name in sorted((kept | scales | counts) - written):
        buffer = program.buffer_by_name[name]
        if isinstance(buffer.holds, NamedContent):
            is_advancing = run.section.name == UPDATE and name in scales | counts
            versions = (0, 1) if is_advancing else (0,)
            if run.section.name == LAST_MICRO_STEP and name in counts:
                versions = (_declared_version(run, buffer, buffer.holds),)
            _check_kept(run, buffer, buffer.holds, versions)


def _check_reported(run: SectionRun) -> None:
    """After the update the engine reports the decision's norm, weight and skip flag: nothing may overwrite these."""
    for region, decided in run.reported.items():
        now = run.memory.read(region)
        if now != decided and not any(algebra.is_poisoned(value) for *_, value in now):
            what = "no longer holds the decision's value, which the engine reports after the step"
            run.fail_at_exit("Z405", region, what)


def _declared_version(run: SectionRun, buffer: Buffer, content: NamedContent) -> int:
    """The version of a step count by the exit state: 1 where the decision was taken early, else 0."""
    advanced = replace(content, version=content.version + 1)
    holdings = run.section.exit.holdings
    return int(any(h.region == whole(buffer) and h.content == advanced for h in holdings))


def _has_advanced(run: SectionRun, counts: Set[str]) -> bool:
    """Whether a decision of the section before has advanced a step count."""
    names = run.program.buffer_by_name
    return any(
        isinstance(value, Elements) and isinstance(value.key, NamedKey) and value.key.version == 1
        for name in counts
        for _, _, value in run.memory.read(whole(names[name]))
    )


def _check_kept(
    run: SectionRun, buffer: Buffer, content: NamedContent, versions: tuple[int, ...]
) -> None:
    """Check that a scalar has one of these versions: only the user, or the ops that own it, may change it."""
    good = [Elements(NamedKey(content.name, content.version + version)) for version in versions]
    for _, _, value in run.memory.read(whole(buffer)):
        if isinstance(value, Poison) or value in good:
            continue
        is_moved = isinstance(value, Elements) and value.key == NamedKey(content.name, 1)
        what = (
            "changes outside the update"
            if is_moved
            else f"was overwritten: it holds {describe(value)}"
        )
        run.fail_at_exit("Z405", whole(buffer), what)
        return


_LOSS_ADVICE = (
    "Keep this rank's loss, a mean over its batch, until the update, which may sum it over every axis once; "
    "the engine divides the sum."
)


def _check_loss(run: SectionRun, region: Region) -> None:
    """A micro-step keeps this rank's loss; the update may sum it over every axis, once, or clear it."""
    is_update = run.section.name == UPDATE
    content = run.program.buffer_by_name[region.buffer].holds
    for _, _, value in run.memory.read(region):
        if isinstance(value, Zero | Poison | Undefined):
            continue
        summed = value.summed if isinstance(value, Elements | Statistic) else ()
        if not is_update:
            if summed:
                what = "is summed over ranks, which only the update may do"
                run.fail_at_exit("Z402", region, what, _LOSS_ADVICE)
            return
        if isinstance(content, NamedContent) and value not in (
            Elements(NamedKey(content.name, content.version)),
            Elements(NamedKey(content.name, content.version), summed=run.layout.axes),
        ):
            sentence = f"is changed: it holds {describe(value)}"
            if len(set(summed)) < len(summed):
                sentence = "is summed more than once over an axis"
            elif isinstance(value, Elements) and value.key == NamedKey(
                content.name, content.version
            ):
                sentence = "is summed over some axes only"
                if set(summed) == set(run.layout.axes):
                    sentence = f"is summed over {' and then '.join(summed)}, not innermost first"
            run.fail_at_exit("Z402", region, sentence, _LOSS_ADVICE)
        return
