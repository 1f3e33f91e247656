"""Activation checkpointing: recompute the forward of a unit before its backward, instead of saving its values.

This is a policy of the minimum cut of ``select-saved`` (``min_cut``). That pass recomputes only cheap ops, inside the
backward. Here every op may be recomputed, so a forward saves little more than the inputs of its unit. A separate
``compute``, just before the backward, recomputes the values that only this backward reads. At that time the full
gradients of the backward are not live yet, and a bound on them does not delay the recomputation. Values with other
readers are still saved: the loss, new running statistics, and outputs that other forwards or backwards of other units
read.

The same ops compute the values from the same inputs. Activations live until then, and seeds of dropout are the same.
Where the forward changes running statistics, a buffer has the new ones until the last reader of the old ones. So all
results are bitwise equal, and every statistic changes once. A unit that is called twice, or whose forward is several
segments, is recomputed call by call, segment by segment. A segment is not changed if that would save more bytes than it
frees, or if its backward follows directly.

``select-saved`` runs before this pass: then a backward recomputes cheap values just before their use, and fewer bytes
are live between the second forward and the backward. In the other order all saved values of a unit would be live there,
because ``select-saved`` chooses only values that pass from forwards to backwards.

What ``recompute{units=a}`` changes::

    - buffer %m : f32[32] device saved
    + buffer %m : f32[32] device activation
    - return ($3, $2)
    + return ($3)
    + segment @a.recompute($0: f32[4,16], $1: f32[16,8]) workspace eager=114688 {
    + $2 = aten.mm.default($0, $1) : f32[4,8]
    + return ($2)
    - alloc %m  stream=compute
    - compute @a.forward(%x, w: %a.param[0:128]) -> (%h, %m)  unit=a stream=compute
    + compute @a.forward(%x, w: %a.param[0:128]) -> (%h)  unit=a stream=compute
      release %h  stream=compute
    + alloc %m  stream=compute
    + compute @a.recompute(%x, w: %a.param[0:128]) -> (%m)  unit=a stream=compute
      compute @a.backward(%dh, %m, %x) -> (grad w: %a.grad[0:128])  unit=a stream=compute
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from zeroir.ir.buffers import Region
from zeroir.ir.ops import Argument
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Segment
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common.min_cut import RecutPair
from zeroir.passes.common.prune import prune
from zeroir.passes.common.redraft import RECOMPUTE, RecutChoices, redraft
from zeroir.passes.common.section_draft import (
    CallPosition,
    SectionDraft,
    argument,
    in_buffer,
)
from zeroir.passes.common.storages import Need, SegmentPair
from zeroir.passes.common.units import ALL_REPEATED, check_patterns, matching

_FORWARD = ".forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute(Pass):
    """Recompute the forwards of these units before their backwards; by default those of all repeated units."""

    name: ClassVar[str] = "recompute"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.ONE_DEVICE})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    units: tuple[str, ...] = (ALL_REPEATED,)

    def __post_init__(self) -> None:
        check_patterns(self.units, self.name)

    def __call__(self, program: Program) -> Program:
        """Return the program in which the values that these units save are recomputed before their backwards.

        Raises:
            UserError: if a pattern names no unit.
        """
        units = matching(self.units, program, self.spec())
        return redraft(program, lambda draft, choices: _recompute(draft, choices, units))


def _recompute(draft: SectionDraft, choices: RecutChoices, units: frozenset[str]) -> None:
    """Recompute the saved values of forwards, starting with the last; values of earlier ones that it reads are kept."""
    forwards = [
        position
        for position, call in draft.calls.items()
        if not draft.is_late(position) and call.op.unit in units
    ]
    for forward in reversed(forwards):
        _recompute_call(draft, choices, forward)


def _recompute_call(draft: SectionDraft, choices: RecutChoices, forward: CallPosition) -> None:
    outputs, backwards = _own_outputs(draft, forward)
    if not outputs:
        return
    first = min(reader for name in outputs for reader in draft.late_readers(name))
    at = draft.before(first, forward)
    if not any(forward < position < at for position in draft.calls):
        return  # It would be computed twice in a row.
    recut = choices.choose(_pair(draft, forward, at, outputs, backwards))
    if recut is not None and recut.backward.nodes:
        _apply(draft, forward, at, outputs, recut)


def _own_outputs(
    draft: SectionDraft, forward: CallPosition
) -> tuple[dict[str, int], set[CallPosition]]:
    """Return the outputs, by buffer, that only the forward's own backwards read after the loss; and those backwards.

    These backwards are the calls of its unit that are the only readers of some output. This distinguishes the calls of
    a unit that is called twice, and the segments of a forward that is split in two.
    """
    call = draft.calls[forward]
    late: dict[str, set[CallPosition]] = {}
    outputs: dict[str, int] = {}
    backwards: set[CallPosition] = set()
    for output, destination in enumerate(call.op.destinations):
        filled = draft.filled_by(destination)
        if filled is None or not (readers := draft.late_readers(filled.buffer.name)):
            continue
        late[filled.buffer.name], outputs[filled.buffer.name] = readers, output
        if readers == filled.readers and all(draft.unit(r) == call.op.unit for r in readers):
            backwards |= readers
    return {name: output for name, output in outputs.items() if late[name] <= backwards}, backwards


def _pair(
    draft: SectionDraft,
    forward: CallPosition,
    at: CallPosition,
    outputs: dict[str, int],
    backwards: set[CallPosition],
) -> SegmentPair:
    """Return the forward, with a backward that passes the forward's outputs on to the real backwards."""
    call = draft.calls[forward]
    types = call.segment.output_types()

    def leaf_bytes(given: Argument) -> int | None:
        name = given.view.region.buffer
        if given.parameter is not None:
            return 0
        if draft.is_changed_between(name, forward, at) and draft.is_delayable(name):
            return 0
        return draft.leaf_bytes(name, forward, at)

    return SegmentPair(
        forward=call.segment,
        backward=Segment(
            name=call.segment.name.removesuffix(_FORWARD) + RECOMPUTE,
            inputs=tuple(types[output] for output in outputs.values()),
            nodes=(),
            outputs=tuple(range(len(outputs))),
        ),
        leaves=tuple(leaf_bytes(given) for given in call.op.arguments),
        is_parameter=tuple(given.parameter is not None for given in call.op.arguments),
        uses=tuple(draft.use(d, backwards) for d in call.op.destinations),
        needs=tuple(Need(call.segment.outputs[output], 0) for output in outputs.values()),
        computes_all=True,
    )


