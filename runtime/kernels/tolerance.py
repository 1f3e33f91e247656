"""The allowed difference between two ways of computing a segment."""

from __future__ import annotations

import math

import torch

from zeroir.ir.dtypes import DType
from zeroir.ir.segments.segment import Segment
from zeroir.ir.segments.views import BITCAST
from zeroir.torch_ops.types import TORCH_DTYPE


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
