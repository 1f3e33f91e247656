"""What each segment of a step takes beside its buffers, as torch's allocators tell: what a profile measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from zeroir.ir import ops
from zeroir.ir.labels import labels
from zeroir.ir.ops import Op
from zeroir.ir.program import EVALUATE, OpPosition, Program
from zeroir.runtime.allocations import allocations, by_range, peak_bytes
from zeroir.runtime.trace import P


def on_host(program: Program, step: Callable[[], object]) -> Mapping[str, int]:
    """Take a step, and tell the most bytes that a call of each of its segments held at once, by the segment's digest.

    This thread carries out the computation, and each op in a range with its label.
    """
    names = labels(program)
    found = by_range(allocations(step), names.values())
    return _most(
        program,
        (
            (op, peak_bytes(found.get(names[position], ())))
            for position, op in program.positioned_ops()
            if position.section != EVALUATE
        ),
    )


class DeviceWatcher:
    """Sees the allocator of a CUDA device while ops are issued, which is when it hands memory out and takes it back."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: list[tuple[Op, int]] = []

    def watch(self, _: OpPosition, op: Op, run: Callable[P, None], /) -> Callable[P, None]:
        """See ``trace.Watch``; only of ops that compute, beside which other threads carry others out."""
        if not isinstance(op, ops.Compute):
            return run

        def watched(*args: P.args, **kwargs: P.kwargs) -> None:
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            run(*args, **kwargs)
            self._seen.append((op, torch.cuda.max_memory_allocated(self._device) - before))

        return watched

    def found(self, program: Program) -> Mapping[str, int]:
        """The most bytes that a call of each segment held at once, by the segment's digest."""
        return _most(program, self._seen)


def _most(program: Program, taken: Iterable[tuple[Op, int]]) -> Mapping[str, int]:
    most: dict[str, int] = {}
    for op, size in taken:
        if isinstance(op, ops.Compute):
            digest = program.segment_by_name[op.segment].digest()
            most[digest] = max(most.get(digest, 0), size)
    return most
