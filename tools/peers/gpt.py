"""The GPT of the comparison on a CPU: 8 layers of width 512, 29.5 million parameters, as a zeroir model file."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tools.peers.gpt_model import GPT

VOCABULARY = 4096
LAYERS = 8
WIDTH = 512
HEADS = 8
LENGTH = 128
BATCH = 4


def model() -> GPT:
    """The module to train."""
    return GPT(vocabulary=VOCABULARY, layers=LAYERS, width=WIDTH, heads=HEADS, length=LENGTH)


def batch() -> tuple[Tensor, Tensor]:
    """An example of one rank's batch."""
    return next(batches(0, 1, 0, 0))


def batches(
    rank: int, world_size: int, seed: int, start_step: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random tokens, different on every rank."""
    generator = torch.Generator().manual_seed(1234 + seed)
    step = 0
    while True:
        drawn = torch.randint(0, VOCABULARY, (world_size, BATCH, LENGTH + 1), generator=generator)
        if step >= start_step:
            yield drawn[rank, :, :-1].contiguous(), drawn[rank, :, 1:].contiguous()
        step += 1
