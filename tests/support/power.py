"""What a disk has after the power failed: the calls of the system are recorded, and what was not synced may be lost."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass(slots=True)
class File:
    """A file: its bytes, and how many of them are synced."""

    data: bytearray = field(default_factory=bytearray)
    synced_bytes: int = 0

    def sync(self) -> None:
        """All bytes are safe."""
        self.synced_bytes = len(self.data)


@dataclass(slots=True)
class Folder:
    """A folder: the names that a running system sees, those that are synced, and the changes since then, in order."""

    names: dict[str, Node] = field(default_factory=dict)
    synced: dict[str, Node] = field(default_factory=dict)
    changes: list[Mapping[str, Node | None]] = field(default_factory=list)

    def change(self, change: Mapping[str, Node | None]) -> None:
        """Give names to nodes, or take them away (None), in one step."""
        _apply(self.names, change)
        self.changes.append(change)

    def sync(self) -> None:
        """All names are safe."""
        self.synced = dict(self.names)
        self.changes = []


Node = File | Folder
Event = Callable[["Disk"], None]
StrPath = str | os.PathLike[str]


@dataclass(slots=True)
class Disk:
    """A disk whose root folder is empty and safe."""

    root: Folder = field(default_factory=Folder)
    open: dict[int, Node] = field(default_factory=dict)

    def node(self, path: tuple[str, ...]) -> Node:
        """The file or folder at a path."""
        node: Node = self.root
        for name in path:
            assert isinstance(node, Folder)
            node = node.names[name]
        return node

    def folder(self, path: tuple[str, ...]) -> Folder:
        """The folder at a path."""
        node = self.node(path)
        assert isinstance(node, Folder)
        return node


@dataclass(slots=True)
class Journal:
    """The calls of the system that changed something below a folder, in order.

    ``forgotten`` is the number of a sync that is left out: a program that forgets it.
    """

    root: Path
    forgotten: int | None = None
    events: list[Event] = field(default_factory=list)
    syncs: int = 0
    handles: dict[int, int] = field(default_factory=dict)
    """The number of each open file: descriptors are used again, these numbers are not."""

    def disk(self, count: int) -> Disk:
        """The disk after the first calls."""
        disk = Disk()
        for event in self.events[:count]:
            event(disk)
        return disk

    def parts(self, path: StrPath) -> tuple[str, ...] | None:
        """The names of a path below the root; None for another path."""
        absolute = Path(path).absolute()
        return absolute.relative_to(self.root).parts if absolute.is_relative_to(self.root) else None

    def opened(self, descriptor: int, path: StrPath) -> None:
        """A file or folder was opened, and made if it was not there."""
        parts = self.parts(path)
        if parts is None:
            return
        number = self.handles[descriptor] = len(self.events)

        def event(disk: Disk) -> None:
            parent = disk.folder(parts[:-1]) if parts else disk.root
            if parts and parts[-1] not in parent.names:
                parent.change({parts[-1]: File()})
            disk.open[number] = disk.node(parts)

        self.events.append(event)

    def written(self, descriptor: int, data: bytes) -> None:
        """Bytes were appended to a file."""
        number = self.handles.get(descriptor)
        if number is None:
            return

        def event(disk: Disk) -> None:
            node = disk.open[number]
            assert isinstance(node, File)
            node.data += data

        self.events.append(event)

    def synced(self, descriptor: int) -> bool:
        """A file or folder was synced, unless the program is to forget it; False if it is elsewhere."""
        number = self.handles.get(descriptor)
        if number is None:
            return False
        if self.syncs != self.forgotten:
            self.events.append(lambda disk: disk.open[number].sync())
        self.syncs += 1
        return True

    def renamed(self, changes: dict[StrPath, StrPath | None]) -> None:
        """In one step, paths of one folder were given the nodes of others, or were removed (None)."""
        parts = {self.parts(new): old and self.parts(old) for new, old in changes.items()}
        named = {new: old for new, old in parts.items() if new}
        if not named:
            return
        (folder,) = {new[:-1] for new in named}

        def event(disk: Disk) -> None:
            nodes = {new[-1]: disk.node(old) if old else None for new, old in named.items()}
            disk.folder(folder).change(nodes)

        self.events.append(event)

    def made(self, path: StrPath) -> None:
        """A folder was made."""
        parts = self.parts(path)
        if parts:
            self.events.append(lambda disk: disk.folder(parts[:-1]).change({parts[-1]: Folder()}))


@contextlib.contextmanager
def recorded(root: Path, forgotten: int | None = None) -> Iterator[Journal]:
    """Record the calls of the system that change something below a folder, which is empty."""
    journal = Journal(root=root, forgotten=forgotten)
    real = os.open, os.write, os.fsync, os.close, os.mkdir, os.rename, os.unlink, os.rmdir
    open_, write, fsync, close, mkdir, rename, unlink, rmdir = real

    def recorded_open(path: StrPath, flags: int, mode: int = 0o777) -> int:
        descriptor = open_(path, flags, mode)
        journal.opened(descriptor, path)
        return descriptor

    def recorded_write(descriptor: int, data: memoryview) -> int:
        count = write(descriptor, data)
        journal.written(descriptor, bytes(data[:count]))
        return count

    def recorded_fsync(descriptor: int) -> None:
        # The journal is what counts; the machine of the test stays up.
        if not journal.synced(descriptor):
            fsync(descriptor)

    def recorded_close(descriptor: int) -> None:
        journal.handles.pop(descriptor, None)
        close(descriptor)

    def recorded_mkdir(path: StrPath, mode: int = 0o777) -> None:
        mkdir(path, mode)
        journal.made(path)

    def recorded_rename(old: StrPath, new: StrPath) -> None:
        rename(old, new)
        journal.renamed({new: old, old: None})

    def recorded_unlink(path: StrPath) -> None:
        unlink(path)
        journal.renamed({path: None})

    def recorded_rmdir(path: StrPath) -> None:
        rmdir(path)
        journal.renamed({path: None})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", recorded_open)
        patch.setattr(os, "write", recorded_write)
        patch.setattr(os, "fsync", recorded_fsync)
        patch.setattr(os, "close", recorded_close)
        patch.setattr(os, "mkdir", recorded_mkdir)
        patch.setattr(os, "rename", recorded_rename)
        patch.setattr(os, "unlink", recorded_unlink)
        patch.setattr(os, "rmdir", recorded_rmdir)
        yield journal


def write_images(disk: Disk, target: Path, *, seed: int, count: int) -> Iterator[Path]:
    """Folders with what the disk may have after a power cut: all that was not synced, nothing of it, random parts."""
    draws = random.Random(seed)

    def is_kept() -> bool:
        return draws.random() < 0.5

    for number, keep in enumerate((lambda: True, lambda: False, *[is_kept] * count)):
        image = target / f"{seed}.{number}"
        _write_folder(disk.root, image, keep)
        yield image


def _apply(names: dict[str, Node], change: Mapping[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _write_folder(folder: Folder, target: Path, keep: Callable[[], bool]) -> None:
    target.mkdir()
    names = dict(folder.synced)
    for change in folder.changes:
        if keep():
            _apply(names, change)
    for name, node in names.items():
        if isinstance(node, Folder):
            _write_folder(node, target / name, keep)
        else:
            lost = node.data[node.synced_bytes :]
            tail = lost if keep() else bytes(len(lost)) if keep() else b""
            (target / name).write_bytes(node.data[: node.synced_bytes] + tail)
