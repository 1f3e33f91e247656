"""The plan by which eager kernels run a segment: the targets of nodes, the copies, and the end of each value.

The eager kernels follow a plan and the memory model computes what the plan needs, so the two cannot differ. A value
that is an output, or that views turn into one, is computed in the output's destination if the destination has the
strides of the node's own result. A node that cannot write to given memory computes the value first; the value is copied
immediately, and later nodes that need it read the destination. Every other output is copied or added as soon as it is
computed, or at the end if its destination is also read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, assert_never

from zeroir.ir.ops import Mode
from zeroir.ir.segments.bindings import Bindings
from zeroir.ir.segments.segment import Node, Ref, Segment, TensorType
from zeroir.ir.segments.views import view_stride


@dataclass(frozen=True, slots=True)
class Permute:
    """The tensor with its dimensions in this order."""

    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements in another shape, without a copy."""

    shape: tuple[int, ...]


ViewStep = Permute | Reshape
"""One step of viewing a tensor in another shape or order of dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTarget:
    """Memory for a value: the destination of output number ``output``, viewed by ``views`` in turn."""

    output: int
    views: tuple[ViewStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNode:
    """Run a node, whose results are numbered from ``first``; its one result is computed in ``target`` if given.

    ``layouts`` are values among the results, each with the strides that it must have. ``drops`` are the values that no
    later step needs.
    """

    node: Node
    first: int
    target: OutputTarget | None
    layouts: tuple[tuple[int, tuple[int, ...]], ...]
    drops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FillTarget:
    """Copy a value to a target or add it there.

    If ``is_read_there``, later steps read the value in the target. ``drops`` are the values that no later step needs.
    """

    value: int
    target: OutputTarget
    mode: Mode
    is_read_there: bool
    drops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerPlan:
    """The steps of a segment, which numbers ``values`` values."""

    values: int
    steps: tuple[RunNode | FillTarget, ...]


def eager_plan(segment: Segment, bindings: Bindings, can_fill: Callable[[Node], bool]) -> EagerPlan:
    """Plan a segment for one way of binding its outputs.

    ``can_fill`` returns whether a node can compute its one result in given memory.
    """
    copied = _copied_values(segment, bindings)
    targets = {
        value: target
        for value, target in in_place(segment, bindings).items()
        if value not in copied
    }
    fixed_layouts = laid_out_values(segment)
    filled_outputs = {target.output for target in targets.values()}
    # what is copied or added as soon as a value exists, by the value; and what only at the end
    at_once: dict[int, list[FillTarget]] = {}
    at_end: list[FillTarget] = []
    for output, (value, binding) in enumerate(zip(segment.outputs, bindings, strict=True)):
        if binding is None or output in filled_outputs:
            continue
        fill = FillTarget(
            value=copied.get(value, value),
            target=OutputTarget(output=output, views=()),
            mode=binding.mode,
            is_read_there=False,
        )
        if binding.is_exclusive:
            at_once.setdefault(value, []).append(fill)
        else:
            at_end.append(fill)
    steps: list[RunNode | FillTarget] = []
    for value in range(len(segment.inputs)):
        steps += at_once.get(value, ())
    first = len(segment.inputs)
    for node in segment.nodes:
        results = range(first, first + len(node.results))
        if first not in copied:
            is_filled = first in targets and can_fill(node)
            steps.append(
                RunNode(
                    node=node,
                    first=first,
                    target=targets[first] if is_filled else None,
                    layouts=tuple(
                        (index, kind.stride)
                        for index, kind in zip(results, node.results, strict=True)
                        if kind is not None and index in fixed_layouts
                    ),
                )
            )
            steps += [
                FillTarget(value=value, target=targets[value], mode=Mode.WRITE, is_read_there=True)
                for value in results
                if value in targets and not is_filled
            ]
        for value in results:
            steps += at_once.get(value, ())
        first = results.stop
    steps += at_end
    return EagerPlan(values=first, steps=_with_drops(steps))


def in_place(segment: Segment, bindings: Bindings) -> Mapping[int, OutputTarget]:
    """Return the values that can be computed in a destination, each with the part of the destination that it fills."""
    makers: dict[int, Node] = {}
    first = len(segment.inputs)
    for node in segment.nodes:
        makers.update(dict.fromkeys(range(first, first + len(node.results)), node))
        first += len(node.results)
    types = segment.types()
    targets: dict[int, OutputTarget] = {}
    for output, (value, binding) in enumerate(zip(segment.outputs, bindings, strict=True)):
        if binding is None or binding.mode is not Mode.WRITE or not binding.is_exclusive:
            continue
        kind = types[value]
        if kind is None:
            continue
        views: list[ViewStep] = []
        made = value
        while made in makers and (back := _undone(makers[made], types)) is not None:
            made, view = back
            views += () if view is None else (view,)
        if made not in makers or made in targets:
            continue
        if types[made] == _viewed(replace(kind, stride=binding.stride), views):
            targets[made] = OutputTarget(output=output, views=tuple(views))
    return targets


RESHAPES: Final = frozenset({"aten.view.default", "aten._unsafe_view.default"})
_SAME: Final = frozenset({"aten.alias.default", "aten.detach.default"})


def _undone(node: Node, types: Sequence[TensorType | None]) -> tuple[int, ViewStep | None] | None:
    """Return, for a node that only views a value, its number and the step that undoes it (None for an alias)."""
    if not node.args or not isinstance(node.args[0], Ref):
        return None
    source = node.args[0].index
    kind = types[source]
    if kind is None:
        return None
    rank = len(kind.shape)
    order = list(range(rank))
    if node.op in _SAME:
        return source, None
    if node.op in RESHAPES:
        return source, Reshape(kind.shape)
    if node.op == "aten.t.default":
        return source, Permute(tuple(reversed(order)))
    if node.op == "aten.transpose.int":
        _, a, b = node.args
        assert isinstance(a, int)
        assert isinstance(b, int)
        if rank:
            order[a], order[b] = order[b], order[a]
        return source, Permute(tuple(order))
    if node.op == "aten.permute.default":
        dims = node.args[1]
        assert isinstance(dims, tuple)
        forward = [d % rank for d in dims if isinstance(d, int)]
        return source, Permute(tuple(sorted(order, key=forward.__getitem__)))
    return None


def _viewed(kind: TensorType, views: Sequence[ViewStep]) -> TensorType | None:
    """Return the type of a tensor after these steps; None if its strides do not allow them."""
    for view in views:
        match view:
            case Permute(order):
                kind = replace(
                    kind,
                    shape=tuple(kind.shape[d] for d in order),
                    stride=tuple(kind.stride[d] for d in order),
                )
            case Reshape(shape):
                stride = view_stride(kind, shape)
                if stride is None:
                    return None
                kind = replace(kind, shape=shape, stride=stride)
            case _:
                assert_never(view)
    return kind


def _copied_values(segment: Segment, bindings: Bindings) -> Mapping[int, int]:
    """Return outputs that are only copies of another value, by number, and that value, which is copied instead."""
    needed = {ref.index for node in segment.nodes for ref in node.refs()}
    # Another output may overwrite the source of a copy before the copy.
    needed |= {
        value
        for value, binding in zip(segment.outputs, bindings, strict=True)
        if binding is not None and not binding.is_exclusive
    }
    sources: dict[int, int] = {}
    first = len(segment.inputs)
    for node in segment.nodes:
        if node.op == "aten.clone.default" and first not in needed:
            (source,) = node.refs()
            sources[first] = source.index
        first += len(node.results)
    return sources


def laid_out_values(segment: Segment) -> set[int]:
    """Return values whose strides determine whether a node can view them, or which elements it sees."""
    ops = RESHAPES | {"aten.view.dtype", "zeroir.strided.default", "zeroir.strided_scatter.default"}
    return {ref.index for node in segment.nodes if node.op in ops for ref in node.refs()}


def _with_drops(steps: Sequence[RunNode | FillTarget]) -> tuple[RunNode | FillTarget, ...]:
    """Drop each value after its last use (an unused value: after it is computed)."""
    last: dict[int, int] = {}
    for at, step in enumerate(steps):
        match step:
            case RunNode(node=node, first=first):
                used = {ref.index for ref in node.refs()}
                used |= set(range(first, first + len(node.results)))
            case FillTarget(value=value):
                used = {value}
            case _:
                assert_never(step)
        last.update(dict.fromkeys(used, at))
    drops: list[list[int]] = [[] for _ in steps]
    for index, at in sorted(last.items()):
        drops[at].append(index)
    return tuple(
        replace(step, drops=tuple(values)) for step, values in zip(steps, drops, strict=True)
    )
