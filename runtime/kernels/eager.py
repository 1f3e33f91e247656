"""The reference kernels: call torch's operators one by one, and write results to their destinations.

``workspace.eager_plan`` plans the destination of each result and when a value is dropped. The last operator of an
output writes directly into its destination, by its ``out=`` overload or, for an embedding's gradient, by an operator of
zeroir; so the gradient of a matrix is never copied, and the bits are the same. An operator with several results, such
as a layer norm's backward, has no such overload, and its results are copied as soon as they exist.

The types of a segment may come from another device, where kernels return results with other strides. These matter for a
view of the result, so before a view the result is copied to the recorded strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, assert_never, cast

import torch
from torch import Tensor

from zeroir.ir.ops import Mode
from zeroir.ir.segments.bindings import Binding, Bindings
from zeroir.ir.segments.segment import Node, NodeArg, Segment
from zeroir.runtime.kernels.base import Kernel
from zeroir.runtime.kernels.calls import Resolve, is_multiple, operator, out_overload, resolver
from zeroir.workspace.eager_plan import (
    FillTarget,
    OutputTarget,
    Permute,
    Reshape,
    RunNode,
    ViewStep,
    eager_plan,
)

Undo = Callable[[Tensor], Tensor]
"""A function that inverts views: it returns the view of a destination in which a value must be written."""


class EagerKernels:
    """Segments interpreted with torch's operators on one device."""

    compiles_dims = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compiled: dict[tuple[str, tuple[Binding | None, ...]], Kernel] = {}

    def compile(self, segment: Segment, bindings: Sequence[Binding | None]) -> Kernel:
        key = (segment.digest(), tuple(bindings))
        if key not in self._compiled:
            self._compiled[key] = compile_eager(segment, bindings, self._device)
        return self._compiled[key]

    def at(self, values: Mapping[str, int]) -> EagerKernels:
        """Return other kernels, which are forgotten with the instance."""
        del values
        return EagerKernels(self._device)

    def finish(self) -> None:
        """Do nothing: compiled kernels are ready to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DestinationView:
    """A destination, viewed in the shape of the value to write."""

    output: int
    undo: Undo | None

    def __call__(self, destinations: Sequence[Tensor | None]) -> Tensor:
        target = destinations[self.output]
        assert target is not None
        return target if self.undo is None else self.undo(target)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OperatorCall:
    """One call of an operator. With ``target`` it writes to that tensor, its argument ``out``, instead of a new one.

    ``layouts`` are those of its results that need certain strides, with these strides.
    """

    function: Callable[..., object]
    args: Sequence[Resolve]
    kwargs: Sequence[tuple[str, Resolve]]
    first: int
    is_multiple: bool
    target: _DestinationView | None
    layouts: Sequence[tuple[int, tuple[int, ...]]]
    drops: Sequence[int]

    def __call__(self, values: list[Tensor | None], destinations: Sequence[Tensor | None]) -> None:
        args = [arg(values) for arg in self.args]
        kwargs = {name: arg(values) for name, arg in self.kwargs}
        result: object
        if self.target is None:
            result = self.function(*args, **kwargs)
        else:
            result = self.target(destinations)
            self.function(*args, **kwargs, out=result)
        if self.is_multiple:
            several = cast("Sequence[Tensor | None]", result)
            values[self.first : self.first + len(several)] = several
            del several
        else:
            values[self.first] = cast("Tensor", result)
        # Any other reference to a value would keep it in memory.
        del args, kwargs, result
        for index, stride in self.layouts:
            values[index] = laid_out(values[index], stride)
        for index in self.drops:
            values[index] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyToDestination:
    """A planned copy of a value to a destination, or its addition to the destination."""

    plan: FillTarget
    target: _DestinationView

    def __call__(self, values: list[Tensor | None], destinations: Sequence[Tensor | None]) -> None:
        """Copy or add the value, and drop the values that no later step needs."""
        target, value = self.target(destinations), values[self.plan.value]
        assert value is not None
        if self.plan.mode is Mode.WRITE:
            target.copy_(value)
        else:
            target.add_(value)
        if self.plan.is_read_there:
            values[self.plan.value] = target
        for index in self.plan.drops:
            values[index] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerKernel:
    """A segment as a list of calls and copies."""

    values: int
    steps: Sequence[_OperatorCall | CopyToDestination]

    def __call__(self, arguments: Sequence[Tensor], destinations: Sequence[Tensor | None]) -> None:
        values: list[Tensor | None] = [None] * self.values
        values[: len(arguments)] = arguments
        for step in self.steps:
            step(values, destinations)


def compile_eager(segment: Segment, bindings: Bindings, device: torch.device) -> EagerKernel:
    """Prepare the calls of a segment."""
    plan = eager_plan(segment, bindings, lambda node: _filler(node, device) is not None)
    steps: list[_OperatorCall | CopyToDestination] = []
    for step in plan.steps:
        match step:
            case RunNode():
                steps.append(_prepared(step, device))
            case FillTarget():
                steps.append(CopyToDestination(plan=step, target=_target(step.target)))
            case _:
                assert_never(step)
    return EagerKernel(values=plan.values, steps=steps)


def _prepared(call: RunNode, device: torch.device) -> _OperatorCall:
    node = call.node
    function, args = _function(node), node.args
    if call.target is not None:
        filler = _filler(node, device)
        assert filler is not None
        function, args = filler
    return _OperatorCall(
        function=function,
        args=[resolver(arg, device) for arg in args],
        kwargs=[(name, resolver(arg, device)) for name, arg in node.kwargs],
        first=call.first,
        is_multiple=is_multiple(operator(node.op)),
        target=None if call.target is None else _target(call.target),
        layouts=call.layouts,
        drops=call.drops,
    )


def laid_out(value: Tensor | None, stride: tuple[int, ...]) -> Tensor | None:
    """Return the tensor with these strides, or a copy that has them; strides of dimensions of size 1 do not matter."""
    if value is None or value.stride() == stride:
        return value
    pairs = zip(value.shape, value.stride(), stride, strict=True)
    if all(size <= 1 or actual == wanted for size, actual, wanted in pairs):
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(
        value
    )


# ---------------------------------------------------------------------------------- operators with a value changed

_SCATTERS: Final = {
    "aten.diagonal_scatter.default": "aten.diagonal.default",
    "aten.select_scatter.default": "aten.select.int",
    "aten.slice_scatter.default": "aten.slice.Tensor",
}
"""Operators that copy a tensor and write to a view of the copy, with the operator that creates the view.

