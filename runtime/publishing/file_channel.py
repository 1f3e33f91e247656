"""Weights on the way through a file, in memory as under ``/dev/shm``, or on a disk that the receivers see.

A version is written beside the file and takes its place by one rename when it is whole. A receiver that has opened the
file before keeps the version before, and nobody waits for anybody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from torch import Tensor

from zeroir.checkpoint.file_errors import unwritable
from zeroir.checkpoint.local_storage import LocalOutput
from zeroir.errors import UserError
from zeroir.runtime.publishing.stored_weights import StoredWeights, opened


class FileOutlet:
    """Puts weights into a file; versions go on from that of a file that is there.

    Raises:
        UserError: where the file cannot be written, another process publishes to it, or it has something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._output: LocalOutput | None = None
        self._lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0, thread_local=False)
        try:
            # The lock would make the folder of a mistyped path.
            path.parent.stat()
            self._lock.acquire()
        except Timeout as error:
            raise UserError(
                f"Another process publishes to '{path}': end it, or give another path."
            ) from error
        except OSError as error:
            raise unwritable(str(path), error) from error
        self._version = 0
        try:
            if path.exists():
                with opened(path) as weights:
                    self._version = weights.version
        except UserError:
            self.close()
            raise

    def is_awaited(self) -> bool:
        return True

    def missing(self) -> str:
        return ""

    def begin(self, header: Callable[[int], bytes], chunks: Sequence[int]) -> int:
        self._version += 1
        beginning = header(self._version)
        part = str(self._path.with_name(f".{self._path.name}.part"))
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            descriptor = os.open(part, flags, 0o666)
            self._output = LocalOutput(path=part, descriptor=descriptor)
            os.posix_fallocate(descriptor, 0, len(beginning) + sum(chunks))
        except OSError as error:
            raise unwritable(part, error) from error
        self._output.write(memoryview(beginning))
        return self._version

    def write(self, data: Tensor) -> None:
        assert self._output is not None
        self._output.write(data.numpy().data)

    def finish(self) -> None:
        assert self._output is not None
        output, self._output = self._output, None
        try:
            output.finish()
            Path(output.path).replace(self._path)
        except OSError as error:
            raise unwritable(str(self._path), error) from error

    def abandon(self) -> None:
        if self._output is not None:
            self._output.abandon()
            self._output = None

    def close(self) -> None:
        self._lock.release()


class FileInlet:
    """Finds weights in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] | None = None

    @contextmanager
    def newer(self, version: int) -> Iterator[StoredWeights | None]:
        try:
            status = self._path.stat()
        except OSError:
            yield None
            return
        identity = status.st_ino, status.st_mtime_ns
        if identity == self._seen:
            yield None
            return
        with opened(self._path) as weights:
            yield weights if weights.version != version else None
        self._seen = identity

    def absence(self) -> str:
        return f"no newer weights have come to '{self._path}'"

    def close(self) -> None:
        pass
