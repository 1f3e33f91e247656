"""Functions of torch that normalise by statistics of the batch, computed by zeroir's batch norm.

torch's own operators store these statistics in 16 bits on a CPU and in FP32 on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

from torch import Tensor

from zeroir.torch_ops.layouts import settled_operand, settled_result
from zeroir.torch_ops.replaced.batch_norm import batch_norm
from zeroir.torch_ops.types import widened


def batch_normed(
    input: Tensor,  # noqa: A002 - torch's name, which callers may use
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute batch norm with zeroir's operator, in FP32 for 16-bit x; the running statistics are updated in place."""
    x = settled_operand(input)
    wide = [widened(each) for each in (x, weight, bias, running_mean, running_var)]
    result, _, _, mean, var = batch_norm(*wide, training, momentum, eps)
    if training and running_mean is not None and running_var is not None:
        running_mean.copy_(mean)
        running_var.copy_(var)
    return settled_result(cast("Tensor", result).to(input.dtype))


def instance_normed(
    input: Tensor,  # noqa: A002 - torch's name, which callers may use
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute instance norm as torch does: batch norm with a separate channel for every channel of every sample."""
    samples, channels, *spatial = input.shape
    if use_input_stats and math.prod(spatial) == 1:
        raise ValueError(
            f"Expected more than 1 spatial element when training, got input size {input.size()}"
        )

    def for_each_sample(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.repeat(samples)

    mean, var = for_each_sample(running_mean), for_each_sample(running_var)
    result = batch_normed(
        input.contiguous().view(1, samples * channels, *spatial),
        mean,
        var,
        for_each_sample(weight),
        for_each_sample(bias),
        use_input_stats,
        momentum,
        eps,
    )
    if use_input_stats:
        for running, own in ((running_mean, mean), (running_var, var)):
            if running is not None and own is not None:
                running.copy_(own.view(samples, channels).mean(0))
    return result.view(input.shape)


def in_order_of_torch(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adapt a function to the argument order of ``torch``, which differs from that of ``torch.nn.functional``."""

    def call(
        input: Tensor,  # noqa: A002 - torch's name, which callers may use
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,  # noqa: ARG001 - it chooses among kernels
    ) -> Tensor:
        return norm(input, running_mean, running_var, weight, bias, training, momentum, eps)

    return call
