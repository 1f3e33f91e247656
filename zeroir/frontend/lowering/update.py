"""The update section of a logical program, and the scalar buffers of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from zeroir.config import CompileOptions
from zeroir.frontend.lowering.parameter_groups import KeptStates, ParameterGroup
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.contents import DIRECTION, EMA, MASTER, PARAM, NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import (
    Alloc,
    Average,
    Cast,
    CheckFinite,
    Decide,
    Direction,
    GradNorm,
    GroupSettings,
    Op,
    OptimizerStep,
    Refill,
    Release,
    UpdateScale,
)
from zeroir.ir.optimizers.declaration import OwnState
from zeroir.ir.optimizers.forms import StoredNumbers
from zeroir.ir.own_coordinates import own_numel
from zeroir.ir.program import Flat, ScalarBinding
from zeroir.ir.reports import Quantity, ReportBinding

LOSS: Final = "loss"
"""The buffer of a micro-step's loss."""

EVAL_LOSS: Final = "eval_loss"
"""The buffer of an evaluation's loss."""


def scalars(
    options: CompileOptions,
    groups: Sequence[ParameterGroup],
    states_by_name: Mapping[str, KeptStates],
    *,
    has_evaluation: bool,
) -> tuple[tuple[Buffer, ScalarBinding], ...]:
    """Return the scalar buffers that a program with these options needs, with their values before the first step."""
    is_scaling = options.precision.is_fp16
    scale = options.first_loss_scale
    hysteresis = float(options.loss_scale.hysteresis) if options.has_dynamic_loss_scale else 0.0
    items = [
        _scalar(LOSS, (0.0,)),
        _scalar("loss_scale", (scale, 0.0, hysteresis)),
        _scalar("step", (0.0,)),
        *(_scalar(name, (0.0,)) for name in _more_counts(states_by_name)),
        *(_scalar(group.lr_buffer, (group.options.lr,), DType.F64) for group in groups),
        *(
            _scalar(group.hyper_buffer, group.options.hyper, DType.F64, Space.HOST)
            for group in groups
        ),
        _scalar("gradient_divisor", (1.0,)),
    ]
    if is_scaling:
        items += [_scalar("overflow", (0.0,)), _scalar("skip", (0.0,))]
    if options.clip is not None:
        items.append(_scalar("norm", (0.0,)))
    if has_evaluation:
        items.append(_scalar(EVAL_LOSS, (0.0,)))
    return tuple(items)


def _more_counts(states_by_name: Mapping[str, KeptStates]) -> list[str]:
    """Return the buffers of the counts of steps beside that of all steps."""
    return sorted({states.step_buffer for states in states_by_name.values() if states.count})


def reports(options: CompileOptions, *, has_evaluation: bool) -> tuple[ReportBinding, ...]:
    """Return the quantities that the engine reads of a program with these options."""
    is_scaling = options.precision.is_fp16
    buffers = {Quantity.LOSS: LOSS, Quantity.BATCH_LOSS: LOSS, Quantity.SUMMED_LOSS: LOSS}
    if has_evaluation:
        buffers[Quantity.EVAL_LOSS] = EVAL_LOSS
    buffers[Quantity.STEP] = "step"
    if is_scaling:
        buffers |= {Quantity.LOSS_SCALE: "loss_scale", Quantity.SKIP: "skip"}
    if options.clip is not None:
        buffers[Quantity.SQUARED_NORM] = "norm"
    return tuple(ReportBinding(quantity=what, buffer=name) for what, name in buffers.items())


def _scalar(
    name: str,
    values: tuple[float, ...],
    dtype: DType = DType.F32,
    space: Space = Space.DEVICE,
) -> tuple[Buffer, ScalarBinding]:
    content = NamedContent(name=name)
    buffer = Buffer(
        name=name, dtype=dtype, numel=len(values), space=space, role=Role.SCALAR, holds=content
    )
    return buffer, ScalarBinding(buffer=name, values=values)


