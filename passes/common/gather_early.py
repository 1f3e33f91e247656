"""Issues gathers as early as a memory budget allows.

In the given program, each gather is at its first use, and waits delay the gather stream until then. The bytes that may
be live are counted along the compute stream: at each op, those of all buffers that may have begun and that are not
known to have ended. A buffer that begins on another stream may begin as soon as that stream waits for no later op of
the compute stream; it has certainly ended once the compute stream has waited for that. A gather moves up as far as its
bytes fit at every op that it passes, and never ahead of a gather that is needed before it. The resulting program gets
the bound that a gather waits for the compute op above it, so no buffer begins before it is counted. So in every order
of the streams, the program needs at most the budget, or at most what it needed before if that was more.

Only the bytes of buffers on the device count, as in `zeroir.memory.curve.peak`. The workspace of segments and the gaps
between placed buffers are not included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zeroir.ir import ops
from zeroir.ir.analysis.happens_before import StreamClocks
from zeroir.ir.buffers import Space
from zeroir.ir.mesh import COMPUTE
from zeroir.ir.ops import Op
from zeroir.ir.program import Program, Section
from zeroir.memory.lifetimes import Lifetimes
from zeroir.passes.common import rewrite
from zeroir.passes.common.gather_groups import PlacedGather, ahead, find_groups


def as_early_as_fits(program: Program, budget_bytes: int) -> Program:
    """Return the program with its gathers moved up.

    Its waits are the old ones, so the caller must derive them again.
    """
    lifetimes = Lifetimes.of(program)
    sections = [
        _moved(section, program, _Room.of(lifetimes, program, number), budget_bytes)
        for number, section in enumerate(program.sections)
    ]
    return replace(program, sections=tuple(sections))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """The bytes that may be live when the compute stream reaches each op of a section.

    ``begins`` is, for each ``alloc`` by its index, the first op for which its buffer counts.
    """

    live_bytes: list[int]
    begins: Mapping[int, int]

    @classmethod
    def of(cls, lifetimes: Lifetimes, program: Program, number: int) -> _Room:
        """Return the bytes that a section of the program needs."""
        start, body = lifetimes.starts[number], program.sections[number].body
        on_device = {b.name: b.size_bytes for b in program.buffers if b.space is Space.DEVICE}
        resting = sum(
            b.size_bytes for b in program.buffers if b.is_persistent and b.name in on_device
        )
        compute = [stream.name for stream in program.streams].index(COMPUTE)
        begins = _begins(program, program.sections[number])
        changes = [0] * (len(body) + 1)
        for life, name in enumerate(lifetimes.buffers):
            # The time of an op is one past its index.
            first = lifetimes.firsts[life] - start - 1
            if not -1 <= first < len(body) or name not in on_device:
                continue
            stop = max(lifetimes.free_from[compute][life] - start - 1, 0)
            changes[begins.get(first, 0)] += on_device[name]
            changes[min(stop, len(body))] -= on_device[name]
        totals = list(accumulate(changes[:-1]))
        return cls(live_bytes=[resting + total for total in totals], begins=begins)


def _begins(program: Program, section: Section) -> Mapping[int, int]:
    """Return for each ``alloc`` the index after the last compute op that is certainly done when it runs.

    0 without one.
    """
    clocks = StreamClocks((stream.name for stream in program.streams), section.entry.pending)
    compute = clocks.numbers[COMPUTE]
    # The n-th entry is the index after the n-th op of the compute stream; those pending at the entry are before all.
    computed = [0] * (clocks.done[compute][compute] + 1)
    begins: dict[int, int] = {}
    for index, op in enumerate(section.body):
        if isinstance(op, ops.Wait):
            clocks.wait(op.waited, op.on)
            continue
        stream = clocks.numbers[op.stream]
        if isinstance(op, ops.Alloc):
            begins[index] = index if stream == compute else computed[clocks.done[stream][compute]]
        if stream == compute:
            computed.append(index + 1)
        clocks.issue(stream, op.event)
    return begins


def _moved(section: Section, program: Program, room: _Room, budget_bytes: int) -> Section:
    body = section.body
    before: dict[int, list[Op]] = {}
    moved: set[int] = set()
    earliest = 0
    for group in find_groups(body, program):
        for gather in group.gathers:
            begun = _begun(gather, body, program, room)
            earliest = max(earliest, gather.earliest)
            # The first gather cannot move, but later gathers may directly follow it.
            places = range(earliest, max(min(gather.begins), 1))
            at = _earliest(body, room, begun, places, budget_bytes)
            if at is None:
                earliest = max(earliest, gather.index + 1)
                continue
            earliest = at
            for begin, size in begun:
                for index in range(at, begin):
                    room.live_bytes[index] += size
            moved.update(gather.indices)
            passed = body[at : min(gather.begins)]
            is_ahead = any(isinstance(op, ops.Compute) for op in passed)
            issued = ahead(gather.op) if is_ahead else gather.op
            before.setdefault(at, []).extend(gather.issued(body, issued))
    return replace(section, body=rewrite.insert(body, before=before, without=moved))


def _begun(
    gather: PlacedGather, body: Sequence[Op], program: Program, room: _Room
) -> list[tuple[int, int]]:
    """Return for each buffer that begins for a gather the first op at which it already counts, and its device bytes."""
    begun: list[tuple[int, int]] = []
    for index in gather.begins:
        op = body[index]
        if isinstance(op, ops.Alloc):
            buffer = program.buffer_by_name[op.buffer]
            size_bytes = buffer.size_bytes if buffer.space is Space.DEVICE else 0
            begun.append((room.begins[index], size_bytes))
    return begun


def _earliest(
    body: Sequence[Op],
    room: _Room,
    begun: Sequence[tuple[int, int]],
    places: range,
    budget_bytes: int,
) -> int | None:
    """Return the first of these places with room from there on: the section's start, or after an op that computes.

    Several consecutive releases take no time. A gather is placed after the last of them, so that it needs only one
    wait.
    """
    best: int | None = None
    for at in reversed(places):
        more = sum(size for begin, size in begun if at < begin)
        # From the place on at which the buffers may begin anyway, a gather needs no additional bytes.
        if more and room.live_bytes[at] + more > budget_bytes:
            break
        if at == 0 or (_is_compute(body[at - 1]) and not _is_released_next(body[at])):
            best = at
    return best


def _is_compute(op: Op) -> bool:
    """Return whether the op runs on the compute stream, so that a gather after it waits until it is done."""
    return not isinstance(op, ops.Wait | ops.Alloc) and op.stream == COMPUTE


def _is_released_next(op: Op) -> bool:
    return isinstance(op, ops.Release) and op.stream == COMPUTE
