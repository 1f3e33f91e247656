"""The rates of the disk of a folder, as one rank sees them: reads and writes through the engine's own requests.

All ranks of a node measure at the same time, because they share its disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Final

import torch
from torch import Tensor

from zeroir.ir.host_rates import MeasuredDisk
from zeroir.runtime.disk.disk_buffers import DiskBuffers
from zeroir.runtime.disk.scratch_file import PAGE_BYTES

_SIZE_BYTES: Final = 128 << 20
_ROUNDS: Final = 5


def measure_disk(folder: Path, rank: int, meet: Callable[[], None]) -> MeasuredDisk:
    """The rates of this rank. ``meet`` returns on all ranks at once; all of them call this together.

    Raises:
        UserError: where the folder or the disk refuses.
    """
    disk = DiskBuffers(folder, rank)
    disk.add({"read": _SIZE_BYTES, "written": _SIZE_BYTES})
    first, second = _whole_pages(_SIZE_BYTES), _whole_pages(_SIZE_BYTES)
    reading = disk.reading("read", 0, first)
    writing = disk.writing("written", 0, second)
    small = disk.reading("read", 0, first[:PAGE_BYTES])
    # What was never written is read without the disk.
    disk.writing("read", 0, first)()

    def seconds(*transfers: Callable[[], None]) -> float:
        """The median seconds until all of the transfers are done, each in a thread of its own."""
        measured: list[float] = []
        with ThreadPoolExecutor(len(transfers)) as threads:
            for _ in range(1 + _ROUNDS):
                meet()
                start = time.perf_counter()
                for done in [threads.submit(transfer) for transfer in transfers]:
                    done.result()
                measured.append(time.perf_counter() - start)
        return median(measured[1:])

    return MeasuredDisk(
        read_bytes_per_s=_SIZE_BYTES / seconds(reading),
        write_bytes_per_s=_SIZE_BYTES / seconds(writing),
        both_bytes_per_s=2 * _SIZE_BYTES / seconds(reading, writing),
        request_s=seconds(small),
    )


def _whole_pages(size_bytes: int) -> Tensor:
    """A flat tensor of bytes at an address that is a multiple of a page, for requests past the page cache."""
    block = torch.zeros(size_bytes + PAGE_BYTES, dtype=torch.uint8)
    start = -block.data_ptr() % PAGE_BYTES
    return block[start : start + size_bytes]
