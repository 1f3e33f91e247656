"""A folder of checkpoints: their names, the newest that is whole, and how many are kept."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from zeroir.checkpoint.manifest import Manifest
from zeroir.checkpoint.reading import CheckpointFiles, read_manifest, verify_items
from zeroir.checkpoint.storage import Storage, join, open_storage
from zeroir.errors import UserError

_NAME: Final = re.compile(r"step-([0-9]{8,})(?:-([1-9][0-9]*))?")


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

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder, which is made if missing, and remove what killed jobs left in it.

        Raises:
            UserError: if another job has it, or it cannot be written.
        """
        storage = self._storage
        with storage.lock(self.root):
            for folder in storage.leftovers(self.root):
                storage.remove(folder)
            yield

    def list(self) -> tuple[Listed, ...]:
        """The checkpoints by name, newest first; no manifest is read."""
        listed = []
        for entry in self._storage.entries(self.root):
            match = _NAME.fullmatch(entry.name)
            path = join(self.root, entry.name)
            if match and entry.is_folder and self._storage.has_appeared(path):
                listed.append(Listed(path=path, step=int(match[1]), attempt=int(match[2] or 1)))
        return tuple(sorted(listed, key=_age, reverse=True))

    def next_path(self, step: int) -> str:
        """The path for a checkpoint of a step: ``step-00000100``, or with ``-2``, … if there are some of this step."""
        name = f"step-{step:08}"
        attempts = [listed.attempt for listed in self.list() if listed.step == step]
        return join(self.root, name if not attempts else f"{name}-{max(attempts) + 1}")

    def newest_whole(
        self,
        check: Callable[[str, Manifest], None],
        refused: Callable[[str, UserError], None],
    ) -> tuple[str, Manifest] | None:
        """The newest checkpoint whose manifest is valid and which ``check`` accepts, and its manifest.

        ``check`` raises a UserError to refuse one; ``refused`` is told each refusal with the path.
        """
        for listed in self.list():
            try:
                manifest = read_manifest(listed.path)
                check(listed.path, manifest)
            except UserError as error:
                refused(listed.path, error)
                continue
            return listed.path, manifest
        return None

    def retain(self, count: int, *, verified: str, best: Best | None = None) -> tuple[str, ...]:
        """Keep the newest ``count`` checkpoints, the best one and ``verified``; remove the others, and name them.

        ``verified`` is the path of a checkpoint that was just read back from the disk and is whole, so that at least
        one such copy always remains. Checkpoints with damaged manifests neither count nor are removed.
        """
        kept = {verified}
        whole = []
        for listed in self.list():
            with contextlib.suppress(UserError):
                whole.append((listed, read_manifest(listed.path)))
        kept |= {listed.path for listed, _ in whole[:count]}
        if best is not None:
            kept |= _best_paths(whole, best)
        removed = [listed.path for listed, _ in whole if listed.path not in kept]
        for path in removed:
            self._storage.remove(path)
        return tuple(removed)

    @property
    def _storage(self) -> Storage:
        return open_storage(self.root)


def verify_all(path: str, manifest: Manifest) -> None:
    """Read a whole checkpoint.

    Raises:
        UserError: naming the file and the tensor that is not what was saved.
    """
    with CheckpointFiles(path=path, manifest=manifest) as files:
        for item in verify_items(manifest):
            files.verify(item)


def _age(listed: Listed) -> tuple[int, int]:
    return listed.step, listed.attempt


def _best_paths(whole: list[tuple[Listed, Manifest]], best: Best) -> set[str]:
    values = [
        (manifest.metrics[best.metric], listed.path)
        for listed, manifest in whole
        if best.metric in manifest.metrics
    ]
    values = [(value, path) for value, path in values if value == value]
    if not values:
        return set()
    choose = max if best.is_highest else min
    return {choose(values)[1]}
