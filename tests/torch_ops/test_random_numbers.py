"""Random numbers of a program have torch's distributions and depend on their seeds only."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.eager import traced
from zeroir.api.checks.check import check_model
from zeroir.config import make_options
from zeroir.torch_ops import neutral_ops

SIZE = (100, 400)
HALF = torch.full(SIZE, 0.25)
WEIGHTS = torch.tensor([1.0, 2.0, 5.0]).repeat(40000, 1)

# What draws, and the mean and standard deviation that it must have; or the middle half's ends, where there is no mean.
MOMENTS: dict[str, tuple[Callable[[], Tensor], float, float]] = {
    "rand": (lambda: torch.rand(SIZE), 0.5, math.sqrt(1 / 12)),
    "rand_like": (lambda: torch.rand_like(HALF.double()), 0.5, math.sqrt(1 / 12)),
    "uniform_": (lambda: torch.empty(SIZE).uniform_(-3, 5), 1, 8 * math.sqrt(1 / 12)),
    "randn": (lambda: torch.randn(SIZE), 0, 1),
    "randn_like": (lambda: torch.randn_like(HALF.bfloat16()), 0, 1),
    "normal_": (lambda: torch.empty(SIZE).normal_(2, 3), 2, 3),
    "normal of tensors": (lambda: torch.normal(HALF, HALF * 2), 0.25, 0.5),
    "normal of a size": (lambda: torch.normal(1.0, 2.0, SIZE), 1, 2),
    "log_normal_": (
        lambda: torch.empty(SIZE).log_normal_(0, 0.5), math.exp(0.125), math.sqrt(math.exp(0.5) - math.exp(0.25)),
    ),
    "exponential_": (lambda: torch.empty(SIZE).exponential_(2), 0.5, 0.5),
    "cauchy_": (lambda: torch.empty(SIZE).cauchy_(1, 2).sub(1).atan(), 0, 1.0735),
    "geometric_": (lambda: torch.empty(SIZE).geometric_(0.25), 4, math.sqrt(12)),
    "bernoulli": (lambda: torch.bernoulli(HALF), 0.25, math.sqrt(3) / 4),
    "bernoulli with a number": (lambda: torch.bernoulli(HALF, 0.75), 0.75, math.sqrt(3) / 4),
    "bernoulli_": (lambda: torch.empty(SIZE).bernoulli_(0.75), 0.75, math.sqrt(3) / 4),
    "bernoulli_ of tensors": (lambda: torch.empty(SIZE).bernoulli_(HALF), 0.25, math.sqrt(3) / 4),
    "randint": (lambda: torch.randint(3, 13, SIZE), 7.5, math.sqrt(99 / 12)),
    "randint, many": (lambda: torch.randint(10**6, SIZE) / 1e6, 0.5, math.sqrt(1 / 12)),
    "randint_like": (lambda: torch.randint_like(HALF, 10), 4.5, math.sqrt(99 / 12)),
    "random_": (lambda: torch.empty(SIZE, dtype=torch.int64).random_(0, 10), 4.5, math.sqrt(99 / 12)),
    "randperm": (lambda: torch.randperm(40000) / 4e4, 0.5, math.sqrt(1 / 12)),
    "multinomial": (lambda: torch.multinomial(WEIGHTS, 1), 1.5, 0.7071),
    "multinomial, replaced": (lambda: torch.multinomial(WEIGHTS, 2, replacement=True), 1.5, 0.7071),
    "rrelu": (lambda: F.rrelu(-torch.ones(SIZE), 0.2, 0.4, training=True), -0.3, 0.2 * math.sqrt(1 / 12)),
    "alpha_dropout": (lambda: F.alpha_dropout(torch.randn(SIZE), 0.3, training=True), 0, 1),
    "gumbel_softmax": (lambda: F.gumbel_softmax(torch.zeros(40000, 2), hard=True)[:, 0], 0.5, 0.5),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MOMENTS)
def test_numbers_have_their_distribution(name: str) -> None:
    make, mean, deviation = MOMENTS[name]
    found: list[Tensor] = []
    for seed in (5, 5, 6):
        with neutral_ops(torch.arange(seed, seed + 10)):
            found.append(make().detach().double().flatten())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    for drawn in found:
        bound = 6 * deviation / math.sqrt(drawn.numel())
        assert abs(float(drawn.mean()) - mean) < bound
        assert abs(float(drawn.std()) - deviation) < 0.05 * deviation


def test_uniform_numbers_are_within_bounds() -> None:
    with neutral_ops(torch.arange(1)):
        drawn = torch.rand(1 << 20)
    assert 0 < drawn.min() < 2**-18
    assert 1 - 2**-18 < drawn.max() < 1


def test_torchs_own_generators_are_unchanged() -> None:
    before = torch.get_rng_state()
    with neutral_ops(torch.arange(3)):
        torch.rand(3), torch.randperm(5), F.rrelu(torch.zeros(3), training=True)
    assert torch.equal(torch.get_rng_state(), before)


MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x):
        x = x + self.drop(self.linear(x)) + 0.1 * torch.randn_like(x)
        return F.rrelu(x, training=True)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x):
        x = x + torch.rand(8)
        for block in self.blocks:
            x = block(x)
        return F.gumbel_softmax(x, hard=True).mul(x).square().mean()

def model():
    return Model()

def batch():
    return torch.randn(4, 8)
"""


def test_no_undefined_memory_is_saved_where_nothing_is_drawn(tmp_path: Path) -> None:
    """The self-check compares all that a segment yields."""
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return torch.nn.functional.rrelu(super().forward(x)).mean()\n"
        "def model():\n"
        "    return Model(2, 2)\n"
        "def batch():\n"
        "    return torch.ones(1, 2)\n"
    )
    program = traced(path, evaluate=False)
    yielded = {
        node.op
        for segment in program.segments
        for value, node in enumerate(segment.nodes, len(segment.inputs))
        if value in segment.outputs
    }
    assert "aten.empty_like.default" not in yielded


@pytest.mark.slow
def test_a_random_model_equals_eager_pytorch_with_the_same_seeds(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    result = check_model(str(path), make_options({"stage": 3, "world_size": 2}), steps=3, seed=0)
    assert result.is_equal, str(result)
    assert len(set(result.losses)) == 3
