"""Save checkpoints to an S3 emulator, let one request of each save go wrong, and count what is lost or half-visible.

    python -m tools.fault_checkpoint --trials 200 --record docs/records/fault-checkpoint.json

Each trial saves the third checkpoint of a folder and removes the first, over HTTP, in a process of its own. Every kind
of fault hits every request in turn, or as many as there are trials, drawn with a seed. A checkpoint is lost if it was
to be kept, or its save has succeeded, and it is not whole afterwards. It is half-visible if readers find it and it is
not whole. The exit code is 1 if there is one of either.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from random import Random

from rich.progress import track

from tests.support import object_store
from tests.support.faulty_store import Fault, Kind, count_requests, trial
from tools import record_file


def draw(methods: Sequence[str], count: int, seed: int) -> list[Fault]:
    """So many different faults, or all there are, of each kind about as many."""
    random = Random(seed)
    faults: list[tuple[int, Fault]] = []
    for kind in Kind:
        requests = random.sample(range(len(methods)), len(methods))
        faults.extend(
            (place, Fault(request=request, kind=kind)) for place, request in enumerate(requests)
        )
    return [fault for _, fault in sorted(faults, key=lambda drawn: drawn[0])][:count]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; 1 if a checkpoint was lost or half-visible."""
    parser = record_file.parser(__doc__ or "")
    parser.add_argument("--trials", type=int, default=200, help="how many faults")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of faults")
    options: argparse.Namespace = parser.parse_args(arguments)
    with object_store.running() as environment:
        os.environ.update(environment)
        bucket = object_store.make_bucket("trials")
        methods = count_requests(bucket)
        faults = draw(methods, options.trials, options.seed)
        ends: Counter[tuple[Kind, str]] = Counter()
        lost, half_visible = [], []
        for number, fault in enumerate(track(faults, "Faults")):
            outcome = trial(bucket, f"trial-{number}", fault, environment)
            ends[fault.kind, outcome.ended] += 1
            where = f"{fault.kind.name} at request {fault.request} ({methods[fault.request]}): {outcome}"
            if outcome.is_lost:
                lost.append(where)
            if outcome.is_half_visible:
                half_visible.append(where)
    columns = ("saved", "refused", "killed")
    rows = [[kind.value, *(str(ends[kind, ended]) for ended in columns)] for kind in Kind]
    record_file.print_table(["fault", *columns], rows)
    for line in (*lost, *half_visible):
        print(line)
    print(f"{len(faults)} faults: {len(lost)} lost, {len(half_visible)} half-visible")
    content = {
        "requests": len(methods),
        "faults": len(faults),
        "lost": lost,
        "half_visible": half_visible,
        "head": ["fault", *columns],
        "rows": rows,
    }
    record_file.write(options.record, "fault_checkpoint", content)
    return 1 if lost or half_visible else 0


if __name__ == "__main__":
    sys.exit(main())
