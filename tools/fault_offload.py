"""Keep buffers on a disk of which one call of the system goes wrong, and count what hangs, is left or is damaged.

    python -m tools.fault_offload --trials 200 --record docs/records/fault-offload.json

Each trial trains two steps with the optimizer and the parameters on disk, and saves two checkpoints, in a process of
its own. Every kind of fault hits as many calls, drawn with a seed. A trial is wrong if it does not end, ends with other
numbers than without a fault, is refused by anything but one sentence that names the folder, leaves a file in the
folder, or leaves a checkpoint that is not whole. The exit code is 1 if one is wrong.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

from rich.progress import track

from tests.support.faulty_disk import Fault, Kind, calls_of_the_system, possible_faults, trial
from tools import record_file


def draw(calls: Sequence[str], count: int, seed: int) -> list[Fault]:
    """So many different faults, or all there are, of each kind about as many."""
    faults = possible_faults(calls)
    Random(seed).shuffle(faults)
    seen: Counter[Kind] = Counter()
    places: list[tuple[int, Fault]] = []
    for fault in faults:
        places.append((seen[fault.kind], fault))
        seen[fault.kind] += 1
    return [fault for _, fault in sorted(places, key=lambda place: place[0])][:count]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; 1 if one is wrong."""
    parser = record_file.parser(__doc__ or "")
    parser.add_argument("--trials", type=int, default=200, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of faults")
    options = parser.parse_args(arguments)
    ends: Counter[tuple[Kind, str]] = Counter()
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        calls, expected = calls_of_the_system(root / "undisturbed")
        faults = draw(calls, options.trials, options.seed)
        for number, fault in enumerate(track(faults, "Faults")):
            outcome = trial(root / f"trial-{number}", fault, expected)
            ends[fault.kind, outcome.ended] += 1
            where = f"{fault.kind.name} at call {fault.call} ({calls[fault.call]})"
            problems += [f"{where}: {problem}" for problem in outcome.problems]
    columns = ("finished", "refused", "killed")
    rows = [[kind.value, *(str(ends[kind, ended]) for ended in columns)] for kind in Kind]
    record_file.print_table(["fault", *columns], rows)
    for problem in problems:
        print(problem)
    print(f"{len(faults)} faults at {len(calls)} calls: {len(problems)} problems")
    content = {
        "calls": len(calls),
        "faults": len(faults),
        "problems": problems,
        "head": ["fault", *columns],
        "rows": rows,
    }
    record_file.write(options.record, "fault_offload", content)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
