"""The storages that paths may name: the machine's file systems, and the stores that fsspec opens."""

from __future__ import annotations

from zeroir.checkpoint.local_storage import LocalStorage
from zeroir.checkpoint.storage import Storage


def open_storage(path: str) -> Storage:
    """The storage of a path: a disk, or what fsspec opens for a URL such as ``s3://bucket/runs``."""
    if "://" in path:
        from zeroir.checkpoint.fsspec_storage import open_store

        return open_store(path)
    return LocalStorage()
