"""One rank whose batches may make a NaN: ``python -m tests.api.anomaly_workers``."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroir
from tests.runtime.support import join
from zeroir.errors import UserError


class Block(nn.Module):
    """Takes a logarithm of what may be negative."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.log(self.line(x).square() - 1e-6)


class Net(nn.Module):
    """Three such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def net() -> Net:
    torch.manual_seed(0)
    made = Net()
    with torch.no_grad():
        for block in made.blocks:
            block.get_parameter("line.weight").zero_()
            block.get_parameter("line.bias").fill_(1.0)
        made.get_parameter("blocks.1.line.weight").fill_(-1.0)
    return made


BAD = torch.full((2, 4), 0.25)
"""The second block's layer gives zeros for it."""


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join()
    good = torch.rand(2, 4)
    engine = zeroir.compile(net(), good, stage=3, world_size=world_size, evaluate=False).engine()
    with engine.detect_anomaly():
        engine.step(good)
    with engine.detect_anomaly(), pytest.raises(UserError, match=r"Rank 1: %input\.0 has NaNs"):
        engine.step(torch.full((2, 4), torch.nan) if rank == 1 else good)
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
