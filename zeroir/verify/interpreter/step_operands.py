"""The operands of ops that read gradients and settings: scalars, settings, places and gradients."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from zeroir.ir import ops
from zeroir.ir.buffers import Region, whole
from zeroir.ir.contents import MASTER, PARAM, FlatContent, NamedContent
from zeroir.ir.program import Slot
from zeroir.ir.reports import Quantity
from zeroir.verify.context import spell
from zeroir.verify.interpreter import algebra
from zeroir.verify.interpreter.abstract_memory import AbstractMemory
from zeroir.verify.interpreter.decisions import (
    changed_region,
    check_skip,
    decision_number,
    held_value,
    is_counter,
    is_version,
)
from zeroir.verify.interpreter.descriptions import describe
from zeroir.verify.interpreter.domain import (
    Cover,
    Elements,
    FlatKey,
    NamedKey,
    PieceList,
    Value,
    cut,
    rebased,
)
from zeroir.verify.interpreter.gradients import locate
from zeroir.verify.interpreter.section_run import SectionRun, Stepped
from zeroir.verify.interpreter.statistics import use_gradient


def step_name(op: ops.StepOp) -> str:
    """Return the op's name for messages."""
    return ops.op_name(type(op))


def trained_elements(value: Value) -> tuple[Elements, FlatKey] | None:
    """Return elements of parameters or master weights, and their key; None for any other value."""
    if not isinstance(value, Elements) or not isinstance(value.key, FlatKey):
        return None
    return (value, value.key) if value.key.quantity in (MASTER, PARAM) else None


def settings_of(run: SectionRun, op: ops.StepOp) -> Mapping[str, Hashable]:
    """Return the values of each group's settings, by its name; they must be those that the group declares."""
    values: dict[str, Hashable] = {}
    for settings in op.settings:
        group = run.shared.groups.get(settings.group)
        if group is None:
            run.fail("Z403", f"{step_name(op)} names group {settings.group}, which is not declared")
        else:
            if group.algorithm is not op.algorithm:
                what = f"but group {group.name} trains with {group.algorithm}"
                run.fail("Z403", f"{step_name(op)} is {op.algorithm}, {what}")
            for region, declared in ((settings.lr, group.lr), (settings.hyper, group.hyper)):
                _check_declared(run, op, group.name, region, declared)
        values[settings.group] = (
            op.algorithm,
            isinstance(op, ops.OptimizerStep) and bool(op.scales),
            held_value(run, op.step),
            held_value(run, settings.lr),
            held_value(run, settings.hyper),
        )
    return values


def _check_declared(
    run: SectionRun, op: ops.StepOp, group: str, region: Region, declared: str
) -> None:
    """Check that a setting is the value at rest in the buffer that its group declares."""
    buffer = run.program.buffer_by_name[declared]
    if not isinstance(buffer.holds, NamedContent):
        return
    expected = Elements(NamedKey(buffer.holds.name, buffer.holds.version))
    held = run.memory.read(region)
    if any(value != expected and not algebra.is_poisoned(value) for _, _, value in held):
        run.fail(
            "Z403",
            f"{step_name(op)} takes {spell(region, run.program)} as a setting of group {group}, whose setting is "
            f"%{buffer.name}",
            region.buffer,
            buffer.name,
            advice=f"Give it %{buffer.name}.",
        )


def apply_settings(
    run: SectionRun,
    op: ops.StepOp,
    elements: Cover,
    settings: Mapping[str, Hashable],
    steps: list[Stepped],
) -> None:
    """Add to ``steps`` the settings with which each element is updated: those of its group."""
    for start, stop, group, slot in run.layout.grouped(elements):
        if group is not None and group in settings:
            steps.append(stepped(run, slot, start, stop, settings[group]))
            continue
        run.fail(
            "Z403",
            f"{step_name(op)} updates {slot.name}, which is in no group"
            if group is None
            else f"{step_name(op)} updates {slot.name} of group {group}, but has no settings for that group",
            changed_region(op).buffer,
            advice="Give the step the settings of every group that its elements are in.",
        )
        return


def resting_elements(run: SectionRun, region: Region, *, is_needed: bool) -> PieceList | None:
    """Return the values at rest of a region's elements, by which the op finds groups and padding.

    Return None if it treats the region as one piece instead: these elements are not in a flat at rest, and
    ``is_needed`` is false.
    """
    resting = run.program.at_rest(region)
    holds = None if resting is None else run.program.buffer_by_name[resting.buffer].holds
    if not is_needed and not isinstance(holds, FlatContent):
        return None
    resting = region if resting is None else resting
    buffer = run.program.buffer_by_name[resting.buffer]
    memory = AbstractMemory({buffer.name: buffer}, run.program.mesh)
    if holds is not None:
        memory.write(whole(buffer), run.layout.pieces(holds, buffer.numel))
    return memory.read(resting)


