"""Choose the values that each unit's forward saves for its backward, and those that the backward recomputes.

A trace saves the values that autograd saved. But the result of an activation function, a norm or a cast takes as many
bytes as that of a matrix product and almost no time to compute, and its inputs are often saved anyway. For each forward
and its backward a minimum cut finds the fewest bytes that the backward needs (``min_cut``); equal units are cut once. A
value that is not saved is no longer an output of the forward, and the backward recomputes it just before its first use.
The same ops compute it from the same values, including seeds of dropout, so all results are bitwise equal; no random
number is drawn twice. Parameters are never saved: the backward reads its own copy, but only of flats that it reads
anyway, because another flat would cost another gather.

What ``select-saved`` changes::

    - buffer %g : f32[32] device saved
      $2 = aten.gelu.default($0) : f32[4,8]
    - return ($2, $4)
    + return ($4)
    - segment @b.backward($0: f32[], $1: f32[4,8], $2: f32[4,8], $3: f32[8,1]) {
    + segment @b.backward($0: f32[], $1: f32[4,8], $2: f32[8,1]) workspace eager=114960 {
    + $8 = aten.gelu.default($1) : f32[4,8]
    - $9 = aten.t.default($2) : f32[8,4;1,8]
    + $9 = aten.t.default($8) : f32[8,4;1,8]
    - alloc %g  stream=compute
    - compute @b.forward(%h, v: %b.param[0:8]) -> (%g, %loss)  unit=b stream=compute
    + compute @b.forward(%h, v: %b.param[0:8]) -> (%loss)  unit=b stream=compute
    - release %g  stream=compute
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from zeroir.ir.ops import Argument
from zeroir.ir.program import Program
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common.redraft import RecutChoices, redraft
from zeroir.passes.common.section_draft import (
    CallPosition,
    SectionDraft,
    argument,
)
from zeroir.passes.common.storages import Need, SegmentPair


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectSaved(Pass):
    """Save the values of fewest bytes, from which the backward recomputes the others."""

    name: ClassVar[str] = "select-saved"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.ONE_DEVICE})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    def __call__(self, program: Program) -> Program:
        """Return the program with other segments, and other buffers between them."""
        return redraft(program, _select)


def _select(draft: SectionDraft, choices: RecutChoices) -> None:
    """Choose the values to save for every backward, until no choice saves bytes any more."""
    backwards = [position for position in draft.calls if draft.is_late(position)]
    # Additional readers may change the best choice for a backward that was already processed.
    while sum(_improve(draft, position, choices) for position in backwards):
        pass


def _improve(draft: SectionDraft, backward: CallPosition, choices: RecutChoices) -> bool:
    """Choose for one backward and its forward; return whether that changed something."""
    call = draft.calls[backward]
    fillings = (draft.buffers.get(given.view.region.buffer) for given in call.op.arguments)
    forwards = [
        filled.writer
        for filled in fillings
        if filled is not None
        and not draft.is_late(filled.writer)
        and draft.calls[filled.writer].op.unit == call.op.unit
    ]
    if not forwards:
        return False
    forward = max(forwards)
    recut = choices.choose(_pair(draft, forward, backward))
    if recut is None:
        return False
    given, destinations = call.op.arguments, call.op.destinations
    inputs = draft.calls[forward].op.arguments
    outputs = draft.recut_forward(forward, recut)
    arguments = [
        argument(source, kind, given, inputs, outputs)
        for source, kind in zip(recut.sources, recut.backward.inputs, strict=True)
    ]
    draft.call(backward, recut.backward, arguments, destinations)
    return True


def _pair(draft: SectionDraft, forward: CallPosition, backward: CallPosition) -> SegmentPair:
    ours, theirs = draft.calls[forward], draft.calls[backward]
    flats = {a.view.region.buffer for a in theirs.op.arguments if a.parameter is not None}

    def leaf_bytes(given: Argument) -> int | None:
        if given.parameter is None:
            return draft.leaf_bytes(given.view.region.buffer, forward, backward)
        return 0 if given.view.region.buffer in flats else None

    return SegmentPair(
        forward=ours.segment,
        backward=theirs.segment,
        leaves=tuple(leaf_bytes(given) for given in ours.op.arguments),
        is_parameter=tuple(given.parameter is not None for given in ours.op.arguments),
        uses=tuple(draft.use(d, {backward}) for d in ours.op.destinations),
        needs=tuple(_need(draft, given, forward) for given in theirs.op.arguments),
    )


def _need(draft: SectionDraft, given: Argument, forward: CallPosition) -> Need | None:
    """Return the value of the forward, and the first of its elements, that an argument of the backward reads."""
    region = given.view.region
    call = draft.calls[forward]
    filled = draft.buffers.get(region.buffer)
    if filled is not None and filled.writer == forward:
        return Need(call.segment.outputs[filled.output], region.offset)
    for position, read in enumerate(call.op.arguments):
        origin = read.view.region
        if read.parameter is not None or given.parameter is not None:
            if read == given:
                return Need(position, 0)
        elif origin.buffer == region.buffer and origin.offset <= region.offset:
            return Need(position, region.offset - origin.offset)
    return None
