"""Reads and writes of a scratch file, split into requests of a few MiB, several of which run at once.

Direct requests need offsets, sizes and addresses that are multiples of a page. Any other request, such as the end of a
shard, goes through an aligned block of the thread. Where it changes part of a page that has other bytes in use, the
page is read first. So elements may begin and end anywhere; this affects only the speed.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from zeroir.runtime.disk.disk_errors import stuck, truncated, unreadable, unwritable
from zeroir.runtime.disk.scratch_file import PAGE_BYTES, ScratchFile, whole_pages

REQUEST_BYTES: Final = 2 << 20
"""The bytes of a request: enough that Python's time for each is short compared to the disk's."""

REQUESTS_AT_ONCE: Final = 8
"""The number of requests that run at once, so that the disk always has the next ones."""

_ATTEMPTS: Final = 16
"""The number of consecutive requests without progress after which the disk counts as failed."""

PreparedTransfer = Callable[[], None]
"""A prepared transfer, which can run any number of times. It returns when all its bytes are transferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DiskRequest:
    """Bytes at an offset of the file, and their memory. The file's bytes after them are unused up to ``limit``."""

    offset: int
    memory: memoryview
    address: int
    limit: int

    @property
    def stop(self) -> int:
        return self.offset + len(self.memory)

    @property
    def is_aligned(self) -> bool:
        return all(n % PAGE_BYTES == 0 for n in (self.offset, len(self.memory), self.address))


class Requests:
    """Reads and writes a file, from any thread.

    ``read_bytes`` and ``written_bytes`` count the bytes requested from the system.
    """

    def __init__(self, file: ScratchFile) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="zeroir-disk")
        self._own = threading.local()
        self._changing_parts = threading.Lock()
        self._counting = threading.Lock()
        self.read_bytes = 0
        self.written_bytes = 0

    def reading(self, offset: int, memory: Tensor) -> PreparedTransfer:
        """Return a function that reads bytes at an offset of the file into a flat CPU tensor.

        It raises UserError where the disk fails.
        """
        return partial(self._all, self._read, list(self._requests(offset, memory, offset)))

    def writing(self, offset: int, memory: Tensor, *, limit: int) -> PreparedTransfer:
        """Return a function that writes a flat CPU tensor at an offset of the file.

        The file's bytes after the tensor's are unused up to the offset ``limit``, and may change. The function raises
        UserError where the disk fails.
        """
        return partial(self._all, self._write, list(self._requests(offset, memory, limit)))

    def _requests(self, offset: int, memory: Tensor, limit: int) -> Iterator[_DiskRequest]:
        """Yield requests that end at multiples of a request's size.

        Direct ones cover whole pages, or part of a single page.
        """
        octets = memory.detach().view(torch.uint8)
        stop = offset + octets.numel()
        last_page = stop // PAGE_BYTES * PAGE_BYTES
        start = offset
        while start < stop:
            end = min(stop, (start // REQUEST_BYTES + 1) * REQUEST_BYTES)
            if self._file.is_direct and start % PAGE_BYTES:
                end = min(end, whole_pages(start))
            elif self._file.is_direct and start < last_page < end:
                end = last_page
            piece = octets[start - offset : end - offset]
            yield _DiskRequest(
                offset=start,
                memory=piece.numpy().data,
                address=piece.data_ptr(),
                limit=max(limit, end),
            )
            start = end

    def _all(self, run: Callable[[_DiskRequest], None], requests: Sequence[_DiskRequest]) -> None:
        """Run requests. A failure is raised only when no request uses the memory any more."""
        if len(requests) == 1:
            run(requests[0])
            return
        futures = [self._pool.submit(run, request) for request in requests]
        wait(futures)
        for future in futures:
            future.result()

    def _read(self, request: _DiskRequest) -> None:
        if not self._file.is_direct or request.is_aligned:
            self._transfer_in(request.offset, request.memory)
            return
        first = request.offset // PAGE_BYTES * PAGE_BYTES
        start = request.offset - first
        pages = self._block()[: whole_pages(request.stop) - first]
        self._transfer_in(first, pages)
        request.memory[:] = pages[start : start + len(request.memory)]

    def _write(self, request: _DiskRequest) -> None:
        if not self._file.is_direct or request.is_aligned:
            self._transfer_out(request.offset, request.memory)
            return
        first, last = request.offset // PAGE_BYTES * PAGE_BYTES, whole_pages(request.stop)
        start = request.offset - first
        pages = self._block()[: last - first]
        own = slice(start, start + len(request.memory))
        if start == 0 and last <= request.limit:
            pages[own] = request.memory
            self._transfer_out(first, pages)
            return
        with self._changing_parts:  # Another thread may change the rest of the page.
            self._transfer_in(first, pages)
            pages[own] = request.memory
            self._transfer_out(first, pages)

    def _block(self) -> memoryview:
        """Return this thread's block for one request, aligned to a page."""
        block: memoryview | None = getattr(self._own, "block", None)
        if block is None:
            block = self._own.block = memoryview(mmap.mmap(-1, REQUEST_BYTES + PAGE_BYTES))
        return block

    def _transfer_in(self, offset: int, target: memoryview) -> None:
        file, done, idle = self._file, 0, 0
        while done < len(target):
            try:
                count = os.preadv(file.descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise unreadable(file.folder, file.rank, error) from error
            progress = self._progress(done, count, len(target))
            idle = 0 if progress > done else idle + 1
            if count == 0 or idle == _ATTEMPTS:
                raise truncated(file.folder, file.rank)
            done = progress
        with self._counting:
            self.read_bytes += len(target)

    def _transfer_out(self, offset: int, source: memoryview) -> None:
        file, done, idle = self._file, 0, 0
        while done < len(source):
            try:
                count = os.pwritev(file.descriptor, [source[done:]], offset + done)
            except OSError as error:
                raise unwritable(file.folder, file.rank, error) from error
            progress = self._progress(done, count, len(source))
            idle = 0 if progress > done else idle + 1
            if idle == _ATTEMPTS:
                raise stuck(file.folder, file.rank)
            done = progress
        with self._counting:
            self.written_bytes += len(source)

    def _progress(self, done: int, count: int, size_bytes: int) -> int:
        """Return the bytes transferred so far: whole pages until all are, because the next request starts there."""
        done += count
        if done < size_bytes and self._file.is_direct:
            done -= done % PAGE_BYTES
        return done
