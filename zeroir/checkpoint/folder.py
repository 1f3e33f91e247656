"""A folder of checkpoints: their names, the newest one that is complete, and which ones are retained."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from zeroir.checkpoint.manifest import Manifest
from zeroir.checkpoint.reading import read_manifest, require_files, verify_all
from zeroir.checkpoint.storage import (
    CHECKPOINT_NAME,
    Hold,
    PassingError,
    Storage,
    join,
    parent_and_name,
)
from zeroir.checkpoint.storages import open_storage
from zeroir.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A checkpoint in a folder, complete or not: ``attempt`` is 1 for ``step-00000100``, 2 for ``step-00000100-2``."""

    path: str
    step: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The criterion for the best checkpoint: the lowest or the highest value of a metric."""

    metric: str
    is_highest: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """The folder that ``zeroir run --save`` names."""

    root: str

    @contextlib.contextmanager
    def lock(self) -> Iterator[HeldFolder]:
        """Lock the folder, which is made if missing, and remove what killed jobs left in it.

        Raises:
            UserError: if another job has it, or it cannot be written.
        """
        storage = self._storage
        with storage.lock(self.root) as hold:
            for folder in storage.leftovers(self.root):
                # Leftovers that cannot be removed, such as another user's, only cost space.
                with contextlib.suppress(UserError):
                    storage.remove(folder)
            yield HeldFolder(folder=self, hold=hold)

    def list(self) -> tuple[Listed, ...]:
        """Return the checkpoints in the folder, newest first, without reading manifests."""
        return tuple(listed for listed in self._named() if self._storage.has_appeared(listed.path))

    def next_path(self, step: int) -> str:
        """Return the path for a new checkpoint of a step: ``step-00000100``, or with ``-2``, … if that step has one."""
        name = f"step-{step:08}"
        attempts = [
            listed.attempt
            for listed in self._named()
            if listed.step == step and self._storage.has_appeared(listed.path)
        ]
        return join(self.root, name if not attempts else f"{name}-{max(attempts) + 1}")

    def _named(self) -> tuple[Listed, ...]:
        """Return the folders with names of checkpoints, newest first; in an object store some may lack a manifest."""
        named = []
        for entry in self._storage.entries(self.root):
            match = CHECKPOINT_NAME.fullmatch(entry.name)
            if match and entry.is_folder:
                path = join(self.root, entry.name)
                named.append(Listed(path=path, step=int(match[1]), attempt=int(match[2] or 1)))
        return tuple(sorted(named, key=_age, reverse=True))

    def newest_whole(
        self,
        check: Callable[[str, Manifest], None],
        refused: Callable[[str, UserError], None],
    ) -> tuple[str, Manifest] | None:
        """Return the newest checkpoint with a valid manifest and all files that ``check`` accepts, and its manifest.

        ``check`` raises a UserError to refuse one. ``refused`` is called with the path and the error of each refusal.
        """
        for listed in self.list():
            try:
                manifest = read_manifest(listed.path)
                require_files(listed.path, manifest)
                check(listed.path, manifest)
            except PassingError:
                # An older one is for damage; a job that starts again when the network is back loses nothing.
                raise
            except UserError as error:
                refused(listed.path, error)
                continue
            return listed.path, manifest
        return None

    @property
    def _storage(self) -> Storage:
        return open_storage(self.root)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFolder:
    """A folder of checkpoints that this job has locked: no other job changes its content."""

    folder: CheckpointFolder
    hold: Hold
    _is_whole: dict[str, bool] = field(default_factory=dict, compare=False, repr=False)
    """Whether checkpoints are complete, once all their bytes were read."""
    _metrics: dict[str, dict[str, float]] = field(default_factory=dict, compare=False, repr=False)
    """The metrics of the checkpoints whose manifests were read; they never change."""

    def next_path(self, step: int) -> str:
        """Return the path for a new checkpoint of a step, as ``CheckpointFolder.next_path`` does.

        Raises:
            UserError: if the folder is no longer the one that was locked.
        """
        self.hold.require()
        return self.folder.next_path(step)

    def retain(
        self,
        count: int,
        *,
        verified: str,
        refused: Callable[[UserError], None],
        best: Best | None = None,
    ) -> tuple[str, ...]:
        """Keep the newest ``count`` complete checkpoints and the best one, and remove the others, oldest first.

        ``verified`` is the path of a checkpoint that was just read back from the disk and found complete; it is kept,
        too. The others to keep are read once by this job. ``refused`` is called with the error of each damaged one
        among them, which does not count. A checkpoint with a damaged manifest is never removed.

        Returns:
            the paths of the removed checkpoints.

        Raises:
            UserError: if the folder is no longer the one that was locked, or a checkpoint cannot be removed.
        """
        self.hold.require()
        verified = join(self.folder.root, parent_and_name(verified)[1])
        self._is_whole[verified] = True
        metrics = {}
        for listed in self.folder.list():
            try:
                metrics[listed.path] = self._metrics_of(listed.path)
            except UserError as error:
                if listed.path == verified or isinstance(error, PassingError):
                    raise
                self._refuse(listed.path, error, refused)
        if verified not in metrics:
            gone = (
                f"'{verified}' was removed after it was saved, so no older checkpoint is removed."
            )
            refused(UserError(gone))
            return ()
        kept = {verified}
        whole_count = 0
        for path in metrics:
            if whole_count == count:
                break
            whole_count += self._read_whole(path, refused)
            kept.add(path)
        if best is not None:
            ranked = _best_first(metrics, best)
            kept |= set([path for path in ranked if self._read_whole(path, refused)][:1])
        removed = [path for path in reversed(metrics) if path not in kept]
        for path in removed:
            self.hold.require()
            open_storage(path).remove(path)
        return tuple(removed)

    def _metrics_of(self, path: str) -> dict[str, float]:
        if path not in self._metrics:
            self._metrics[path] = read_manifest(path).metrics
        return self._metrics[path]

    def _read_whole(self, path: str, refused: Callable[[UserError], None]) -> bool:
        """Return whether a checkpoint is complete; the first call reads all its files."""
        if path not in self._is_whole:
            try:
                verify_all(path, read_manifest(path))
                self._is_whole[path] = True
            except PassingError:
                raise
            except UserError as error:
                self._refuse(path, error, refused)
        return self._is_whole[path]

    def _refuse(self, path: str, error: UserError, refused: Callable[[UserError], None]) -> None:
        """Record that a checkpoint is damaged, and report it once."""
        if self._is_whole.get(path, True):
            refused(error)
        self._is_whole[path] = False


def _age(listed: Listed) -> tuple[int, int]:
    return listed.step, listed.attempt


def _best_first(metrics: Mapping[str, Mapping[str, float]], best: Best) -> list[str]:
    """Return the paths of checkpoints with the metric, best value first, and the newest first among equal ones."""
    values = {
        path: numbers[best.metric]
        for path, numbers in metrics.items()
        if not math.isnan(numbers.get(best.metric, math.nan))
    }
    return sorted(values, key=lambda path: -values[path] if best.is_highest else values[path])
