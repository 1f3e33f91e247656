"""Damages programs in small ways and checks each: the verifier rejects it, or it computes the same.

    python -m tools.mutants --count 20000 --record docs/records/mutants.json

The proved programs of ``tests/support/subjects.py`` are damaged in turn, each time in another way that chance chooses.
A damage that can be done to few programs is the likelier there, so that it is done about as often as the others. What
the verifier accepts runs under several interleavings, and must come to the very bits of the undamaged program. Exits
with 1 where one does not.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from random import Random
from typing import NamedTuple

from rich.progress import track

from tests.support.mutate import MUTATIONS
from tests.support.subjects import NAMES, subject
from tools import record_file
from zeroir.report.diff import diff
from zeroir.verify import Reference, verify

SEEDS = 3
"""Interleavings that an accepted mutant is run under."""
_PER_TASK = 50
_TRIES = 100
_PROBES = 5


class MutantVerdict(NamedTuple):
    """The outcome of one mutant. ``why`` says how an accepted one differs, or with what error the verifier failed."""

    kind: str
    outcome: str
    why: str = ""


def judged(
    name: str, seed: int, reference: Reference, weights: Mapping[str, float]
) -> MutantVerdict | None:
    """One mutant of a program, whose kind is as likely as its weight; None where no such damage could be done to it."""
    chance = Random(f"{name} {seed}")
    original = subject(name).scheduled
    kinds = chance.choices(list(weights), list(weights.values()), k=_TRIES)
    for kind in kinds:
        mutant = MUTATIONS[kind](original, chance)
        if mutant is not None and mutant != original:
            break
    else:
        return None
    try:
        is_valid = verify(mutant, reference).is_valid
    except Exception as error:  # noqa: BLE001 - whatever it is, the verifier must not raise it
        return MutantVerdict(
            kind, "crashed", f"{type(error).__name__}: {error}\n{diff(original, mutant)}"
        )
    if not is_valid:
        return MutantVerdict(kind, "rejected")
    for schedule_seed in range(SEEDS):
        why = subject(name).difference(mutant, schedule_seed)
        if why is not None:
            return MutantVerdict(kind, "accepted and different", f"{why}\n{diff(original, mutant)}")
    return MutantVerdict(kind, "accepted and equal")


def possible(name: str, kinds: Sequence[str]) -> list[str]:
    """The kinds of damage that can be done to a program."""
    original = subject(name).scheduled
    chance = Random(name)
    return [
        kind
        for kind in kinds
        if any(MUTATIONS[kind](original, chance) not in (None, original) for _ in range(_PROBES))
    ]


def batch(
    name: str, first: int, count: int, weights: Mapping[str, float], deadline: float
) -> list[tuple[int, MutantVerdict | None]]:
    """Several mutants of one program, which is made once for them; none begins after the deadline."""
    found: list[tuple[int, MutantVerdict | None]] = []
    reference: Reference | None = None
    for seed in range(first, first + count):
        if time.monotonic() >= deadline:
            break
        reference = reference or Reference(subject(name).logical)
        found.append((seed, judged(name, seed, reference, weights)))
    return found


def main() -> int:
    """Judge mutants and print the outcomes."""
    parser = argparse.ArgumentParser(description="Judge damaged programs.")
    parser.add_argument("--count", type=int, default=700, help="how many mutants")
    parser.add_argument(
        "--first", type=int, default=0, help="the seed of the first of each program"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no mutant after this time"
    )
    parser.add_argument("--program", choices=NAMES, action="append", help="of this one alone")
    parser.add_argument("--kind", choices=sorted(MUTATIONS), action="append", help="this damage")
    record_file.add_option(parser)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    names, kinds = arguments.program or list(NAMES), arguments.kind or sorted(MUTATIONS)
    each = -(-arguments.count // len(names))
    counts_by_kind: dict[str, Counter[str]] = {kind: Counter() for kind in sorted(MUTATIONS)}
    begun = bad = 0
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("forkserver")) as pool:
        possible_kinds = dict(
            zip(names, pool.map(possible, names, [kinds] * len(names)), strict=True)
        )
        program_counts = Counter(kind for own in possible_kinds.values() for kind in own)
        tasks = [
            (
                name,
                arguments.first + start,
                min(_PER_TASK, each - start),
                {kind: 1 / program_counts[kind] for kind in possible_kinds[name]},
                deadline,
            )
            for start in range(0, each, _PER_TASK)
            for name in names
            if possible_kinds[name]
        ]
        futures = [pool.submit(batch, *task) for task in tasks]
        for (name, *_), future in track(
            list(zip(tasks, futures, strict=True)), "Judging", disable=not sys.stderr.isatty()
        ):
            for seed, verdict in future.result():
                begun += 1
                if verdict is None:
                    continue
                counts_by_kind[verdict.kind][verdict.outcome] += 1
                if verdict.why:
                    bad += 1
                    print(f"{name} {seed}: {verdict.kind} {verdict.outcome}: {verdict.why}\n")
    head = ["damage", "mutants", "rejected", "accepted, and equal to the bit", "accepted, and not"]
    rows = [
        [
            kind,
            str(counts.total()),
            str(counts["rejected"]),
            str(counts["accepted and equal"]),
            str(counts["accepted and different"] + counts["crashed"]),
        ]
        for kind, counts in counts_by_kind.items()
    ]
    rows.append(["all", *(str(sum(int(row[i]) for row in rows)) for i in range(1, 5))])
    for row in rows:
        print("  ".join(f"{cell:>10}" if i else f"{cell:<24}" for i, cell in enumerate(row)))
    wanted = sum(count for _, _, count, *_ in tasks)
    if begun < wanted:
        print(f"{begun} of {wanted} mutants were tried in {arguments.seconds:g} seconds.")
    record_file.write(arguments.record, "mutants", {"head": head, "rows": rows})
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
