"""One rank that trains beside quantised weights, saves, and goes on: ``python -m tests.api.quantized_workers``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroir
from tests.runtime.support import join
from zeroir.quantize import WeightFormat

WIDTH, HIDDEN = 24, 20
STEPS = 3


class Block(nn.Module):
    """Frozen linear layers with a trained adapter beside the one and a trained bias in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN).requires_grad_(False)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.down.weight.requires_grad_(False)
        self.adapter = nn.Sequential(
            nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, HIDDEN, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = (self.up(x) + self.adapter(x)).tanh()
        result: Tensor = x + self.down(hidden)
        return result


class Coded(nn.Module):
    """Codes of its own, in 8-bit floats and integers."""

    def __init__(self) -> None:
        super().__init__()
        floats = torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn)
        self.floats = nn.Parameter(floats, requires_grad=False)
        self.integers = nn.Parameter(torch.arange(WIDTH, dtype=torch.int8), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.floats.to(x.dtype) * (self.integers.to(x.dtype) / WIDTH)
        return x + nn.functional.linear(x, weight, self.bias).tanh()


class Net(nn.Module):
    """Blocks that are units of their own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList([*(Block() for _ in range(3)), Coded()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = x.square().mean()
        return loss


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


def train(weights: WeightFormat, folder: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = zeroir.quantize_frozen(Net(0), weights)
    optimizer = sgd(plain)
    frozen = {name: p.clone() for name, p in plain.named_parameters() if not p.requires_grad}

    def engine_of(seed: int) -> zeroir.Engine:
        # The values are those of rank 0.
        with torch.device("cpu" if rank == 0 else "meta"):
            net = zeroir.quantize_frozen(Net(seed), weights)
        compiled = zeroir.compile(
            net, batch_of(0, 0), optimizer=sgd(net), stage=3, world_size=world_size, evaluate=False
        )
        return compiled.engine()

    def step(engine: zeroir.Engine, number: int) -> None:
        found = engine.step(batch_of(rank, number)).loss
        optimizer.zero_grad()
        losses = [plain(batch_of(each, number)) for each in range(world_size)]
        for loss in losses:
            loss.backward()
        for parameter in plain.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(world_size)
        optimizer.step()
        assert found == losses[rank].item(), (weights, number)

    engine = engine_of(0)
    for number in range(STEPS):
        step(engine, number)
    engine.save(folder).wait()
    engine.close()
    # Other weights, frozen ones too, than those that were saved.
    engine = engine_of(1)
    engine.load(folder)
    for number in range(STEPS, 2 * STEPS):
        step(engine, number)
    found, expected = engine.state_dict(), plain.state_dict()
    engine.close()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name
    for name, value in frozen.items():
        assert torch.equal(found[name].view(torch.uint8), value.view(torch.uint8)), name


def main() -> None:
    join()
    # Two ranks try the first and third format, and three the others.
    for weights in get_args(WeightFormat)[dist.get_world_size() - 2 :: 2]:
        train(weights, Path(os.environ["TEST_FOLDER"]) / weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
