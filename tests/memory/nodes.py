"""Segments of one op, and what the eager kernels allocate when they carry one out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from tests.memory.library import library_calls, without_scratch
from tests.support.allocations import left_bytes
from zeroir.ir.buffers import span_numel
from zeroir.ir.ops import Mode
from zeroir.ir.segments.bindings import Binding
from zeroir.ir.segments.segment import Node, NodeArg, Ref, Segment, TensorType
from zeroir.runtime.kernels.calls import operator
from zeroir.runtime.kernels.eager import compile_eager
from zeroir.runtime.memory.allocations import allocations, by_range, peak_bytes
from zeroir.torch_ops.types import IR_DTYPE, TORCH_DTYPE

CPU = torch.device("cpu")

Argument = Tensor | bool | int | float | None | torch.dtype | Sequence["Argument"]


def segment_of(op: str, *args: Argument, **kwargs: Argument) -> tuple[Segment, list[Tensor]]:
    """A segment that calls an op once, with the types that its results have, and its tensors."""
    function = operator(op)
    returned = function(*args, **kwargs)
    results = [returned] if isinstance(returned, Tensor) else list(returned)
    tensors: list[Tensor] = []
    node = Node(
        op=op,
        args=tuple(_plain(arg, tensors) for arg in args),
        kwargs=tuple((name, _plain(arg, tensors)) for name, arg in kwargs.items()),
        results=tuple(None if one is None else type_of(one) for one in results),
    )
    first = len(tensors)
    outputs = tuple(first + i for i, one in enumerate(results) if one is not None)
    inputs = tuple(type_of(tensor) for tensor in tensors)
    return Segment(name="one", inputs=inputs, nodes=(node,), outputs=outputs), tensors


def type_of(tensor: Tensor) -> TensorType:
    """The type of a tensor as a segment has it."""
    return TensorType(
        dtype=IR_DTYPE[tensor.dtype], shape=tuple(tensor.shape), stride=tensor.stride()
    )


def unwanted(segment: Segment) -> list[Binding | None]:
    """No output has a destination."""
    return [None] * len(segment.outputs)


def bound(
    segment: Segment, mode: Mode = Mode.WRITE, *, dense: bool = False
) -> list[Binding | None]:
    """Every output has one, with the strides of the result or, with ``dense``, row-major."""
    return [
        Binding(
            mode=mode,
            stride=torch.empty(kind.shape, device="meta").stride() if dense else kind.stride,
            is_exclusive=True,
        )
        for kind in segment.output_types()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A segment with one way of binding its outputs, and its arguments."""

    segment: Segment
    outputs: Sequence[Binding | None]
    tensors: Sequence[Tensor]

    def prepared(self) -> Callable[[], None]:
        """What calls the segment's kernel."""
        kernel = compile_eager(self.segment, self.outputs, CPU)
        destinations = [
            None
            if one is None
            else torch.zeros(
                span_numel(kind.shape, one.stride), dtype=TORCH_DTYPE[kind.dtype]
            ).as_strided(kind.shape, one.stride)
            for one, kind in zip(self.outputs, self.segment.output_types(), strict=True)
        ]
        return lambda: kernel(self.tensors, destinations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What the kernel of a case holds at most beside its arguments and destinations, without scratch and with it."""

    counted_bytes: int
    peak_bytes: int


def taken(cases: Sequence[Case]) -> list[Taken]:
    """What every case takes; it may leave nothing."""
    calls = [case.prepared() for case in cases]
    names = [f"case {at}" for at in range(len(cases))]

    def run() -> None:
        with torch.no_grad():
            for name, call in zip(names, calls, strict=True):
                with record_function(name):
                    call()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = by_range(allocations(run), names)
    finally:
        torch.set_num_threads(threads)
    events = [found.get(name, ()) for name in names]
    assert not any(map(left_bytes, events))
    return [
        Taken(
            counted_bytes=peak_bytes(without_scratch(own, library_calls(case.segment))),
            peak_bytes=peak_bytes(own),
        )
        for case, own in zip(cases, events, strict=True)
    ]


def _plain(arg: Argument, tensors: list[Tensor]) -> NodeArg:
    if isinstance(arg, Tensor):
        tensors.append(arg)
        return Ref(len(tensors) - 1)
    if isinstance(arg, torch.dtype):
        return IR_DTYPE[arg]
    if isinstance(arg, Sequence) and not isinstance(arg, str):
        return tuple(_plain(item, tensors) for item in arg)
    return arg
