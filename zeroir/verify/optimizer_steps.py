"""Optimizer steps in the abstract interpreter: their gradients, settings, states and parameters."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from zeroir.ir import ops
from zeroir.ir.buffers import Region, whole
from zeroir.ir.contents import DIRECTION, MASTER, PARAM, FlatContent, NamedContent
from zeroir.ir.copies import at_rest
from zeroir.ir.eight_bit_states import BLOCK_NUMEL
from zeroir.ir.program import Slot
from zeroir.verify import algebra, whole_steps
from zeroir.verify.abstract_memory import AbstractMemory
from zeroir.verify.context import spell
from zeroir.verify.decisions import (
    changed_region,
    check_skip,
    decision_number,
    held_value,
    is_version,
)
from zeroir.verify.descriptions import describe
from zeroir.verify.domain import (
    POISON,
    Cover,
    Elements,
    FlatKey,
    NamedKey,
    PieceList,
    Strides,
    Value,
    cut,
    rebased,
)
from zeroir.verify.gradients import is_zero, locate
from zeroir.verify.statistics import use_gradient

if TYPE_CHECKING:
    from zeroir.verify.interpreter import SectionRun


_Step = ops.Direction | ops.OptimizerStep
"""The ops that read a gradient, and the settings of groups."""


class Stepped(NamedTuple):
    """Elements ``[start, stop)`` of a parameter that an optimizer step updates, with what settings, and its line."""

    parameter: str
    start: int
    stop: int
    setting: Hashable
    line: int


def optimizer_step(run: SectionRun, op: ops.OptimizerStep) -> None:
    """Move each element and its states to the next version, by its final gradient, after the decision."""
    _check_scalars(run, op)
    settings = _settings(run, op)
    is_whole = op.algorithm.direction_dtype is not None
    resting = _resting(run, op.param, is_needed=is_whole or bool(op.others))
    states = [run.take(region, "Z403") for region in op.states]
    scales = [run.take(region, "Z403") for region in op.scales]
    gradient = run.take(op.grad, "Z402")
    written: list[list[tuple[int, int, Value]]] = [[] for _ in (op.param, *op.states)]
    for a, b, value in run.take(op.param, "Z403"):
        key = value.key if isinstance(value, Elements) else None
        if (
            not isinstance(value, Elements)
            or not isinstance(key, FlatKey)
            or key.quantity not in (MASTER, PARAM)
        ):
            if not algebra.is_poisoned(value):
                where = spell(op.param, run.program)
                run.fail(
                    "Z403",
                    f"optimizer_step updates {where}, which holds no parameter or master weights",
                    op.param.buffer,
                )
            for updated in written:
                updated.append((a, b, POISON))
            continue
        if not run.program.flat_by_name[key.flat].is_trainable:
            run.fail("Z403", f"optimizer_step updates the frozen flat {key.flat}", op.param.buffer)
        elements = Cover(key.flat, value.shift + a, value.strides, b - a)
        _apply_settings(run, op, elements, settings, run.steps)
        if resting is not None:
            _check_places(run, op, op.param, (a, b), value, key.flat, resting)
        if key.version:
            run.fail(
                "Z403",
                f"optimizer_step updates {key.quantity} of flat {key.flat} a second time",
                op.param.buffer,
            )
        for name, region, pieces in zip(op.state_quantities, op.states, states, strict=True):
            expected = Elements(FlatKey(name, key.flat, key.version), value.shift, value.strides)
            _check_state(run, op, (name, region), pieces, (a, b), expected)
        _check_scales(run, op, scales, (a, b), value, key)
        for quantity, updated in zip((key.quantity, *op.state_quantities), written, strict=True):
            new = FlatKey(quantity, key.flat, key.version + 1)
            updated.append((a, b, Elements(new, value.shift, value.strides)))
        if is_whole:
            whole_steps.check_operands(run, op, gradient, key, elements)
        else:
            _check_gradient(run, op, gradient, (a, b), value, key.flat)
    for region in (*op.scales, *(() if op.factors is None else (op.factors,))):
        whole_steps.advance(run, region)
    run.memory.write(op.grad, [(a, b, algebra.spent(value)) for a, b, value in gradient])
    for region, updated in zip((op.param, *op.states), written, strict=True):
        run.memory.write(region, updated)


def direction(run: SectionRun, op: ops.Direction) -> None:
    """Move the states of each element to the next version, by its final gradient, after the decision."""
    _check_scalars(run, op)
    settings = _settings(run, op)
    states = [run.take(region, "Z403") for region in op.states]
    gradient = run.take(op.grad, "Z402")
    numel = run.memory.numel(op.grad)
    place = next(filter(None, (locate(value) for _, _, value in gradient)), None)
    if place is None and all(is_zero(value) for _, _, value in gradient):
        place = _place_of(states)
    spent: PieceList = [(a, b, algebra.spent(value)) for a, b, value in gradient]
    run.memory.write(op.grad, spent)
    if place is None:
        if not any(algebra.is_poisoned(value) for _, _, value in gradient):
            where = spell(op.grad, run.program)
            run.fail("Z402", f"direction reads {where}, which holds no gradient", op.grad.buffer)
        for region in (op.direction, *op.states):
            run.memory.write(region, [(0, numel, POISON)])
        return
    flat, shift, strides = place
    moved = Elements(FlatKey(DIRECTION, flat, 1), shift, strides)
    _check_gradient(run, op, gradient, (0, numel), moved, flat)
    _apply_settings(run, op, Cover(flat, shift, strides, numel), settings, run.directions)
    resting = _resting(run, op.states[0], is_needed=bool(op.others)) if op.states else None
    if resting is not None:
        _check_places(run, op, op.states[0], (0, numel), moved, flat, resting)
    for name, region, pieces in zip(op.algorithm.state_names, op.states, states, strict=True):
        expected = Elements(FlatKey(name, flat, 0), shift, strides)
        _check_state(run, op, (name, region), pieces, (0, numel), expected)
        new = Elements(FlatKey(name, flat, 1), shift, strides)
        run.memory.write(region, [(0, numel, new)])
    run.memory.write(op.direction, [(0, numel, moved)])


def _place_of(states: Sequence[PieceList]) -> tuple[str, int, Strides] | None:
    """Flat, shift and strides of the elements whose states these are, which padding alone does not tell."""
    for pieces in states:
        for _, _, value in pieces:
            if isinstance(value, Elements) and isinstance(value.key, FlatKey):
                return value.key.flat, value.shift, value.strides
    return None


def _name(op: _Step) -> str:
    return ops.op_name(type(op))


def _settings(run: SectionRun, op: _Step) -> Mapping[str, Hashable]:
    """The values of each group's settings, by its name; they must be those that the group declares."""
    values: dict[str, Hashable] = {}
    for settings in op.settings:
        group = run.shared.groups.get(settings.group)
        if group is None:
            if run.shared.groups:
                what = f"{_name(op)} names group {settings.group}, which is not declared"
                run.fail("Z403", what)
        else:
            if group.algorithm is not op.algorithm:
                what = f"but group {group.name} trains with {group.algorithm}"
                run.fail("Z403", f"{_name(op)} is {op.algorithm}, {what}")
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
    run: SectionRun, op: _Step, group: str, region: Region, declared: str | None
) -> None:
    """A setting must be the value that rests in the buffer that its group declares."""
    buffer = None if declared is None else run.program.buffer_by_name[declared]
    if buffer is None or not isinstance(buffer.holds, NamedContent):
        return
    expected = Elements(NamedKey(buffer.holds.name, buffer.holds.version))
    held = run.memory.read(region)
    if any(value != expected and not algebra.is_poisoned(value) for _, _, value in held):
        run.fail(
            "Z403",
            f"{_name(op)} takes {spell(region, run.program)} as a setting of group {group}, whose setting is "
            f"%{buffer.name}",
            region.buffer,
            buffer.name,
            advice=f"Give it %{buffer.name}.",
        )


