"""Whether the nodes of segments have the results that they declare: every operator is asked, on tensors without data.

Buffers, places and proofs rest on the types that a program declares, and a program is a file. What only looks at a
value is checked wherever a program is read (``zeroir.ir.views``); here torch's own meta kernels say what the other
operators make. How a result is laid out in memory differs between devices, and no value depends on it: dtype and
shape do not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Final, cast

import torch
from torch import Tensor

from zeroir.ir.segment import Node, Ref, Segment, TensorType
from zeroir.ir.views import is_view
from zeroir.runtime.kernels.calls import operator, resolver
from zeroir.runtime.kernels.compiler_import import compiler_not_imported
from zeroir.runtime.tensors import TORCH_DTYPE

_META = torch.device("meta")
_NORMS: Final = frozenset(
    {
        "aten._fused_rms_norm.default",
        "aten.native_group_norm.default",
        "aten.native_layer_norm.default",
    }
)
"""Their statistics, which follow the result, are FP32 on a GPU and of the operand's dtype on a CPU."""

_BOOKKEEPING: Final = frozenset(
    {"aten._embedding_bag.default", "aten._embedding_bag_forward_only.default"}
)
"""Their results after the first are for their own backward: each device keeps what it needs, in shapes of its own."""


def misdeclared(segments: Iterable[Segment]) -> str | None:
    """The first node whose operator makes something else than it declares, or refuses the call, as a clause.

    Equal nodes are asked once, wherever they stand.
    """
    with compiler_not_imported():
        return _misdeclared(segments)


def _misdeclared(segments: Iterable[Segment]) -> str | None:
    known: set[Hashable] = set()
    for segment in {segment.digest(): segment for segment in segments}.values():
        types = segment.types()
        for number, node in enumerate(segment.nodes):
            if is_view(node.op):
                continue
            operands = tuple(types[ref.index] for ref in node.refs())
            args = (node.args, node.kwargs)
            key = (node.op, _nameless(args), operands, node.results)
            if key in known:
                continue
            problem = _problem(node, types)
            if problem is not None:
                return f"node {number} of segment @{segment.name} ({node.op}) {problem}"
            known.add(key)
    return None


def _nameless(args: object) -> Hashable:
    """Arguments without the numbers of the values among them; 1, 1.0 and True are told apart."""
    if isinstance(args, Ref):
        return Ref
    if isinstance(args, tuple):
        return tuple(_nameless(item) for item in args)
    return (type(args), args)


def _problem(node: Node, types: Sequence[TensorType | None]) -> str | None:
    function = operator(node.op)
    # By number, as a resolver asks for them.
    values = cast(
        "Sequence[Tensor | None]", {ref.index: _sketch(types[ref.index]) for ref in node.refs()}
    )
    args = [resolver(arg, _META)(values) for arg in node.args]
    kwargs = {name: resolver(arg, _META)(values) for name, arg in node.kwargs}
    try:
        made = function(*args, **kwargs)
    except NotImplementedError:
        # Torch has no such kernel. Nothing is out of bounds where it makes something else: kernels check shapes.
        return None
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises, it refuses the call
        return f"cannot be called as it stands: {str(error).splitlines()[0] if str(error) else error!r}"
    results = list(made) if isinstance(made, list | tuple) else [made]
    if len(results) != len(node.results):
        return f"declares {len(node.results)} results where {len(results)} are made"
    for at, (declared, result) in enumerate(zip(node.results, results, strict=True)):
        if declared is None or (at > 0 and node.op in _BOOKKEEPING):
            continue
        wanted, found = _spell(_sketch(declared)), _spell(result)
        is_statistic = at > 0 and node.op in _NORMS and declared.dtype.is_floating
        if found != wanted and not (is_statistic and _shape(result) == declared.shape):
            return f"declares {wanted} where {found} is made"
    return None


def _sketch(kind: TensorType | None) -> Tensor | None:
    if kind is None:
        return None
    return torch.empty_strided(kind.shape, kind.stride, dtype=TORCH_DTYPE[kind.dtype], device=_META)


def _shape(result: object) -> tuple[int, ...] | None:
    return tuple(result.shape) if isinstance(result, Tensor) else None


def _spell(result: object) -> str:
    if not isinstance(result, Tensor):
        return "nothing"
    return f"{result.dtype}{list(result.shape)}"
