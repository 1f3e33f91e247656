"""Recordings of steps: when each op ran, and the memory that segments used."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zeroir.ir.spans import Span
from zeroir.runtime.engine.opened_program import open_clock
from zeroir.runtime.engine.rank_program import RankProgram
from zeroir.runtime.execution.trace import SpanRecorder, aligned, to_bytes
from zeroir.runtime.memory.measured_workspaces import DeviceWatcher, on_host


class Recording:
    """Records steps of a program on a rank; ``Engine`` describes each method."""

    def __init__(self, rank_program: RankProgram) -> None:
        self._rank_program = rank_program
        self._recorder = SpanRecorder()

    def record(self, step: int) -> None:
        """Record the start and end of every op of that step."""
        rank_program = self._rank_program
        rank_program.executor.finish()  # no op of an earlier recording may still be running
        self._recorder.begin(open_clock(rank_program.program, rank_program.device))
        rank_program.executor.watch(step, self._recorder.watch)

    def timelines(self) -> list[list[Span]] | None:
        """Return the recorded spans of every rank, on one clock; None on ranks other than 0."""
        self._rank_program.executor.finish()
        encoded = self._rank_program.job.gather(to_bytes(self._recorder.spans()))
        return None if encoded is None else aligned(encoded)

    def workspaces(self, step: Callable[[], object]) -> Mapping[str, int]:
        """Return the bytes that each segment uses beside its buffers during ``step``, by digest."""
        rank_program = self._rank_program
        if rank_program.device.type == "cpu":
            return on_host(rank_program.program, step)
        watcher = DeviceWatcher(rank_program.device)
        rank_program.executor.watch(rank_program.step_count + 1, watcher.watch)
        step()
        return watcher.workspaces(rank_program.program)
