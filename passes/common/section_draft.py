"""A section whose calls change: the values that forwards save and backwards read, and inserted calls.

A draft knows for every buffer that one call fills which ops read it. When all changes are made, it returns the
section's ops: a buffer begins before the call that fills it and ends after the last op that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import NamedTuple, assert_never

from zeroir.ir import ops
from zeroir.ir.analysis.section_view import SectionView
from zeroir.ir.buffers import Buffer, Region, Role, Space, View, span_numel, whole
from zeroir.ir.ops import Argument, Compute, Destination, Mode, Op
from zeroir.ir.program import Program, Section
from zeroir.ir.segments.segment import Segment, TensorType
from zeroir.passes.common.min_cut import (
    FromBackward,
    FromInput,
    FromOutput,
    RecutPair,
    Source,
)
from zeroir.passes.common.storages import Use


class CallPosition(NamedTuple):
    """The position of a call: at an op of the section, or before that op, in order among the other calls there."""

    op: int
    is_own: bool = True
    order: int = 0


@dataclass(slots=True)
class DraftCall:
    """A compute op, with the segment that it now calls; the name of a new segment may still change."""

    op: Compute
    segment: Segment


@dataclass(slots=True)
class DraftBuffer:
    """A buffer that one call fills: which call and which of its outputs, and the ops that read it."""

    buffer: Buffer
    writer: CallPosition
    output: int
    readers: set[CallPosition]


class SectionDraft:
    """The calls of a section and the buffers that they fill, while a pass changes them."""

    def __init__(self, program: Program, section: Section) -> None:
        self._program = program
        self._body = section.body
        self.view = SectionView(program, section.body)
        self.calls = {
            CallPosition(index): DraftCall(op, program.segment_by_name[op.segment])
            for index, op in self.view.computes.items()
        }
        self.buffers = {
            name: DraftBuffer(
                filled.buffer,
                CallPosition(filled.writer),
                filled.output,
                {CallPosition(reader) for reader in filled.readers},
            )
            for name, filled in self.view.filled.items()
            if filled.readers
        }
        self._filled = frozenset(self.buffers)
        self._delayed: dict[str, str] = {}
        """The buffer with the new content of a persistent one until that has been read for the last time."""
        self._backward = CallPosition(self.view.backward.start)

    # --------------------------------------------------------------------------------------------------- questions

    def is_late(self, position: CallPosition) -> bool:
        """Return whether an op is after the one that computes the loss."""
        return position >= CallPosition(self._backward.op, is_own=False)

    def late_readers(self, name: str) -> set[CallPosition]:
        """Return the ops after the loss that read a buffer that one call fills."""
        return {reader for reader in self.buffers[name].readers if self.is_late(reader)}

    def filled_by(self, destination: Destination | None) -> DraftBuffer | None:
        """Return the buffer of a result, where only this result fills it."""
        return None if destination is None else self.buffers.get(destination.view.region.buffer)

    def unit(self, position: CallPosition) -> str | None:
        """Return the unit of a call; None for another op."""
        return self.calls[position].op.unit if position in self.calls else None

    def before(self, reader: CallPosition, forward: CallPosition) -> CallPosition:
        """Return the position of a repeated forward whose results an op reads: before the op's own allocs."""
        index = reader.op
        while reader.is_own and isinstance(self._body[index - 1], ops.Alloc | ops.Fill):
            index -= 1
        return CallPosition(index, is_own=False, order=forward.op)

    def leaf_bytes(self, name: str, forward: CallPosition, at: CallPosition) -> int | None:
        """Return the bytes needed to keep an input of a forward, except parameters, for a later op.

        None if impossible.
        """
        if name in self.buffers:
            return 0 if self.late_readers(name) else self.buffers[name].buffer.size_bytes
        # A persistent buffer exists in the backward, but with another content if the step has changed it.
        is_there = self._program.buffer_by_name[name].is_persistent
        return 0 if is_there and not self.is_changed_between(name, forward, at) else None

    def is_changed_between(self, name: str, forward: CallPosition, at: CallPosition) -> bool:
        """Return whether a persistent buffer is written between a forward and a later op."""
        if name in self.buffers:
            return False
        writers = self.view.writers.get(name, ())
        return any(forward <= CallPosition(writer) < at for writer in writers)

    def use(self, destination: Destination | None, besides: Collection[CallPosition]) -> Use:
        """Return the readers of a result of a forward, apart from these backwards."""
        filled = self.filled_by(destination)
        if filled is None:
            return Use.OTHERS
        further_readers = filled.readers.difference(besides)
        if any(map(self.is_late, further_readers)):
            return Use.BACKWARDS
        return Use.OTHERS if further_readers else Use.NOBODY

    def is_delayable(self, name: str) -> bool:
        """Return whether one op replaces the content of a persistent buffer, and no op reads it afterwards."""
        writers = self.view.writers[name]
        op = self._body[writers[0]]
        if len(writers) > 1 or not isinstance(op, Compute):
            return False
        results = [d for d in op.destinations if d is not None and d.view.region.buffer == name]
        is_whole = [d.view.region for d in results] == [whole(self._program.buffer_by_name[name])]
        readers = self.view.readers.get(name, ())
        is_replaced = is_whole and results[0].mode is Mode.WRITE
        return is_replaced and all(reader <= writers[0] for reader in readers)

    # ----------------------------------------------------------------------------------------------------- changes

    def recut_forward(
        self, forward: CallPosition, recut: RecutPair
    ) -> Sequence[Destination | None]:
        """Make a forward return the chosen values; return the destinations of its outputs.

        The buffers of dropped outputs are removed, and so is a call without outputs; new outputs have buffers.
        """
        op = self.calls[forward].op
        destinations: list[Destination | None] = []
        types = recut.forward.output_types()
        for position, (old, kind) in enumerate(zip(recut.outputs, types, strict=True)):
            if old is None:
                buffer = self._saved_buffer(op.unit, kind)
                self.buffers[buffer.name] = DraftBuffer(buffer, forward, position, set())
                view = View(region=whole(buffer), shape=kind.shape, stride=kind.stride)
                destinations.append(Destination(view=view))
                continue
            destinations.append(op.destinations[old])
            if (filled := self.filled_by(op.destinations[old])) is not None:
                filled.output = position
        for old, destination in enumerate(op.destinations):
            if old not in recut.outputs and destination is not None:
                del self.buffers[destination.view.region.buffer]
        self.call(forward, recut.forward, [op.arguments[i] for i in recut.inputs], destinations)
        if not destinations:
            self.call(forward, recut.forward, (), ())
            del self.calls[forward]
        return destinations

    def _saved_buffer(self, unit: str, kind: TensorType) -> Buffer:
        names = (f"{unit}.saved.{i}" for i in count())
        return Buffer(
            name=self._free_name(names),
            dtype=kind.dtype,
            numel=kind.numel,
            space=Space.DEVICE,
            role=Role.SAVED,
        )

    def _free_name(self, names: Iterable[str]) -> str:
        taken = self._program.buffer_by_name.keys() | self.buffers.keys()
        return next(name for name in names if name not in taken)

    def call(
        self,
        position: CallPosition,
        segment: Segment,
        arguments: Sequence[Argument],
        destinations: Sequence[Destination | None],
    ) -> None:
        """Make a call use another segment; update the readers of buffers accordingly."""
        call = self.calls[position]
        for argument in call.op.arguments:
            if (filled := self.buffers.get(argument.view.region.buffer)) is not None:
                filled.readers.discard(position)
        for argument in arguments:
            if (filled := self.buffers.get(argument.view.region.buffer)) is not None:
                filled.readers.add(position)
        call.segment = segment
        call.op = replace(call.op, arguments=tuple(arguments), destinations=tuple(destinations))

    def redirect(self, position: CallPosition, buffer: str, region: Region) -> None:
        """Make a call read another region instead of a buffer."""
        op, segment = self.calls[position].op, self.calls[position].segment
        arguments = [
            _moved(read, region) if read.view.region.buffer == buffer else read
            for read in op.arguments
        ]
        self.call(position, segment, arguments, op.destinations)

    def insert(self, position: CallPosition, op: Compute, segment: Segment) -> None:
        """Add a call. The buffers that it fills keep their names where no other call fills them."""
        self.calls[position] = DraftCall(replace(op, arguments=(), event=None), segment)
        self.call(position, segment, op.arguments, op.destinations)

    def fill(self, name: str, writer: CallPosition, output: int) -> str:
        """Begin a buffer that a new call fills, as large as one of the program; return its name.

        It has the name of that buffer, unless another call still fills it.
        """
        stem = f"{name}.again"
        own = self._free_name(chain((stem,), (f"{stem}.{i}" for i in count(1))))
        free = own if name in self.buffers else name
        old = self._program.buffer_by_name.get(name) or self.buffers[name].buffer
        self.buffers[free] = DraftBuffer(replace(old, name=free), writer, output, set())
        return free

    def delay(self, name: str, reader: CallPosition) -> None:
        """Delay the change of a persistent buffer until after an op that reads its old content."""
        if name not in self._delayed:
            stem = f"{name}.new"
            new = self._free_name(chain((stem,), (f"{stem}.{i}" for i in count(1))))
            (writer,) = self.view.writers[name]
            op = self.calls[CallPosition(writer)].op
            old = self._program.buffer_by_name[name]
            buffer = replace(old, name=new, role=Role.ACTIVATION, holds=None)
            destinations = [
                in_buffer(d, new) if d is not None and d.view.region.buffer == name else d
                for d in op.destinations
            ]
            output = next(
                i
                for i, d in enumerate(destinations)
                if d is not None and d.view.region.buffer == new
            )
            self.buffers[new] = DraftBuffer(buffer, CallPosition(writer), output, set())
            self.calls[CallPosition(writer)].op = replace(op, destinations=tuple(destinations))
            self._delayed[name] = new
        self.buffers[self._delayed[name]].readers.add(reader)

    # ------------------------------------------------------------------------------------------------- the result

    def roles(self) -> Mapping[str, Buffer]:
        """Return the buffers that forwards and new calls fill; those that a backward reads have the role ``saved``."""
        filled: dict[str, Buffer] = {}
        for name, item in self.buffers.items():
            is_early = not self.is_late(item.writer)
            if not (is_early or not item.writer.is_own):
                continue
            buffer = item.buffer
            if buffer.role in (Role.SAVED, Role.ACTIVATION) and name not in self._delayed.values():
                is_saved = is_early and any(r in self.calls for r in self.late_readers(name))
                buffer = replace(buffer, role=Role.SAVED if is_saved else Role.ACTIVATION)
            filled[name] = buffer
        return filled

    def ops(self, name_of: Callable[[Segment], str]) -> Iterator[Op]:
        """Yield the ops, with the calls under the names of their segments."""
        begun: dict[CallPosition, list[str]] = {}
        ended: dict[CallPosition, list[str]] = {}
        moved_allocs = set(self._filled - self.buffers.keys())
        moved_releases = set(moved_allocs)
        for name, item in self.buffers.items():
            old = self.view.filled.get(name)
            if old is None or item.writer != CallPosition(old.writer):
                begun.setdefault(item.writer, []).append(name)
                moved_allocs.add(name)
            last = max(item.readers, default=item.writer)
            if old is None or last != CallPosition(max(old.readers)):
                ended.setdefault(last, []).append(name)
                moved_releases.add(name)

        def call(position: CallPosition) -> Iterator[Op]:
            called = self.calls[position]
            for name in begun.get(position, ()):
                yield ops.Alloc(buffer=name, stream=called.op.stream)
            yield replace(called.op, segment=name_of(called.segment))

        def ends(position: CallPosition, stream: str) -> Iterator[Op]:
            changes = {new: name for name, new in self._delayed.items()}
            for name in ended.get(position, ()):
                if name in changes:
                    target = whole(self._program.buffer_by_name[changes[name]])
                    source = replace(target, buffer=name)
                    yield ops.Cast(source=source, destination=target, stream=stream)
                yield ops.Release(buffer=name, stream=stream)

        inserted: dict[int, list[CallPosition]] = {}
        for position in sorted(self.calls):
            if not position.is_own:
                inserted.setdefault(position.op, []).append(position)
        for index, op in enumerate(self._body):
            for position in inserted.get(index, ()):
                yield from call(position)
                yield from ends(position, self.calls[position].op.stream)
            match op:
                case ops.Alloc() if op.buffer in moved_allocs:
                    continue
                case ops.Release() if op.buffer in moved_releases:
                    continue
                case Compute() if CallPosition(index) in self.calls:
                    yield from call(CallPosition(index))
                case Compute():
                    continue
                case _:
                    yield op
            yield from ends(CallPosition(index), self.view.effects[index].stream)


