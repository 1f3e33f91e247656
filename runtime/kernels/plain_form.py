"""The plain form of a segment: its operators, called one by one on separate tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

import torch
from torch import Tensor

from zeroir.ir.buffers import span_numel
from zeroir.ir.segments.segment import Node, Segment
from zeroir.runtime.kernels.calls import is_multiple, operator, resolver
from zeroir.runtime.kernels.differences import difference
from zeroir.runtime.kernels.eager import laid_out
from zeroir.runtime.kernels.foreign import watched_call
from zeroir.torch_ops.purity import is_foreign
from zeroir.workspace.eager_plan import laid_out_values

OTHER_KERNELS: Final = 64.0
"""The tolerance of all other kernels, as a multiple of that of the CPU's eager kernels."""


def span(tensor: Tensor) -> Tensor:
    """Return all elements from the first to the last of a view, as one dimension."""
    numel = span_numel(tuple(tensor.shape), tensor.stride())
    return tensor.as_strided((numel,), (1,), tensor.storage_offset())


def separate(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, in separate memory."""
    return span(tensor).clone().as_strided(tensor.shape, tensor.stride())


See = Callable[[Node, Sequence[Tensor], Sequence[Tensor]], object]
"""Takes a node, its operands and its results."""


def plain_results(
    segment: Segment, arguments: Sequence[Tensor], device: torch.device, see: See | None = None
) -> list[Tensor]:
    """Return the segment's outputs, computed node by node; every value is dropped after its last use.

    ``see`` is called after each node.
    """
    values: list[Tensor | None] = list(arguments)
    strided = laid_out_values(segment)
    last = {ref.index: at for at, node in enumerate(segment.nodes) for ref in node.refs()}
    last.update(dict.fromkeys(segment.outputs, len(segment.nodes)))
    for at, node in enumerate(segment.nodes):
        results = [
            laid_out(value, kind.stride) if kind and number in strided else value
            for number, (kind, value) in enumerate(
                zip(node.results, _results(node, values, device), strict=True), len(values)
            )
        ]
        if see is not None:
            operands = (values[ref.index] for ref in node.refs())
            see(node, [x for x in operands if x is not None], [x for x in results if x is not None])
        values += results
        for ref in node.refs():
            if last[ref.index] == at:
                values[ref.index] = None
    outputs = [values[output] for output in segment.outputs]
    return [output for output in outputs if output is not None]


def _results(
    node: Node, values: Sequence[Tensor | None], device: torch.device
) -> Sequence[Tensor | None]:
    function = operator(node.op)
    args = [resolver(arg, device)(values) for arg in node.args]
    kwargs = {name: resolver(arg, device)(values) for name, arg in node.kwargs}
    if is_foreign(function):
        returned = watched_call(node, function, args, kwargs, _is_repeated)
    else:
        returned = function(*args, **kwargs)
    if is_multiple(function):
        return cast("Sequence[Tensor | None]", returned)
    return [cast("Tensor", returned)]


def _is_repeated(result: Tensor, again: Tensor) -> bool:
    """Return whether two equal calls of an operator gave equal results, up to the order of sums on several threads."""
    eps = torch.finfo(result.dtype).eps if result.dtype.is_floating_point else 0.0
    return difference(again, result, 4 * eps * OTHER_KERNELS) is None
