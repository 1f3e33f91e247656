"""Read and write buffers on disk, beside fio on the same disk.

    python -m tools.bench_disk --folder /mnt/nvme

A buffer is read and written whole through the engine's requests, and a file of the same size by fio, with direct
requests of the same size and as many under way at once. Both were written before. They take turns; the medians count.
Without fio, dd with direct requests takes its place.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from tools import record_file
from zeroir.runtime.disk.disk_buffers import DiskBuffers
from zeroir.runtime.disk.disk_rates import page_aligned
from zeroir.runtime.disk.requests import REQUEST_BYTES, REQUESTS_AT_ONCE

DIRECTIONS = ("read", "write")


def measure(folder: Path, size_bytes: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """The bytes per second of each round, by direction and program."""
    memory = page_aligned(size_bytes)
    disk = DiskBuffers(folder, 0)
    disk.add({"buffer": size_bytes})
    if not disk.is_direct:
        raise SystemExit(f"{folder} has no direct reads and writes: name a folder on another disk")
    transfers = {
        "read": disk.reading("buffer", 0, memory),
        "write": disk.writing("buffer", 0, memory),
    }
    path = folder / ".bench-disk"
    judge = _fio if shutil.which("fio") else _dd
    rates: dict[str, dict[str, list[float]]] = {}
    try:
        judge(path, "write", size_bytes)
        transfers["write"]()
        for _ in range(rounds):
            for direction in DIRECTIONS:
                of_direction = rates.setdefault(direction, {"zeroir": [], judge.__name__[1:]: []})
                of_direction["zeroir"].append(_rate(transfers[direction], size_bytes))
                of_direction[judge.__name__[1:]].append(judge(path, direction, size_bytes))
    finally:
        path.unlink(missing_ok=True)
    return rates


def _rate(transfer: Callable[[], None], size_bytes: int) -> float:
    began = time.perf_counter()
    transfer()
    return size_bytes / (time.perf_counter() - began)


def _fio(path: Path, direction: str, size_bytes: int) -> float:
    """The bytes per second that fio reports."""
    command = [
        "fio",
        f"--name={direction}",
        f"--filename={path}",
        f"--rw={direction}",
        f"--size={size_bytes}",
        f"--bs={REQUEST_BYTES}",
        f"--iodepth={REQUESTS_AT_ONCE}",
        "--ioengine=libaio",
        "--direct=1",
        "--overwrite=1",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (job,) = json.loads(done.stdout)["jobs"]
    return float(job[direction]["bw_bytes"])


def _dd(path: Path, direction: str, size_bytes: int) -> float:
    """The bytes per second of dd, with one request at a time."""
    ends = [f"if={path}", "of=/dev/null", "iflag=direct"]
    if direction == "write":
        ends = ["if=/dev/zero", f"of={path}", "oflag=direct", "conv=notrunc"]
    command = ["dd", *ends, f"bs={REQUEST_BYTES}", f"count={size_bytes // REQUEST_BYTES}"]
    began = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return size_bytes / (time.perf_counter() - began)


def cells(rates: Mapping[str, Mapping[str, list[float]]]) -> list[list[str]]:
    """For each direction: what was done, GB/s, beside what, its GB/s, and the share."""
    rows: list[list[str]] = []
    for direction, of_direction in rates.items():
        own, judge = of_direction
        rate, other = (median(of_direction[name]) for name in (own, judge))
        verb = {"read": "reading", "write": "writing"}[direction]
        rows.append(
            [
                f"{verb} a disk",
                f"{rate / 1e9:.2f}",
                judge,
                f"{other / 1e9:.2f}",
                f"{rate / other:.0%}",
            ]
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = record_file.parser(__doc__ or "")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--size-mib", type=int, default=1024, help="of the buffer")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    size_bytes = options.size_mib << 20
    rates = measure(options.folder, size_bytes, options.rounds)
    head = ["what", "GB/s", "beside", "GB/s", "share"]
    about = {"size_bytes": size_bytes, "request_bytes": REQUEST_BYTES, "at_once": REQUESTS_AT_ONCE}
    record_file.publish(options.record, "bench_disk", head, cells(rates), about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
