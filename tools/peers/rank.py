"""One rank of one contestant: takes as many steps as each line on its standard input says, and reports them as JSON.

    python -m tools.peers.rank CONTESTANT RANK WORLD_SIZE PROGRAMS FOLDER

Compiled programs lie in PROGRAMS; ranks meet in FOLDER.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def peak_rss_bytes() -> int:
    """The most memory that this process ever had resident."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Build the contestant, say that it is ready, and serve until the input ends."""
    name, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    programs, folder = Path(sys.argv[4]), Path(sys.argv[5])
    # What the contestant's libraries print must not come between the reports.
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=10),
    )
    bare = peak_rss_bytes()

    from tools.peers import contestants, gpt

    step = contestants.build(name, programs)
    batches = gpt.batches(rank, world_size, contestants.SEED, 0)

    def say(report: dict[str, object]) -> None:
        reports.write(json.dumps(report) + "\n")
        reports.flush()

    start = time.perf_counter()
    first = float(step(next(batches)))
    say({"first_step_seconds": time.perf_counter() - start, "losses": [first]})
    for line in sys.stdin:
        of_round = [next(batches) for _ in range(int(line))]
        dist.barrier()
        start = time.perf_counter()
        losses = [step(batch) for batch in of_round]
        dist.barrier()
        seconds = (time.perf_counter() - start) / len(of_round)
        say(
            {
                "seconds": seconds,
                "losses": [float(loss) for loss in losses],
                "bare_bytes": bare,
                "peak_bytes": peak_rss_bytes(),
            }
        )
    os._exit(0)  # peers may have threads that an ordinary exit would wait for


if __name__ == "__main__":
    main()
