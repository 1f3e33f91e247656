"""Code whose sizes follow from dims in other ways than by sums and products gives the bits of eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
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


def _in_blocks(x: Tensor) -> Tensor:
    blocks = math.ceil(x.shape[1] / 4)
    return F.pad(x, (0, 0, 0, 4 * blocks - x.shape[1])).view(-1, blocks, 16)


def _without_the_last_half(x: Tensor) -> Tensor:
    return x[:, : math.floor((x.shape[1] + 2) / 2)]


def _last(x: Tensor, kept: int | Tensor) -> Tensor:
    """As transformers' models keep logits: torch's own sizes are no ``int``."""
    return x[:, slice(-kept, None) if isinstance(kept, int) else kept]


def _all_but_the_first(x: Tensor) -> Tensor:
    return _last(x, x.shape[1] - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", [_with_the_last_biases, _in_blocks, _without_the_last_half, _all_but_the_first]
)
def test_losses_have_the_bits_of_eager_pytorch(code: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module = Mean(code)
    eager = deepcopy(module)
    shape = (Dim("rows", min=2, max=4), Dim("length", min=SHORTEST, max=LONGEST), 4)
    program = zeroir.compile(
        module,
        torch.randn(3, 9, 4),
        shapes=shape,
        stage=0,
        optimizer="sgd",
        lr=0.1,
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


@pytest.mark.slow
def test_a_size_that_code_makes_a_number_is_named_where_it_is_made() -> None:
    """What follows from it may be no size at all."""

    def code(x: Tensor) -> Tensor:
        number = int(x.shape[1])
        return x.reshape(-1, number).reshape(-1, 2, 2)

    shape = (Dim("rows", max=4), Dim("length", min=SHORTEST, max=LONGEST), 4)
    with pytest.raises(zeroir.UserError, match=r"test_code_of_any_size\.py:\d+ .* length = 9"):
        zeroir.compile(Mean(code), torch.randn(3, 9, 4), shapes=shape)
