"""Sizes are polynomials while torch computes with them, and comparisons that hold for all sizes are no questions."""

from __future__ import annotations

import operator
from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

from zeroir.frontend._torch_dim_nodes import DimNode, Relation, answer_for_all, sizes_as_nodes
from zeroir.frontend._torch_private import fake_mode
from zeroir.frontend._torch_sizes import DimEnv, size_of
from zeroir.ir.sizes import Dim, Size

ROWS = Dim(name="rows", minimum=1, maximum=4)
LENGTH = Dim(name="length", minimum=2, maximum=5)
ROW, LONG = ROWS.size, LENGTH.size
SIZES = (0, 1, 5, ROW, LONG, ROW + 4, ROW - LONG, ROW * LONG, -LONG * 3 + 1, ROW * 2 - LONG + 1)


@pytest.mark.parametrize("relation", get_args(Relation))
def test_a_comparison_that_holds_for_all_sizes_is_answered(relation: Relation) -> None:
    compare = getattr(operator, relation)
    points = [{"rows": rows, "length": length} for rows in range(1, 5) for length in range(2, 6)]
    answered = 0
    for left, right in product(SIZES, repeat=2):
        answer = answer_for_all(relation, left, right)
        values = {
            compare(*(s.at(point) if isinstance(s, Size) else s for s in (left, right)))
            for point in points
        }
        answered += answer is not None
        assert answer is None or values == {answer}
    assert answered > len(SIZES) ** 2 / 3


def test_sizes_of_fake_tensors_are_polynomials_without_expressions() -> None:
    env = DimEnv({ROWS: 3, LENGTH: 4})
    line = torch.nn.Linear(4, 6)

    def compute(x: Tensor) -> Tensor:
        y: Tensor = line(x).transpose(1, 2).reshape(x.shape[0], -1)
        return torch.cat([y, y[:, 3 * x.shape[1] :]], dim=1)[: 2**63 - 1]

    with fake_mode(env), sizes_as_nodes():
        x = torch.empty([env.symint(size) for size in (ROW, LONG, 4)])
        # The second time the results come from torch's cache.
        for result in (compute(x), compute(x)):
            assert [size_of(size) for size in result.shape] == [ROW, LONG * 9]
            sizes: list[int | torch.SymInt] = [*result.shape]
            nodes = [size.node for size in sizes if isinstance(size, torch.SymInt)]
            assert [type(node) for node in nodes] == [DimNode, DimNode]
            assert nodes[1] is env.node(LONG * 9)


def test_numbers_that_are_no_polynomials_are_torchs() -> None:
    env = DimEnv({ROWS: 3, LENGTH: 4})
    row, length = env.symint(ROW), env.symint(LONG)
    assert isinstance(row, torch.SymInt)
    assert isinstance(length, torch.SymInt)
    assert (row * 6 + length * 4) // 2 == env.symint(ROW * 3 + LONG * 2)
    assert (row * 6) % 3 == 0
    assert (length + 2**62) > row
    assert int((row * length // 5) % 2) == 3 * 4 // 5 % 2
    assert float(row / length) == 3 / 4
    assert max(length, 1) == length
    assert not (row * 0)
