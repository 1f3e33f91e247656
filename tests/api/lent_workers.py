"""One rank that trains two modules against each other: ``python -m tests.api.lent_workers``."""

from __future__ import annotations

import copy
import gc
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import zeroir
from tests.runtime.support import join

STEPS = 4


class Generator(nn.Module):
    """Makes samples of noise, with a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, z: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(z)).tanh())
        return y


class Critic(nn.Module):
    """Tells samples from real ones; one layer is tied, and one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 1)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(1.5))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(self.second(self.first(x).tanh()).tanh())
        y: Tensor = self.last(hidden) * self.get_buffer("scale")
        return y


def judged(logits: Tensor, is_real: bool) -> Tensor:
    aim = torch.ones_like(logits) if is_real else torch.zeros_like(logits)
    return functional.binary_cross_entropy_with_logits(logits, aim)


def critics_loss(critic: nn.Module, generator: nn.Module, real: Tensor, z: Tensor) -> Tensor:
    with torch.no_grad():
        made = generator(z)
    return judged(critic(real), True) + judged(critic(made), False)


def generators_loss(generator: nn.Module, critic: nn.Module, z: Tensor) -> Tensor:
    return judged(critic(generator(z)), True)


def batch_of(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """The real samples, f32[5, 6], and the noise, f32[5, 4], of a rank."""
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=drawn), torch.randn(5, 4, generator=drawn)


def step_of_replicas(losses: list[Tensor], optimizers: list[torch.optim.Optimizer]) -> float:
    """Step replicas with the mean of their gradients, as data parallelism does; return the mean loss."""
    for loss, optimizer in zip(losses, optimizers, strict=True):
        optimizer.zero_grad()
        (loss / len(losses)).backward()  # type: ignore[no-untyped-call]
    for parameters in zip(*(o.param_groups[0]["params"] for o in optimizers), strict=True):
        total = torch.stack([p.grad for p in parameters]).sum(0)
        for parameter in parameters:
            parameter.grad = total.clone()
    for optimizer in optimizers:
        optimizer.step()
    return sum(loss.item() for loss in losses) / len(losses)


def trained(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.05)


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    gc.disable()
    join()
    torch.manual_seed(0)
    generator, critic = Generator(), Critic()
    generator.norm.eval()
    replicas = [(copy.deepcopy(generator), copy.deepcopy(critic)) for _ in range(world_size)]
    of_critics = [trained(each) for _, each in replicas]
    of_generators = [trained(each) for each, _ in replicas]

    def critics(critic: nn.Module, real: Tensor, z: Tensor) -> Tensor:
        return critics_loss(critic, generator, real, z)

    def generators(generator: nn.Module, z: Tensor) -> Tensor:
        return generators_loss(generator, critic, z)

    real, z = batch_of(rank, 0)
    critics_engine = zeroir.compile(
        critic,
        (real, z),
        loss=lambda critic, batch: critics(critic, *batch),
        optimizer=trained(critic),
        stage=3,
        world_size=world_size,
        evaluate=False,
    ).engine()
    compiled = zeroir.compile(
        generator,
        z,
        loss=generators,
        optimizer=trained(generator),
        stage=2,
        world_size=world_size,
        evaluate=False,
    )
    # What a trace leaves behind refers to the tensors, on some ranks longer than on others.
    if rank:
        gc.collect()
    generators_engine = compiled.engine()
    for step in range(STEPS):
        losses = [
            critics_loss(each, other, *batch_of(number, step))
            for number, (other, each) in enumerate(replicas)
        ]
        found = critics_engine.step(batch_of(rank, step)).mean_loss
        assert abs(found - step_of_replicas(losses, of_critics)) < 1e-6, step
        losses = [
            generators_loss(each, other, batch_of(number, step)[1])
            for number, (each, other) in enumerate(replicas)
        ]
        found = generators_engine.step(batch_of(rank, step)[1]).mean_loss
        assert abs(found - step_of_replicas(losses, of_generators)) < 1e-6, step
    generators_engine.close()
    critics_engine.step(batch_of(rank, STEPS))  # the generator's tensors have their values again
    critics_engine.close()
    for name, value in generator.state_dict().items():
        torch.testing.assert_close(
            value, replicas[rank][0].state_dict()[name], rtol=1e-5, atol=1e-6
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