def check_places(
    run: SectionRun,
    op: ops.StepOp,
    region: Region,
    interval: tuple[int, int],
    value: Elements,
    flat: str,
    resting: PieceList,
) -> None:
    """Check that the elements of a region are those of its place at rest."""
    for _, _, expected in cut(resting, *interval):
        is_there = (
            isinstance(expected, Elements)
            and isinstance(expected.key, FlatKey)
            and expected.key.flat == flat
            and (expected.shift, expected.strides) == (value.shift, value.strides)
        )
        if not is_there:
            run.fail(
                "Z403",
                f"{step_name(op)} updates {spell(region, run.program)}, which does not hold the elements that rest "
                "there: it would take others as those of a group, as a parameter or as padding",
                region.buffer,
                advice="Step the elements where they rest.",
            )
            return


def stepped(run: SectionRun, slot: Slot, start: int, stop: int, setting: Hashable) -> Stepped:
    """Return flat elements ``[start, stop)`` of a parameter, as the present op changes them."""
    return Stepped(slot.name, start - slot.offset, stop - slot.offset, setting, run.line)


def check_state(
    run: SectionRun,
    op: ops.StepOp,
    state_of: tuple[str, Region],
    pieces: PieceList,
    interval: tuple[int, int],
    expected: Elements,
) -> None:
    """Check that the region has this quantity of the same elements, at the same version."""
    name, state = state_of
    for _, _, value in cut(pieces, *interval):
        if value != expected and not algebra.is_poisoned(value):
            run.fail(
                "Z501" if state.buffer in run.shared.pages else "Z403",
                f"{step_name(op)} of {spell(changed_region(op), run.program)} takes {spell(state, run.program)} as its "
                f"{name}, which holds {describe(value)}",
                changed_region(op).buffer,
                state.buffer,
                advice=f"Give it {describe(expected)}.",
            )


def check_gradient(
    run: SectionRun,
    op: ops.StepOp,
    gradient: PieceList,
    interval: tuple[int, int],
    param: Elements,
    flat: str,
) -> None:
    """Check that the gradient is the final one of the elements ``interval`` of a region, which ``param`` describes."""
    start, stop = interval
    here = rebased(cut(gradient, start, stop), start)
    if any(algebra.is_poisoned(value) for _, _, value in here):
        return
    where = spell(op.grad, run.program)
    on_flat = run.layout.on_flat(here, stop - start, param.shift + start, param.strides)
    for _, _, value in here:
        place = locate(value)
        if on_flat is None or (
            place is not None and place != (flat, param.shift + start, param.strides)
        ):
            run.fail(
                "Z403",
                f"{step_name(op)} steps other elements than those whose gradient stands in {where}",
                changed_region(op).buffer,
                op.grad.buffer,
            )
            return
    if on_flat is None:
        return
    problem = use_gradient(run, flat, on_flat)
    if problem is not None:
        run.fail(
            problem.code,
            f"{step_name(op)} reads {where}: {problem.sentence}",
            op.grad.buffer,
            advice=problem.advice,
        )


def check_scalars(run: SectionRun, op: ops.Direction | ops.OptimizerStep | ops.CommitStep) -> None:
    """Check that the divisor, the step count and whether to skip are those of this step's decision."""
    number = decision_number(run, op.gradient_divisor, "divisor")
    if number is None:
        run.fail(
            "Z405",
            f"{step_name(op)} reads {spell(op.gradient_divisor, run.program)}, which is not this step's decision",
            op.gradient_divisor.buffer,
        )
        return
    if not is_counter(run, op.step, Quantity.STEP, 1):
        (_, _, value), *_ = run.memory.read(op.step)
        run.fail(
            "Z405",
            f"{step_name(op)} reads {spell(op.step, run.program)}, which is not the count that decide advanced: "
            f"it holds {describe(value)}",
            op.step.buffer,
        )
    check_settings(run, op)
    check_skip(run, op, op.skip, number if run.decided.get(number, False) else None)


def check_settings(run: SectionRun, op: ops.StepOp) -> None:
    """Check that learning rates and hyper-parameters are those from the start of the step."""
    for region in (region for s in op.settings for region in (s.lr, s.hyper)):
        if not is_version(run, region, 0):
            run.fail(
                "Z405",
                f"{step_name(op)} reads {spell(region, run.program)}, which the step has overwritten",
                region.buffer,
            )
