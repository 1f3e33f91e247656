"""Checks that the nodes of segments have their declared results, by running every operator on meta tensors.

Buffers, offsets and proofs rest on the types that a program declares, and a program is a file. Views are checked
wherever a program is read (``zeroir.ir.segments.views``); here torch's own meta kernels give the results of the other
operators. Dtypes and shapes are compared. Strides are not: they differ between devices, and no value depends on them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Final, cast

import torch
from torch import Tensor

from zeroir.ir.segments.segment import Node, Ref, Segment, TensorType
from zeroir.ir.segments.views import is_view
from zeroir.runtime.kernels.calls import operator, resolver
from zeroir.runtime.kernels.compiler_import import compiler_not_imported
from zeroir.torch_ops.types import TORCH_DTYPE

_META = torch.device("meta")
_NORMS: Final = frozenset(
    {
        "aten._fused_rms_norm.default",
        "aten.native_group_norm.default",
        "aten.native_layer_norm.default",
    }
)
"""Operators whose statistics, which follow the result, are FP32 on a GPU and have the operand's dtype on a CPU."""

_BOOKKEEPING: Final = frozenset(
    {
        "aten._embedding_bag.default",
        "aten._embedding_bag_forward_only.default",
        "aten.log_sigmoid_forward.default",
    }
)
"""Operators whose additional results serve only their own backward, in shapes that differ between devices."""


def misdeclared(segments: Iterable[Segment]) -> str | None:
    """Return a clause on the first node whose operator produces other results than declared, or rejects the call.

    Equal nodes are checked once.
    """
    with compiler_not_imported():
        return _misdeclared(segments)


def _misdeclared(segments: Iterable[Segment]) -> str | None:
    checked: set[Hashable] = set()
    for segment in {segment.digest(): segment for segment in segments}.values():
        types = segment.types()
        for number, node in enumerate(segment.nodes):
            if is_view(node.op):
                continue
            operands = tuple(types[ref.index] for ref in node.refs())
            args = (node.args, node.kwargs)
            key = (node.op, _nameless(args), operands, node.results)
            if key in checked:
                continue
            problem = _problem(node, types)
            if problem is not None:
                op = f"{node.op}, {node.source}" if node.source else node.op
                return f"node {number} of segment @{segment.name} ({op}) {problem}"
            checked.add(key)
    return None


def _nameless(args: object) -> Hashable:
    """Return the arguments with all values made equal; 1, 1.0 and True remain different."""
    if isinstance(args, Ref):
        return Ref
    if isinstance(args, tuple):
        return tuple(_nameless(item) for item in args)
    return (type(args), args)


def _problem(node: Node, types: Sequence[TensorType | None]) -> str | None:
    function = operator(node.op)
    # Indexed by value, because a resolver looks them up that way.
    values = cast(
        "Sequence[Tensor | None]",
        {ref.index: _meta_tensor(types[ref.index]) for ref in node.refs()},
    )
    args = [resolver(arg, _META)(values) for arg in node.args]
    kwargs = {name: resolver(arg, _META)(values) for name, arg in node.kwargs}
    try:
        returned = function(*args, **kwargs)
    except NotImplementedError:
        # Torch has no meta kernel for it. Other results could not go out of bounds, because kernels check shapes.
        return None
    except Exception as error:  # noqa: BLE001 - any exception of a kernel refuses the call
        return f"cannot be called as it stands: {str(error).splitlines()[0] if str(error) else error!r}"
    results = list(returned) if isinstance(returned, list | tuple) else [returned]
    if len(results) != len(node.results):
        return f"declares {len(node.results)} results where {len(results)} are made"
    for number, (declared, result) in enumerate(zip(node.results, results, strict=True)):
        if declared is None or (number > 0 and node.op in _BOOKKEEPING):
            continue
        wanted, made = _spell(_meta_tensor(declared)), _spell(result)
        is_statistic = number > 0 and node.op in _NORMS and declared.dtype.is_floating
        if made != wanted and not (is_statistic and _shape(result) == declared.shape):
            return f"declares {wanted} where {made} is made"
    return None


def _meta_tensor(kind: TensorType | None) -> Tensor | None:
    if kind is None:
        return None
    return torch.empty_strided(kind.shape, kind.stride, dtype=TORCH_DTYPE[kind.dtype], device=_META)


def _shape(result: object) -> tuple[int, ...] | None:
    return tuple(result.shape) if isinstance(result, Tensor) else None


def _spell(result: object) -> str:
    if not isinstance(result, Tensor):
        return "nothing"
    return f"{result.dtype}{list(result.shape)}"
