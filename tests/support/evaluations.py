"""Programs with a section that evaluates, made of their training forward."""

from __future__ import annotations

from dataclasses import replace

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.contents import NamedContent
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Mode
from zeroir.ir.program import EVALUATE, LAST_MICRO_STEP, Program, ScalarBinding, Section
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
