"""Which forwards of a section are issued again before their backwards, for which values, and the ops that then result.

Who belongs to whom is told by data: the backwards of a forward are the ops of its unit, after the loss, that read what
nobody else reads of it. So the calls of a unit that is called twice are told apart, and so are the segments of a
forward that is cut in two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, whole
from zeroir.ir.effects import effects
from zeroir.ir.ops import Argument, Compute, Destination, Mode, Op
from zeroir.ir.program import Program
from zeroir.ir.segment import Segment
from zeroir.passes.common.prune import Pruned, prune

_FORWARD = ".forward"
_RECOMPUTE = ".recompute"


class Call(NamedTuple):
    """A compute op and the segment that it calls; of a segment that is new the name is a wish."""

    op: Compute
    segment: Segment


class Pruner:
    """Cut segments, each in the same way only once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...]], Pruned] = {}

    def prune(self, segment: Segment, positions: Sequence[int]) -> Pruned:
        """The segment with these of its outputs."""
        key = (segment.name, tuple(positions))
        if key not in self._known:
            self._known[key] = prune(segment, [segment.outputs[i] for i in positions])
        return self._known[key]


@dataclass(slots=True, kw_only=True)
class _Temporary:
    """A buffer that one op fills, all of it: which op and which of its outputs, and the ops that read it."""

    buffer: Buffer
    writer: int
    output: int
    readers: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """A forward issued again just before the op at ``at``, for the outputs at these positions."""

    forward: int
    at: int
    outputs: tuple[int, ...]
    pruned: Pruned

    @property
    def order(self) -> tuple[int, int]:
        """Where it stands among others."""
        return (self.at, self.forward)


