"""The checkpoints of ``zeroir run``: when they are due, how many are kept, and what happens on a request to stop."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from zeroir.checkpoint.folder import Best, HeldFolder
from zeroir.errors import CheckpointWarning, UserError
from zeroir.runtime.checkpoint.background import PendingSave
from zeroir.runtime.training.training_state import TrainingState


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
    """Saves a training run to a folder after every ``every``-th step and after the last. All ranks call this together.

    Files are written while training continues. Rank 0 holds the folder.
    """

    training: TrainingState
    root: str
    held: HeldFolder | None
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
        """Save if a checkpoint is due, and report one that has become durable. After the last step, wait for it.

        Raises:
            UserError: where a checkpoint cannot be saved, old ones cannot be removed, or the folder has disappeared.
        """
        self._settle(report)
        if is_last or (self.every is not None and step % self.every == 0):
            self._settle(report, is_awaited=True)
            self._begin(step, metrics)
        if is_last:
            self._settle(report, is_awaited=True)
            if self._cleaning is not None:
                self._cleaning.wait()

    def _begin(self, step: int, metrics: Mapping[str, float]) -> None:
        # Only rank 0's name counts.
        path = self.root if self.held is None else self.held.next_path(step)
        pending = self.training.engine.save(
            path,
            metrics=metrics,
            shared=self.training.shared(),
            state=self.training.of_rank(),
            wait=False,
            read_back=self.retention is not None,
        )
        self._pending = (step, pending)

    def _settle(self, report: Callable[[SaveReport], None], *, is_awaited: bool = False) -> None:
        """Report the current save if it has ended, and remove checkpoints that are no longer kept."""
        if self._pending is None or not (is_awaited or self._pending[1].is_done):
            return
        step, pending = self._pending
        self._pending = None
        path = self._saved(pending)
        report(SaveReport(step=step, path=path))
        if self.retention is not None and self.held is not None:
            if self._cleaning is not None:
                self._cleaning.wait()
            self._cleaning = _Cleaning(self.held, self.retention, verified=path)

    def _saved(self, pending: PendingSave) -> str:
        """Return the path of a checkpoint that is durable in the folder that this job holds."""
        try:
            return pending.wait()
        finally:
            # If the folder has disappeared, that is why a save failed, or what it has saved is elsewhere.
            if self.held is not None:
                self.held.hold.require()


class _Cleaning:
    """Removes checkpoints in a thread, because large files take long.

    ``verified`` is one that was read back completely.
    """

    def __init__(self, held: HeldFolder, retention: Retention, *, verified: str) -> None:
        self._failure: BaseException | None = None
        self._refused: list[UserError] = []
        self._held, self._retention, self._verified = held, retention, verified
        self._thread = threading.Thread(target=self._run, name="zeroir-keep", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until they are removed; warn of folders that do not count as checkpoints.

        Raises:
            UserError: where one cannot be removed.
        """
        self._thread.join()
        for refusal in self._refused:
            sentence = f"{refusal} It does not count among those of --keep."
            warnings.warn(sentence, CheckpointWarning, stacklevel=2)
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._held.retain(
                self._retention.keep,
                verified=self._verified,
                best=self._retention.best,
                refused=self._refused.append,
            )
        except BaseException as failure:  # noqa: BLE001 - it is raised again in the thread that trains
            self._failure = failure
