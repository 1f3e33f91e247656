"""One rank of a simulated world, with real memory and no traffic: one device shows the memory of, say, rank 5 of 64.

Torch's fake process group is not public; only this module uses it. Received elements have arbitrary values, so sizes
and times are meaningful and numbers are not.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def join_fake_world(rank: int, world_size: int) -> None:
    """Make the default process group a fake one; ``torch.distributed.destroy_process_group`` destroys it."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
