"""Compares the verdicts of both checkers on valid and on damaged programs.

    python -m tools.compare_checkers --count 20020 --journal judged.jsonl --record docs/records/checkers.json

The programs and the damages are those of ``tools.mutants``. Each damaged program is written to a file's bytes;
``zeroir.verify`` judges the program, and ``tools.checker`` the bytes. Where zeroir refuses a program that the second
checker accepts, the program runs under one interleaving: if it computes the same bits as the undamaged one, zeroir may
be stricter than it must be, and if not, the second checker has missed a fault. A run that was stopped goes on after the
judgements in its journal. Exits with 1 where the second checker missed a fault, or refuses what zeroir accepts.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import NamedTuple

from rich.progress import track

from tests.support.artifacts import artifact_of
from tests.support.mutate import MUTATIONS
from tests.support.subjects import NAMES, subject
from tools import record_file
from tools.checker.check import findings
from tools.checker.reading import NoProgramError, read_bytes
from zeroir.artifact.file import to_bytes
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

    program: str
    seed: int
    kind: str
    outcome: str
    why: str = ""


def second_findings(logical: Program, scheduled: Program) -> list[str]:
    """Return what the second checker finds in the file with these programs."""
    try:
        return findings(read_bytes(to_bytes(artifact_of(scheduled, logical)), with_dims=True))
    except (NoProgramError, UserError) as error:
        return [str(error)]


def judged(name: str, seed: int, mutant: Program, kind: str, reference: Reference) -> Judgement:
    """Return both verdicts on a damaged program."""
    made = subject(name)
    report = verify(mutant, reference)
    found = second_findings(made.logical, mutant)
    outcome, why = OUTCOMES[0], ""
    if report.is_valid:
        outcome, why = (OUTCOMES[4], found[0]) if found else (OUTCOMES[1], "")
    elif not found:
        is_same = made.difference(mutant, 0) is None
        outcome, why = OUTCOMES[2 if is_same else 3], report.render().splitlines()[0]
    return Judgement(name, seed, kind, outcome, why)


def batch(
    name: str, seeds: Sequence[int], kinds: Sequence[str], deadline: float
) -> list[Judgement]:
    """Judge several damages of one program; none begins after the deadline."""
    found: list[Judgement] = []
    reference = Reference(subject(name).logical)
    original = subject(name).scheduled
    for seed in seeds:
        if time.monotonic() >= deadline:
            break
        chance = Random(f"{name} {seed}")
        for kind in chance.choices(kinds, k=_TRIES):
            mutant = MUTATIONS[kind](original, chance)
            if mutant is not None and mutant != original:
                found.append(judged(name, seed, mutant, kind, reference))
                break
    return found


def judgements_in(journal: Path | None) -> list[Judgement]:
    """Return the judgements of earlier runs."""
    if journal is None or not journal.exists():
        return []
    return [Judgement(*json.loads(line)) for line in journal.read_text().splitlines()]


def main() -> int:
    """Compare verdicts and print how often each outcome occurs."""
    parser = argparse.ArgumentParser(description="Compare the verdicts of both checkers.")
    parser.add_argument("--count", type=int, default=500, help="how many damaged programs")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first of each")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin none after this")
    parser.add_argument("--program", choices=NAMES, action="append", help="of this one alone")
    parser.add_argument("--kind", choices=sorted(MUTATIONS), action="append", help="this damage")
    parser.add_argument("--journal", type=Path, help="judgements so far, which new ones follow")
    record_file.add_option(parser)
    arguments = parser.parse_args()
    names, kinds = arguments.program or list(NAMES), arguments.kind or sorted(MUTATIONS)
    deadline = time.monotonic() + arguments.seconds
    each = -(-arguments.count // len(names))
    judgements = judgements_in(arguments.journal)
    done = {(judgement.program, judgement.seed) for judgement in judgements}
    stop = arguments.first + each
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("forkserver")) as pool:
        futures = []
        for start in range(arguments.first, stop, _PER_TASK):
            for name in names:
                seeds = [
                    seed
                    for seed in range(start, min(start + _PER_TASK, stop))
                    if (name, seed) not in done
                ]
                futures += [pool.submit(batch, name, seeds, kinds, deadline)] if seeds else []
        for future in track(
            as_completed(futures), "Judging", len(futures), disable=not sys.stderr.isatty()
        ):
            judgements += future.result()
            if arguments.journal is not None:
                with arguments.journal.open("a") as file:
                    file.writelines(json.dumps(judgement) + "\n" for judgement in future.result())
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    for judgement in sorted(judgements):
        counts[judgement.kind][judgement.outcome] += 1
        if judgement.why:
            print(": ".join(map(str, judgement)))
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
    record_file.write(arguments.record, "compare_checkers", {"head": head, "rows": rows})
    return 1 if int(rows[-1][5]) or int(rows[-1][6]) else 0


if __name__ == "__main__":
    sys.exit(main())
