"""Verification that reports all the damage of a checkpoint, where a load stops at the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from zeroir.checkpoint.folder import CheckpointFolder
from zeroir.checkpoint.manifest import MANIFEST_NAME, Manifest
from zeroir.checkpoint.reading import CheckpointFiles, VerifyItem, read_manifest, verify_items
from zeroir.checkpoint.storages import open_storage
from zeroir.errors import UserError

_SUFFIX: Final = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedPart:
    """A damaged part of a checkpoint: its file, its tensor (None: the header or the whole file), and a sentence."""

    file: str
    tensor: str | None
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result for one checkpoint. ``manifest`` is None if it is damaged.

    ``size_bytes`` counts the bytes whose checksums were compared. ``foreign_names`` are files and folders in the
    checkpoint that its manifest does not name; they are never read.
    """

    path: str
    manifest: Manifest | None
    size_bytes: int
    damages: tuple[DamagedPart, ...]
    foreign_names: tuple[str, ...]


def checkpoints_at(path: str) -> tuple[str, ...]:
    """Return the checkpoints in a folder, newest first, or the one at the path itself; damaged ones are included.

    Raises:
        UserError: if there is none.
    """
    listed = tuple(each.path for each in CheckpointFolder(root=path).list())
    names = [entry.name for entry in open_storage(path).entries(path) if not entry.is_folder]
    if not listed and not any(name.endswith(_SUFFIX) for name in names):
        read_manifest(path)
    return listed or (path,)


def verify_checkpoint(path: str) -> Verification:
    """Compare all checksums of a checkpoint, with what is on the disk where the system allows that."""
    try:
        manifest = read_manifest(path)
    except UserError as error:
        damage = DamagedPart(file=MANIFEST_NAME, tensor=None, sentence=str(error))
        return Verification(
            path=path, manifest=None, size_bytes=0, damages=(damage,), foreign_names=()
        )
    return Verification(
        path=path,
        manifest=manifest,
        size_bytes=sum(file.size_bytes for file in manifest.files),
        damages=tuple(_damages(path, manifest)),
        foreign_names=_foreign_names(path, manifest),
    )


def _damages(path: str, manifest: Manifest) -> Iterator[DamagedPart]:
    unreadable: set[str] = set()
    with CheckpointFiles(path=path, manifest=manifest, from_disk=True) as files:
        for item in verify_items(manifest):
            if item.file in unreadable:
                continue
            sentence = _refusal(files, item)
            if sentence is not None:
                if item.tensor is None:
                    unreadable.add(item.file)
                yield DamagedPart(file=item.file, tensor=item.tensor, sentence=sentence)


def _refusal(files: CheckpointFiles, item: VerifyItem) -> str | None:
    try:
        files.verify(item)
    except UserError as error:
        return str(error)
    return None


def _foreign_names(path: str, manifest: Manifest) -> tuple[str, ...]:
    known = {MANIFEST_NAME, *(file.name for file in manifest.files)}
    entries = open_storage(path).entries(path)
    return tuple(entry.name for entry in entries if entry.name not in known)
