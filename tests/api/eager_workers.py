"""One rank that runs some of its steps in eager PyTorch: ``python -m tests.api.eager_workers``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import zeroir
from tests.runtime.support import join
from zeroir.errors import UserError

STEPS = 3
WORDS = 20

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))
        return y


class Tagger(nn.Module):
    """Blocks between a tied embedding, and a batch norm; ``calls`` counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x.flatten(0, 1)))
        return y


def loss(net: nn.Module, batch: Batch) -> Tensor:
    ids, labels = batch
    return functional.cross_entropy(net(ids), labels.flatten())


def batch_of(rank: int, number: int) -> Batch:
    """Ids and labels, i64[3, 5], some of which do not count."""
    drawn = torch.Generator().manual_seed(100 * number + rank)
    ids, labels = torch.randint(WORDS, (2, 3, 5), generator=drawn)
    labels[0, : 1 + number % 3] = -100
    return ids, labels


def trained(
    eager: int | None, rank: int, **options: object
) -> tuple[list[float], dict[str, Tensor]]:
    """Train, one step of it in eager PyTorch; return the losses and the state dict."""
    torch.manual_seed(0)
    net, losses = Tagger(), list[float]()
    compiled = zeroir.compile(net, batch_of(0, 0), loss=loss, lr=0.01, evaluate=False, **options)  # type: ignore[arg-type]
    engine = compiled.engine(self_check=False)
    for step in range(STEPS):
        batches: list[object] = [batch_of(rank, 2 * step), batch_of(rank, 2 * step + 1)]
        if step == eager:
            with engine.eager():
                losses.append(engine.step(batches).loss)
        else:
            losses.append(engine.step(batches).loss)
    state = engine.state_dict()
    engine.close()
    return losses, state


def fails_on_one_rank(rank: int, world_size: int) -> None:
    """The code of the last rank fails in a step, which changes no parameter of any rank."""
    failing = False

    def failing_loss(net: nn.Module, batch: Batch) -> Tensor:
        if failing and rank == world_size - 1:
            raise ValueError("bad number")
        return loss(net, batch)

    states = []
    for is_interrupted in (False, True):
        torch.manual_seed(0)
        net = Tagger()
        engine = zeroir.compile(
            net, batch_of(0, 0), loss=failing_loss, lr=0.01, world_size=world_size, evaluate=False
        ).engine(self_check=False, ignore=["failing"])
        engine.step(batch_of(rank, 0))
        if is_interrupted:
            failing = True
            try:
                with engine.eager():
                    engine.step(batch_of(rank, 1))
                raise AssertionError("the step did not fail")
            except UserError as error:
                assert "failed: ValueError: bad number" in str(error)  # noqa: PT017 - no pytest
            failing = False
        engine.step(batch_of(rank, 2))
        states.append(engine.full_parameters())
        engine.close()
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value), name


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join()
    options = {"stage": 3, "world_size": world_size, "micro_steps": 2, "clip": 0.5}
    losses, state = trained(1, rank, **options)
    expected, expected_state = trained(None, rank, **options)
    assert losses == expected
    for name, value in expected_state.items():
        assert torch.equal(state[name], value), name
    fails_on_one_rank(rank, world_size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
