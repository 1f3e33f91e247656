"""Finds out whether a program that was captured for one device runs on another one, which need not be there.

Operators with several results save some of them for their own backward. A few save others on a GPU than on a CPU, such
as the statistics of a norm, which are FP32 there. Within a segment these pass from operator to operator as they are.
Where another segment takes them, a buffer of the declared type holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, cast

import torch
from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir.analysis.instances import segments_at_ends
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Node, Segment, TensorType
from zeroir.ir.segments.views import is_view
from zeroir.runtime.kernels.calls import is_multiple, operator, resolver
from zeroir.runtime.kernels.compiler_import import compiler_not_imported
from zeroir.torch_ops._torch_device_tensors import DeviceTensorMode, tensors_of
from zeroir.torch_ops.types import TORCH_DTYPE

_TITLES: Final = {"cpu": "the CPU", "cuda": "CUDA"}
_HERE: Final = torch.device("cpu")


def require_device(program: Program, device: torch.device) -> None:
    """Raise a UserError if a program was captured for another device than the one that it is to run on."""
    difference = difference_on(program, device)
    if difference is not None:
        raise UserError(
            f"The program was captured for {captured_for(program)} and cannot run on {_title(device.type)}: "
            f"{difference}. Compile it with --device {device.type}."
        )


def difference_on(program: Program, device: torch.device) -> str | None:
    """Return a clause on the first result that this device makes otherwise; None where the program runs on it."""
    captured = program.options.texts.get("device")
    if captured in (None, device.type):
        return None
    return first_difference(program, device.type)


def captured_for(program: Program) -> str:
    """Return the device for which a program was captured, as a sentence names it."""
    return _title(program.options.texts.get("device", "any device"))


def first_difference(program: Program, device: str) -> str | None:
    """Return a clause on the first result that other segments take and that operators of a device make otherwise."""
    segments = segments_at_ends(program)
    asked: set[object] = set()
    mode = DeviceTensorMode(device=device)
    with compiler_not_imported(), torch.no_grad(), tensors_of(device), mode:
        for segment in {segment.digest(): segment for segment in segments}.values():
            types, leaving = segment.types(), _leaving(segment)
            for node, first in _saving_nodes(segment):
                saved = tuple(first + i in leaving for i in range(len(node.results)))
                operands = tuple(types[ref.index] for ref in node.refs())
                key = (node.op, operands, node.results, saved)
                if key in asked:
                    continue
                asked.add(key)
                clause = _difference(node, types, saved)
                if clause is not None:
                    return clause
    return None


def _saving_nodes(segment: Segment) -> Iterator[tuple[Node, int]]:
    """Yield the nodes with several results, with the number of the first one."""
    first = len(segment.inputs)
    for node in segment.nodes:
        if len(node.results) > 1 and is_multiple(operator(node.op)):
            yield node, first
        first += len(node.results)


def _leaving(segment: Segment) -> frozenset[int]:
    """Return the numbers of the values that leave a segment, or of which it makes views."""
    viewed = (ref.index for node in segment.nodes if is_view(node.op) for ref in node.refs())
    return frozenset((*segment.outputs, *viewed))


def _difference(
    node: Node, types: Sequence[TensorType | None], saved: Sequence[bool]
) -> str | None:
    # Indexed by value, because a resolver looks them up that way.
    values = cast(
        "Sequence[Tensor | None]",
        {ref.index: _without_data(types[ref.index]) for ref in node.refs()},
    )
    args = [resolver(arg, _HERE)(values) for arg in node.args]
    kwargs = {name: resolver(arg, _HERE)(values) for name, arg in node.kwargs}
    try:
        results = cast("Sequence[Tensor | None]", operator(node.op)(*args, **kwargs))
    except Exception:  # noqa: BLE001 - whatever torch cannot say without data, a run says
        return None
    for is_saved, declared, made in zip(saved, node.results, results, strict=True):
        if not is_saved or declared is None or made is None:
            continue
        if made.dtype != TORCH_DTYPE[declared.dtype] or tuple(made.shape) != declared.shape:
            wanted = f"{TORCH_DTYPE[declared.dtype]}{list(declared.shape)}"
            place = f", {node.source}," if node.source else ""
            return f"there {node.op}{place} saves {made.dtype}{list(made.shape)} for the backward, not {wanted}"
    return None


def _without_data(kind: TensorType | None) -> Tensor | None:
    if kind is None:
        return None
    return torch.empty_strided(kind.shape, kind.stride, dtype=TORCH_DTYPE[kind.dtype])


def _title(device: str) -> str:
    return _TITLES.get(device, device)
