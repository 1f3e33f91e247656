"""Publishing: the files of a checkpoint are written out of sight, and appear together with a manifest."""

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
    """A checkpoint that is being written: its files go to ``folder``, and readers will find it at ``target``.

    Rank 0 creates it and sends it to all ranks; each writes ``file_name(rank)`` or nothing; rank 0 publishes it.
    """

    target: str
    folder: str
    token: str
    was_sent: bool = False
    """Whether its manifest may have been sent, even if publishing failed."""

    def file_name(self, rank: int) -> str:
        """Return the name of a rank's file."""
        return open_storage(self.folder).file_name(rank, self.token)

    def publish(self, manifest: Manifest) -> str:
        """Make the checkpoint appear, durably, and return its path. The draft is abandoned if that fails.

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
        """Remove the files of a checkpoint that did not appear. It raises nothing."""
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
    """Start a checkpoint at an unused path.

    Raises:
        UserError: if something is there, or nothing can be written next to it.
    """
    token = secrets.token_hex(6)
    folder = open_storage(target).begin(target, token)
    return Draft(target=target, folder=folder, token=token)
