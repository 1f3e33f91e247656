"""Damage compiled programs, give each to the commands that read one, and count how they end.

    python -m tools.fuzz_artifact --bodies 10000 --edits 5000 --record docs/records/fuzz.json

Every damaged file has a correct digest, so the commands must refuse its contents. `verify` reads each and, where no
law is broken, `show` in both its forms, in a process of its own with at most 2 s of CPU time and 1 GB of address space.
The process must end with 0 (accepted), 1 (a law is broken) or 2 (refused), and print no control characters. The exit
code is 1 where one does not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import resource
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from rich.progress import track

from tests.support.programs import mlp
from tests.support.stored_program import STORED
from tools import record_file
from tools.damage import Damage, damaged, edited
from zeroir.artifact import Artifact, envelope, load
from zeroir.artifact.schema import pack
from zeroir.cli.app import run_command
from zeroir.config import make_options
from zeroir.passes.pipelines import lower

CPU_SECONDS: Final = 2
MEMORY_BYTES: Final = 1_000_000_000
_WALL_SECONDS: Final = 120
"""A process that waits takes no CPU time, and must end, too."""
_PER_TASK: Final = 100
_GOOD: Final = {0: "accepted", 1: "a law is broken", 2: "refused"}
_OBEYED: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class FuzzOutcome(NamedTuple):
    """The outcome of the commands for one damaged file, with their output where that is bad."""

    kind: str
    outcome: str
    said: str = ""


def subjects() -> list[bytes]:
    """The bodies of programs that hold: of every stage, written by hand or stored."""
    bodies = [pack(load(STORED))]
    for stage, precision in ((0, "fp32"), (2, "bf16"), (3, "fp16")):
        options = {"stage": stage, "world_size": 2, "precision": precision, "clip": 1.0}
        logical = mlp(blocks=2, precision=precision, clip=1.0)
        artifact = Artifact(
            logical=logical,
            scheduled=lower(logical, make_options(options)),
            model_path="model.py",
            model_sha256="0" * 64,
            torch_version="2.13.0",
            zeroir_version="0.1.0",
        )
        bodies.append(pack(artifact))
    return bodies


def ending(damage: Damage, folder: Path) -> FuzzOutcome:
    """Run the commands on one damaged file, in a separate process."""
    path, output = folder / "damaged.zir", folder / "output.txt"
    path.write_bytes(envelope(damage.body))
    process = os.fork()
    if process == 0:
        _read_all(path, output)
    _, status, used = os.wait4(process, 0)
    said = output.read_bytes().decode(errors="replace")
    outcome = _outcome(status, used.ru_utime + used.ru_stime, said)
    return FuzzOutcome(damage.kind, outcome, "" if outcome in _GOOD.values() else said[-3000:])


def _read_all(path: Path, output: Path) -> None:
    """The work of the child, which ends here in every case."""
    exit_code = 70
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(_WALL_SECONDS)
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(target, 1)
        os.dup2(target, 2)
        exit_code = _exit_code(path)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(exit_code)


def _exit_code(path: Path) -> int:
    exit_code = run_command(["verify", str(path)])
    if exit_code != 0:
        return exit_code
    return max(run_command(["show", str(path), *flags]) for flags in ((), ("--text",)))


def _outcome(status: int, cpu_seconds: float, said: str) -> str:
    number = os.waitstatus_to_exitcode(status)
    if number in (-signal.SIGXCPU, -signal.SIGKILL) or cpu_seconds > CPU_SECONDS:
        return f"beyond {CPU_SECONDS} s"
    if number < 0:
        return f"killed by {signal.Signals(-number).name}"
    if "MemoryError" in said:
        return f"beyond {MEMORY_BYTES // 10**9} GB"
    if number not in _GOOD or "Traceback" in said:
        return "traceback"
    if _OBEYED.search(said):
        return "control characters"
    return _GOOD[number]


def batch(name: str, first: int, count: int) -> list[tuple[int, FuzzOutcome]]:
    """Several damaged files of one subject after the other; ``name`` is ``bodies`` or ``edits``."""
    bodies = subjects()
    damage = damaged if name == "bodies" else edited
    outcomes: list[tuple[int, FuzzOutcome]] = []
    # What the commands import is imported here once, and not in every fork.
    with contextlib.redirect_stdout(io.StringIO()):
        _exit_code(STORED)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + count):
            chance = Random(f"{name} {seed}")
            outcomes.append(
                (seed, ending(damage(bodies[seed % len(bodies)], chance), Path(folder)))
            )
    return outcomes


def table(name: str, endings: Sequence[FuzzOutcome]) -> list[list[str]]:
    """One row a kind of damage, and the sum of all."""
    kinds: dict[str, Counter[str]] = {}
    for ended in endings:
        kinds.setdefault(ended.kind, Counter())[ended.outcome] += 1
    kinds = dict(sorted(kinds.items()))
    kinds[f"all {name}"] = Counter(ended.outcome for ended in endings)
    rows: list[list[str]] = []
    for kind, counts in kinds.items():
        good = [counts[outcome] for outcome in ("refused", "a law is broken", "accepted")]
        rows.append([kind, *map(str, (counts.total(), *good, counts.total() - sum(good)))])
    return rows


HEAD: Final = ["damage", "files", "refused", "a law is broken", "accepted", "ended otherwise"]


def main() -> int:
    """Damage, read and count."""
    parser = argparse.ArgumentParser(description="Read damaged programs.")
    parser.add_argument("--bodies", type=int, default=200, help="how many damaged bodies")
    parser.add_argument("--edits", type=int, default=100, help="how many edits that keep types")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    record_file.add_option(parser)
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    bad: Counter[str] = Counter()
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("forkserver")) as pool:
        for name, count in (("bodies", arguments.bodies), ("edits", arguments.edits)):
            starts = range(arguments.first, arguments.first + count, _PER_TASK)
            futures = [
                pool.submit(batch, name, start, min(_PER_TASK, arguments.first + count - start))
                for start in starts
            ]
            endings: list[FuzzOutcome] = []
            for future in track(futures, f"Reading {name}", disable=not sys.stderr.isatty()):
                for seed, ended in future.result():
                    endings.append(ended)
                    if ended.outcome not in _GOOD.values():
                        bad[ended.outcome] += 1
                        print(
                            f"{name} {seed}: {ended.kind}: {ended.outcome}\n{ended.said}\n",
                            flush=True,
                        )
            rows += table(name, endings)
    for row in [HEAD, *rows]:
        print("  ".join(f"{cell:>15}" if i else f"{cell:<24}" for i, cell in enumerate(row)))
    if bad:
        print(", ".join(f"{count} {outcome}" for outcome, count in bad.items()))
    record_file.write(arguments.record, "fuzz_artifact", {"head": HEAD, "rows": rows})
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
