"""The training state in host memory, as section ``save`` copied it.

``StepExecutor.save_state`` returns while the copies may still be running. Another thread may wait for them and write
them to files while training continues. The host buffers belong to the reader until it releases them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from zeroir.ir.buffers import Role, copied_region
from zeroir.ir.contents import SnapshotContent
from zeroir.ir.program import Program
from zeroir.runtime.memory.rank_memory import RankMemory


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedTensor:
    """A copy of elements ``[start, stop)`` of a buffer of one rank, in host memory, 1-d; pinned where CUDA is used."""

    start: int
    stop: int
    tensor: Tensor


class SavedState:
    """The state of one rank: ``tensors`` has the copies by the name of the copied buffer.

    The tensors may only be read after ``wait`` has returned and before ``release``. All methods may be called from any
    thread.
    """

    def __init__(self, tensors: Mapping[str, SavedTensor], wait: Callable[[], None]) -> None:
        self.tensors = tensors
        self._wait = wait
        self._released = threading.Event()

    def wait(self) -> None:
        """Wait until all copies are done; the training's streams do not wait.

        Raises:
            Exception: the error of a failed op, where the copies will never be done.
        """
        self._wait()

    def release(self) -> None:
        """Release the host memory for the next save, which waits for that."""
        self._released.set()

    def wait_until_released(self) -> None:
        """Wait until ``release`` was called."""
        self._released.wait()


def saved_states(
    program: Program, memories: Sequence[RankMemory], wait: Callable[[], None]
) -> list[SavedState]:
    """Return the snapshots of each rank of this process; ``wait`` waits until their copies are done."""
    return [SavedState(_snapshots(program, memory), wait) for memory in memories]


def snapshot_events(program: Program) -> list[str]:
    """Return the events after which all snapshots of the program are complete."""
    contents = (buffer.holds for buffer in program.buffers if buffer.role is Role.SNAPSHOT)
    return [
        content.event
        for content in contents
        if isinstance(content, SnapshotContent) and content.event is not None
    ]


def _snapshots(program: Program, memory: RankMemory) -> Mapping[str, SavedTensor]:
    coordinate = program.mesh.coordinate(memory.rank)
    tensors: dict[str, SavedTensor] = {}
    for buffer in program.buffers:
        if isinstance(buffer.holds, SnapshotContent):
            region = copied_region(buffer.holds)
            start, stop = region.local_range(program.mesh, coordinate)
            tensors[region.buffer] = SavedTensor(
                start=start, stop=stop, tensor=memory.buffer(buffer.name)
            )
    return tensors
