"""Weigh the micro-batches of a logical program: the host gives each a weight, such as its number of unmasked labels.

The weight is the value of the user's function, or follows from the loss (``loss_weight.py``).

The backward begins with the loss scale times the weight instead of the loss scale, the losses are summed times their
weights, and the update divides by the sum of the weights over ranks and micro-steps. So the gradient is that of the
weighted mean of the micro-batches' losses. A step whose weights are all 0 changes nothing.

What changes::

    + report batch_loss %batch_loss
    + report summed_weight %weight
    + report skip %skip
    + weight %batch_weight
    + cast %batch_weight -> %weight  stream=compute
    - !1 = compute @a.forward(…) -> (%loss)  unit=a stream=compute
    + !1 = compute @a.forward(…) -> (%batch_loss)  unit=a stream=compute
    + cast %batch_loss -> %weighted_loss  stream=compute
    + scale %weighted_loss by %batch_weight  stream=compute
    + cast %weighted_loss -> %loss  stream=compute
    + cast %loss_scale[0:1] -> %tangent  stream=compute
    + scale %tangent by %batch_weight  stream=compute
    - !2 = compute @a.backward(%loss_scale[0:1], …) -> (…)  unit=a stream=compute
    + !2 = compute @a.backward(%tangent, …) -> (…)  unit=a stream=compute
      section update {
    - decide step=%step gradient_divisor=%divisor divisor=1  stream=compute
    + decide step=%step gradient_divisor=%divisor divisor=1 skip=%skip weight=%weight  stream=compute
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zeroir.errors import InternalError
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.contents import Content, Micro, NamedContent, WeightContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Op
from zeroir.ir.program import (
    LAST_MICRO_STEP,
    MICRO_STEP,
    UPDATE,
    Holding,
    Program,
    ScalarBinding,
    Section,
    State,
    Weighing,
)
from zeroir.ir.reports import Quantity, with_report
from zeroir.ir.segments.segment import Segment

BATCH_LOSS = "batch_loss"
"""The loss of the present micro-batch, without its weight."""
BATCH_WEIGHT = "batch_weight"
"""The weight of the present micro-batch."""
WEIGHT = "weight"
"""The sum of the weights of the step's micro-batches."""
SKIP = "skip"
_LOSS_SCALE = "loss_scale"
_TANGENT = "tangent"
_WEIGHTED_LOSS = "weighted_loss"


def add_micro_batch_weights(program: Program) -> Program:
    """Return the program with weights of its micro-batches; it must be a logical one for one micro-step."""
    if program.loss is None or MICRO_STEP in program.section_by_name:
        raise InternalError(
            "only a logical program for one micro-step, with a loss, can be weighted"
        )
    changed = {
        LAST_MICRO_STEP: lambda section: _weighted_micro_step(section, program),
        UPDATE: _divided,
    }
    sections = tuple(changed.get(s.name, lambda same: same)(s) for s in program.sections)
    scalars = [
        one_number(BATCH_WEIGHT, WeightContent(micro=Micro.CURRENT)),
        one_number(WEIGHT, WeightContent(micro=Micro.STALE)),
        one_number(BATCH_LOSS),
    ]
    bindings = [ScalarBinding(buffer=BATCH_WEIGHT, values=(1.0,))]
    if SKIP not in program.buffer_by_name:
        scalars.append(one_number(SKIP))
    temporaries = [
        replace(one_number(name), role=Role.ACTIVATION, holds=None)
        for name in (_WEIGHTED_LOSS, _TANGENT)
    ]
    reports = with_report(program.reports, Quantity.BATCH_LOSS, BATCH_LOSS)
    reports = with_report(reports, Quantity.SUMMED_WEIGHT, WEIGHT)
    return replace(
        program,
        buffers=(*program.buffers, *scalars, *temporaries),
        scalars=(*program.scalars, *bindings),
        sections=sections,
        reports=with_report(reports, Quantity.SKIP, SKIP),
        weight=BATCH_WEIGHT,
    )


def weighed_by(program: Program, segment: Segment, paths: Sequence[str]) -> Program:
    """Return a program with weights that the host computes by a segment, from the batch's tensors at these paths."""
    buffers = {binding.path: binding.buffer for binding in program.inputs}
    arguments = tuple(buffers[path] for path in paths)
    return replace(
        program,
        segments=(*program.segments, segment),
        weighing=Weighing(segment=segment.name, arguments=arguments),
    )


