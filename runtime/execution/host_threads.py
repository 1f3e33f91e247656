"""How many threads an update on the host may use, beside a device that computes."""

from __future__ import annotations

import os

import torch


def update_threads() -> int:
    """The threads of one rank's update on the host of a device: its share of the cores but one, and at least one.

    A process that is bound to some of the machine's cores has all of these; otherwise the ranks of the machine
    (``LOCAL_WORLD_SIZE``, which torchrun sets) share its cores equally. One core is left to the thread that issues ops.
    ``OMP_NUM_THREADS`` above 1 is the user's own number. It does not count where it is 1, because torchrun sets that
    for every job of several ranks, and one thread would be many times slower than the memory.
    """
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 1:
        return int(given)
    cores, bound = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local_ranks) if local_ranks.isdecimal() and bound == cores else 1
    return max(bound // max(ranks, 1) - 1, 1)


def use_update_threads() -> None:
    """Let torch's operators in the calling thread use these threads; those in other threads keep their number."""
    torch.set_num_threads(update_threads())