def update_body(
    flats: Sequence[Flat],
    options: CompileOptions,
    groups: Sequence[ParameterGroup],
    states_by_name: Mapping[str, KeptStates],
) -> tuple[Op, ...]:
    """Decide whether the step is skipped, then update flat by flat; ``flats`` are the trainable ones."""
    gradients = tuple(_whole(flat, "grad") for flat in flats)
    is_scaling = options.precision.is_fp16
    skip = _first("skip") if is_scaling else None
    ops: list[Op] = []
    if is_scaling:
        ops.append(CheckFinite(sources=gradients, destination=_first("overflow"), stream=COMPUTE))
    if options.clip is not None:
        ops.append(GradNorm(sources=gradients, destination=_first("norm"), stream=COMPUTE))
    ops.append(
        Decide(
            step=_first("step"),
            gradient_divisor=_first("gradient_divisor"),
            divisor=1,
            overflow=_first("overflow") if is_scaling else None,
            norm=None if options.clip is None else _first("norm"),
            loss_scale=_first("loss_scale") if is_scaling else None,
            skip=skip,
            max_norm=options.clip,
            counts=tuple(map(_first, _more_counts(states_by_name))),
            stream=COMPUTE,
        )
    )
    for flat, gradient in zip(flats, gradients, strict=True):
        names = {slot.name for slot in flat.slots}
        own_groups = [group for group in groups if not names.isdisjoint(group.parameters)]
        kept = states_by_name[flat.slots[0].name]
        ops += _update(flat, gradient, skip, options, own_groups, kept)
    if options.has_dynamic_loss_scale:
        scale = options.loss_scale
        ops.append(
            UpdateScale(
                state=Region(buffer="loss_scale", offset=0, numel=3),
                skip=_first("skip"),
                stream=COMPUTE,
                window=scale.window,
                factor=scale.factor,
                hysteresis=scale.hysteresis,
                minimum=scale.minimum,
                refill=Refill.STEP if scale.consecutive_hysteresis else Refill.WINDOW,
            )
        )
    return tuple(ops)


def _update(
    flat: Flat,
    gradient: Region,
    skip: Region | None,
    options: CompileOptions,
    groups: Sequence[ParameterGroup],
    kept: KeptStates,
) -> list[Op]:
    """Return the update of a flat, whose parameters are in these groups, all with these states."""
    is_low = flat.dtype.is_low_precision
    wide = _whole(flat, "grad32")
    trained = _whole(flat, MASTER if is_low else PARAM)
    ops: list[Op] = []
    if is_low:
        ops += [
            Alloc(buffer=wide.buffer, stream=COMPUTE),
            Cast(source=gradient, destination=wide, stream=COMPUTE),
        ]
    first, *others = (
        GroupSettings(
            group=group.name,
            lr=_first(group.lr_buffer),
            hyper=Region(buffer=group.hyper_buffer, offset=0, numel=len(group.options.hyper)),
        )
        for group in groups
    )
    algorithm = kept.algorithm
    complete = wide if is_low else gradient
    names = algorithm.state_names
    stored = [kept.form.numbers(name) for name in names]
    states = tuple(_numbers(flat, of_elements) for of_elements, *_ in stored)
    scales = tuple(_numbers(flat, of_blocks) for _, *scales in stored for of_blocks in scales)
    direction = _whole(flat, DIRECTION)
    if algorithm.direction_dtype is not None:
        ops += [
            Alloc(buffer=direction.buffer, stream=COMPUTE),
            Direction(
                algorithm=algorithm,
                grad=complete,
                states=states,
                direction=direction,
                step=_first(kept.step_buffer),
                lr=first.lr,
                hyper=first.hyper,
                gradient_divisor=_first("gradient_divisor"),
                skip=skip,
                group=first.group,
                others=tuple(others),
                stream=COMPUTE,
            ),
        ]
        complete, states = direction, ()
    ops.append(
        OptimizerStep(
            algorithm=algorithm,
            param=trained,
            grad=complete,
            states=states,
            step=_first(kept.step_buffer),
            lr=first.lr,
            hyper=first.hyper,
            gradient_divisor=_first("gradient_divisor"),
            skip=skip,
            group=first.group,
            others=tuple(others),
            factors=_own_state(flat, algorithm.declaration.own_state),
            scales=scales,
            stream=COMPUTE,
        )
    )
    if algorithm.direction_dtype is not None:
        ops.append(Release(buffer=direction.buffer, stream=COMPUTE))
    if options.ema is not None:
        ops.append(
            Average(
                param=trained,
                average=_whole(flat, EMA),
                decay=options.ema,
                skip=skip,
                stream=COMPUTE,
            )
        )
    if is_low:
        ops += [
            Cast(source=_whole(flat, "master"), destination=_whole(flat, "param"), stream=COMPUTE),
            Release(buffer=wide.buffer, stream=COMPUTE),
        ]
    return ops


def _whole(flat: Flat, suffix: str) -> Region:
    return Region(buffer=f"{flat.name}.{suffix}", offset=0, numel=flat.padded_numel)


def _numbers(flat: Flat, numbers: StoredNumbers) -> Region:
    numel = numbers.numel(flat.padded_numel)
    return Region(buffer=f"{flat.name}.{numbers.quantity}", offset=0, numel=numel)


def _own_state(flat: Flat, state: OwnState | None) -> Region | None:
    if state is None:
        return None
    name = state.quantity
    return Region(buffer=f"{flat.name}.{name}", offset=0, numel=own_numel(name, flat))


def _first(scalar: str) -> Region:
    return Region(buffer=scalar, offset=0, numel=1)
