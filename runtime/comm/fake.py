"""One rank of a pretended world: real memory, no traffic, so that one device shows what rank 5 of 64 would hold.

Everything that knows torch's fake process group, which is not public, is here. Received elements are whatever torch
puts there: sizes and times mean something, numbers do not.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from zeroir.ir.program import Program
from zeroir.runtime.comm.groups import make_groups
from zeroir.runtime.comm.nccl import NcclComm


def join_fake_world(rank: int, world_size: int) -> None:
    """Make the default process group a pretended one; ``torch.distributed.destroy_process_group`` ends it."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def fake_comm(program: Program) -> NcclComm:
    """Collectives that return at once; ``join_fake_world`` comes first."""
    return NcclComm(make_groups(program, "fake", timedelta(seconds=60)))
