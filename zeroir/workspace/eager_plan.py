"""How a segment is carried out op by op: what each op writes, what is copied where, and when each value is dropped.

The eager kernels do what a plan says and the memory model counts what it takes, so the two cannot differ. A value
that ends up in a destination is made there, through transposes and reshapes between the two, where the destination
has the strides that the op's own result would have; an op that cannot write to given memory makes the value first,
it is copied at once, and whoever needs it later reads the destination. Everything else is copied or added as soon as
it is there, or at the end where the destination is also read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, assert_never

from zeroir.ir.bindings import Bindings
from zeroir.ir.ops import Mode
from zeroir.ir.segment import Node, Ref, Segment, TensorType
from zeroir.ir.views import view_stride


@dataclass(frozen=True, slots=True)
class Permute:
    """The tensor with its dimensions in this order."""

    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same elements in another shape, without a copy."""

    shape: tuple[int, ...]


Look = Permute | Reshape
"""Another way to look at a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A value's place: the destination of an output, looked at through ``looks`` one after another."""

    output: int
    looks: tuple[Look, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Carry out a node, whose results are numbered from ``first``; ``place`` is filled with its result if given.

    ``layouts`` are the values among the results that must have the strides given here. ``drops`` are the values that
    nobody needs any more.
    """

    node: Node
    first: int
    place: Place | None
    layouts: tuple[tuple[int, tuple[int, ...]], ...]
    drops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Copy or add a value to a place; with ``is_home`` whoever needs the value later reads it there."""

    value: int
    place: Place
    mode: Mode
    is_home: bool
    drops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerPlan:
    """The steps of a segment, which numbers ``values`` values."""

    values: int
    steps: tuple[Call | Move, ...]


def eager_plan(segment: Segment, bindings: Bindings, can_fill: Callable[[Node], bool]) -> EagerPlan:
    """Plan a segment for one way of binding its outputs.

    ``can_fill`` says which ops of one result can make it in given memory.
    """
    skipped = _copied(segment, bindings)
    places = {
        value: place for value, place in in_place(segment, bindings).items() if value not in skipped
    }
    looked_at = laid_out_values(segment)
    placed = {place.output for place in places.values()}
    # What is copied or added once a value is there, by the value; and what only at the end.
    soon: dict[int, list[Move]] = {}
    late: list[Move] = []
    for output, (value, binding) in enumerate(zip(segment.outputs, bindings, strict=True)):
        if binding is None or output in placed:
            continue
        move = Move(
            value=skipped.get(value, value),
            place=Place(output=output, looks=()),
            mode=binding.mode,
            is_home=False,
        )
        if binding.is_exclusive:
            soon.setdefault(value, []).append(move)
        else:
            late.append(move)
    steps: list[Call | Move] = []
    for value in range(len(segment.inputs)):
        steps += soon.get(value, ())
    first = len(segment.inputs)
    for node in segment.nodes:
        results = range(first, first + len(node.results))
        if first not in skipped:
            is_filled = first in places and can_fill(node)
            steps.append(
                Call(
                    node=node,
                    first=first,
                    place=places[first] if is_filled else None,
                    layouts=tuple(
                        (index, kind.stride)
                        for index, kind in zip(results, node.results, strict=True)
                        if kind is not None and index in looked_at
                    ),
                )
            )
            steps += [
                Move(value=value, place=places[value], mode=Mode.WRITE, is_home=True)
                for value in results
                if value in places and not is_filled
            ]
        for value in results:
            steps += soon.get(value, ())
        first = results.stop
    steps += late
    return EagerPlan(values=first, steps=_with_drops(steps))


def in_place(segment: Segment, bindings: Bindings) -> Mapping[int, Place]:
    """The values that can live in a destination from the first on."""
    makers: dict[int, Node] = {}
    first = len(segment.inputs)
    for node in segment.nodes:
        makers.update(dict.fromkeys(range(first, first + len(node.results)), node))
        first += len(node.results)
    types = segment.types()
    found: dict[int, Place] = {}
    for output, (value, binding) in enumerate(zip(segment.outputs, bindings, strict=True)):
        if binding is None or binding.mode is not Mode.WRITE or not binding.is_exclusive:
            continue
        kind = types[value]
        if kind is None:
            continue
        looks: list[Look] = []
        made = value
        while made in makers and (back := _undone(makers[made], types)) is not None:
            made, look = back
            looks += () if look is None else (look,)
        if made not in makers or made in found:
            continue
        if types[made] == _seen(replace(kind, stride=binding.stride), looks):
            found[made] = Place(output=output, looks=tuple(looks))
    return found


RESHAPES: Final = frozenset({"aten.view.default", "aten._unsafe_view.default"})
_SAME: Final = frozenset({"aten.alias.default", "aten.detach.default"})


def _undone(node: Node, types: Sequence[TensorType | None]) -> tuple[int, Look | None] | None:
    """If a node only looks at a value in another way: that value's number, and the way back."""
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


def _seen(kind: TensorType, looks: Sequence[Look]) -> TensorType | None:
    """The type of a tensor looked at in other ways; None where its strides do not allow that."""
    for look in looks:
        match look:
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
                assert_never(look)
    return kind


def _copied(segment: Segment, bindings: Bindings) -> Mapping[int, int]:
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


def laid_out_values(segment: Segment) -> set[int]:
    """Values whose strides decide whether a node that looks at them can, or what it sees."""
    ops = RESHAPES | {"aten.view.dtype", "zeroir.strided.default", "zeroir.strided_scatter.default"}
    return {ref.index for node in segment.nodes if node.op in ops for ref in node.refs()}


def _with_drops(steps: Sequence[Call | Move]) -> tuple[Call | Move, ...]:
    """Drop each value after its last use (a value that nobody uses: after it is made)."""
    last: dict[int, int] = {}
    for at, step in enumerate(steps):
        match step:
            case Call(node=node, first=first):
                used = {ref.index for ref in node.refs()}
                used |= set(range(first, first + len(node.results)))
            case Move(value=value):
                used = {value}
            case _:
                assert_never(step)
        last.update(dict.fromkeys(used, at))
    drops: list[list[int]] = [[] for _ in steps]
    for index, at in sorted(last.items()):
        drops[at].append(index)
    return tuple(replace(step, drops=tuple(of)) for step, of in zip(steps, drops, strict=True))
