"""The reference kernels: call torch's operators one by one, writing results where they belong.

An output's last operator writes straight into the destination (its ``out=`` overload, or for an embedding's gradient
an operator of ours), through transposes and reshapes between the two, so that the gradient of a matrix is never
copied. That is done only where the destination has the strides that the operator's own result would have: the same
call then gives the same bits. Everything else is computed and copied or added: results of operators that have
several, such as the vectors that a layer norm's backward yields. A value is dropped after its last use.

A segment's types were recorded on another device perhaps, whose kernels lay their results out differently. That
matters to a node that looks at a result in another shape, so there it is laid out anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from zeroir.ir.ops import Mode
from zeroir.ir.segment import Node, NodeArg, Ref, Segment, TensorType
from zeroir.runtime.kernels.base import Binding, Kernel
from zeroir.runtime.kernels.calls import (
    Resolve,
    is_multiple,
    node_refs,
    operator,
    out_overload,
    resolver,
)

Undo = Callable[[Tensor], Tensor]
"""Given a destination, the tensor to write so that a view of it is what the destination must hold."""


class EagerKernels:
    """Segments interpreted with torch's operators on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compiled: dict[tuple[str, tuple[Binding | None, ...]], Kernel] = {}

    def compile(self, segment: Segment, bindings: Sequence[Binding | None]) -> Kernel:
        """See ``Kernels.compile``."""
        key = (segment.digest(), tuple(bindings))
        if key not in self._compiled:
            self._compiled[key] = compile_eager(segment, bindings, self._device)
        return self._compiled[key]

    def finish(self) -> None:
        """See ``Kernels.finish``: there is nothing left to do."""


@dataclass(slots=True, kw_only=True)
class _Step:
    """One call. With ``out`` the call fills ``undo(destinations[out])`` instead of making a tensor.

    ``is_out_first`` says that it takes that tensor as its first argument, and not as ``out=``. ``layouts`` are the
    values among its results that must have the strides given here.
    """

    function: torch._ops.OpOverload
    args: list[Resolve]
    kwargs: list[tuple[str, Resolve]]
    first: int
    is_multiple: bool
    out: int | None = None
    undo: Undo | None = None
    is_out_first: bool = False
    layouts: Sequence[tuple[int, tuple[int, ...]]] = ()
    drops: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finish:
    """An output that was not written in place: copy or add it."""

    output: int
    value: int
    mode: Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerKernel:
    """A segment as a list of calls."""

    values: int
    steps: Sequence[_Step]
    finishes: Sequence[_Finish]

    def __call__(self, arguments: Sequence[Tensor], destinations: Sequence[Tensor | None]) -> None:
        """See ``Kernel``."""
        values: list[Tensor | None] = [None] * self.values
        values[: len(arguments)] = arguments
        for step in self.steps:
            args = [arg(values) for arg in step.args]
            kwargs = {name: arg(values) for name, arg in step.kwargs}
            if step.out is not None:
                target = destinations[step.out]
                assert target is not None
                filled = target if step.undo is None else step.undo(target)
                if step.is_out_first:
                    step.function(filled, *args)
                    result = filled
                else:
                    result = step.function(*args, **kwargs, out=filled)
            else:
                result = step.function(*args, **kwargs)
            if step.is_multiple:
                values[step.first : step.first + len(result)] = result
            else:
                values[step.first] = result
            for index, stride in step.layouts:
                values[index] = _laid_out(values[index], stride)
            del args, kwargs, result
            for index in step.drops:
                values[index] = None
        for finish in self.finishes:
            target, value = destinations[finish.output], values[finish.value]
            assert target is not None
            assert value is not None
            if finish.mode is Mode.WRITE:
                target.copy_(value)
            else:
                target.add_(value)


def compile_eager(
    segment: Segment, bindings: Sequence[Binding | None], device: torch.device
) -> EagerKernel:
    """Plan the calls of a segment: where each result goes and when each value is dropped."""
    places = in_place(segment, bindings, lambda node: _filler(node, device) is not None)
    copied = _copied(segment, bindings)
    reshaped = _reshaped(segment)
    steps: list[_Step] = []
    nodes: list[Node] = []
    first = len(segment.inputs)
    for node in segment.nodes:
        if first in copied and first not in places:
            first += 1
            continue
        function = operator(node.op)
        step = _Step(
            function=function,
            args=[resolver(arg, device) for arg in node.args],
            kwargs=[(name, resolver(arg, device)) for name, arg in node.kwargs],
            first=first,
            is_multiple=is_multiple(function),
            layouts=[
                (index, kind.stride)
                for index, kind in enumerate(node.results, first)
                if kind is not None and index in reshaped
            ],
        )
        if first in places:
            step.out, step.undo = places[first]
            filler = _filler(node, device)
            assert filler is not None
            step.function, step.is_out_first = filler.function, filler.is_out_first
            step.args = [resolver(arg, device) for arg in filler.args]
        steps.append(step)
        nodes.append(node)
        first += len(node.results)
    written = {output for output, _ in places.values()}
    finishes = [
        _Finish(output=output, value=copied.get(value, value), mode=binding.mode)
        for output, (value, binding) in enumerate(zip(segment.outputs, bindings, strict=True))
        if binding is not None and output not in written
    ]
    _plan_drops(len(segment.inputs), nodes, steps, kept={finish.value for finish in finishes})
    return EagerKernel(values=first, steps=steps, finishes=finishes)


