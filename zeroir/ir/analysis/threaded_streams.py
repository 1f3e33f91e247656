"""The streams of a device that another thread issues than the one that issues the program.

A device cannot wait for a thread, so the thread that issues an op after an op of the host or a disk waits for it. One
thread issues a program; if it waited, later ops on other streams would not be issued meanwhile. So copy streams that
wait for threads have their own issuing threads, both in the runtime and in the cost model.
"""

from __future__ import annotations

from zeroir.ir import ops
from zeroir.ir.mesh import COMPUTE, Executor
from zeroir.ir.program import Program

_Copying = ops.Transfer | ops.Memory | ops.Fill
"""The kinds of ops on streams that threads issue."""


def threaded_streams(program: Program) -> frozenset[str]:
    """Return the device streams that threads issue: copy streams that wait, directly or indirectly, for a thread."""
    of_host = {s.name for s in program.streams if s.executor is not Executor.DEVICE}
    copying = {s.name for s in program.streams} - of_host - {COMPUTE}
    awaited: set[tuple[str, str]] = set()
    for section in program.sections:
        signallers = {pending.event: pending.stream for pending in section.entry.pending}
        for op in section.body:
            if isinstance(op, ops.Wait):
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
