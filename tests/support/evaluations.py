"""Programs with a section that evaluates, made of their training forward."""

from __future__ import annotations

from dataclasses import replace

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import Content, NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Mode
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    Holding,
    Program,
    ScalarBinding,
    Section,
    State,
)
from zeroir.ir.reports import Quantity, with_report


def with_evaluation(logical: Program) -> Program:
    """A logical program that can be evaluated, too: its forward up to the loss, with every temporary released."""
    body = logical.section_by_name[LAST_MICRO_STEP].body
    stop = next(
        i for i, op in enumerate(body) if isinstance(op, ops.Compute) and "back" in op.segment
    )
    used = {
        region.buffer
        for op in body[:stop]
        if isinstance(op, ops.Compute)
        for region in (*effects(op).reads, *effects(op).writes)
    }
    forward = [
        op
        for op in body[:stop]
        if isinstance(op, ops.Compute) or (isinstance(op, ops.Alloc) and op.buffer in used)
    ]
    live = [op.buffer for op in forward if isinstance(op, ops.Alloc)]
    released = (ops.Release(buffer=name, stream=COMPUTE) for name in live)
    section = Section(name=EVALUATE, body=(*map(_into_eval_loss, forward), *released))
    loss = replace(
        logical.buffer_by_name["loss"], name="eval_loss", holds=NamedContent(name="eval_loss")
    )
    return replace(
        logical,
        buffers=(*logical.buffers, loss),
        scalars=(*logical.scalars, ScalarBinding(buffer=loss.name, values=(0.0,))),
        sections=(*logical.sections, section),
        reports=with_report(logical.reports, Quantity.EVAL_LOSS, loss.name),
    )


def _into_eval_loss(op: ops.Op) -> ops.Op:
    """The op, writing the loss of an evaluation where it wrote that of a micro-step, or added to it."""
    if not isinstance(op, ops.Compute):
        return op
    destinations = tuple(
        d
        if d is None or d.view.region.buffer != "loss"
        else replace(
            d,
            mode=Mode.WRITE,
            view=replace(d.view, region=replace(d.view.region, buffer="eval_loss")),
        )
        for d in op.destinations
    )
    return replace(op, destinations=destinations)


def evaluating_what_is_handed_on(program: Program, content: Content) -> Program:
    """An evaluation alone, whose loss is element 3 of a buffer with a content of ``blocks.0`` that steps hand on."""
    numel = program.flat_by_name["blocks.0"].padded_numel
    buffer = Buffer(
        name="handed_on", dtype=DType.F32, numel=numel, space=Space.DEVICE, role=Role.GATHERED
    )
    holding = Holding(region=whole(buffer), content=content)
    state = State(live=(buffer.name,), holdings=(holding,))
    one, loss = (
        Region(buffer=name, offset=at, numel=1) for name, at in ((buffer.name, 3), ("loss", 0))
    )
    body = (ops.Cast(source=one, destination=loss, stream=COMPUTE),)
    return replace(
        program,
        buffers=(*program.buffers, buffer),
        sections=(Section(name=EVALUATE, entry=state, body=body, exit=state),),
        reports=with_report(program.reports, Quantity.EVAL_LOSS, "loss"),
    )
