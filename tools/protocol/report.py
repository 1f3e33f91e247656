"""Searches the states of compiled programs for deadlocks and races, and damages them.

    python -m tools.protocol --record docs/records/protocol.json
    python -m tools.protocol program.zir

Without files the programs are those of ``tools.protocol.programs``. Every state of a rank is visited, with all orders
of the steps of its streams; where these are few, also every state of all ranks together, which must show the same.
Exits with 1 on a race or a deadlock, where both searches differ, or where the search and ``zeroir verify`` differ about
a damage for no known reason.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

from rich.progress import track

from tools import record_file
from tools.checker.program import Declarations
from tools.checker.reading import NoProgramError, read_file
from tools.protocol.damages import OUTCOMES, Damaged, damages
from tools.protocol.programs import KINDS, compiled, declarations, runs
from tools.protocol.search import races, visit
from tools.protocol.system import system_of

STAGES = range(4)
FEW = 3000
"""States of a rank in one run, up to which all ranks are searched together."""


class Searched(NamedTuple):
    """The findings on a program, the number of states of a rank, and that of all ranks together where they are few."""

    findings: list[str]
    states: int
    together: int


def searched(names: Declarations, few: int = FEW) -> Searched:
    """Visit the states of a rank, and of all ranks together where a rank has few."""
    findings: list[str] = []
    states = together = 0
    programs = [names] * names.ranks
    for run in runs(names):
        for blocking in ("compute", "devices"):
            # A thread that waits only delays steps, so one order of them shows whether the ranks come to a stop.
            stop = visit(system_of(programs, run, blocking=blocking), ()).stop
            findings += [f"{stop} (blocking: {blocking})"] if stop else []
        system = system_of(programs, run)
        found = visit(system, system.queues_of(0))
        # The ranks carry out the same program, so what one rank may do at once, each may do.
        each = len(system.queues) // names.ranks
        found.pairs = {
            ((one + rank * each, i), (other + rank * each, j))
            for (one, i), (other, j) in found.pairs
            for rank in range(names.ranks)
        }
        findings += [*races(system, found), *([found.stop] if found.stop else [])]
        states += found.states
        if found.states <= few:
            whole = visit(system, range(len(system.queues)))
            together += whole.states
            if (whole.pairs, whole.stop) != (found.pairs, found.stop):
                findings.append("the search of all ranks together shows something else")
    return Searched(findings, states, together)


def examined(kind: str, stage: int) -> tuple[Searched, list[Damaged]]:
    """Search the program of a kind at a stage, and damage it."""
    scheduled, logical = compiled(kind, stage)
    found = searched(declarations(scheduled, logical))
    return found, list(damages(scheduled, logical))


def main() -> int:
    """Search programs, and print the numbers of states and the outcomes of damages."""
    parser = argparse.ArgumentParser(description="Search the states of compiled programs.")
    parser.add_argument("files", nargs="*", metavar="FILE.zir")
    parser.add_argument("--kind", choices=KINDS, action="append", help="programs of this kind")
    parser.add_argument("--processes", type=int, default=2)
    record_file.add_option(parser)
    arguments = parser.parse_args()
    if arguments.files:
        return _search_files(arguments.files)
    kinds = arguments.kind or list(KINDS)
    tasks = [(kind, stage) for kind in kinds for stage in STAGES]
    found_in: dict[tuple[str, int], Searched] = {}
    counts: dict[str, Counter[str]] = {}
    is_bad = False
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("forkserver")) as pool:
        results = pool.map(examined, *zip(*tasks, strict=True))
        for task in track(tasks, "Searching", disable=not sys.stderr.isatty()):
            found_in[task], damaged = next(results)
            for text in found_in[task].findings:
                print(*task, text, sep=": ", flush=True)
            for each in damaged:
                counts.setdefault(each.kind, Counter())[each.outcome] += 1
                if each.outcome not in OUTCOMES[:2]:
                    print(*task, *each, each.outcome, sep=": ", flush=True)
            is_bad |= bool(found_in[task].findings) or any(d.is_unknown for d in damaged)
    rows = []
    for kind in kinds:
        own = [found_in[kind, stage] for stage in STAGES]
        together = sum(each.together for each in own)
        rows.append([kind, *(f"{count:,}" for count in (*(each.states for each in own), together))])
    sums = [sum(int(row[i].replace(",", "")) for row in rows) for i in range(1, 6)]
    rows.append(["all", *(f"{total:,}" for total in sums)])
    outcomes = [
        [kind, *(f"{count:,}" for count in (of.total(), *(of[outcome] for outcome in OUTCOMES)))]
        for kind, of in counts.items()
    ]
    heads = ["outside the device", *(f"stage {stage}" for stage in STAGES), "both ranks together"]
    tables = {"states": (heads, rows), "damages": (["damage", "programs", *OUTCOMES], outcomes)}
    for table in tables.values():
        record_file.print_table(*table)
    content = {name: {"head": head, "rows": rows} for name, (head, rows) in tables.items()}
    record_file.write(arguments.record, "protocol", content)
    return 1 if is_bad else 0


def _search_files(paths: list[str]) -> int:
    code = 0
    for path in paths:
        try:
            found = searched(Declarations(read_file(path).scheduled))
        except NoProgramError as error:
            print(error, file=sys.stderr)
            code = 2
            continue
        print(f"{path}: {found.states:,} states of a rank, {found.together:,} of all together")
        for text in found.findings:
            print(f"{path}: {text}")
        code = max(code, 1 if found.findings else 0)
    return code
