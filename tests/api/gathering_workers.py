"""One rank of losses over the features of all ranks, beside DDP: ``python -m tests.api.gathering_workers``."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

import zeroir
from tests.runtime.support import join
from tests.support.replicated import replicated
from zeroir.errors import UserError

ROWS = 3
Batch = tuple[Tensor, Tensor, Tensor]


class TwoTowers(nn.Module):
    """Features of two kinds of inputs; what all ranks have at a place within the model is added to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.other = nn.Linear(5, 6)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks[0](x).tanh()
        x = x - torch.stack(differentiable.all_gather(x)).mean((0, 1))  # type: ignore[no-untyped-call]
        x = self.blocks[1](x)
        return F.normalize(x, dim=-1), F.normalize(self.other(y), dim=-1)


def towers() -> TwoTowers:
    torch.manual_seed(0)
    return TwoTowers()


def with_gradients_of_all(x: Tensor) -> Tensor:
    return torch.cat(differentiable.all_gather(x))  # type: ignore[no-untyped-call]


def with_own_gradient(x: Tensor) -> Tensor:
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    parts[dist.get_rank()] = x
    return torch.cat(parts)


def in_one_tensor(x: Tensor) -> Tensor:
    world = dist.group.WORLD
    assert world is not None
    whole: Tensor = functional.all_gather_tensor_autograd(x, 0, world)
    return whole


def contrastive(gather: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
    """A loss of each rank's rows against those of all ranks, of which some have the same label."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y, label = batch
        features, others = model(x, y)
        place = torch.arange(len(x)) + len(x) * dist.get_rank()
        labels = torch.empty(dist.get_world_size() * len(x), dtype=label.dtype)
        dist.all_gather_into_tensor(labels, label)
        to_all, of_all = features @ gather(others).T, gather(features) @ others.T
        clip = F.cross_entropy(5 * to_all, place) + F.cross_entropy(5 * of_all.T, place)
        alike = (label[:, None] == labels).float()
        loss: Tensor = clip - 0.1 * (to_all.log_softmax(-1) * alike).mean()
        return loss

    return loss


def batch_of(rank: int, index: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * index + rank)
    x, y = torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 5, generator=generator)
    return x, y, torch.randint(3, (ROWS,), generator=generator)


def beside_ddp(gather: Callable[[Tensor], Tensor], *, stage: int, micro_steps: int) -> None:
    """Train in both ways, and compare losses, an evaluation and parameters."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loss = contrastive(gather)
    plain = towers()
    ddp = replicated(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3, momentum=0.9)
    engine = zeroir.compile(
        towers(),
        batch_of(0, 0),
        loss=loss,
        stage=stage,
        optimizer=zeroir.optim.SGD(lr=0.3, momentum=0.9),
        micro_steps=micro_steps,
        world_size=world_size,
    ).engine(self_check=False)
    is_exact = world_size == 2 and micro_steps == 1

    def compare(found: Tensor, expected: Tensor) -> None:
        tolerance = 0.0 if is_exact else 1e-5
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

    for step in range(3):
        batches = [batch_of(rank, step * micro_steps + index) for index in range(micro_steps)]
        with torch.no_grad():
            compare(torch.tensor(engine.evaluate(batches[0]).loss), loss(ddp, batches[0]))
        losses: list[Tensor] = []
        for batch in batches:
            is_last = batch is batches[-1]
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                value = loss(ddp, batch)
                (value / micro_steps).backward()  # type: ignore[no-untyped-call]
                losses.append(value.detach())
        optimizer.step()
        optimizer.zero_grad()
        compare(torch.tensor(engine.step(batches).loss), torch.stack(losses).mean())
    for parameter_name, value in engine.state_dict().items():
        compare(value, plain.state_dict()[parameter_name])
    engine.close()


def of_some_ranks(group: dist.ProcessGroup) -> None:
    """A gather over another group than that of all ranks is refused."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        parts = [torch.empty_like(batch[0])]
        dist.all_gather(parts, batch[0], group=group)
        return contrastive(with_gradients_of_all)(model, (parts[0], *batch[1:]))

    sentence = r"calls torch\.distributed\.all_gather for a group of its own"
    with pytest.raises(UserError, match=sentence):
        zeroir.compile(towers(), batch_of(0, 0), loss=loss, world_size=dist.get_world_size())


def main() -> None:
    # Torch deprecates most of these functions.
    warnings.simplefilter("ignore", FutureWarning)
    join()
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    of_some_ranks(own[dist.get_rank()])
    beside_ddp(with_gradients_of_all, stage=0, micro_steps=1)
    beside_ddp(with_own_gradient, stage=3, micro_steps=1)
    beside_ddp(in_one_tensor, stage=1, micro_steps=2)
    beside_ddp(with_gradients_of_all, stage=2, micro_steps=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
