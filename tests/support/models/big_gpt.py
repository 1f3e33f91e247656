"""The example's GPT at 7.5 billion parameters, and at 32 layers of the same width."""

import torch
from torch import Tensor, nn

from examples.gpt import GPT, LENGTH

WIDTH = 4096
HEADS = 32


def model() -> nn.Module:
    return GPT(WIDTH, HEADS, layers=37)


def model_32() -> nn.Module:
    return GPT(WIDTH, HEADS, layers=32)


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(1, LENGTH, dtype=torch.int64)
    return tokens, tokens.clone()
