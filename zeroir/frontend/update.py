"""The update section of a logical program, and the scalar buffers of training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from zeroir.config import CompileOptions
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.contents import NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import (
    Alloc,
    Cast,
    CheckFinite,
    Decide,
    Fill,
    GradNorm,
    Op,
    OptimizerStep,
    Release,
    UpdateScale,
)
from zeroir.ir.program import Flat, ScalarBinding

LOSS: Final = "loss"
"""The buffer of a micro-step's loss."""

EVAL_LOSS: Final = "eval_loss"
"""The buffer of an evaluation's loss."""


def scalars(
    options: CompileOptions, *, has_evaluation: bool
) -> tuple[tuple[Buffer, ScalarBinding], ...]:
    """The scalar buffers that a program with these options needs, with their values before the first step."""
    is_scaling = options.precision == "fp16"
    scale = options.initial_loss_scale if is_scaling else 1.0
    hysteresis = float(options.loss_scale_hysteresis) if is_scaling else 0.0
    items = [
        _scalar(LOSS, (0.0,)),
        _scalar("loss_scale", (scale, 0.0, hysteresis)),
        _scalar("step", (0.0,)),
        _scalar("lr", (options.lr,), DType.F64),
        _scalar("hyper", options.hyper, DType.F64, Space.HOST),
        _scalar("gradient_divisor", (1.0,)),
    ]
    if is_scaling:
        items += [_scalar("overflow", (0.0,)), _scalar("skip", (0.0,))]
    if options.clip is not None:
        items.append(_scalar("norm", (0.0,)))
    if has_evaluation:
        items.append(_scalar(EVAL_LOSS, (0.0,)))
    return tuple(items)


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


def update_body(flats: Sequence[Flat], options: CompileOptions) -> tuple[Op, ...]:
    """Decide whether the step is skipped, then update flat by flat; ``flats`` are the trainable ones."""
    suffix = "grad_sum" if options.micro_steps > 1 else "grad"
    gradients = tuple(_whole(flat, suffix) for flat in flats)
    is_scaling = options.precision == "fp16"
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
            divisor=options.micro_steps,
            overflow=_first("overflow") if is_scaling else None,
            norm=None if options.clip is None else _first("norm"),
            loss_scale=_first("loss_scale") if is_scaling else None,
            skip=skip,
            max_norm=options.clip,
            stream=COMPUTE,
        )
    )
    for flat, gradient in zip(flats, gradients, strict=True):
        ops += _update(flat, gradient, skip, options)
    if is_scaling:
        ops.append(
            UpdateScale(
                state=Region(buffer="loss_scale", offset=0, numel=3),
                skip=_first("skip"),
                stream=COMPUTE,
                window=options.loss_scale_window,
                hysteresis=options.loss_scale_hysteresis,
                minimum=options.minimum_loss_scale,
            )
        )
    if options.micro_steps > 1:
        ops.append(Fill(destination=_first(LOSS), value=0.0, stream=COMPUTE))
    return tuple(ops)


def _update(flat: Flat, gradient: Region, skip: Region | None, options: CompileOptions) -> list[Op]:
    is_low = flat.dtype.is_low_precision
    is_summed = options.micro_steps > 1
    is_widened = is_low and not is_summed
    wide = _whole(flat, "grad32")
    ops: list[Op] = []
    if is_widened:
        ops += [
            Alloc(buffer=wide.buffer, stream=COMPUTE),
            Cast(source=gradient, destination=wide, stream=COMPUTE),
        ]
    ops.append(
        OptimizerStep(
            algorithm=options.optimizer,
            param=_whole(flat, "master" if is_low else "param"),
            grad=wide if is_widened else gradient,
            states=tuple(_whole(flat, state) for state in options.optimizer.state_names),
            step=_first("step"),
            lr=_first("lr"),
            hyper=Region(buffer="hyper", offset=0, numel=len(options.hyper)),
            gradient_divisor=_first("gradient_divisor"),
            skip=skip,
            stream=COMPUTE,
        )
    )
    if is_low:
        ops.append(
            Cast(source=_whole(flat, "master"), destination=_whole(flat, "param"), stream=COMPUTE)
        )
    if is_widened:
        ops.append(Release(buffer=wide.buffer, stream=COMPUTE))
    if is_summed:
        ops.append(Fill(destination=gradient, value=0.0, stream=COMPUTE))
    return ops


def _whole(flat: Flat, suffix: str) -> Region:
    return Region(buffer=f"{flat.name}.{suffix}", offset=0, numel=flat.padded_numel)


def _first(scalar: str) -> Region:
    return Region(buffer=scalar, offset=0, numel=1)
