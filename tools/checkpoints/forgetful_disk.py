"""A disk whose power is cut: what was not synchronised is lost, or is there in any part and order.

The rules are those of POSIX, and stricter than any usual file system: ``fsync`` of a file makes its bytes durable, and
``fsync`` of a folder its entries. Without it, each write, each new size and each entry is there or not, whatever
came before or after it. Only a rename within one folder is never half done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Final, TypeVar

from tools.checkpoints.recorder import FileOperation, OperationKind


class Loss(StrEnum):
    """The part of unsynchronised operations that a cut loses."""

    ALL = "all is lost"
    DATA = "bytes are lost, folders are written"
    FOLDERS = "folders are lost, bytes are written"
    RANDOM = "each is lost or not"


_KEPT_SHARES: Final = {
    Loss.ALL: (0.0, 0.0),
    Loss.DATA: (1.0, 0.0),
    Loss.FOLDERS: (0.0, 1.0),
    Loss.RANDOM: (0.5, 0.5),
}
"""The probability that a change of a folder is on the disk, and that of a write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """Bytes at an offset, or without bytes a new size."""

    start: int
    data: bytes | None


@dataclass(slots=True, eq=False)
class DiskFile:
    """A file: what is durable of it, and the writes since then."""

    durable: bytes = b""
    pending: list[Write] = field(default_factory=list)

    def synchronise(self) -> None:
        """See ``fsync``."""
        self.durable = _written(self.durable, self.pending)
        self.pending = []


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryChange:
    """One change of a folder, done wholly or not at all: names that begin or end to stand for something."""

    entries: tuple[tuple[str, Entry | None], ...]


@dataclass(slots=True, eq=False)
class DiskFolder:
    """A folder: its durable entries, its present ones, and the changes that lie between them."""

    durable: dict[str, Entry] = field(default_factory=dict)
    present: dict[str, Entry] = field(default_factory=dict)
    pending: list[EntryChange] = field(default_factory=list)

    def change(self, *entries: tuple[str, Entry | None]) -> None:
        """Change entries at once."""
        made = EntryChange(entries=entries)
        self.pending.append(made)
        _apply(self.present, made)

    def synchronise(self) -> None:
        """See ``fsync``."""
        self.durable = dict(self.present)
        self.pending = []


Entry = DiskFile | DiskFolder


class ForgetfulDisk:
    """The folder ``root`` on such a disk, empty and durable at first."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self.folder = DiskFolder()
        self._by_inode: dict[int, Entry] = {root.stat().st_ino: self.folder}

    def apply(self, operation: FileOperation) -> None:
        """Carry out an operation of a log."""
        match operation.kind:
            case OperationKind.CREATE:
                self._add(operation, DiskFile())
            case OperationKind.MAKE_FOLDER:
                self._add(operation, DiskFolder())
            case OperationKind.LINK:
                self._add(operation, self._by_inode[operation.inode])
            case OperationKind.REMOVE:
                parent, name = self._entry(operation.path)
                parent.change((name, None))
            case OperationKind.RENAME:
                source, old = self._entry(operation.path)
                target, new = self._entry(operation.second_path)
                moved = source.present[old]
                if source is target:
                    source.change((old, None), (new, moved))
                else:
                    source.change((old, None))
                    target.change((new, moved))
            case OperationKind.WRITE:
                write = Write(start=operation.number, data=operation.data)
                self._file(operation.inode).pending.append(write)
            case OperationKind.RESIZE:
                self._file(operation.inode).pending.append(Write(start=operation.number, data=None))
            case OperationKind.SYNC:
                self._by_inode[operation.inode].synchronise()
            case OperationKind.MARK:
                pass

    def write(self, target: Path) -> None:
        """Write the present contents to an empty folder."""

        def content(file: DiskFile) -> bytes:
            return _written(file.durable, file.pending)

        _write_folder(self.folder, target, lambda folder: folder.present, content)

    def cut(self, target: Path, loss: Loss, chance: Random) -> None:
        """Write the contents after a power cut to an empty folder; the disk itself goes on."""
        change_share, write_share = _KEPT_SHARES[loss]

        def entries(folder: DiskFolder) -> dict[str, Entry]:
            left = dict(folder.durable)
            for change in _part(folder.pending, change_share, chance):
                _apply(left, change)
            return left

        def content(file: DiskFile) -> bytes:
            return _written(file.durable, _part(file.pending, write_share, chance))

        _write_folder(self.folder, target, entries, content)

    def _add(self, operation: FileOperation, made: Entry) -> None:
        self._by_inode[operation.inode] = made
        parent, name = self._entry(operation.path)
        parent.change((name, made))

    def _file(self, inode: int) -> DiskFile:
        file = self._by_inode[inode]
        assert isinstance(file, DiskFile)
        return file

    def _entry(self, path: str) -> tuple[DiskFolder, str]:
        """The folder of a path as it is at present, and the last part of the path."""
        *parents, name = Path(path).relative_to(self._root).parts
        folder = self.folder
        for part in parents:
            inner = folder.present[part]
            assert isinstance(inner, DiskFolder)
            folder = inner
        return folder, name


Change = TypeVar("Change")


def _part(changes: Sequence[Change], share: float, chance: Random) -> list[Change]:
    return [change for change in changes if chance.random() < share]


def _apply(entries: dict[str, Entry], change: EntryChange) -> None:
    for name, entry in change.entries:
        if entry is None:
            entries.pop(name, None)
        else:
            entries[name] = entry


def _written(content: bytes, writes: Sequence[Write]) -> bytes:
    """The content after the writes; zeros stand where nothing was written."""
    new = bytearray(content)
    for write in writes:
        if write.data is None:
            del new[write.start :]
        stop = write.start + len(write.data or b"")
        new.extend(bytes(max(0, stop - len(new))))
        if write.data is not None:
            new[write.start : stop] = write.data
    return bytes(new)


def _write_folder(
    folder: DiskFolder,
    target: Path,
    entries: Callable[[DiskFolder], Mapping[str, Entry]],
    content: Callable[[DiskFile], bytes],
) -> None:
    for name, entry in entries(folder).items():
        match entry:
            case DiskFile():
                (target / name).write_bytes(content(entry))
            case DiskFolder():
                (target / name).mkdir()
                _write_folder(entry, target / name, entries, content)
