"""How many threads an update on the host may use while a device computes."""

from __future__ import annotations

import os

import torch


def update_threads() -> int:
    """Return the threads of one rank's update on a device's host: its share of the cores minus one, at least one.

    A process bound to some of the machine's cores uses these; otherwise the ranks of the machine (``LOCAL_WORLD_SIZE``,
    which torchrun sets) share its cores equally. One core is left to the thread that issues ops. The user may set
    ``OMP_NUM_THREADS`` above 1. The value 1 is ignored, because torchrun sets it for every job of several ranks, and
    one thread would be many times slower than the memory.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 1:
        return int(given)
    cores, bound = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local_ranks) if local_ranks.isdecimal() and bound == cores else 1
    return max(bound // max(ranks, 1) - 1, 1)


def use_update_threads() -> None:
    """Set this number of threads for torch's operators in the calling thread only."""
    torch.set_num_threads(update_threads())
