"""The workspace of an operator that a library or the model registers, measured by torch's allocators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zeroir.runtime.device.driver import driver
from zeroir.runtime.memory.allocations import allocations, peak_bytes
from zeroir.torch_ops.foreign_workspaces import ForeignOperator, resolved

T = TypeVar("T")


def measure_workspace(op: ForeignOperator, *args: object, **kwargs: object) -> int:
    """Call an operator twice; return the most bytes that the second call held at once, minus those of its results.

    The operator runs on the device of its first tensor. The first call is not measured, because libraries then allocate
    memory that they keep for later calls.

    Raises:
        UserError: if the operator is not registered, or is one of torch or zeroir.
    """
    function = resolved(op)
    with torch.no_grad():
        function(*args, **kwargs)
        return measured(lambda: function(*args, **kwargs), device_of(args, kwargs))[1]


def is_profiled() -> bool:
    """Return whether a profiler of the user's runs, beside which ``measured`` cannot."""
    return torch._C._autograd._profiler_enabled()


def measured(call: Callable[[], T], device: torch.device) -> tuple[T, int]:
    """Return the result of a call, and the most bytes that it held at once minus those of its results' elements."""
    results: list[T] = []
    if device.type == "cuda":
        driver().reset_peak_bytes(device)
        before = driver().requested_bytes(device, "current")
        results.append(call())
        peak = driver().requested_bytes(device, "peak") - before
    else:
        peak = peak_bytes(allocations(lambda: results.append(call())))
    made = sum(
        leaf.numel() * leaf.element_size()
        for leaf in pytree.tree_leaves(results)
        if isinstance(leaf, Tensor)
    )
    return results[0], max(0, peak - made)


def device_of(args: object, kwargs: object) -> torch.device:
    """Return the device of the first tensor among the arguments of a call; the CPU where there is none."""
    leaves = pytree.tree_leaves((args, kwargs))
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))
