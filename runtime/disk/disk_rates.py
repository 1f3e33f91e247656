"""The transfer rates of a disk for one rank, measured with the reads and writes of buffers on disk.

All ranks of a node measure at the same time, so that they share the disk as they do in training. Each figure is the
median of several rounds, after the file was written once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

import torch

from zeroir.ir.host_rates import MeasuredDisk
from zeroir.runtime.disk.disk_buffers import DiskBuffers
from zeroir.runtime.disk.scratch_file import PAGE_BYTES

_SIZE_BYTES: Final = 256 << 20
_ROUNDS: Final = 5


def measure_disk(
    folder: Path, rank: int, meet: Callable[[], None], size_bytes: int = _SIZE_BYTES
) -> MeasuredDisk:
    """Measure the transfer rates of a folder's disk. ``meet`` is a barrier; all ranks call this together.

    Raises:
        UserError: where the folder has no room for a file of twice ``size_bytes``, or the disk fails.
    """
    disk = DiskBuffers(folder, rank)
    disk.add({"read": size_bytes, "written": size_bytes})
    sources = [page_aligned(size_bytes) for _ in range(2)]
    read = disk.reading("read", 0, sources[0])
    write = disk.writing("written", 0, sources[1])
    small = disk.reading("read", 0, sources[0][:PAGE_BYTES])
    disk.writing("read", 0, sources[0])()
    write()

    def both() -> None:
        writing = threading.Thread(target=write)
        writing.start()
        read()
        writing.join()

    def seconds(task: Callable[[], object]) -> float:
        measured: list[float] = []
        for _ in range(_ROUNDS):
            meet()
            began = time.perf_counter()
            task()
            measured.append(time.perf_counter() - began)
        return median(measured)

    return MeasuredDisk(
        read_bytes_per_s=size_bytes / seconds(read),
        write_bytes_per_s=size_bytes / seconds(write),
        both_bytes_per_s=2 * size_bytes / seconds(both),
        request_s=seconds(small),
    )


def page_aligned(size_bytes: int) -> torch.Tensor:
    """Return random bytes (u8) that begin at a page, so that the disk can access them without a copy."""
    block = torch.empty(size_bytes + PAGE_BYTES, dtype=torch.uint8)
    start = -block.data_ptr() % PAGE_BYTES
    return block[start : start + size_bytes].random_(255)