def _apply_settings(
    run: SectionRun,
    op: _Step,
    elements: Cover,
    settings: Mapping[str, Hashable],
    steps: list[Stepped],
) -> None:
    """Add to ``steps`` with which settings each element is updated: those of its group."""
    if not run.shared.groups:
        for start, stop, slot in run.layout.covered(elements):
            steps.append(stepped(run, slot, start, stop, settings[op.group]))
        return
    for start, stop, group, slot in run.layout.grouped(elements):
        if group is not None and group in settings:
            steps.append(stepped(run, slot, start, stop, settings[group]))
            continue
        run.fail(
            "Z403",
            f"{_name(op)} updates {slot.name}, which is in no group"
            if group is None
            else f"{_name(op)} updates {slot.name} of group {group}, but has no settings for that group",
            changed_region(op).buffer,
            advice="Give the step the settings of every group that its elements are in.",
        )
        return


def _resting(run: SectionRun, region: Region, *, is_needed: bool) -> PieceList | None:
    """The values at rest of the elements that a region stands for, by which the op finds groups and padding.

    None where it takes the region as one piece instead: these elements rest with no flat, and ``is_needed`` is false.
    """
    resting = at_rest(run.program, region)
    holds = None if resting is None else run.program.buffer_by_name[resting.buffer].holds
    if not is_needed and not isinstance(holds, FlatContent):
        return None
    resting = region if resting is None else resting
    buffer = run.program.buffer_by_name[resting.buffer]
    memory = AbstractMemory({buffer.name: buffer}, run.program.mesh)
    if holds is not None:
        memory.write(whole(buffer), run.layout.pieces(holds, buffer.numel))
    return memory.read(resting)


