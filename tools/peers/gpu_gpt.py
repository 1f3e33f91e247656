"""The GPT of the comparison on a GPU, as a zeroir model file.

The environment gives its shape, so that one file serves every size: ``BENCH_GPT=24x2048x16x2048x4`` are layers, width,
heads, tokens per sample and samples per batch. That is also the default, with 1.42 billion parameters.
"""

import os

import torch
from torch import Tensor

from tools.peers.gpt_model import GPT

VOCABULARY = 50304
VARIABLE = "BENCH_GPT"
SHAPE = "24x2048x16x2048x4"


def shape() -> tuple[int, int, int, int, int]:
    """Layers, width, heads, tokens per sample, samples per batch."""
    layers, width, heads, length, batch = map(int, os.environ.get(VARIABLE, SHAPE).split("x"))
    return layers, width, heads, length, batch


def model() -> GPT:
    """The module to train."""
    layers, width, heads, length, _ = shape()
    return GPT(vocabulary=VOCABULARY, layers=layers, width=width, heads=heads, length=length)


def batch() -> tuple[Tensor, Tensor]:
    """An example of one rank's batch."""
    return random_batches(1, seed=0)[0]


def random_batches(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Random tokens and their successors."""
    *_, length, samples = shape()
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, VOCABULARY, (count, samples, length + 1), generator=generator)
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in drawn]
