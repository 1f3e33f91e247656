"""Events of a CUDA device that threads record, and which streams have such threads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from zeroir.ir import ops
from zeroir.ir.mesh import COMPUTE, Executor
from zeroir.ir.ops import Wait
from zeroir.ir.program import Program


@dataclass(slots=True, eq=False)
class LateEvent:
    """An event that another thread records, once it has issued the op that signals it."""

    recorded: torch.cuda.Event | None = None


Event = torch.cuda.Event | LateEvent

_Copying = ops.Transfer | ops.Memory | ops.Fill
"""The kinds of ops on streams that threads issue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """An op whose event has the name of one that is pending between sections; ``before`` precedes it on its stream."""

    event: str
    before: Event


def under_way(last: Sequence[Crossing], pending: Collection[str]) -> list[Crossing]:
    """The last ops of a stream that signal ``pending``; where two ops signal one name, the later counts."""
    left = set(pending)
    first = len(last)
    while first > 0 and last[first - 1].event in left:
        first -= 1
        left.remove(last[first].event)
    return list(last[first:])


def issued_apart(program: Program) -> frozenset[str]:
    """The device streams whose ops threads issue: streams of copies that wait, at once or in turn, for a thread."""
    of_host = {s.name for s in program.streams if s.executor is not Executor.DEVICE}
    copying = {s.name for s in program.streams} - of_host - {COMPUTE}
    awaited: set[tuple[str, str]] = set()
    for section in program.sections:
        signallers = {pending.event: pending.stream for pending in section.entry.pending}
        for op in section.body:
            if isinstance(op, Wait):
                awaited.add((op.on, signallers.get(op.waited, "")))
                continue
            if op.event is not None:
                signallers[op.event] = op.stream
            if not isinstance(op, _Copying):
                copying.discard(op.stream)
    apart: set[str] = set()
    while more := {on for on, of in awaited if on in copying and of in of_host | apart} - apart:
        apart |= more
    return frozenset(apart)


def recorded(event: Event | None) -> torch.cuda.Event | None:
    """The event of the device; None where there is none, or none yet."""
    return event.recorded if isinstance(event, LateEvent) else event


def synchronize(event: Event) -> None:
    """Wait for the device; a late event must have been recorded."""
    arrived = recorded(event)
    assert arrived is not None
    arrived.synchronize()