def _check_places(
    run: SectionRun,
    op: _Step,
    region: Region,
    interval: tuple[int, int],
    value: Elements,
    flat: str,
    resting: PieceList,
) -> None:
    """The elements of a region must be those that rest there."""
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
                f"{_name(op)} updates {spell(region, run.program)}, which does not hold the elements that rest there: "
                "it would take others as those of a group, as a parameter or as padding",
                region.buffer,
                advice="Step the elements where they rest.",
            )
            return


def stepped(run: SectionRun, slot: Slot, start: int, stop: int, setting: Hashable) -> Stepped:
    """Flat elements ``[start, stop)`` of a parameter, as the present op changes them."""
    return Stepped(slot.name, start - slot.offset, stop - slot.offset, setting, run.line)


def _check_state(
    run: SectionRun,
    op: _Step,
    state_of: tuple[str, Region],
    pieces: PieceList,
    interval: tuple[int, int],
    expected: Elements,
) -> None:
    """The region must hold this quantity of the same elements, at the same version."""
    name, state = state_of
    for _, _, value in cut(pieces, *interval):
        if value != expected and not algebra.is_poisoned(value):
            run.fail(
                "Z501" if state.buffer in run.shared.pages else "Z403",
                f"{_name(op)} of {spell(changed_region(op), run.program)} takes {spell(state, run.program)} as its "
                f"{name}, which holds {describe(value)}",
                changed_region(op).buffer,
                state.buffer,
                advice=f"Give it {describe(expected)}.",
            )


def _check_scales(
    run: SectionRun,
    op: ops.OptimizerStep,
    scales: Sequence[PieceList],
    interval: tuple[int, int],
    param: Elements,
    key: FlatKey,
) -> None:
    """The scales must be those of the blocks that the elements are in, at the same version."""
    start, stop = (position // BLOCK_NUMEL for position in interval)
    strides = tuple((axis, stride // BLOCK_NUMEL) for axis, stride in param.strides)
    for name, region, pieces in zip(op.scale_quantities, op.scales, scales, strict=True):
        numbers = (*interval, param.shift, *(stride for _, stride in param.strides))
        if any(number % BLOCK_NUMEL for number in numbers):
            run.fail(
                "Z403",
                f"optimizer_step updates {spell(op.param, run.program)}, a part of the {BLOCK_NUMEL} elements that "
                f"share a scale in {spell(region, run.program)}",
                op.param.buffer,
                region.buffer,
            )
            return
        blocks = Elements(FlatKey(name, key.flat, key.version), param.shift // BLOCK_NUMEL, strides)
        _check_state(run, op, (name, region), pieces, (start, stop), blocks)


def _check_gradient(
    run: SectionRun,
    op: _Step,
    gradient: PieceList,
    interval: tuple[int, int],
    param: Elements,
    flat: str,
) -> None:
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
                f"{_name(op)} steps other elements than those whose gradient stands in {where}",
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
            f"{_name(op)} reads {where}: {problem.sentence}",
            op.grad.buffer,
            advice=problem.advice,
        )


def _check_scalars(run: SectionRun, op: _Step) -> None:
    number = decision_number(run, op.gradient_divisor, "divisor")
    if number is None:
        run.fail(
            "Z405",
            f"{_name(op)} reads {spell(op.gradient_divisor, run.program)}, which is not this step's decision",
            op.gradient_divisor.buffer,
        )
        return
    if not is_version(run, op.step, 1):
        (_, _, value), *_ = run.memory.read(op.step)
        run.fail(
            "Z405",
            f"{_name(op)} reads {spell(op.step, run.program)}, which is not the count that decide advanced: "
            f"it holds {describe(value)}",
            op.step.buffer,
        )
    for region in (region for s in op.settings for region in (s.lr, s.hyper)):
        if not is_version(run, region, 0):
            run.fail(
                "Z405",
                f"{_name(op)} reads {spell(region, run.program)}, which the step has overwritten",
                region.buffer,
            )
    check_skip(run, op, op.skip, number if run.decided.get(number, False) else None)