def _apply(
    draft: SectionDraft,
    forward: CallPosition,
    at: CallPosition,
    outputs: dict[str, int],
    recut: RecutPair,
) -> None:
    """Insert the call that recomputes the chosen values, and let the backwards read its results."""
    op = draft.calls[forward].op
    readers = {name: draft.late_readers(name) for name in outputs}
    saved = draft.recut_forward(forward, recut)
    old = {name: op.destinations[output] for name, output in outputs.items()}
    given = [Argument(view=destination.view) for destination in old.values() if destination]
    sources = [
        argument(source, kind, given, op.arguments, saved)
        for source, kind in zip(recut.sources, recut.backward.inputs, strict=True)
    ]
    computed: list[int] = []
    moved: dict[str, Region] = {}
    destinations = []
    for (name, destination), value in zip(old.items(), recut.backward.outputs, strict=True):
        assert destination is not None  # It fills a buffer.
        if value < len(sources):
            moved[name] = sources[value].view.region
            continue
        filled = in_buffer(destination, draft.fill(name, at, len(computed)))
        moved[name] = filled.view.region
        destinations.append(filled)
        computed.append(value)
    segment, inputs = prune(recut.backward, computed)
    arguments = tuple(sources[i] for i in inputs)
    draft.insert(at, replace(op, arguments=arguments, destinations=tuple(destinations)), segment)
    for name in dict.fromkeys(read.view.region.buffer for read in arguments):
        if draft.is_changed_between(name, forward, at):
            draft.delay(name, at)
    for name, region in moved.items():
        for reader in readers[name]:
            draft.redirect(reader, name, region)
