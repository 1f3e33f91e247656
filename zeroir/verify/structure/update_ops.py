"""Checks of each op of the update: its scalars, states, settings and regions agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Region, Space
from zeroir.ir.dtypes import DType
from zeroir.verify.context import title
from zeroir.verify.structure.operands import OperandChecks, Problem

LANES_NUMEL = 64
"""Optimizer steps begin and end at multiples of this, as parameters do. A CPU's kernels process FP32 vectors of 4 to 16
elements, and round the elements after the last whole vector differently."""


def problems(operands: OperandChecks, op: ops.UpdateOp) -> Iterator[Problem]:
    """Yield all problems of one op of the update."""
    match op:
        case ops.GradNorm() | ops.CheckFinite():
            yield from operands.scalar(op, "destination", op.destination, DType.F32)
            yield from operands.floating(op, "reads", *op.sources)
        case ops.Guess():
            yield from _guess(operands, op)
        case ops.Decide():
            yield from _decide(operands, op)
        case ops.Direction():
            yield from _direction(operands, op)
        case ops.OptimizerStep():
            yield from _optimizer_step(operands, op)
        case ops.SpeculativeStep() | ops.CommitStep():
            yield from _speculation(operands, op)
        case ops.Average():
            yield from _average(operands, op)
        case ops.UpdateScale():
            yield from operands.scalar(op, "skip", op.skip, DType.F32)
            yield from operands.scalar(op, "weight", op.weight, DType.F32)
            if operands.numel(op.state) != 3 or operands.dtype(op.state) is not DType.F32:
                yield "Z004", f"update_scale needs f32[3] in {operands.spell(op.state)}"
        case _:
            assert_never(op)


def _decide(operands: OperandChecks, op: ops.Decide) -> Iterator[Problem]:
    for name, region in (
        ("step", op.step),
        ("gradient_divisor", op.gradient_divisor),
        ("overflow", op.overflow),
        ("norm", op.norm),
        ("skip", op.skip),
        ("weight", op.weight),
        ("guess", op.guess),
        ("redo", op.redo),
        *(("counts", region) for region in op.counts),
    ):
        yield from operands.scalar(op, name, region, DType.F32)
    yield from _divisor(operands, op)
    if (op.guess is None) != (op.redo is None):
        yield "Z005", "decide needs guess and redo together, or neither"
    if op.skip is None and op.overflow is not None:
        yield "Z005", "decide needs skip, because it is given overflow"
    if op.skip is not None and op.overflow is None and op.weight is None:
        yield "Z005", "decide needs overflow or weight, because it is given skip"
    if (op.norm is None) != (op.max_norm is None):
        yield "Z005", "decide needs norm and max_norm together, or neither"


def _guess(operands: OperandChecks, op: ops.Guess) -> Iterator[Problem]:
    for name, region in (
        ("step", op.step),
        ("next_step", op.next_step),
        ("gradient_divisor", op.gradient_divisor),
        ("weight", op.weight),
    ):
        yield from operands.scalar(op, name, region, DType.F32)
    yield from _divisor(operands, op)


def _divisor(operands: OperandChecks, op: ops.Decide | ops.Guess) -> Iterator[Problem]:
    if op.loss_scale is not None and operands.dtype(op.loss_scale) is not DType.F32:
        where = operands.spell(op.loss_scale)
        yield "Z004", f"{title(op)} needs f32 as loss_scale, {where} is not"
    if op.divisor < 1:
        yield "Z005", f"{title(op)} divides by {op.divisor}"


def _direction(operands: OperandChecks, op: ops.Direction) -> Iterator[Problem]:
    dtype = op.algorithm.direction_dtype
    if dtype is None:
        yield "Z005", f"{op.algorithm} works element by element, and has no direction"
        return
    yield from _states(op)
    yield from operands.alike(op, ("Z005", "Z004", "Z006"), op.grad, *op.states)
    yield from operands.alike(op, ("Z005", "Z006"), op.grad, op.direction)
    yield from _in_lanes(operands, op, op.grad, *op.states)
    for region, wanted in ((op.grad, DType.F32), (op.direction, dtype)):
        yield from operands.typed(op, region, wanted)
    yield from operands.in_memory(op, op.grad)
    yield from _told(operands, op)


def _optimizer_step(operands: OperandChecks, op: ops.OptimizerStep) -> Iterator[Problem]:
    dtype = op.algorithm.direction_dtype
    if dtype is not None:
        yield from _whole_step(operands, op, dtype)
    elif op.scales:
        yield from _states(op)
        yield from _coded_states(operands, op)
    else:
        yield from _states(op)
        yield from operands.alike(op, ("Z005", "Z004", "Z006"), op.param, op.grad, *op.states)
    yield from _in_lanes(operands, op, op.param, op.grad, *op.states)
    yield from operands.typed(op, op.param, DType.F32)
    yield from operands.in_memory(op, op.param)
    yield from _told(operands, op)


def _speculation(
    operands: OperandChecks, op: ops.SpeculativeStep | ops.CommitStep
) -> Iterator[Problem]:
    """Check that the gradient has a floating-point dtype, and that copies match the parameters and each state."""
    if op.algorithm.direction_dtype is not None:
        yield "Z005", f"{op.algorithm} works on whole parameters, and has no {title(op)}"
        return
    yield from _states(op)
    regions = (op.param, *op.states)
    yield from operands.alike(op, ("Z005", "Z004", "Z006"), *regions, *op.kept)
    yield from operands.alike(op, ("Z005", "Z006"), op.param, op.grad)
    yield from operands.floating(op, "reads", op.grad)
    if op.rounded is not None:
        yield from operands.alike(op, ("Z005", "Z006"), op.param, op.rounded)
        yield from operands.floating(op, "rounds to", op.rounded)
    if len(op.kept) != len(regions):
        yield "Z005", f"{title(op)} updates {len(regions)} regions, but keeps {len(op.kept)}"
    yield from _in_lanes(operands, op, *regions, op.grad)
    yield from operands.typed(op, op.param, DType.F32)
    yield from operands.in_memory(op, op.param)
    yield from _told(operands, op)
    if operands.space(op.param) is not Space.HOST:
        where = operands.spell(op.param)
        yield "Z006", f"{title(op)} updates {where}, but only the host speculates"
    if isinstance(op, ops.CommitStep):
        yield from operands.scalar(op, "redo", op.redo, DType.F32)


def _coded_states(operands: OperandChecks, op: ops.OptimizerStep) -> Iterator[Problem]:
    """Check that each state is u8 codes of whole blocks, with one f32 scale for each block."""
    block_numel = op.form.block_numel
    yield from operands.alike(op, ("Z005", "Z004", "Z006"), op.param, op.grad)
    yield from operands.alike(op, ("Z005", "Z006"), op.param, *op.states)
    for region in op.states:
        yield from operands.typed(op, region, DType.U8)
    for region in op.scales:
        yield from operands.typed(op, region, DType.F32)
    if len(op.scales) != len(op.states):
        yield "Z005", f"{title(op)} has {len(op.states)} states, but scales of {len(op.scales)}"
    for region in (op.param, *op.states):
        if region.offset % block_numel or operands.numel(region) % block_numel:
            where = f"{operands.spell(region)} off the {block_numel} elements that share a scale"
            yield "Z003", f"{title(op)} cuts {where}"
    for region in op.scales:
        if operands.numel(region) * block_numel != operands.numel(op.param):
            blocks = f"{operands.numel(op.param)} elements in blocks of {block_numel}"
            what = f"{operands.numel(region)} scales in {operands.spell(region)}"
            yield "Z005", f"{title(op)} updates {blocks}, but has {what}"


def _whole_step(operands: OperandChecks, op: ops.OptimizerStep, dtype: DType) -> Iterator[Problem]:
    """Check that the directions, and the parameters where they are read, are those of whole flats."""
    if op.states or op.scales:
        yield "Z005", f"{op.algorithm} keeps its states in `direction`, optimizer_step has some"
    yield from operands.typed(op, op.grad, dtype)
    yield from operands.alike(op, ("Z006",), op.param, op.grad)
    needs_whole = op.algorithm.declaration.own_state is not None
    if (op.factors is not None) is not needs_whole:
        problem = "needs factors" if needs_whole else "has no factors"
        yield "Z005", f"optimizer_step: {op.algorithm} {problem}"
    if op.factors is not None:
        yield from operands.typed(op, op.factors, DType.F32)
        yield from operands.alike(op, ("Z006",), op.param, op.factors)
    if op.whole is not None:
        yield from operands.alike(op, ("Z004", "Z006"), op.param, op.whole)


def _states(op: ops.StepOp) -> Iterator[Problem]:
    count = len(op.algorithm.state_names)
    if len(op.states) != count:
        yield "Z005", f"{op.algorithm} keeps {count} states, {title(op)} has {len(op.states)}"


def _in_lanes(operands: OperandChecks, op: ops.StepOp, *regions: Region) -> Iterator[Problem]:
    for region in regions:
        if region.offset % LANES_NUMEL or operands.numel(region) % LANES_NUMEL:
            where = f"{operands.spell(region)} off the {LANES_NUMEL} elements that its kernels take"
            yield "Z003", f"{title(op)} cuts {where} at a time, which changes the rounding"


def _told(operands: OperandChecks, op: ops.StepOp) -> Iterator[Problem]:
    """Check the scalars, and the settings of each group."""
    yield from operands.scalar(op, "step", op.step, DType.F32)
    yield from operands.scalar(op, "gradient_divisor", op.gradient_divisor, DType.F32)
    if not isinstance(op, ops.SpeculativeStep):
        yield from operands.scalar(op, "skip", op.skip, DType.F32)
    named: set[str] = set()
    for settings in op.settings:
        yield from operands.scalar(op, "lr", settings.lr, DType.F64)
        hyper, numel = settings.hyper, len(op.algorithm.hyper_names)
        if operands.dtype(hyper) is not DType.F64 or operands.numel(hyper) != numel:
            what = f"{op.algorithm} needs f64[{numel}] in {operands.spell(hyper)}"
            yield "Z004", f"{title(op)}: {what}: {', '.join(op.algorithm.hyper_names)}"
        if settings.group in named:
            yield "Z403", f"{title(op)} has settings for group {settings.group} twice"
        named.add(settings.group)


def _average(operands: OperandChecks, op: ops.Average) -> Iterator[Problem]:
    yield from operands.alike(op, ("Z005", "Z004", "Z006"), op.param, op.average)
    dtype = operands.dtype(op.average)
    if dtype is not DType.F32:
        yield "Z004", f"average changes {operands.spell(op.average)} of {dtype}: it needs f32"
    yield from operands.in_memory(op, op.param)
    yield from operands.scalar(op, "skip", op.skip, DType.F32)
    if not 0 <= op.decay <= 1:
        yield "Z005", f"average has a decay of {op.decay}, which is not from 0 to 1"