Torch would copy the whole storage of the tensor: the block of all temporary buffers."""


def _function(node: Node) -> Callable[..., object]:
    """Return the operator of a node, or a function with the same results that needs less memory."""
    if node.op == "aten.copy.default":
        return _overwritten
    if node.op in _SCATTERS:
        return _scattered(operator(_SCATTERS[node.op]))
    return operator(node.op)


def _overwritten(tensor: Tensor, source: Tensor) -> Tensor:
    return torch.empty_like(tensor).copy_(source)


def _scattered(view: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scatter(tensor: Tensor, source: Tensor, *where: object, **named: object) -> Tensor:
        result = tensor.clone()
        view(result, *where, **named).copy_(source)
        return result

    return scatter


# ---------------------------------------------------------------------------------------- results in place


_Filler = tuple[Callable[..., object], tuple[NodeArg, ...]]
"""A function that writes a result to its argument ``out``, and its positional arguments."""


def _filler(node: Node, device: torch.device) -> _Filler | None:
    """Return the call that writes the node's result to a given tensor, with equal bits; None where there is none."""
    if len(node.results) != 1:
        return None
    if node.op == "aten.embedding_dense_backward.default" and device.type == "cpu":
        grad, indices, _, padding_idx, is_scaled = node.args
        return None if is_scaled else (_fill_embedding_gradient, (grad, indices, padding_idx))
    overload = out_overload(operator(node.op))
    return None if overload is None else (overload, node.args)


def _fill_embedding_gradient(
    grad: Tensor, indices: Tensor, padding_idx: int, *, out: Tensor
) -> None:
    torch.ops.zeroir.embedding_gradient.default(out, grad, indices, padding_idx)


def _target(target: OutputTarget) -> _DestinationView:
    return _DestinationView(output=target.output, undo=_undo(target.views))


def _undo(views: Sequence[ViewStep]) -> Undo | None:
    if not views:
        return None

    def undo(destination: Tensor) -> Tensor:
        for view in views:
            match view:
                case Permute(order):
                    destination = destination.permute(order)
                case Reshape(shape):
                    destination = destination.view(shape)
                case _:
                    assert_never(view)
        return destination

    return undo
