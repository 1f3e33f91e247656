"""Issue gathers as early as a budget of memory allows.

The program comes with each gather at its first use. How much is live is counted along the compute stream: at each op
all buffers count that may have begun by then and that the stream does not know to be over. What begins on another
stream may have begun once that stream need wait for the compute stream no more; what ends there is over for sure when
the compute stream has waited for it. A gather may move up as far as its bytes fit on top of that at every op it passes,
never ahead of a gather that is needed before it. There it waits for the compute op before it, and so begins no sooner
than the count says. Hence no order in which the streams may run takes more than the budget, or than the program took
before where that is more.

Bytes are those of buffers on the device, as `zeroir.memory.curve.peak` counts them: the workspace of segments, and
what is lost between buffers that have a place each, come on top.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zeroir.ir import ops
from zeroir.ir.buffers import Space
from zeroir.ir.mesh import COMPUTE, HOST
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.memory.lifetimes import Lifetimes
from zeroir.passes.common.gather_groups import Gather, ahead, find_waves
from zeroir.passes.common.order import synchronise


def as_early_as_fits(program: Program, budget_bytes: int) -> Program:
    """The program with its gathers moved up; their waits are made anew."""
    found = Lifetimes.of(program)
    sections = [
        _moved(section, program, _Room.of(found, program, number), budget_bytes)
        for number, section in enumerate(program.sections)
    ]
    return synchronise(replace(program, sections=tuple(sections)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """Of each op of a section, how many bytes may be live when the compute stream comes to it.

    ``begins`` is, for each ``alloc`` by its index, the first op for which its buffer counts.
    """

    live_bytes: list[int]
    begins: Mapping[int, int]

    @classmethod
    def of(cls, found: Lifetimes, program: Program, number: int) -> _Room:
        """What a section of the program takes."""
        start, body = found.starts[number], program.sections[number].body
        on_device = {b.name: b.size_bytes for b in program.buffers if b.space is Space.DEVICE}
        resting = sum(
            b.size_bytes for b in program.buffers if b.is_persistent and b.name in on_device
        )
        compute = [stream.name for stream in program.streams].index(COMPUTE)
        begins = _begins(program.sections[number])
        changes = [0] * (len(body) + 1)
        for life, name in enumerate(found.buffers):
            # An op's moment is one past its index.
            first = found.firsts[life] - start - 1
            if not -1 <= first < len(body) or name not in on_device:
                continue
            stop = max(found.free_from[compute][life] - start - 1, 0)
            changes[begins.get(first, 0)] += on_device[name]
            changes[min(stop, len(body))] -= on_device[name]
        totals = list(accumulate(changes[:-1]))
        return cls(live_bytes=[resting + total for total in totals], begins=begins)


def _begins(section: Section) -> Mapping[int, int]:
    """For each ``alloc`` the number of ops of the section after whose last compute op it may run."""
    known: dict[str, int] = {}
    events: dict[str, int] = {}
    found: dict[int, int] = {}
    for index, op in enumerate(section.body):
        if isinstance(op, ops.Wait):
            after = events.get(op.waited, 0)
            for stream in (*known, HOST) if op.on == HOST else (op.on,):
                known[stream] = max(known.get(stream, known.get(HOST, 0)), after)
            continue
        if isinstance(op, ops.Alloc):
            is_compute = op.stream == COMPUTE
            found[index] = index if is_compute else known.get(op.stream, known.get(HOST, 0))
        if op.stream == COMPUTE:
            known[COMPUTE] = index + 1
        if op.event is not None:
            events[op.event] = known.get(op.stream, known.get(HOST, 0))
    return found


def _moved(section: Section, program: Program, room: _Room, budget_bytes: int) -> Section:
    body = list(section.body)
    before: dict[int, list[Op]] = {}
    moved: set[int] = set()
    earliest = 0
    for wave in find_waves(body, program):
        for gather in wave.gathers:
            begun = _begun(gather, program, room)
            earliest = max(earliest, gather.earliest)
            # One that stands first already moves nowhere, but may have others behind it.
            places = range(earliest, max(min(gather.allocs), 1))
            at = _earliest(body, room, begun, places, budget_bytes)
            if at is None:
                earliest = max(earliest, gather.index + 1)
                continue
            earliest = at
            for begin, size in begun:
                for index in range(at, begin):
                    room.live_bytes[index] += size
            moved |= {*gather.allocs, gather.index}
            before.setdefault(at, []).extend(_issued(body, gather, at))
    left: list[Op] = []
    for index, op in enumerate(body):
        left.extend(before.get(index, ()))
        if index not in moved:
            left.append(op)
    return replace(section, body=tuple(left))


def _begun(gather: Gather, program: Program, room: _Room) -> list[tuple[int, int]]:
    """Of each buffer that is gathered, from which op on it counts already, and its bytes on the device."""
    names = [pair.destination.buffer for pair in gather.op.pairs]
    buffers = [program.buffer_by_name[name] for name in names]
    return [
        (room.begins[alloc], buffer.size_bytes if buffer.space is Space.DEVICE else 0)
        for alloc, buffer in zip(gather.allocs, buffers, strict=True)
    ]


def _earliest(
    body: Sequence[Op],
    room: _Room,
    begun: Sequence[tuple[int, int]],
    places: range,
    budget_bytes: int,
) -> int | None:
    """The first of these places with room from there on: the section's start, or just after ops that compute.

    Several releases in a row take no time, so only after the last of them: then one wait is enough for all.
    """
    best: int | None = None
    for at in reversed(places):
        more = sum(size for begin, size in begun if at < begin)
        if room.live_bytes[at] + more > budget_bytes:
            break
        if at == 0 or (_is_compute(body[at - 1]) and not _is_released_next(body[at])):
            best = at
    return best


def _is_compute(op: Op) -> bool:
    """Whether the op runs on the compute stream, so that waiting for it bounds how far another stream runs ahead."""
    return not isinstance(op, ops.Wait | ops.Alloc) and op.stream == COMPUTE


def _is_released_next(op: Op) -> bool:
    return isinstance(op, ops.Release) and op.stream == COMPUTE


def _issued(body: list[Op], gather: Gather, at: int) -> list[Op]:
    """A gather at its new place, behind the compute op there, which signals from now on."""
    found: list[Op] = []
    if at > 0:
        previous = body[at - 1]
        assert not isinstance(previous, ops.Wait)
        event = previous.event or f"early.{at - 1}"
        body[at - 1] = replace(previous, event=event)
        found.append(ops.Wait(waited=event, on=gather.op.stream))
    found.extend(body[alloc] for alloc in gather.allocs)
    found.append(ahead(gather.op) if at < min(gather.allocs) else gather.op)
    return found
