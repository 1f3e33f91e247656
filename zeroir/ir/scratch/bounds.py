"""Operators of which no more than a bound is known: losses over all elements, and a few that look elements up."""

from __future__ import annotations

from typing import Final

from zeroir.ir.scratch.arguments import Types
from zeroir.ir.segment import Node, Ref, TensorType

_WIDENED: Final = frozenset(
    f"aten.{name}"
    for name in (
        *("mse_loss.default", "smooth_l1_loss.default", "huber_loss.default"),
        *("binary_cross_entropy.default", "binary_cross_entropy_backward.default"),
        *("binary_cross_entropy_with_logits.default", "logsumexp.default"),
        *("gather.default", "scatter_add.default", "scatter.src", "scatter.value"),
    )
)
"""They keep up to two copies of their largest tensor and one of smaller ones, numbers of 16 bits as FP32."""

_LAID_OUT: Final = frozenset(
    f"aten.upsample_{name}{kind}"
    for name in ("nearest1d", "nearest2d", "nearest3d", "bilinear2d", "bicubic2d", "trilinear3d")
    for kind in (".vec", ".default")
)
"""They lay argument and result out with the channels last."""

_SORTS: Final = frozenset({"aten.sort.default", "aten.sort.stable", "aten.topk.default"})
"""They move one row at a time, with the index of every element."""

BOUNDED: Final = _WIDENED | _LAID_OUT | _SORTS
NUMBERS_BYTES: Final = 64
"""More than the numbers take that an operator makes tensors of."""


def bound_bytes(node: Node, types: Types) -> int:
    """What an operator of ``BOUNDED`` holds beside its results, at most."""
    tensors = [types[arg.index] for arg in node.args if isinstance(arg, Ref)]
    kinds = [kind for kind in (*tensors, *node.results) if kind is not None]
    if node.op in _WIDENED:
        sizes = sorted(map(_widened_bytes, kinds))
        return 2 * sizes[-1] + sum(size for size in sizes if size < sizes[-1]) + NUMBERS_BYTES
    if node.op in _LAID_OUT:
        return sum(kind.size_bytes for kind in kinds) + NUMBERS_BYTES
    longest = max((size for kind in kinds for size in kind.shape), default=1)
    return 2 * 8 * longest + NUMBERS_BYTES


def _widened_bytes(kind: TensorType) -> int:
    return kind.numel * max(kind.dtype.itemsize_bytes, 4)
