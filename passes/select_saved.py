"""Choose what each unit's forward saves for its backward, and what the backward computes once more.

A trace saves whatever autograd saved. But the result of an activation function, a norm or a cast costs as many bytes
as a matrix product's and next to nothing to compute, and often enough what it was computed from is there anyway. For
each forward and its backward a minimum cut finds the fewest bytes from which the backward gets by (``min_cut``); equal
units are looked at once. What the forward need not save any more is not an output of it any more, and the backward
begins with what it computes again, each value just before its first use. It is computed by the same ops from the same
values, seeds of dropout included, so every bit stays the same; no random number is drawn twice. Parameters are never
saved: the backward reads its own copy, but of no flat that it does not read already, which would cost another gather.

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

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import ClassVar, assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, View, span_numel, whole
from zeroir.ir.effects import Effects, effects
from zeroir.ir.ops import Argument, Compute, Destination, Mode, Op
from zeroir.ir.program import Program, Section
from zeroir.ir.segment import Segment, TensorType
from zeroir.passes.base import NO_FACTS, Fact, Pass
from zeroir.passes.common.min_cut import Choice, Given, Input, Output, Source, choose
from zeroir.passes.common.storages import Need, Pair, Use


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectSaved(Pass):
    """Save for the backward what takes fewest bytes, and compute the rest there once more."""

    name: ClassVar[str] = "select-saved"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.ONE_DEVICE})
    establishes: ClassVar[frozenset[Fact]] = NO_FACTS
    destroys: ClassVar[frozenset[Fact]] = NO_FACTS

    def __call__(self, program: Program) -> Program:
        """The program with other segments, and other buffers between them."""
        choices = _Choices()
        bodies: dict[tuple[Op, ...], _Body] = {}
        for section in program.sections:
            if section.body not in bodies:
                bodies[section.body] = _Body(program, section, choices)
        segments = _named(program, bodies.values(), choices)
        buffers: dict[str, Buffer] = {}
        for body in bodies.values():
            buffers |= body.buffers()
        rewritten = {before: tuple(body.ops(segments)) for before, body in bodies.items()}
        sections = [replace(section, body=rewritten[section.body]) for section in program.sections]
        return _tidied(program, sections, buffers, list(segments.values()))


class _Choices:
    """Choices for pairs seen before: equal units are cut once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Choice | None] = {}
        self._digests: dict[int, tuple[Segment, str]] = {}

    def digest(self, segment: Segment) -> str:
        """The segment's digest; the segment is kept, so that its identity tells it."""
        found = self._digests.get(id(segment))
        if found is None:
            found = self._digests[id(segment)] = (segment, segment.digest())
        return found[1]

    def choose(self, pair: Pair) -> Choice | None:
        """What is best for a pair."""
        one, other = self.digest(pair.forward), self.digest(pair.backward)
        key = (one, other, pair.leaves, pair.is_parameter, pair.uses, pair.needs)
        if key not in self._known:
            self._known[key] = choose(pair)
        return self._known[key]


@dataclass(slots=True)
class _Call:
    """A compute op with the segment that it calls now."""

    op: Compute
    segment: Segment


@dataclass(slots=True)
class _Temporary:
    """A buffer that one op fills, all of it: which op and which of its outputs, and the ops that read it."""

    buffer: Buffer
    writer: int
    output: int
    readers: set[int] = field(default_factory=set)