def _moved(read: Argument, region: Region) -> Argument:
    """Return the argument with its elements in a region instead of at the start of a buffer."""
    offset = region.offset + read.view.region.offset
    moved = replace(read.view.region, buffer=region.buffer, offset=offset)
    return replace(read, view=replace(read.view, region=moved))


def in_buffer(destination: Destination, buffer: str) -> Destination:
    """Return the destination in another buffer."""
    region = replace(destination.view.region, buffer=buffer)
    return replace(destination, view=replace(destination.view, region=region))


def argument(
    source: Source,
    kind: TensorType,
    given: Sequence[Argument],
    inputs: Sequence[Argument],
    outputs: Sequence[Destination | None],
) -> Argument:
    """Return the argument for an input of a new backward, from those of the old backward and of the forward."""
    match source:
        case FromBackward(position=position):
            return given[position]
        case FromInput(position=position, offset=offset):
            if inputs[position].parameter is not None:
                return inputs[position]
            region = inputs[position].view.region
        case FromOutput(position=position, offset=offset):
            destination = outputs[position]
            assert destination is not None  # Only a kept value is read.
            region = destination.view.region
        case _:
            assert_never(source)
    seen = Region(
        buffer=region.buffer,
        offset=region.offset + offset,
        numel=span_numel(kind.shape, kind.stride),
    )
    return Argument(view=View(region=seen, shape=kind.shape, stride=kind.stride))
