"""Batch norm as one operator pair whose result types and layouts are the same on every device.

torch's operators differ between devices in their kernels, results and layouts. This one calls the native kernel of the
device, returns the new running statistics as results, and gives its results the layout of its input.

Tensors: x ``(batch, channels, ...)``; weight, bias and statistics ``(channels,)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeroir.torch_ops.define import Saved, define, differentiate, fake

aten = torch.ops.aten


def normalise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalise x.

    Without ``training`` x is normalised by the running statistics, and the batch's statistics are empty. Without
    running statistics the new running statistics are empty.

    Returns:
        the normalised x, the mean and inverse deviation of this batch, and the new running mean and variance.
    """
    if running_mean is None or running_var is None:
        mean, var = x.new_empty(0), x.new_empty(0)
        out, batch_mean, batch_invstd = aten._native_batch_norm_legit.no_stats(
            x, weight, bias, training, momentum, eps
        )
    else:
        mean, var = running_mean.clone(), running_var.clone()
        out, batch_mean, batch_invstd = aten._native_batch_norm_legit(
            x, weight, bias, mean, var, training, momentum, eps
        )
    if not training:
        batch_mean, batch_invstd = x.new_empty(0), x.new_empty(0)
    return _laid_out_as(x, out), batch_mean, batch_invstd, mean, var


def normalise_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batch_mean: Tensor,
    batch_invstd: Tensor,
    training: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of x, weight and bias; the running statistics are read only without ``training``."""
    has_weight = weight is not None
    grad_x, grad_weight, grad_bias = aten.native_batch_norm_backward(
        grad, x, weight, running_mean, running_var, batch_mean, batch_invstd, training, eps,
        [True, has_weight, has_weight],
    )  # fmt: skip
    if not has_weight:
        grad_weight, grad_bias = x.new_empty(0), x.new_empty(0)
    return _laid_out_as(x, grad_x), grad_weight, grad_bias


def _laid_out_as(x: Tensor, result: Tensor) -> Tensor:
    expected = torch.empty_like(x, device="meta")
    if result.stride() == expected.stride():
        return result
    return torch.empty_like(x).copy_(result)


batch_norm = define("zeroir::batch_norm", normalise)
batch_norm_backward = define("zeroir::batch_norm_backward", normalise_backward)


@fake("zeroir::batch_norm")
def _(
    x: Tensor, _: object, __: object, running_mean: Tensor | None, ___: object, training: bool,
    *____: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    channels = x.shape[1] if training else 0
    running = x.shape[1] if running_mean is not None else 0
    dtype = x.dtype if running_mean is None else running_mean.dtype
    return (
        torch.empty_like(x),
        x.new_empty(channels),
        x.new_empty(channels),
        x.new_empty(running, dtype=dtype),
        x.new_empty(running, dtype=dtype),
    )


@fake("zeroir::batch_norm_backward")
def _(_: Tensor, x: Tensor, weight: Tensor | None, *__: object) -> tuple[Tensor, Tensor, Tensor]:
    if weight is None:
        return torch.empty_like(x), x.new_empty(0), x.new_empty(0)
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


def _saved(inputs: tuple[Any, ...], results: tuple[Tensor, ...]) -> Saved:
    x, weight, _, mean, var, training, _, eps = inputs
    # In training the running statistics change before the backward, which does not read them.
    running = (None, None) if training else (mean, var)
    return (x, weight, *running, *results[1:3]), (training, eps)


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, *saved: object
) -> tuple[Tensor, ...]:
    gradients: tuple[Tensor, ...] = batch_norm_backward(grad, x, weight, *saved)
    return gradients[:1] if weight is None else gradients


differentiate("zeroir::batch_norm", _gradients, _saved)
