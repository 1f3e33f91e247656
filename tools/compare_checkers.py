"""Compares the verdicts of both checkers on valid and on damaged programs.

    python -m tools.compare_checkers --count 2000 --record docs/records/checkers.json

The programs and the damages are those of ``tools.mutants``. Each damaged program is written to a file's bytes;
``zeroir.verify`` judges the program, and ``tools.checker`` the bytes. Where zeroir refuses a program that the second
checker accepts, the program runs under one interleaving: if it computes the same bits as the undamaged one, zeroir may
be stricter than it must be, and if not, the second checker has missed a fault. Exits with 1 where the second checker
missed one, or refuses what zeroir accepts.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from random import Random
from typing import NamedTuple

from rich.progress import track

from tests.support.mutate import MUTATIONS
from tests.support.subjects import NAMES, subject
from tools import record_file
from tools.checker.check import findings
from tools.checker.reading import NoProgramError, read_bytes
from zeroir.artifact.file import Artifact, to_bytes
from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.verify import Reference, verify

OUTCOMES = (
    "both refuse",
    "both accept",
    "zeroir alone refuses, same bits",
    "zeroir alone refuses, other bits",
    "the second checker alone refuses",
)
_PER_TASK = 25
_TRIES = 100


class Judgement(NamedTuple):
    """Both verdicts on one damaged program: an outcome, and the finding of the one checker that refuses it."""

    kind: str
    outcome: str
    why: str = ""


def second_findings(logical: Program, scheduled: Program) -> list[str]:
    """Return what the second checker finds in the file with these programs."""
    artifact = Artifact(
        logical=logical,
        scheduled=scheduled,
        model_path="model.py",
        model_sha256="",
        torch_version="",
        zeroir_version="",
    )
    try:
        return findings(read_bytes(to_bytes(artifact)))
    except (NoProgramError, UserError) as error:
        return [str(error)]


def judged(name: str, mutant: Program, kind: str, reference: Reference) -> Judgement:
    """Return both verdicts on a damaged program."""
    made = subject(name)
    report = verify(mutant, reference)
    found = second_findings(made.logical, mutant)
    if report.is_valid:
        return Judgement(kind, OUTCOMES[4], found[0]) if found else Judgement(kind, OUTCOMES[1])
    if found:
        return Judgement(kind, OUTCOMES[0])
    is_same = made.difference(mutant, 0) is None
    return Judgement(kind, OUTCOMES[2 if is_same else 3], report.render().splitlines()[0])


def batch(
    name: str, first: int, count: int, kinds: Sequence[str], deadline: float
) -> list[tuple[int, Judgement]]:
    """Judge several damages of one program; none begins after the deadline."""
    found: list[tuple[int, Judgement]] = []
    reference = Reference(subject(name).logical)
    original = subject(name).scheduled
    for seed in range(first, first + count):
        if time.monotonic() >= deadline:
            break
        chance = Random(f"{name} {seed}")
        for kind in chance.choices(kinds, k=_TRIES):
            mutant = MUTATIONS[kind](original, chance)
            if mutant is not None and mutant != original:
                found.append((seed, judged(name, mutant, kind, reference)))
                break
    return found


def main() -> int:
    """Compare verdicts and print how often each outcome occurs."""
    parser = argparse.ArgumentParser(description="Compare the verdicts of both checkers.")
    parser.add_argument("--count", type=int, default=500, help="how many damaged programs")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first of each")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after this")
    parser.add_argument("--program", choices=NAMES, action="append", help="of this one alone")
    parser.add_argument("--kind", choices=sorted(MUTATIONS), action="append", help="this damage")
    record_file.add_option(parser)
    arguments = parser.parse_args()
    names, kinds = arguments.program or list(NAMES), arguments.kind or sorted(MUTATIONS)
    deadline = time.monotonic() + arguments.seconds
    each = -(-arguments.count // len(names))
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("forkserver")) as pool:
        tasks = [
            (name, arguments.first + start, min(_PER_TASK, each - start), kinds, deadline)
            for start in range(0, each, _PER_TASK)
            for name in names
        ]
        futures = [pool.submit(batch, *task) for task in tasks]
        for (name, *_), future in track(
            list(zip(tasks, futures, strict=True)), "Judging", disable=not sys.stderr.isatty()
        ):
            for seed, judgement in future.result():
                counts[judgement.kind][judgement.outcome] += 1
                if judgement.why:
                    print(f"{name} {seed}: {judgement.kind}: {judgement.outcome}: {judgement.why}")
    differing = {kind: of for kind, of in counts.items() if sum(of[o] for o in OUTCOMES[2:])}
    alike = sum((of for kind, of in counts.items() if kind not in differing), Counter[str]())
    shown = {**differing, "all others": alike, "all": sum(counts.values(), Counter[str]())}
    rows = [
        [kind, str(of.total()), *(str(of[outcome]) for outcome in OUTCOMES)]
        for kind, of in shown.items()
    ]
    for row in rows:
        print("  ".join(f"{cell:>8}" if i else f"{cell:<24}" for i, cell in enumerate(row)))
    head = ["damage", "programs", *OUTCOMES]
    record_file.write(arguments.record, "checkers", {"head": head, "rows": rows})
    return 1 if int(rows[-1][5]) or int(rows[-1][6]) else 0


if __name__ == "__main__":
    sys.exit(main())