def _copied(segment: Segment, bindings: Sequence[Binding | None]) -> Mapping[int, int]:
    """Outputs that are but copies of another value, for which the copy to the destination is enough."""
    needed = {ref.index for node in segment.nodes for ref in node.refs()}
    # Another output may overwrite what is copied before it is.
    needed |= {
        value
        for value, binding in zip(segment.outputs, bindings, strict=True)
        if binding is not None and not binding.is_exclusive
    }
    found: dict[int, int] = {}
    first = len(segment.inputs)
    for node in segment.nodes:
        if node.op == "aten.clone.default" and first not in needed:
            (source,) = node.refs()
            found[first] = source.index
        first += len(node.results)
    return found


def _reshaped(segment: Segment) -> set[int]:
    """Values whose strides decide whether a node that looks at them can."""
    ops = _RESHAPES | {"aten.as_strided.default", "aten.view.dtype"}
    return {ref.index for node in segment.nodes if node.op in ops for ref in node.refs()}


def _laid_out(value: Tensor | None, stride: tuple[int, ...]) -> Tensor | None:
    """The tensor with these strides, as far as they matter: copied if it has others."""
    if value is None or value.stride() == stride:
        return value
    pairs = zip(value.shape, value.stride(), stride, strict=True)
    if all(size <= 1 or own == wanted for size, own, wanted in pairs):
        return value
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(
        value
    )


def _plan_drops(inputs: int, nodes: Sequence[Node], steps: Sequence[_Step], kept: set[int]) -> None:
    """Drop each value after its last use (a value that nobody uses: after it is made)."""
    last: dict[int, int] = dict.fromkeys(range(inputs), -1)
    for at, (node, step) in enumerate(zip(nodes, steps, strict=True)):
        last.update(dict.fromkeys(range(step.first, step.first + len(node.results)), at))
        last.update(dict.fromkeys(node_refs(node), at))
    for index, at in last.items():
        if at >= 0 and index not in kept:
            steps[at].drops.append(index)


# ---------------------------------------------------------------------------------------- results in place


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filler:
    """The call that fills a given tensor with a node's result."""

    function: torch._ops.OpOverload
    args: tuple[NodeArg, ...]
    is_out_first: bool = False


def _filler(node: Node, device: torch.device) -> _Filler | None:
    """How to fill a given tensor with the bits that the node's own result would have; None where that cannot be."""
    if len(node.results) != 1:
        return None
    if node.op == "aten.embedding_dense_backward.default" and device.type == "cpu":
        grad, indices, _, padding_idx, is_scaled = node.args
        if is_scaled:
            return None
        return _Filler(
            function=torch.ops.zeroir.embedding_gradient.default,
            args=(grad, indices, padding_idx),
            is_out_first=True,
        )
    overload = out_overload(operator(node.op))
    return None if overload is None else _Filler(function=overload, args=node.args)


def in_place(
    segment: Segment, bindings: Sequence[Binding | None], can_fill: Callable[[Node], bool]
) -> Mapping[int, tuple[int, Undo | None]]:
    """Values that can be made in a destination: value → (output, how the destination becomes that value).

    ``can_fill`` says whether a node's results may be made in given tensors.
    """
    makers: dict[int, Node] = {}
    first = len(segment.inputs)
    for node in segment.nodes:
        makers.update(dict.fromkeys(range(first, first + len(node.results)), node))
        first += len(node.results)
    types = segment.types()
    found: dict[int, tuple[int, Undo | None]] = {}
    for output, (value, binding) in enumerate(zip(segment.outputs, bindings, strict=True)):
        if binding is None or binding.mode is not Mode.WRITE or not binding.is_exclusive:
            continue
        kind = types[value]
        if kind is None:
            continue
        undos: list[Undo] = []
        made = value
        while made in makers and (back := _undo_view(makers[made], types)) is not None:
            made, undo = back
            undos.append(undo)
        if made not in makers or made in found or not can_fill(makers[made]):
            continue
        if not _has_layout_of(types[made], undos, kind, binding.stride):
            continue
        found[made] = (output, _chain(undos) if undos else None)
    return found


def _chain(undos: Sequence[Undo]) -> Undo:
    def undo_all(destination: Tensor) -> Tensor:
        for undo in undos:
            destination = undo(destination)
        return destination

    return undo_all


def _has_layout_of(
    made: TensorType | None, undos: Sequence[Undo], kind: TensorType, stride: tuple[int, ...]
) -> bool:
    """Whether the destination, seen as the node's result, has the result's own shape and strides."""
    if made is None or made.dtype is not kind.dtype:
        return False
    probe = torch.empty_strided(kind.shape, stride, device="meta")
    try:
        for undo in undos:
            probe = undo(probe)
    except RuntimeError:  # a reshape that this layout does not allow
        return False
    return tuple(probe.shape) == made.shape and probe.stride() == made.stride


_SAME = frozenset({"aten.alias.default", "aten.detach.default"})
_RESHAPES = frozenset({"aten.view.default", "aten._unsafe_view.default"})


def _undo_view(node: Node, types: Sequence[TensorType | None]) -> tuple[int, Undo] | None:
    """If a node only looks at a value in another way: that value's number, and the way back."""
    if not node.args or not isinstance(node.args[0], Ref):
        return None
    source = node.args[0].index
    kind = types[source]
    if kind is None:
        return None
    shape = kind.shape
    if node.op in _SAME:
        return source, lambda destination: destination
    if node.op == "aten.t.default":
        return source, lambda destination: destination.t()
    if node.op in _RESHAPES:
        return source, lambda destination: destination.view(shape)
    if node.op == "aten.transpose.int":
        _, a, b = node.args
        assert isinstance(a, int)
        assert isinstance(b, int)
        return source, lambda destination: destination.transpose(a, b)
    if node.op == "aten.permute.default":
        dims = node.args[1]
        assert isinstance(dims, tuple)
        order = [d % len(shape) for d in dims if isinstance(d, int)]
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return source, lambda destination: destination.permute(inverse)
    return None