class _Body:
    """One section's ops, rewritten until nothing is gained any more."""

    def __init__(self, program: Program, section: Section, choices: _Choices) -> None:
        self._program = program
        self._section = section
        self._choices = choices
        self._effects = [effects(op) for op in section.body]
        self.calls = {
            index: _Call(op, program.segment_by_name[op.segment])
            for index, op in enumerate(section.body)
            if isinstance(op, Compute)
        }
        self._temporaries = self._find_temporaries()
        self._last = {name: max(item.readers) for name, item in self._temporaries.items()}
        self._removed: set[str] = set()
        self._written = {
            region.buffer for e in self._effects for region in (*e.writes, *e.accumulates)
        }
        loss = [
            index
            for index in self.calls
            if any(region.buffer == program.loss for region in _writes(self._effects[index]))
        ]
        self._loss = max(loss, default=len(section.body))
        backwards = [index for index in self.calls if index > self._loss]
        # What more backwards read by now may tip the scales for one that has been looked at.
        while sum(self._improve(index) for index in backwards):
            pass

    def _find_temporaries(self) -> dict[str, _Temporary]:
        """The buffers that only this section knows and one compute op fills."""
        found: dict[str, _Temporary] = {}
        allocated, freed, written = Counter[str](), Counter[str](), Counter[str]()
        for index, effect in enumerate(self._effects):
            allocated.update(effect.allocs)
            freed.update(effect.frees)
            written.update(region.buffer for region in _writes(effect))
            if index not in self.calls:
                continue
            for output, destination in enumerate(self.calls[index].op.destinations):
                if destination is None or destination.mode is not Mode.WRITE:
                    continue
                buffer = self._program.buffer_by_name[destination.view.region.buffer]
                is_all = destination.view.region == whole(buffer)
                if is_all and not buffer.is_persistent:
                    found[buffer.name] = _Temporary(buffer, index, output)
        for index, effect in enumerate(self._effects):
            for region in (*effect.reads, *effect.accumulates):
                if region.buffer in found:
                    found[region.buffer].readers.add(index)
        return {
            name: item
            for name, item in found.items()
            if allocated[name] == freed[name] == written[name] == 1 and item.readers
        }

    # ------------------------------------------------------------------------------------------------- one pair

    def _improve(self, backward: int) -> bool:
        """Choose for one backward and its forward; whether that changed something."""
        call = self.calls[backward]
        forwards = [
            item.writer
            for argument in call.op.arguments
            if (item := self._temporaries.get(argument.view.region.buffer)) is not None
            and item.writer <= self._loss
            and self.calls[item.writer].op.unit == call.op.unit
        ]
        if not forwards:
            return False
        forward = max(forwards)
        choice = self._choices.choose(self._pair(forward, backward))
        if choice is None:
            return False
        self._apply(choice, forward, backward)
        return True

    def _pair(self, forward: int, backward: int) -> Pair:
        one, other = self.calls[forward], self.calls[backward]
        flats = {a.view.region.buffer for a in other.op.arguments if a.parameter is not None}
        return Pair(
            forward=one.segment,
            backward=other.segment,
            leaves=tuple(self._leaf_bytes(a, flats) for a in one.op.arguments),
            is_parameter=tuple(a.parameter is not None for a in one.op.arguments),
            uses=tuple(self._use(d, backward) for d in one.op.destinations),
            needs=tuple(self._need(a, forward) for a in other.op.arguments),
        )

    def _leaf_bytes(self, argument: Argument, flats: set[str]) -> int | None:
        name = argument.view.region.buffer
        if argument.parameter is not None:
            return 0 if name in flats else None
        item = self._temporaries.get(name)
        if item is None:
            # What outlives the step is there in the backward, but not as it was if the step changes it.
            buffer = self._program.buffer_by_name[name]
            return 0 if buffer.is_persistent and name not in self._written else None
        return 0 if any(r > self._loss for r in item.readers) else item.buffer.size_bytes

    def _use(self, destination: Destination | None, backward: int) -> Use:
        item = self._temporaries.get(destination.view.region.buffer) if destination else None
        if item is None:
            return Use.OTHERS
        others = item.readers - {backward}
        if any(reader > self._loss for reader in others):
            return Use.BACKWARDS
        return Use.OTHERS if others else Use.NOBODY

    def _need(self, argument: Argument, forward: int) -> Need | None:
        region = argument.view.region
        call = self.calls[forward]
        item = self._temporaries.get(region.buffer)
        if item is not None and item.writer == forward:
            return Need(call.segment.outputs[item.output], region.offset)
        for position, other in enumerate(call.op.arguments):
            origin = other.view.region
            if other.parameter is not None or argument.parameter is not None:
                if other == argument:
                    return Need(position, 0)
            elif origin.buffer == region.buffer and origin.offset <= region.offset:
                return Need(position, region.offset - origin.offset)
        return None

    def _apply(self, choice: Choice, forward: int, backward: int) -> None:
        one, other = self.calls[forward], self.calls[backward]
        destinations: list[Destination | None] = []
        for position, (old, kind) in enumerate(
            zip(choice.outputs, choice.forward.output_types(), strict=True)
        ):
            if old is None:
                buffer = Buffer(
                    name=self._free_name(one.op.unit),
                    dtype=kind.dtype,
                    numel=kind.numel,
                    space=Space.DEVICE,
                    role=Role.SAVED,
                )
                self._temporaries[buffer.name] = _Temporary(buffer, forward, position)
                view = View(region=whole(buffer), shape=kind.shape, stride=kind.stride)
                destinations.append(Destination(view=view))
                continue
            destination = one.op.destinations[old]
            destinations.append(destination)
            item = self._temporary(destination)
            if item is not None:
                item.output = position
        for old, destination in enumerate(one.op.destinations):
            if old not in choice.outputs and destination is not None:
                name = destination.view.region.buffer
                del self._temporaries[name]
                self._removed.add(name)
        old_inputs = one.op.arguments
        arguments = [
            self._argument(source, kind, other.op.arguments, old_inputs, destinations)
            for source, kind in zip(choice.sources, choice.backward.inputs, strict=True)
        ]
        self._call(forward, choice.forward, [old_inputs[i] for i in choice.inputs], destinations)
        self._call(backward, choice.backward, arguments, other.op.destinations)

    def _temporary(self, destination: Destination | None) -> _Temporary | None:
        return (
            None if destination is None else self._temporaries.get(destination.view.region.buffer)
        )

    def _free_name(self, unit: str) -> str:
        taken = self._program.buffer_by_name.keys() | self._temporaries.keys()
        return next(name for i in count() if (name := f"{unit}.saved.{i}") not in taken)

    def _argument(
        self,
        source: Source,
        kind: TensorType,
        given: Sequence[Argument],
        inputs: Sequence[Argument],
        outputs: Sequence[Destination | None],
    ) -> Argument:
        match source:
            case Given(position=position):
                return given[position]
            case Input(position=position, offset=offset):
                if inputs[position].parameter is not None:
                    return inputs[position]
                region = inputs[position].view.region
            case Output(position=position, offset=offset):
                destination = outputs[position]
                assert destination is not None  # Only what is kept is looked at.
                region = destination.view.region
            case _:
                assert_never(source)
        seen = Region(
            buffer=region.buffer,
            offset=region.offset + offset,
            numel=span_numel(kind.shape, kind.stride),
        )
        return Argument(view=View(region=seen, shape=kind.shape, stride=kind.stride))

    def _call(
        self,
        index: int,
        segment: Segment,
        arguments: Sequence[Argument],
        destinations: Sequence[Destination | None],
    ) -> None:
        """Let an op call another segment; who reads what changes with it."""
        call = self.calls[index]
        for argument in call.op.arguments:
            if (item := self._temporaries.get(argument.view.region.buffer)) is not None:
                item.readers.discard(index)
        for argument in arguments:
            if (item := self._temporaries.get(argument.view.region.buffer)) is not None:
                item.readers.add(index)
        call.segment = segment
        call.op = replace(call.op, arguments=tuple(arguments), destinations=tuple(destinations))

    # -------------------------------------------------------------------------------------------------- the result

    def buffers(self) -> Mapping[str, Buffer]:
        """The buffers that a forward fills, with roles that say whether a backward reads them."""
        found: dict[str, Buffer] = {}
        for name, item in self._temporaries.items():
            if item.writer <= self._loss and item.buffer.role in (Role.SAVED, Role.ACTIVATION):
                is_saved = any(reader > self._loss for reader in item.readers)
                role = Role.SAVED if is_saved else Role.ACTIVATION
                found[name] = replace(item.buffer, role=role)
        return found

    def ops(self, names: Mapping[str, Segment]) -> Iterator[Op]:
        """The ops, calling segments by their new names; memory is given back after its new last use."""
        before: dict[int, list[str]] = {}
        after: dict[int, list[str]] = {}
        moved: set[str] = set()
        for name, item in self._temporaries.items():
            if name not in self._last:
                before.setdefault(item.writer, []).append(name)
            last = max(item.readers, default=item.writer)
            if last != self._last.get(name):
                moved.add(name)
                after.setdefault(last, []).append(name)
        for index, op in enumerate(self._section.body):
            match op:
                case ops.Alloc() if op.buffer in self._removed:
                    continue
                case ops.Release() if op.buffer in self._removed | moved:
                    continue
                case Compute():
                    call = self.calls[index]
                    stream = op.stream
                    for name in before.get(index, ()):
                        yield ops.Alloc(buffer=name, stream=stream)
                    yield replace(call.op, segment=names[self._choices.digest(call.segment)].name)
                    for name in after.get(index, ()):
                        yield ops.Release(buffer=name, stream=stream)
                case _:
                    yield op


