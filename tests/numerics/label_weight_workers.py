"""One rank that trains on batches of different numbers of labels: ``python -m tests.numerics.label_weight_workers``."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim

import zeroir
from tests.runtime.support import join

VOCABULARY, STEPS, MICRO_STEPS, RANKS = 13, 3, 2, 3
Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    """Predicts the next label, as transformers' causal models do: a label is shifted, and the last one ignored."""

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)
        self.smoothing = smoothing

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = torch.relu(block(hidden)) + hidden
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        logits = self.head(hidden).float().view(-1, VOCABULARY)
        return F.cross_entropy(logits, labels.view(-1), label_smoothing=self.smoothing)


def module() -> nn.Module:
    torch.manual_seed(7)
    return Model()


def batch_of(rank: int, step: int, micro_step: int, *, has_dims: bool) -> Batch:
    chance = torch.Generator().manual_seed((step * MICRO_STEPS + micro_step) * RANKS + rank)
    shape = (1 + (rank + step) % 3, 2 + 5 * micro_step + rank) if has_dims else (2, 6)
    tokens = torch.randint(VOCABULARY, shape, generator=chance)
    is_kept = torch.rand(shape, generator=chance) < (0.2 + 0.3 * rank)
    return tokens, torch.where(is_kept, tokens, -100)


def counted(batch: Batch) -> Tensor:
    """Return the number of labels that the loss counts, computed apart from the program."""
    return (batch[1][:, 1:] != -100).sum()


def main() -> None:
    rank, has_dims = int(os.environ["RANK"]), os.environ["HAS_DIMS"] == "1"
    folder = Path(os.environ["TEST_FOLDER"])
    join()
    rows, length = Dim("rows", max=4), Dim("length", max=16)
    example = batch_of(rank=0, step=0, micro_step=0, has_dims=has_dims)
    compiled = zeroir.compile(
        module(),
        example,
        shapes=((rows, length), (rows, length)) if has_dims else None,
        world_size=RANKS,
        micro_steps=MICRO_STEPS,
        optimizer="sgd",
        lr=0.5,
        evaluate=False,
    )
    # As a file is: the program itself has what its weights need.
    compiled.save(folder / f"program{rank}.zir")
    engine = zeroir.load(folder / f"program{rank}.zir").engine(model=module())
    losses: list[float] = []
    for step in range(STEPS):
        batches = [batch_of(rank, step, micro, has_dims=has_dims) for micro in range(MICRO_STEPS)]
        result = engine.step(batches)
        assert result.weight == float(sum(map(counted, batches)))
        losses.append(result.mean_loss)
    found = engine.full_parameters()
    if rank == 0:
        save_file({**found, "losses": torch.tensor(losses)}, folder / "trained.safetensors")
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
