"""Searches the states of compiled programs for deadlocks and races, and damages them.

    python -m tools.protocol --record docs/records/protocol.json
    python -m tools.protocol --damages --record docs/records/protocol-damages.json
    python -m tools.protocol program.zir

Without files the programs are those of ``tools.protocol.programs``. The states of each two streams of a rank are
visited; where they are few, also those of all its streams, and of all ranks together, which must show the same.
Exits with 1 on a race or a deadlock, where both searches differ, or where the search and ``zeroir verify`` differ about
a damage for no known reason.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import combinations
from multiprocessing import get_context
from typing import Any, NamedTuple

from rich.progress import track

from tools import record_file
from tools.checker.program import Declarations
from tools.checker.reading import NoProgramError, read_file
from tools.protocol.damages import OUTCOMES, Damaged, damages
from tools.protocol.programs import KINDS, compiled, declarations, runs
from tools.protocol.search import Visited, races, visit
from tools.protocol.system import system_of

STAGES = range(4)
MOST, FEW = 150_000, 1000
"""States of a rank in a run, up to which all are visited, and those of all ranks together."""


class Searched(NamedTuple):
    """The findings on a program, the number of states of one rank that were visited, and that of all ranks."""

    findings: list[str]
    states: int
    together: int


def searched(names: Declarations, few: int = FEW) -> Searched:
    """Visit the states of each two streams of a rank, and where they are few of all its streams, and of all ranks."""
    findings: list[str] = []
    states = together = 0
    programs = [names] * names.ranks
    for run in runs(names):
        for blocking in ("compute", "devices"):
            # A thread that waits only delays steps, so one order of them shows whether the ranks come to a stop.
            stop = visit(system_of(programs, run, blocking=blocking), ()).stop
            findings += [f"{stop} (blocking: {blocking})"] if stop else []
        system = system_of(programs, run)
        own = system.queues_of(0)
        found = Visited()
        for pair in combinations(own, 2):
            of_pair = visit(system, pair)
            found.pairs |= of_pair.pairs
            found.stop, states = of_pair.stop, states + of_pair.states
        of_rank = visit(system, own, MOST)
        states += of_rank.states
        if of_rank.states <= MOST and (of_rank.pairs, of_rank.stop) != (found.pairs, found.stop):
            findings.append("the search of a whole rank shows something else")
        # The ranks carry out the same program, so what one rank may do at once, each may do.
        each = len(system.queues) // names.ranks
        found.pairs = {
            ((one + rank * each, i), (other + rank * each, j))
            for (one, i), (other, j) in found.pairs
            for rank in range(names.ranks)
        }
        findings += [*races(system, found), *([found.stop] if found.stop else [])]
        if of_rank.states <= few:
            whole = visit(system, range(len(system.queues)))
            together += whole.states
            if (whole.pairs, whole.stop) != (found.pairs, found.stop):
                findings.append("the search of all ranks together shows something else")
    return Searched(findings, states, together)


def searched_program(kind: str, stage: int) -> Searched:
    """Search the program of a kind at a stage."""
    return searched(declarations(*compiled(kind, stage)))


def damaged_program(kind: str, stage: int) -> list[Damaged]:
    """Damage the program of a kind at a stage, and judge each damage."""
    return list(damages(*compiled(kind, stage)))


def main() -> int:
    """Search programs or damages to them, and print the numbers of states or the outcomes."""
    parser = argparse.ArgumentParser(description="Search the states of compiled programs.")
    parser.add_argument("files", nargs="*", metavar="FILE.zir")
    parser.add_argument("--kind", choices=KINDS, action="append", help="programs of this kind")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--damages", action="store_true", help="damage them, and ask zeroir, too")
    record_file.add_option(parser)
    arguments = parser.parse_args()
    if arguments.files:
        return _search_files(arguments.files)
    kinds = arguments.kind or list(KINDS)
    tasks = [(kind, stage) for kind in kinds for stage in STAGES]
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("forkserver")) as pool:
        run: Callable[[str, int], Any] = damaged_program if arguments.damages else searched_program
        results = pool.map(run, *zip(*tasks, strict=True))
        found = list(track(results, "Searching", len(tasks), disable=not sys.stderr.isatty()))
    of_tasks = dict(zip(tasks, found, strict=True))
    head, rows, is_bad = _damages_table(of_tasks) if arguments.damages else _states_table(of_tasks)
    record_file.publish(arguments.record, "protocol", head, rows)
    return 1 if is_bad else 0


def _states_table(
    found: Mapping[tuple[str, int], Searched],
) -> tuple[list[str], list[list[str]], bool]:
    """Return the numbers of states by kind and stage, and whether anything was found."""
    counts: dict[str, Counter[str]] = {}
    for (kind, stage), each in found.items():
        for row in (counts.setdefault(kind, Counter()), counts.setdefault("all", Counter())):
            row[f"stage {stage}"] += each.states
            row["both ranks together"] += each.together
        for text in each.findings:
            print(kind, stage, text, sep=": ")
    columns = [*(f"stage {stage}" for stage in STAGES), "both ranks together"]
    counts["all"] = counts.pop("all")
    rows = [[kind, *(f"{of[column]:,}" for column in columns)] for kind, of in counts.items()]
    return ["outside the device", *columns], rows, any(each.findings for each in found.values())


def _damages_table(
    found: Mapping[tuple[str, int], list[Damaged]],
) -> tuple[list[str], list[list[str]], bool]:
    """Return the outcomes by kind of damage, and whether any is unknown."""
    counts: dict[str, Counter[str]] = {}
    for (kind, stage), damaged in found.items():
        for each in damaged:
            counts.setdefault(each.kind, Counter())[each.outcome] += 1
            if each.outcome not in OUTCOMES[:2]:
                print(kind, stage, *each, each.outcome, sep=": ")
    rows = [
        [kind, *(f"{count:,}" for count in (of.total(), *(of[outcome] for outcome in OUTCOMES)))]
        for kind, of in counts.items()
    ]
    is_bad = any(each.is_unknown for damaged in found.values() for each in damaged)
    return ["damage", "programs", *OUTCOMES], rows, is_bad


def _search_files(paths: list[str]) -> int:
    code = 0
    for path in paths:
        try:
            found = searched(Declarations(read_file(path).scheduled))
        except NoProgramError as error:
            print(error, file=sys.stderr)
            code = 2
            continue
        print(
            f"{path}: {found.states:,} states of a rank visited, {found.together:,} of all together"
        )
        for text in found.findings:
            print(f"{path}: {text}")
        code = max(code, 1 if found.findings else 0)
    return code
