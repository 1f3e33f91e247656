"""Publishing: the files of a checkpoint are written aside, and appear at once with a manifest."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass

from zeroir.checkpoint.manifest import Manifest
from zeroir.checkpoint.manifest_file import manifest_bytes
from zeroir.checkpoint.storage import join
from zeroir.checkpoint.storages import open_storage
from zeroir.errors import UserError


@dataclass(slots=True, kw_only=True)
class Draft:
    """A checkpoint while it is written: its files go to ``folder``, and readers will find it at ``target``.

    Rank 0 begins it and sends it to all ranks; each writes ``file_name(rank)`` or nothing; rank 0 ends it.
    """

    target: str
    folder: str
    token: str
    was_sent: bool = False
    """Whether its manifest may be on the way, even if publishing failed."""

    def file_name(self, rank: int) -> str:
        """The name of a rank's file."""
        return open_storage(self.folder).file_name(rank, self.token)

    def publish(self, manifest: Manifest) -> str:
        """Let the checkpoint appear, durably; its path. If that fails, the draft is abandoned.

        Raises:
            UserError: if this machine lacks a file of the manifest, something is at the target, or the disk fails.
        """
        try:
            self._publish(manifest)
        except BaseException:
            self.abandon()
            raise
        return self.target

    def abandon(self) -> None:
        """Remove what is written of a checkpoint that did not appear. It raises nothing."""
        with contextlib.suppress(UserError):
            storage = open_storage(self.folder)
            storage.discard(self.folder, self.token, was_sent=self.was_sent)

    def _publish(self, manifest: Manifest) -> None:
        storage = open_storage(self.folder)
        for file in manifest.files:
            size_bytes = storage.size_bytes(join(self.folder, file.name))
            if size_bytes is None:
                raise UserError(
                    f"'{self.folder}' lacks {file.name}, which another rank has written: save to a folder that all "
                    "machines share."
                )
            if size_bytes != file.size_bytes:
                raise UserError(
                    f"'{join(self.folder, file.name)}' has {size_bytes} bytes instead of the {file.size_bytes} that "
                    "were written: save to another disk."
                )
        self.was_sent = True
        storage.publish(self.folder, self.target, manifest_bytes(manifest))


def begin(target: str) -> Draft:
    """Begin a checkpoint at a path where nothing is.

    Raises:
        UserError: if something is there, or nothing can be written beside it.
    """
    token = secrets.token_hex(6)
    folder = open_storage(target).begin(target, token)
    return Draft(target=target, folder=folder, token=token)
