"""Optimizers that work on whole parameters: Muon and Adafactor, as torch.optim has them, and Shampoo.

A rank has the directions of a whole flat, and updates its slice of the parameters. It computes the step of each
parameter that meets the slice, and applies the elements of the slice, chunk by chunk. Nothing depends on how the flat
is cut: torch's kernels for additions and products round each element alike, wherever a piece begins.

On a CPU, numbers that torch.optim reads from tensors are read likewise. On a CUDA device they stay there, so that
nothing waits for it; then a step may differ from torch's in the last digit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, assert_never

import torch
from torch import Tensor

from zeroir.ir.ops import Algorithm
from zeroir.workspace.op_scratch import STEPPED_CHUNK_NUMEL

_RMS_ADAMW: Final = 0.2
"""The root mean square of AdamW's updates, which ``match_rms_adamw`` aims at (Liu et al. 2025, arXiv 2502.16982)."""

Number = float | Tensor
"""A number on the host, or one element on a CUDA device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Shampoo's sums of a parameter before the step, of rows and of columns, and the parts of the state to replace.

    Each part is flat, and holds the elements of the first or second matrix from ``start`` on.
    """

    rows: Tensor
    columns: Tensor
    parts: Sequence[tuple[Tensor, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeParameter:
    """Tensors of one parameter on one rank.

    ``direction`` has the parameter's shape. ``param`` is the flat part that this rank updates, from the parameter's
    element ``start`` on; it may be empty. ``whole`` is all of the parameter, before the step, ``rows`` and ``columns``
    are its factors, and ``sums`` Shampoo's, where the algorithm reads these.
    """

    direction: Tensor
    param: Tensor
    start: int
    whole: Tensor | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    sums: Sums | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeOperands:
    """Operands of the step of a group's parameters; the scalars are those of ``optim.Operands``."""

    parameters: Sequence[WholeParameter]
    step: Tensor
    lr: Tensor
    hyper: Tensor
    skip: Tensor | None


def step(algorithm: Algorithm, operands: WholeOperands) -> None:
    """Update the parameters in place, as torch.optim does; where ``skip`` is 1 nothing changes.

    Directions are used as scratch memory.
    """
    match algorithm:
        case Algorithm.MUON:
            _muon(operands)
        case Algorithm.ADAFACTOR:
            _adafactor(operands)
        case Algorithm.SHAMPOO:
            _shampoo(operands)
        case Algorithm.SGD | Algorithm.MOMENTUM | Algorithm.ADAM | Algorithm.ADAMW | Algorithm.LION:
            raise ValueError(f"{algorithm} works element by element")
        case _:
            assert_never(algorithm)


# ------------------------------------------------------------------------------------------------------------- Muon


def _muon(operands: WholeOperands) -> None:
    _, _, weight_decay, eps, ns_steps, *coefficients, adjustment = operands.hyper.tolist()
    lr = _number(operands.lr)
    for parameter in operands.parameters:
        matrix = parameter.direction
        orthogonalise(matrix, coefficients, int(ns_steps), eps)
        rows, columns = matrix.shape
        ratio = math.sqrt(max(1, rows / columns))
        if adjustment:
            ratio = _RMS_ADAMW * math.sqrt(max(rows, columns))
        _apply(parameter, matrix, 1 - lr * weight_decay, lr * ratio, operands.skip)


def orthogonalise(matrix: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> None:
    """Replace a BF16 matrix by its Newton-Schulz iteration: singular values come near 1, vectors stay.

    The operations are those of torch.optim.Muon, in its order and on tensors of its layout.
    """
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
        del gram, update
    if steps:
        matrix.copy_(x.T if is_tall else x)


# -------------------------------------------------------------------------------------------------------- Adafactor


def _adafactor(operands: WholeOperands) -> None:
    beta2_decay, eps1, eps2, largest, weight_decay = operands.hyper.tolist()
    # Before the first step that is not skipped the count is 0, and the result is never used.
    lr, count = _number(operands.lr), _largest(_number(operands.step), 1.0)
    weight = count**beta2_decay
    rate = _least(lr, 1 / count**0.5)
    for parameter in operands.parameters:
        gradient, whole, rows = parameter.direction, parameter.whole, parameter.rows
        assert whole is not None
        assert rows is not None
        size = _largest(_norm(whole) / whole.numel() ** 0.5, eps2) * rate
        variance = _variance(parameter, rows, weight, eps1, operands.skip)
        if variance is None:
            continue
        update = variance.clamp_(min=eps1 * eps1).rsqrt_().mul_(gradient)
        length = _largest(_norm(update) / (update.numel() ** 0.5 * largest), 1.0)
        _apply(parameter, update, 1 - lr * weight_decay, size / length, operands.skip)


def _variance(
    parameter: WholeParameter, rows: Tensor, weight: Number, eps1: float, skip: Tensor | None
) -> Tensor | None:
    """Move the second moments, and return those of the elements; None where this rank updates none."""
    gradient, columns = parameter.direction, parameter.columns
    if columns is None:
        _move(rows, gradient * gradient, weight, skip)
        return rows.clone() if parameter.param.numel() else None
    for moments, dim in ((rows, -1), (columns, -2)):
        means = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True)
        _move(moments, means.square_().div_(gradient.size(dim)), weight, skip)
    if not parameter.param.numel():
        return None
    return (rows @ columns).div_(rows.mean(dim=-2, keepdim=True).clamp_(min=eps1))


def _move(moments: Tensor, new: Tensor, weight: Number, skip: Tensor | None) -> None:
    if isinstance(weight, Tensor):
        moved = torch.lerp(moments, new, weight.to(moments.dtype))
    else:
        moved = torch.lerp(moments, new, weight)
    _replace(moments, moved, skip)


# ---------------------------------------------------------------------------------------------------------- Shampoo


def _shampoo(operands: WholeOperands) -> None:
    """Algorithm 1 of Gupta et al. 2018 (arXiv 1802.09568), with decoupled weight decay."""
    eps, weight_decay = operands.hyper.tolist()
    lr = _number(operands.lr)
    for parameter in operands.parameters:
        gradient, sums = parameter.direction, parameter.sums
        assert sums is not None
        moved = [sums.rows + gradient @ gradient.T, sums.columns + gradient.T @ gradient]
        if operands.skip is not None:
            # A gradient with infinities has no roots.
            is_skipped = operands.skip.reshape(()) > 0
            moved = [
                torch.where(is_skipped, old, new)
                for old, new in zip((sums.rows, sums.columns), moved, strict=True)
            ]
        for part, side, start in sums.parts:
            part.copy_(moved[side].flatten()[start : start + part.numel()])
        if parameter.param.numel():
            rows, columns = (inverse_fourth_root(matrix, eps) for matrix in moved)
            update = rows @ gradient @ columns
            _apply(parameter, update, 1 - lr * weight_decay, lr, operands.skip)


def inverse_fourth_root(matrix: Tensor, eps: float) -> Tensor:
    """The power −1/4 of a symmetric matrix with ``eps`` added to its diagonal, whose negative eigenvalues are noise."""
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_(min=0).add_(eps).pow_(-0.25)) @ vectors.T


# -------------------------------------------------------------------------------------------------- common arithmetic


def _apply(
    parameter: WholeParameter, update: Tensor, kept: Number, rate: Number, skip: Tensor | None
) -> None:
    """Change this rank's part to parameter × kept − update × rate, chunk by chunk."""
    numel = parameter.param.numel()
    part = update.flatten()[parameter.start : parameter.start + numel]
    scratch = parameter.param.new_empty(2, min(numel, STEPPED_CHUNK_NUMEL))
    for start in range(0, numel, STEPPED_CHUNK_NUMEL):
        param = parameter.param[start : start + STEPPED_CHUNK_NUMEL]
        new, wide = scratch[:, : param.numel()]
        torch.mul(param, kept, out=new)
        wide.copy_(part[start : start + STEPPED_CHUNK_NUMEL])
        if isinstance(rate, Tensor):
            new.sub_(wide.mul_(rate))
        else:
            new.add_(wide, alpha=-rate)
        _replace(param, new, skip)


def _replace(old: Tensor, new: Tensor, skip: Tensor | None) -> None:
    if skip is None:
        old.copy_(new)
    else:
        torch.where(skip.reshape(()) > 0, old, new, out=old)


def _number(value: Tensor) -> Number:
    """One element: on a CPU as a number of the host, in which torch.optim computes."""
    return float(value) if value.device.type == "cpu" else value.to(torch.float64).reshape(())


def _norm(values: Tensor) -> Number:
    return _number(torch.linalg.vector_norm(values))


def _largest(value: Number, bound: float) -> Number:
    return value.clamp(min=bound) if isinstance(value, Tensor) else max(value, bound)


def _least(value: Number, bound: Number) -> Number:
    if isinstance(value, Tensor) and isinstance(bound, Tensor):
        return torch.minimum(value, bound)
    assert not isinstance(value, Tensor)
    assert not isinstance(bound, Tensor)
    return min(value, bound)
