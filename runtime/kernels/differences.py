"""Differences between a kernel's result and that of its operators.

Numbers are compared where both are finite. Elsewhere both must be the same infinity, or both NaN.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import Segment
from zeroir.ir.segments.views import BITCAST
from zeroir.torch_ops.types import TORCH_DTYPE

_BEYOND_NOISE: Final = 256.0
"""A difference counts if it is this many times the effect of rounding every argument."""


def tolerance(segment: Segment) -> float:
    """Return the allowed difference between results of two kernel backends, relative to an output's largest element.

    It is 4 × eps × √d, with eps of the narrowest floating dtype in the segment and d operators on its longest path. An
    embedding's gradient may be summed row by row, so it counts as many operators as rows are looked up. Floats of 8
    bits count only where an operator rounds to them: stored codes are exact.
    """
    kinds = segment.types()
    depths: list[int] = [0] * len(segment.inputs)
    for node in segment.nodes:
        steps = 1
        if node.op == "aten.embedding_dense_backward.default":
            _, rows, *_ = node.refs()
            looked_up = kinds[rows.index]
            steps = 1 if looked_up is None else looked_up.numel
        depth = steps + max((depths[ref.index] for ref in node.refs()), default=0)
        depths += [depth] * len(node.results)
    made = [kind for node in segment.nodes if node.op != BITCAST for kind in node.results]
    stored = [kind for kind in kinds if kind is not None and kind.dtype is not DType.F8_E4M3]
    dtypes = {TORCH_DTYPE[kind.dtype] for kind in (*stored, *made) if kind is not None}
    eps = max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)
    return 4 * eps * math.sqrt(max(depths, default=0))


def difference(result: Tensor, wanted: Tensor, allowed: float | None) -> str | None:
    """Return the difference of a result, as the end of a sentence; None where there is none.

    ``allowed`` is relative to the largest finite number wanted; None allows every result.
    """
    if allowed is None or not result.numel():
        return None
    actual, expected = result.double(), wanted.double()
    unlike = int(_unlike(actual, expected).sum())
    if unlike:
        return f"is infinite or NaN in other elements than theirs: {unlike} differ in that"
    gaps = (actual - expected).abs().masked_fill(~_finite(actual, expected), 0)
    largest = float(expected.masked_fill(~expected.isfinite(), 0).abs().max())
    gap = float(gaps.max())
    if gap <= allowed * largest:
        return None
    count = int((gaps > 0).sum())
    return f"differs in {count} elements, by up to {gap:.3g} where the largest is {largest:.3g}"


def is_beyond_noise(result: Tensor, wanted: Tensor, disturbed: Tensor) -> bool:
    """Return whether a difference exceeds the effect of rounding; ``disturbed`` is the result for rounded arguments.

    Elements that rounding changes between finite and not finite are ignored.
    """
    actual, expected, noisy = result.double(), wanted.double(), disturbed.double()
    is_stable = ~_unlike(expected, noisy)
    if bool((_unlike(actual, expected) & is_stable).any()):
        return True
    is_finite = _finite(expected, noisy)
    gap = (actual - expected).abs().masked_fill(~is_finite, 0).max()
    noise = (noisy - expected).abs().masked_fill(~is_finite, 0).max()
    return bool(gap > _BEYOND_NOISE * noise)


def _finite(first: Tensor, second: Tensor) -> Tensor:
    return first.isfinite() & second.isfinite()


def _unlike(first: Tensor, second: Tensor) -> Tensor:
    """Return a mask of the elements where one is infinite or NaN and the other is not, or is another infinity."""
    is_alike = (first == second) | (first.isnan() & second.isnan())
    return ~(is_alike | _finite(first, second))
