"""The folders that commands write. A folder is replaced only by one of the same kind, completely or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zeroir.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderKind:
    """A kind of folder that commands write: its name, an example of a path, and patterns of names in it.

    A folder is of the kind if one of its names matches ``mark``; every name that the command writes matches ``names``.
    """

    noun: str
    example: str
    mark: re.Pattern[str]
    names: re.Pattern[str]


HUGGING_FACE: Final = FolderKind(
    noun="a model in the format of Hugging Face",
    example="out",
    mark=re.compile(r"model\.safetensors(\.index\.json)?"),
    names=re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|config\.json"),
)
DISTRIBUTED: Final = FolderKind(
    noun="a checkpoint of torch.distributed.checkpoint",
    example="out",
    mark=re.compile(r"\.metadata"),
    names=re.compile(r"\.metadata|.*\.distcp"),
)
UNIVERSAL: Final = FolderKind(
    noun="a universal checkpoint of DeepSpeed",
    example="out",
    mark=re.compile(r"latest_universal"),
    names=re.compile(r"latest_universal|global_step\d+_universal"),
)


def require_folder_writable(path: Path, kind: FolderKind) -> None:
    """Check that a folder of the kind can be written at the path, before any work is done for it.

    What stands at the path may be replaced if it is an empty folder, or a folder of the kind in which nothing else is.

    Raises:
        UserError: if the folder cannot be written.
    """
    try:
        if path.is_symlink():
            raise UserError(f"'{path}' is a link: name the folder itself.")
        if path.exists() and not path.is_dir():
            raise UserError(
                f"'{path}' is a file: name a folder to write, for instance {kind.example}."
            )
        parent = path.absolute().parent
        if not parent.is_dir():
            raise UserError(f"'{path}' cannot be written: there is no folder '{parent}'.")
        if not os.access(parent, os.W_OK):
            raise UserError(f"'{path}' cannot be written: you may not write in '{parent}'.")
        names = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    except OSError as error:
        raise unwritable_folder(path, error) from error
    if names and not any(kind.mark.fullmatch(name) for name in names):
        raise UserError(
            f"'{path}' exists and is not {kind.noun}: name another folder to write, for instance {kind.example}."
        )
    for name in names:
        if not kind.names.fullmatch(name):
            raise UserError(
                f"'{path}' also contains {name}, which would be lost: name another folder to write, or move it away."
            )


@contextlib.contextmanager
def folder_written_whole(path: Path, kind: FolderKind) -> Iterator[Path]:
    """Give an empty folder to write into, and let it appear at the path if the body succeeds; otherwise remove it.

    All of it is durable before it appears. An old folder is moved aside at the last moment, and removed afterwards.

    Raises:
        UserError: if the folder cannot be written.
    """
    require_folder_writable(path, kind)
    target = path.absolute()
    token = secrets.token_hex(6)
    aside = target.with_name(f".{target.name}.{token}.tmp")
    old = target.with_name(f".{target.name}.{token}.old")
    try:
        aside.mkdir()
        yield aside
        _make_durable(aside)
        if target.exists():
            target.rename(old)
        try:
            aside.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise
        _sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise unwritable_folder(path, error) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def unwritable_folder(path: Path, error: OSError) -> UserError:
    """Return the error that says that a folder cannot be written."""
    return UserError(f"'{path}' cannot be written: {error.strerror or error}.")


def _make_durable(folder: Path) -> None:
    """Sync every file and folder of a tree, the folders after their contents."""
    for entry in sorted(folder.rglob("*"), reverse=True):
        _sync(entry)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
