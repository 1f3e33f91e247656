"""The storages that paths may name: the machine's file systems, and the stores that fsspec opens."""

from __future__ import annotations

from zeroir.checkpoint.local_storage import LocalStorage
from zeroir.checkpoint.storage import Storage


def open_storage(path: str) -> Storage:
    """Open the storage of a path: a file system, or fsspec's for a URL such as ``s3://bucket/runs``."""
    if "://" in path:
        from zeroir.checkpoint.fsspec_storage import open_store

        return open_store(path)
    return LocalStorage()
