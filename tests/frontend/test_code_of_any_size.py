"""Code whose sizes follow from dims in other ways than by sums and products gives the bits of eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import zeroir

SHORTEST, LONGEST = 2, 24
BIASES = torch.linspace(0, 1, 64)


class Mean(nn.Module):
    """The mean over a line of 4 numbers for each word, from which other code computes."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.code(self.line(x)).square().mean()
        return loss


def _with_the_last_biases(x: Tensor) -> Tensor:
    return x + BIASES[-x.shape[1] :, None]


@pytest.mark.parametrize("code", [_with_the_last_biases])
def test_losses_have_the_bits_of_eager_pytorch(code: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module = Mean(code)
    eager = deepcopy(module)
    shape = (Dim("rows", min=2, max=4), Dim("length", min=SHORTEST, max=LONGEST), 4)
    program = zeroir.compile(
        module, torch.randn(3, 9, 4), shapes=shape, stage=0, optimizer="sgd", lr=0.1
    )
    engine = program.engine()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for rows, length in ((4, LONGEST), (2, SHORTEST), (3, 3), (2, 16), (3, 7)):
        batch = torch.randn(rows, length, 4)
        loss = eager(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert engine.step(batch).loss == loss
    engine.close()