class Body:
    """The ops of a section, with the forwards of some units issued again."""

    def __init__(
        self, program: Program, body: Sequence[Op], units: frozenset[str], pruner: Pruner
    ) -> None:
        self._program = program
        self._body = body
        self._pruner = pruner
        self._effects = [effects(op) for op in body]
        self._writers: dict[str, list[int]] = {}
        self._readers: dict[str, list[int]] = {}
        for index, effect in enumerate(self._effects):
            for region in (*effect.writes, *effect.accumulates):
                self._writers.setdefault(region.buffer, []).append(index)
            for region in (*effect.reads, *effect.accumulates):
                self._readers.setdefault(region.buffer, []).append(index)
        self._temporaries = self._find_temporaries()
        self._loss = max(self._writers.get(program.loss or "", ()), default=len(body))
        self._postponed: dict[str, str] = {}
        """The buffer that holds what a persistent one is to hold once it has been read for the last time."""
        self._agains = self._find([i for i in self._calls() if self._call(i).unit in units])
        self._doubles = self._find_doubles()

    @property
    def is_changed(self) -> bool:
        """Whether anything is issued again."""
        return bool(self._agains)

    # ------------------------------------------------------------------------------------------------- what there is

    def _calls(self) -> Iterator[int]:
        """The forwards."""
        for index, op in enumerate(self._body[: self._loss + 1]):
            if isinstance(op, Compute):
                yield index

    def _call(self, index: int) -> Compute:
        op = self._body[index]
        assert isinstance(op, Compute)
        return op

    def _find_temporaries(self) -> dict[str, _Temporary]:
        """The buffers that only this section knows and one compute op fills."""
        allocated, freed = Counter[str](), Counter[str]()
        for effect in self._effects:
            allocated.update(effect.allocs)
            freed.update(effect.frees)
        found: dict[str, _Temporary] = {}
        for index, op in enumerate(self._body):
            for output, destination in enumerate(
                op.destinations if isinstance(op, Compute) else ()
            ):
                if destination is None or destination.mode is not Mode.WRITE:
                    continue
                buffer = self._program.buffer_by_name[destination.view.region.buffer]
                is_once = allocated[buffer.name] == freed[buffer.name] == 1
                if is_once and self._is_sole_write(buffer, index, destination):
                    readers = set(self._readers.get(buffer.name, ()))
                    found[buffer.name] = _Temporary(
                        buffer=buffer, writer=index, output=output, readers=readers
                    )
        return found

    def _is_sole_write(self, buffer: Buffer, index: int, destination: Destination) -> bool:
        """Whether the op's result is all that the section ever writes to the buffer."""
        is_all = destination.view.region == whole(buffer)
        return is_all and self._writers[buffer.name] == [index]

    def _output(self, forward: int, output: int) -> _Temporary | None:
        destination = self._call(forward).destinations[output]
        return (
            None if destination is None else self._temporaries.get(destination.view.region.buffer)
        )

    def _name(self, forward: int, output: int) -> str:
        item = self._output(forward, output)
        assert item is not None  # Only temporaries are made anew.
        return item.buffer.name

    def _late(self, item: _Temporary) -> set[int]:
        """Who reads it after the loss."""
        return {reader for reader in item.readers if reader > self._loss}

    # ---------------------------------------------------------------------------------------------------- the choice

    def _find(self, forwards: Iterable[int]) -> tuple[_Again, ...]:
        """The forwards to issue again, in the order in which they then stand."""
        wanted = {forward: self._own(forward) for forward in forwards}
        agains: dict[int, _Again] = {}
        is_settled = False
        while not is_settled:
            agains = {f: self._again(f, outputs) for f, outputs in wanted.items() if outputs}
            # What is read when a forward is issued again stays from the first run on.
            read = {r.buffer for again in agains.values() for r in self._read(again)}
            fewer = {
                forward: [o for o in outputs if self._name(forward, o) not in read]
                for forward, outputs in wanted.items()
            }
            is_settled = fewer == wanted
            wanted = fewer
        kept: set[str] = set()
        found: list[_Again] = []
        for again in agains.values():
            if self._is_apart(again) and self._is_alike(again) and self._is_worth(again, kept):
                kept.update(region.buffer for region in self._read(again))
                found.append(again)
        self._postpone(found)
        return tuple(sorted(found, key=lambda again: again.order))

    def _own(self, forward: int) -> list[int]:
        """The outputs that only the forward's own backwards read after the loss."""
        unit = self._call(forward).unit
        items = {
            output: item
            for output in range(len(self._call(forward).destinations))
            if (item := self._output(forward, output)) is not None and self._late(item)
        }
        backwards = {
            reader
            for item in items.values()
            if item.readers == self._late(item) and self._are_of(item.readers, unit)
            for reader in item.readers
        }
        return [output for output, item in items.items() if self._late(item) <= backwards]

    def _are_of(self, indices: Iterable[int], unit: str) -> bool:
        found = (self._body[index] for index in indices)
        return all(isinstance(op, Compute) and op.unit == unit for op in found)

    def _again(self, forward: int, outputs: Sequence[int]) -> _Again:
        segment = self._program.segment_by_name[self._call(forward).segment]
        items = (self._output(forward, output) for output in outputs)
        return _Again(
            forward=forward,
            at=min(reader for item in items if item is not None for reader in self._late(item)),
            outputs=tuple(outputs),
            pruned=self._pruner.prune(segment, outputs),
        )

    def _read(self, again: _Again) -> list[Region]:
        """What the second run reads."""
        arguments = self._call(again.forward).arguments
        return [arguments[i].view.region for i in again.pruned.inputs]

    def _is_apart(self, again: _Again) -> bool:
        """Whether anything is computed between the two runs."""
        between = self._body[again.forward + 1 : again.at]
        return any(isinstance(op, Compute) for op in between)

    def _is_alike(self, again: _Again) -> bool:
        """Whether the second run finds what the first one found, if need be by postponing a change."""
        for name in {region.buffer for region in self._read(again)} - self._temporaries.keys():
            if not self._program.buffer_by_name[name].is_persistent:
                return False
            if self._is_changed_before(name, again) and not self._is_postponable(name):
                return False
        return True

    def _is_changed_before(self, name: str, again: _Again) -> bool:
        return any(again.forward <= writer < again.at for writer in self._writers.get(name, ()))

    def _is_postponable(self, name: str) -> bool:
        """Whether one op replaces what a buffer holds, and nobody reads it afterwards."""
        writers = self._writers[name]
        op = self._body[writers[0]]
        if len(writers) > 1 or not isinstance(op, Compute):
            return False
        into = [d for d in op.destinations if d is not None and d.view.region.buffer == name]
        is_all = [d.view.region for d in into] == [whole(self._program.buffer_by_name[name])]
        readers = self._readers.get(name, ())
        return is_all and into[0].mode is Mode.WRITE and all(r <= writers[0] for r in readers)

    def _is_worth(self, again: _Again, kept: set[str]) -> bool:
        """Whether it frees more bytes than it keeps."""
        items = [self._output(again.forward, output) for output in again.outputs]
        freed = sum(item.buffer.size_bytes for item in items if item is not None)
        read = {region.buffer for region in self._read(again)} & self._temporaries.keys() - kept
        more = [self._temporaries[name] for name in read]
        return freed > sum(item.buffer.size_bytes for item in more if not self._late(item))

    def _postpone(self, agains: Iterable[_Again]) -> None:
        for again in agains:
            for region in self._read(again):
                name = region.buffer
                if name in self._temporaries or not self._is_changed_before(name, again):
                    continue
                self._postponed.setdefault(name, self._free_name(f"{name}.new"))

    def _find_doubles(self) -> dict[str, str]:
        """What other forwards read, too, has two lives: the buffer for the second of them."""
        found: dict[str, str] = {}
        for again in self._agains:
            for output in again.outputs:
                item = self._output(again.forward, output)
                if item is not None and item.readers != self._late(item):
                    found[item.buffer.name] = self._free_name(f"{item.buffer.name}.again")
        return found

    def _free_name(self, stem: str) -> str:
        names = (stem if i == 0 else f"{stem}.{i}" for i in count())
        return next(name for name in names if name not in self._program.buffer_by_name)

    # ---------------------------------------------------------------------------------------------------- the result

    def buffers(self) -> Mapping[str, Buffer]:
        """The buffers that change or are new. Of what a forward leaves, a backward reads what is called saved."""
        by_name = self._program.buffer_by_name
        made = {self._name(a.forward, output) for a in self._agains for output in a.outputs}
        read = {region.buffer for again in self._agains for region in self._read(again)}
        found: dict[str, Buffer] = {}
        for name in (made | read) & self._temporaries.keys():
            buffer = self._temporaries[name].buffer
            if buffer.role in (Role.SAVED, Role.ACTIVATION):
                role = Role.ACTIVATION if name in made else Role.SAVED
                found[name] = replace(buffer, role=role)
        for names in (self._doubles, self._postponed):
            for name, other in names.items():
                found[other] = replace(by_name[name], name=other, role=Role.ACTIVATION, holds=None)
        return found

    def ops(self) -> Iterator[Op | Call]:
        """The ops."""
        made = {self._name(a.forward, output): a for a in self._agains for output in a.outputs}
        last = self._last_reads()
        issued: dict[int, list[_Again]] = {}
        for again in self._agains:
            issued.setdefault(self._place(again.at), []).append(again)
        released: dict[int, list[str]] = {}
        for name in self._doubles:
            item = self._temporaries[name]
            first_life = max(reader for reader in item.readers if reader <= self._loss)
            released.setdefault(first_life, []).append(name)
        for index, op in enumerate(self._body):
            for again in issued.get(index, ()):
                yield from self._issued(again, last)
            match op:
                case ops.Alloc() if op.buffer in made and op.buffer not in self._doubles:
                    continue
                case ops.Release() if op.buffer in last:
                    continue
                case ops.Release() if op.buffer in self._doubles:
                    yield replace(op, buffer=self._doubles[op.buffer])
                case Compute():
                    yield from self._called(index, op, made)
                case _:
                    yield op
            for name in released.get(index, ()):
                yield ops.Release(buffer=name, stream=self._effects[index].stream)

    def _place(self, at: int) -> int:
        """In front of what begins for the op."""
        while isinstance(self._body[at - 1], ops.Alloc | ops.Fill):
            at -= 1
        return at

    def _last_reads(self) -> Mapping[str, _Again]:
        """The buffers that a second run is the last to read, and which one; and persistent ones that then change."""
        found: dict[str, _Again] = {}
        for again in self._agains:
            for region in self._read(again):
                item = self._temporaries.get(region.buffer)
                if item is not None and max(item.readers) < again.at:
                    found[region.buffer] = again
                if region.buffer in self._postponed and self._is_changed_before(
                    region.buffer, again
                ):
                    found[region.buffer] = again
        return found

    def _issued(self, again: _Again, last: Mapping[str, _Again]) -> Iterator[Op | Call]:
        """A forward issued again, and what ends with it."""
        call, segment = self._call(again.forward), again.pruned.segment
        destinations: list[Destination] = []
        for output in again.outputs:
            destination = call.destinations[output]
            assert destination is not None  # It has a buffer.
            name = destination.view.region.buffer
            name = self._doubles.get(name, name)
            yield ops.Alloc(buffer=name, stream=call.stream)
            destinations.append(_into(destination, name))
        arguments = tuple(call.arguments[i] for i in again.pruned.inputs)
        yield Call(
            replace(call, arguments=arguments, destinations=tuple(destinations), event=None),
            replace(segment, name=segment.name.removesuffix(_FORWARD) + _RECOMPUTE),
        )
        for name in dict.fromkeys(region.buffer for region in self._read(again)):
            if last.get(name) is not again:
                continue
            ended = name
            if name in self._postponed:
                ended = self._postponed[name]
                target = whole(self._program.buffer_by_name[name])
                waiting = replace(target, buffer=ended)
                yield ops.Cast(source=waiting, destination=target, stream=call.stream)
            yield ops.Release(buffer=ended, stream=call.stream)

    def _called(self, index: int, op: Compute, made: Mapping[str, _Again]) -> Iterator[Op | Call]:
        """A compute op of before, without the outputs that are made later."""
        kept: list[int] = []
        destinations: list[Destination | None] = []
        for output, destination in enumerate(op.destinations):
            name = None if destination is None else destination.view.region.buffer
            if name in made and name not in self._doubles:
                continue
            kept.append(output)
            if destination is not None and name in self._postponed:
                waiting = self._postponed[name]
                yield ops.Alloc(buffer=waiting, stream=op.stream)
                destinations.append(_into(destination, waiting))
            else:
                destinations.append(destination)
        if not kept:
            return
        segment, arguments = self._program.segment_by_name[op.segment], op.arguments
        if len(kept) < len(op.destinations):
            segment, inputs = self._pruner.prune(segment, kept)
            arguments = tuple(arguments[i] for i in inputs)
        if index > self._loss:
            arguments = tuple(self._in_second_life(argument) for argument in arguments)
        yield Call(replace(op, arguments=arguments, destinations=tuple(destinations)), segment)

    def _in_second_life(self, argument: Argument) -> Argument:
        name = self._doubles.get(argument.view.region.buffer)
        if name is None:
            return argument
        region = replace(argument.view.region, buffer=name)
        return replace(argument, view=replace(argument.view, region=region))


def _into(destination: Destination, buffer: str) -> Destination:
    """The destination in another buffer."""
    region = replace(destination.view.region, buffer=buffer)
    return replace(destination, view=replace(destination.view, region=region))