def _writes(effect: Effects) -> tuple[Region, ...]:
    return (*effect.writes, *effect.accumulates)


def _named(program: Program, bodies: Iterable[_Body], choices: _Choices) -> Mapping[str, Segment]:
    """The segments that are called, by digest, in the order of their first calls; each with a name of its own."""
    called: dict[str, Segment] = {}
    for body in bodies:
        for call in body.calls.values():
            called.setdefault(choices.digest(call.segment), call.segment)
    taken = {
        segment.name
        for segment in called.values()
        if program.segment_by_name[segment.name] is segment
    }
    found: dict[str, Segment] = {}
    for digest, segment in called.items():
        name = segment.name
        if program.segment_by_name[name] is not segment:
            names = chain((name,), (f"{name}.{i}" for i in count(1)))
            name = next(free for free in names if free not in taken)
            taken.add(name)
        found[digest] = replace(segment, name=name)
    return found


def _tidied(
    program: Program,
    sections: Sequence[Section],
    made: Mapping[str, Buffer],
    segments: Sequence[Segment],
) -> Program:
    """The program with new sections and segments, and with the buffers that these speak of."""
    gone = _mentioned(program.sections) - _mentioned(sections)
    buffers = [made.get(b.name, b) for b in program.buffers if b.name not in gone]
    buffers += [buffer for name, buffer in made.items() if name not in program.buffer_by_name]
    return replace(
        program, buffers=tuple(buffers), segments=tuple(segments), sections=tuple(sections)
    )


def _mentioned(sections: Iterable[Section]) -> set[str]:
    """The buffers that are allocated in sections."""
    return {op.buffer for section in sections for op in section.body if isinstance(op, ops.Alloc)}
