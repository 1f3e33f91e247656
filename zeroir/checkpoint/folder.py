"""A folder of checkpoints: their names, the newest that is whole, and how many are kept."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from zeroir.checkpoint.manifest import Manifest
from zeroir.checkpoint.reading import read_manifest, require_files
from zeroir.checkpoint.storage import (
    CHECKPOINT_NAME,
    PassingError,
    Storage,
    join,
    open_storage,
    parent_and_name,
)
from zeroir.errors import InternalError, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A checkpoint in a folder, whole or not: ``attempt`` is 1 for ``step-00000100``, 2 for ``step-00000100-2``."""

    path: str
    step: int
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """Which checkpoint is the best: that with the lowest or the highest value of a metric."""

    metric: str
    is_highest: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """The folder that ``zeroir run --save`` names. Methods that change it are for the job that holds its lock."""

    root: str
    _metrics: dict[str, dict[str, float]] = field(default_factory=dict, compare=False, repr=False)
    """The metrics of checkpoints whose manifests were read: they never change."""

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder, which is made if missing, and remove what killed jobs left in it.

        Raises:
            UserError: if another job has it, or it cannot be written.
        """
        storage = self._storage
        with storage.lock(self.root):
            for folder in storage.leftovers(self.root):
                # A leftover that stays, for instance because it is another user's, costs space and nothing else.
                with contextlib.suppress(UserError):
                    storage.remove(folder)
            yield

    def list(self) -> tuple[Listed, ...]:
        """The checkpoints by name, newest first; no manifest is read."""
        return tuple(listed for listed in self._named() if self._storage.has_appeared(listed.path))

    def next_path(self, step: int) -> str:
        """The path for a checkpoint of a step: ``step-00000100``, or with ``-2``, … if there are some of this step."""
        name = f"step-{step:08}"
        attempts = [
            listed.attempt
            for listed in self._named()
            if listed.step == step and self._storage.has_appeared(listed.path)
        ]
        return join(self.root, name if not attempts else f"{name}-{max(attempts) + 1}")

    def _named(self) -> tuple[Listed, ...]:
        """The folders with names of checkpoints, newest first; in a store some may be without a manifest."""
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
        """The newest checkpoint that has a valid manifest and all files, and that ``check`` accepts; and its manifest.

        ``check`` raises a UserError to refuse one; ``refused`` is told each refusal with the path.
        """
        for listed in self.list():
            try:
                manifest = read_manifest(listed.path)
                require_files(listed.path, manifest)
                check(listed.path, manifest)
            except PassingError:
                # An older one is for damage. A job that starts again when the network is back loses nothing.
                raise
            except UserError as error:
                refused(listed.path, error)
                continue
            return listed.path, manifest
        return None

    def retain(self, count: int, *, verified: str, best: Best | None = None) -> tuple[str, ...]:
        """Keep the newest ``count`` checkpoints, the best one and ``verified``; remove the others, oldest first.

        ``verified`` is the path of a checkpoint that was just read back from the disk and is whole, so that at least
        one such copy always remains. Checkpoints with damaged manifests neither count nor are removed.

        Returns:
            the paths of the removed checkpoints.
        """
        verified = join(self.root, parent_and_name(verified)[1])
        metrics = {}
        for listed in self.list():
            try:
                metrics[listed.path] = self._metrics_of(listed.path)
            except UserError as error:
                if listed.path == verified or isinstance(error, PassingError):
                    raise
        if verified not in metrics:
            raise InternalError(f"'{verified}' is not a checkpoint in '{self.root}'.")
        kept = {verified, *list(metrics)[:count]}
        if best is not None:
            kept |= _best_path(metrics, best)
        removed = [path for path in reversed(metrics) if path not in kept]
        for path in removed:
            self._storage.remove(path)
        return tuple(removed)

    def _metrics_of(self, path: str) -> dict[str, float]:
        if path not in self._metrics:
            self._metrics[path] = read_manifest(path).metrics
        return self._metrics[path]

    @property
    def _storage(self) -> Storage:
        return open_storage(self.root)


def _age(listed: Listed) -> tuple[int, int]:
    return listed.step, listed.attempt


def _best_path(metrics: Mapping[str, Mapping[str, float]], best: Best) -> set[str]:
    """The newest of the paths with the best value; none if no checkpoint has one."""
    values = {
        path: numbers[best.metric]
        for path, numbers in metrics.items()
        if not math.isnan(numbers.get(best.metric, math.nan))
    }
    if not values:
        return set()
    choose = max if best.is_highest else min
    return {choose(values, key=values.__getitem__)}
