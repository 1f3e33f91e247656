"""Products of groups of rows or columns in any dtype, as mixtures of experts compute them.

``torch._grouped_mm`` computes them eagerly in FP32, BF16 and FP16, but can be traced in BF16 only. This is the same
product for the other dtypes, with a backward of the same products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroir.torch_ops.define import Saved, define, differentiate, fake


def _grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Compute the product of each group; ``ends`` (i32[groups]) are the ends of the groups of rows or columns.

    With ``x[rows, k]`` and ``weight[groups, k, n]`` rows are grouped, and the result is ``[rows, n]``; with ``x[groups,
    m, k]`` and ``weight[k, columns]`` columns are grouped, ``[m, columns]``; and with ``x[m, rows]`` and ``weight[rows,
    n]`` the rows that are summed, ``[groups, m, n]``.
    """
    return torch._grouped_mm(x, weight, offs=ends)


grouped_mm = define("zeroir::grouped_mm", _grouped_mm)


@fake("zeroir::grouped_mm")
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    match x.dim(), weight.dim():
        case 2, 3:
            shape = [x.shape[0], weight.shape[2]]
        case 3, 2:
            shape = [x.shape[1], weight.shape[1]]
        case 2, 2:
            shape = [ends.shape[0], x.shape[0], weight.shape[1]]
        case _:
            raise ValueError(
                f"a grouped product takes matrices, one of them for each group, but got {x.dim()} and {weight.dim()} "
                "dimensions"
            )
    return x.new_empty(shape)


def _saved(inputs: tuple[Tensor, Tensor, Tensor], _: tuple[Tensor, ...]) -> Saved:
    return inputs, ()


def _backward(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return (
        grouped_mm(grad, weight.transpose(-2, -1), ends),
        grouped_mm(x.transpose(-2, -1), grad, ends),
    )


differentiate("zeroir::grouped_mm", _backward, _saved)