def one_number(name: str, content: Content | None = None) -> Buffer:
    """Return a buffer of one FP32 number on the device; by default its content is the value of its own name."""
    return Buffer(
        name=name,
        dtype=DType.F32,
        numel=1,
        space=Space.DEVICE,
        role=Role.SCALAR,
        holds=content or NamedContent(name=name),
    )


def first(buffer: str) -> Region:
    """Return the first element of a buffer."""
    return Region(buffer=buffer, offset=0, numel=1)


def cast(source: str, destination: str, mode: ops.Mode = ops.Mode.WRITE) -> ops.Cast:
    """Return an op that copies one number, or adds it."""
    return ops.Cast(source=first(source), destination=first(destination), mode=mode, stream=COMPUTE)


def with_batch_loss(op: ops.Compute, loss: str) -> ops.Compute | None:
    """Return the call with its loss in ``%batch_loss``; None if it does not compute the loss."""
    destinations = tuple(
        replace(d, view=replace(d.view, region=first(BATCH_LOSS)))
        if d is not None and d.view.region.buffer == loss
        else d
        for d in op.destinations
    )
    return None if destinations == op.destinations else replace(op, destinations=destinations)


def _weighted_micro_step(section: Section, program: Program) -> Section:
    assert program.loss is not None
    body: list[Op] = [cast(BATCH_WEIGHT, WEIGHT)]
    readers = [
        index
        for index, op in enumerate(section.body)
        if isinstance(op, ops.Compute) and _reads_loss_scale(op)
    ]
    for index, op in enumerate(section.body):
        if not isinstance(op, ops.Compute):
            body.append(op)
            continue
        if readers and index == readers[0]:
            body += _scaled(_LOSS_SCALE, _TANGENT)
        call = with_batch_loss(op, program.loss)
        body.append(_with_tangent(op if call is None else call))
        if call is not None:
            body += _scaled(BATCH_LOSS, _WEIGHTED_LOSS)
            body += [
                cast(_WEIGHTED_LOSS, program.loss),
                ops.Release(buffer=_WEIGHTED_LOSS, stream=COMPUTE),
            ]
        if readers and index == readers[-1]:
            body.append(ops.Release(buffer=_TANGENT, stream=COMPUTE))
    return replace(section, body=tuple(body), exit=_with_weight(section.exit))


def _scaled(source: str, temporary: str) -> Iterator[Op]:
    """Yield ops that write a number times the weight of the micro-batch to a new temporary buffer."""
    yield ops.Alloc(buffer=temporary, stream=COMPUTE)
    yield cast(source, temporary)
    yield ops.Scale(region=first(temporary), by=first(BATCH_WEIGHT), stream=COMPUTE)


def _reads_loss_scale(op: ops.Compute) -> bool:
    return any(argument.view.region.buffer == _LOSS_SCALE for argument in op.arguments)


def _with_tangent(op: ops.Compute) -> ops.Compute:
    arguments = tuple(
        replace(argument, view=replace(argument.view, region=first(_TANGENT)))
        if argument.view.region.buffer == _LOSS_SCALE
        else argument
        for argument in op.arguments
    )
    return replace(op, arguments=arguments)


def _divided(section: Section) -> Section:
    body = tuple(_by_weight(section.body))
    return replace(section, entry=_with_weight(section.entry), body=body)


def _by_weight(body: Sequence[Op]) -> Iterator[Op]:
    """Yield the update's ops, which divide by the weight, and are skipped where it is 0."""
    skip = first(SKIP)
    for op in body:
        match op:
            case ops.Decide():
                yield replace(op, weight=first(WEIGHT), skip=skip)
            case ops.Direction() | ops.OptimizerStep() | ops.Average():
                yield replace(op, skip=skip)
            case ops.UpdateScale():
                yield replace(op, weight=first(WEIGHT))
            case _:
                yield op


def _with_weight(state: State) -> State:
    complete = Holding(region=first(WEIGHT), content=WeightContent(micro=Micro.ALL))
    return replace(state, holdings=(*state.holdings, complete))
