"""The memory that each segment of a step uses beside its buffers, measured by torch's allocators for a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from zeroir.ir import ops
from zeroir.ir.analysis.labels import labels
from zeroir.ir.ops import Op
from zeroir.ir.program import EVALUATE, OpPosition, Program
from zeroir.runtime.device.driver import driver
from zeroir.runtime.execution.trace import Task
from zeroir.runtime.memory.allocations import allocations, by_range, peak_bytes


def on_host(program: Program, step: Callable[[], object]) -> Mapping[str, int]:
    """Run a step; return the most bytes that a call of each segment held at once, by the segment's digest.

    The calling thread must run the computation, each op in a profiler range named by its label.
    """
    names = labels(program)
    events_by_label = by_range(allocations(step), names.values())
    return _largest(
        program,
        (
            (op, peak_bytes(events_by_label.get(names[position], ())))
            for position, op in program.positioned_ops()
            if position.section != EVALUATE
        ),
    )


class DeviceWatcher:
    """Watches the allocator of a CUDA device while ops are issued, because it allocates and frees memory then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: list[tuple[Op, int]] = []

    def watch(self, _: OpPosition, op: Op, run: Task) -> Task:
        """Return an observed version of a compute op's task.

        Other ops are not observed, because other threads may run them.
        """
        if not isinstance(op, ops.Compute):
            return run

        def watched() -> None:
            driver().reset_peak_bytes(self._device)
            before = driver().allocated_bytes(self._device)
            run()
            self._peaks.append((op, driver().peak_bytes(self._device) - before))

        return watched

    def workspaces(self, program: Program) -> Mapping[str, int]:
        """Return the most bytes that a call of each segment held at once, by the segment's digest."""
        return _largest(program, self._peaks)


def _largest(program: Program, peaks: Iterable[tuple[Op, int]]) -> Mapping[str, int]:
    """Return the largest peak of the calls of each segment, in bytes by digest."""
    largest: dict[str, int] = {}
    for op, peak in peaks:
        if isinstance(op, ops.Compute):
            digest = program.segment_by_name[op.segment].digest()
            largest[digest] = max(largest.get(digest, 0), peak)
    return largest
