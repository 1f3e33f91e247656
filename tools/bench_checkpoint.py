"""The cost of checkpoints: bandwidth beside `dd`, hold-up of steps, and time and memory of loads.

    python -m tools.bench_checkpoint [--rounds 5] [--folder FOLDER] [--record FILE]

One rank trains a model with 400 MB of state on the CPU. In turn, so that other load on the machine hits both alike,
`dd` writes as many bytes with an fsync at the end, training waits for a save, and a save runs in the background during
steps. Between them come steps without a save. Figures are medians over the rounds; those of bandwidth and of steps are
medians of the ratios within a round.

* Hold-up: the time that `save(wait=False)` takes, and what the step after it takes more than usually, because an update
  waits for the copy of what it overwrites; as a share of the time of a save that training waits for.
* Steps during a save: the median of the steps until the save has ended, divided by that of the steps before it.
* Hashing: the time spent in checksums, as a share of a load from the disk.
* Memory: the peak of the resident memory during a load (or after the first background save) above what was resident
  before, less the state itself, in MB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import torch

import zeroir
from tools import record_file
from tools.checkpoints import wide_model
from zeroir.api import CompiledProgram
from zeroir.checkpoint import checksums, reading
from zeroir.checkpoint.reading import read_manifest
from zeroir.runtime.engine.engine import Engine

_STEPS: Final = 6
_BLOCK_BYTES: Final = 256 << 10
"""The fastest of ``dd`` on Linux: above 1 MiB it is several times slower."""


@dataclass(slots=True)
class Figures:
    """What was measured, by name, once a round."""

    by_name: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Note the figure of a round."""
        self.by_name.setdefault(name, []).append(value)


class TimedChecksum(checksums.Checksum):
    """A checksum that measures the seconds that all of them take."""

    __slots__ = ()
    seconds = 0.0

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """See ``Checksum.add``."""
        start = time.perf_counter()
        super().add(data)
        TimedChecksum.seconds += time.perf_counter() - start


def compiled() -> CompiledProgram:
    """The program of one rank."""
    return zeroir.compile(wide_model.__file__, stage=1, world_size=1, optimizer="adamw")


def dd_seconds(folder: Path, size_bytes: int) -> float:
    """The time in which ``dd`` writes a file and synchronises it."""
    target = folder / "dd"
    count = size_bytes // _BLOCK_BYTES
    command = ["dd", "if=/dev/zero", f"of={target}", f"bs={_BLOCK_BYTES}", f"count={count}"]
    start = time.perf_counter()
    subprocess.run([*command, "conv=fsync"], check=True, capture_output=True)
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds * size_bytes / (count * _BLOCK_BYTES)


def step_seconds(engine: Engine) -> float:
    """The time of a step."""
    start = time.perf_counter()
    engine.step(wide_model.batch())
    return time.perf_counter() - start


def measure_saves(engine: Engine, folder: Path, figures: Figures) -> None:
    """One round: ``dd``, a save that training waits for, steps, and a save in the background."""
    paths = [str(folder / name) for name in ("waited", "background")]
    start = time.perf_counter()
    engine.save(paths[0])
    waited = time.perf_counter() - start
    size_bytes = sum(file.size_bytes for file in read_manifest(paths[0]).files)
    dd = dd_seconds(folder, size_bytes)
    figures.add("dd with fsync, MB/s", size_bytes / 1e6 / dd)
    figures.add("save, MB/s", size_bytes / 1e6 / waited)
    figures.add("bandwidth beside dd", dd / waited)
    plain = median(step_seconds(engine) for _ in range(_STEPS))
    start = time.perf_counter()
    pending = engine.save(paths[1], wait=False)
    held = time.perf_counter() - start
    during = [step_seconds(engine)]
    while not pending.is_done:
        during.append(step_seconds(engine))
    pending.wait()
    figures.add("step, s", plain)
    figures.add("save that training waits for, s", waited)
    held_up = held + max(0.0, during[0] - plain)
    figures.add("call of a background save, s", held)
    figures.add("hold-up, share of a waited save", held_up / waited)
    figures.add("steps during a save, relative", median(during[1:] or during) / plain)
    for path in paths:
        shutil.rmtree(path)


@contextmanager
def resident_peak() -> Iterator[list[float]]:
    """The growth of resident memory to its peak within the body, in MB; the list has it afterwards."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_mb("VmRSS")
    growth: list[float] = []
    yield growth
    growth.append(_status_mb("VmHWM") - before)


def _status_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024 / 1e6


def measure_load(path: str) -> tuple[float, float, float]:
    """The seconds of a load, the share of hashing, and the peak of memory above the state in MB, in this process."""
    setattr(reading, "Checksum", TimedChecksum)  # noqa: B010
    engine = Engine(compiled().program)
    for file in read_manifest(path).files:
        descriptor = os.open(f"{path}/{file.name}", os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    with resident_peak() as growth:
        start = time.perf_counter()
        engine.load(path)
        seconds = time.perf_counter() - start
    engine.close()
    state_bytes = sum(file.size_bytes for file in read_manifest(path).files)
    return seconds, TimedChecksum.seconds / seconds, growth[0] - state_bytes / 1e6


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description="The cost of checkpoints.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="the disk to write to")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    record_file.add_option(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.load is not None:
        print(*measure_load(arguments.load))
        return 0
    figures = Figures()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        engine = compiled().engine()
        path = str(folder / "first")
        for _ in range(2):
            step_seconds(engine)
        with resident_peak() as growth:
            engine.save(path, wait=False).wait()
        size_bytes = sum(file.size_bytes for file in read_manifest(path).files)
        figures.add("memory of a background save, share of the state", growth[0] * 1e6 / size_bytes)
        command = [sys.executable, "-m", "tools.bench_checkpoint", "--load", path]
        for _ in range(arguments.rounds):
            measure_saves(engine, folder, figures)
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seconds, share, extra = map(float, printed.split()[-3:])
            figures.add("load, s", seconds)
            figures.add("hashing, share of a load", share)
            figures.add("memory of a load above the state, MB", extra)
        engine.close()
    rows = [
        [name, f"{median(values):.4g}", f"{min(values):.4g}", f"{max(values):.4g}"]
        for name, values in figures.by_name.items()
    ]
    record_file.publish(
        arguments.record,
        "bench_checkpoint",
        ["figure", "median", "least", "most"],
        rows,
        {"rounds": arguments.rounds, "state_bytes": size_bytes, "load": os.getloadavg()[1]},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
