"""One rank that freezes layers and trains them again: ``python -m tests.api.freezing_workers``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroir
from tests.runtime.support import join

WIDTH = 16
RANKS = 3
STEPS = 10


def net_of() -> nn.Sequential:
    torch.manual_seed(3)
    layers = (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers)


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (net(x) - x.roll(1, 1)).square().mean()
    return loss


def change(net: nn.Sequential, step: int) -> None:
    """Freeze half way, train again later, and set the norm to evaluation mode."""
    match step:
        case 2:
            net[:2].requires_grad_(False)
        case 4:
            net[1].eval()
        case 5:
            net[0].requires_grad_(True)
        case 7:
            net[3].bias.requires_grad_(False)
        case 8:
            net.train().requires_grad_(True)
        case _:
            pass


def train(rank: int, stage: int) -> None:
    net, replicas = net_of(), [net_of() for _ in range(RANKS)]
    own = torch.optim.AdamW(net.parameters(), lr=0.01)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, fused=True) for each in replicas]
    engine = zeroir.compile(
        net,
        batch_of(0, 0),
        loss=loss_of,
        optimizer=own,
        stage=stage,
        world_size=RANKS,
        evaluate=False,
    ).engine()
    for step in range(STEPS):
        change(net, step)
        found = engine.step(batch_of(rank, step)).loss
        for number, replica in enumerate(replicas):
            change(replica, step)
            replica.zero_grad()
            loss = loss_of(replica, batch_of(number, step))
            loss.backward()  # type: ignore[no-untyped-call]
            if number == rank:
                assert found == loss.item(), (stage, step)
        for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                total = sum(gradients[1:], gradients[0]) / RANKS
                for parameter in parameters:
                    parameter.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
    engine.close()
    expected = replicas[rank].state_dict()
    for name, value in net.state_dict().items():
        assert torch.equal(value, expected[name]), (stage, name)


def main() -> None:
    join()
    for stage in (1, 3):
        train(int(os.environ["RANK"]), stage)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
