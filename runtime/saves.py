"""The checkpoints of ``zeroir run``: when they are due, how many are kept, and what happens on a request to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from zeroir.checkpoint.folder import Best, CheckpointFolder
from zeroir.errors import UserError
from zeroir.runtime.checkpoint.background import PendingSave
from zeroir.runtime.training_state import TrainingState


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """A checkpoint after ``step`` steps, which is durable at ``path``."""

    step: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How many checkpoints of a folder are kept: the newest ``keep``, and the best one."""

    keep: int
    best: Best | None = None


@dataclass(slots=True, kw_only=True)
class Saves:
    """Saves a training run in a folder after every ``every``-th step and after the last one. Ranks call it together.

    Files are written while training goes on.
    """

    training: TrainingState
    folder: CheckpointFolder
    every: int | None
    retention: Retention | None
    _pending: tuple[int, PendingSave] | None = field(default=None, init=False)
    _cleaning: _Cleaning | None = field(default=None, init=False)

    def after_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        is_last: bool,
        report: Callable[[SaveReport], None],
    ) -> None:
        """Save if a checkpoint is due, and report the one that has become durable. After the last step, wait for it.

        Raises:
            UserError: where a checkpoint cannot be saved, or old ones cannot be removed.
        """
        self._settle(report)
        if is_last or (self.every is not None and step % self.every == 0):
            if self._pending is not None:
                self._pending[1].wait()
                self._settle(report)
            self._begin(step, metrics)
        if is_last and self._pending is not None:
            self._pending[1].wait()
            self._settle(report)
            if self._cleaning is not None:
                self._cleaning.wait()

    def _begin(self, step: int, metrics: Mapping[str, float]) -> None:
        engine = self.training.engine
        # The name counts on rank 0 alone.
        path = self.folder.next_path(step) if engine.rank == 0 else self.folder.root
        pending = engine.save(
            path,
            metrics=metrics,
            shared=self.training.shared(),
            state=self.training.of_rank(),
            wait=False,
            read_back=self.retention is not None,
        )
        self._pending = (step, pending)

    def _settle(self, report: Callable[[SaveReport], None]) -> None:
        """Report the save under way if it has ended, and remove what it makes superfluous."""
        if self._pending is None or not self._pending[1].is_done:
            return
        step, pending = self._pending
        self._pending = None
        path = pending.wait()
        report(SaveReport(step=step, path=path))
        if self.retention is not None and self.training.engine.rank == 0:
            if self._cleaning is not None:
                self._cleaning.wait()
            self._cleaning = _Cleaning(self.folder, self.retention, verified=path)


class _Cleaning:
    """Removes checkpoints in a thread, because large files take long; ``verified`` is one that was read back whole."""

    def __init__(self, folder: CheckpointFolder, retention: Retention, *, verified: str) -> None:
        self._error: UserError | None = None
        self._folder, self._retention, self._verified = folder, retention, verified
        self._thread = threading.Thread(target=self._run, name="zeroir-keep", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when they are removed.

        Raises:
            UserError: where one cannot be removed.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._folder.retain(
                self._retention.keep, verified=self._verified, best=self._retention.best
            )
        except UserError as error:
            self._error = error
