"""Finds the operator that makes the first NaN of a step, and what it was computed from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

import torch
from torch import Tensor

from zeroir.ir import ops
from zeroir.ir.segments.segment import Node, Segment
from zeroir.runtime.execution.opaque_anomalies import SeenCalls
from zeroir.runtime.kernels.base import Kernel
from zeroir.runtime.kernels.plain_form import plain_results, separate
from zeroir.torch_ops.opaque import opaque_modules, seen, words_of
from zeroir.torch_ops.types import IR_DTYPE

_CONSTANTS: Final = ("full", "masked_fill", "fill", "where", "scalar_tensor", "constant_pad")
"""Parts of the names of operators by which code makes infinities on purpose, as in masks."""


class Anomalies:
    """Looks at the results of kernels, until one has a NaN; ``first`` is the sentence on it.

    A segment with a NaN is computed once more, operator by operator, from copies of its arguments. The operators of
    code that runs as it is are seen while it runs.
    """

    def __init__(self) -> None:
        self.first: str | None = None
        self._made = self._infinite = self._where = ""
        self._calls = SeenCalls(self._see)

    def around(self, op: ops.Compute, segment: Segment, kernel: Kernel) -> Kernel:
        """Return a kernel that looks at the results of another one, which an op calls."""
        where = f"in unit {op.unit} (@{segment.name})"
        has_opaque_code = bool(words_of([segment]))

        def watched(arguments: Sequence[Tensor], destinations: Sequence[Tensor | None]) -> None:
            if self.first is not None:
                kernel(arguments, destinations)
                return
            # Destinations may be in the memory of arguments.
            copies = [separate(argument) for argument in arguments]
            self._made, self._infinite, self._where = "", "", where
            with seen(self._calls) if has_opaque_code else nullcontext():
                kernel(arguments, destinations)
            if any(x is not None and _has_nan(x) for x in destinations):
                self.first = self._sentence(op, segment, copies)

        return watched

    def _sentence(self, op: ops.Compute, segment: Segment, copies: Sequence[Tensor]) -> str:
        where = self._where
        given = [
            argument.view.region.buffer
            for argument, x in zip(op.arguments, copies, strict=True)
            if _has_nan(x)
        ]
        if given:
            return f"%{given[0]} has NaNs already, as it is read {where}: look at parameters and batches."
        modules = opaque_modules([segment])
        if modules and not self._made:
            names = ", ".join(name or "the model itself" for name in modules)
            return f"Code that runs as it is made a NaN {where}: {names}."
        if not modules:
            device = copies[0].device if copies else torch.device("cpu")
            plain_results(segment, copies, device, self._see_node)
        if not self._made:
            return f"The kernel of @{segment.name} makes a NaN {where}, and its operators do not."
        return self._made + self._infinite

    def _see_node(self, node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        self._see(node.op, node.source or "", operands, results)

    def _see(
        self, op: str, line: str, operands: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """Note the first operator that makes a NaN, and the last one before it that makes infinities."""
        if self._made:
            return
        place = f"{line or 'An operator of the loss:'} {op}"
        bad = next((x for x in results if _has_nan(x)), None)
        if bad is not None:
            inputs = ", ".join(map(_described, operands)) or "nothing"
            made = f"{int(torch.isnan(bad).sum()):,} of {bad.numel():,} values NaN, from {inputs}"
            self._made = f"{place} {self._where} makes {made}."
            return
        is_new = any(map(_has_infinity, results)) and not any(map(_has_infinity, operands))
        if is_new and not any(part in op for part in _CONSTANTS):
            self._infinite = f" Infinities before it are made by {place}."


def _described(x: Tensor) -> str:
    """Describe a tensor, such as ``f32[4, 8] between -1.2 and 3.4``."""
    kind = f"{IR_DTYPE[x.dtype].value}{list(x.shape)}"
    if not x.dtype.is_floating_point or not x.numel():
        return kind
    x = x.float()
    finite = x[torch.isfinite(x)]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
    infinities = int(torch.isinf(x).sum())
    beside = f" and {infinities:,} infinities" if infinities else ""
    return f"{kind} between {low:.3g} and {high:.3g}{beside}"


def _has_nan(x: Tensor) -> bool:
    return x.dtype.is_floating_point and bool(torch.isnan(x).any())


def _has_infinity(x: Tensor) -> bool:
    return x.dtype.is_floating_point and x.itemsize > 1 and bool(torch.isinf(x).any())
