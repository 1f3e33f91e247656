"""One rank that trains beside a teacher that follows: ``python -m tests.api.living_workers``."""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroir
from tests.runtime.support import join

STEPS = 4
MICRO_STEPS = 2


class Student(nn.Module):
    """Two layers and a running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.norm(self.first(x)).tanh())
        return y


def follow(teacher: nn.Module, parameters: dict[str, Tensor]) -> None:
    """Move the teacher towards the student, as scripts do it."""
    for name, parameter in teacher.named_parameters():
        parameter.data.mul_(0.5).add_(parameters[name], alpha=0.5)


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join()
    torch.manual_seed(0)
    student, teacher, plain_teacher = Student(), Student(), Student()
    for module in (teacher, plain_teacher):
        module.requires_grad_(False)
    plain_teacher.load_state_dict(teacher.state_dict())
    replicas = [Student() for _ in range(world_size)]
    for replica in replicas:
        replica.load_state_dict(student.state_dict())
    optimizers = [torch.optim.SGD(replica.parameters(), lr=0.1) for replica in replicas]

    weights = {"distance": 1.0}

    def loss_of(module: nn.Module, guide: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = guide(x)
        loss: Tensor = weights["distance"] * (module(x) - aim).square().mean()
        return loss

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        return loss_of(module, teacher.eval(), x)

    plain_teacher.eval()
    kept: dict[str, Tensor] = {}

    def keep(_: nn.Module, __: object, output: Tensor) -> None:
        kept["first"] = output.detach()

    student.first.register_forward_hook(keep)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    engine = zeroir.compile(
        student,
        batch_of(0, 0),
        loss=loss,
        optimizer=optimizer,
        stage=3,
        world_size=world_size,
        evaluate=False,
    ).engine()
    for step in range(STEPS):
        weights["distance"] = 1.0 / (1 + step)  # the second program follows it
        before = copy.deepcopy(replicas[rank].first)
        result = engine.step([batch_of(rank, MICRO_STEPS * step + i) for i in range(MICRO_STEPS)])
        of_last_batch = before(batch_of(rank, MICRO_STEPS * step + MICRO_STEPS - 1))
        torch.testing.assert_close(kept["first"], of_last_batch.detach(), rtol=1e-5, atol=1e-6)
        mean = 0.0
        for number, (replica, own) in enumerate(zip(replicas, optimizers, strict=True)):
            own.zero_grad()
            for i in range(MICRO_STEPS):
                value = loss_of(replica, plain_teacher, batch_of(number, MICRO_STEPS * step + i))
                (value / MICRO_STEPS / world_size).backward()  # type: ignore[no-untyped-call]
                mean += value.item() / MICRO_STEPS / world_size
        for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
            gradients = [p.grad for p in parameters if p.grad is not None]
            total = torch.stack(gradients).sum(0)
            for parameter in parameters:
                parameter.grad = total.clone()
        for own in optimizers:
            own.step()
        assert abs(result.mean_loss - mean) < 1e-6, (step, result.mean_loss, mean)
        follow(teacher, engine.full_parameters())
        follow(plain_teacher, dict(replicas[rank].named_parameters()))
    engine.close()
    expected = replicas[rank].state_dict()
    for name, value in student.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    assert student(batch_of(rank, 0)).shape == (5, 3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
