"""Segments with fewer outputs, and with only the nodes and inputs that these outputs need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from zeroir.ir.segments.segment import Node, NodeArg, Ref, Segment
from zeroir.workspace.segments import eager_workspace


class Pruned(NamedTuple):
    """A pruned segment, with its old name, and the positions of the old inputs that it still takes."""

    segment: Segment
    inputs: tuple[int, ...]


def prune(segment: Segment, outputs: Sequence[int]) -> Pruned:
    """Return the segment that returns these of its values, given by number; its nodes keep their order."""
    needed = set(outputs)
    stop = len(segment.inputs) + sum(len(node.results) for node in segment.nodes)
    needed_nodes: list[tuple[int, Node]] = []
    for node in reversed(segment.nodes):
        stop -= len(node.results)
        if needed.intersection(range(stop, stop + len(node.results))):
            needed_nodes.append((stop, node))
            needed.update(ref.index for ref in node.refs())
    inputs = tuple(i for i in range(len(segment.inputs)) if i in needed)
    numbers = {value: i for i, value in enumerate(inputs)}
    for first, node in reversed(needed_nodes):
        for i in range(len(node.results)):
            numbers[first + i] = len(numbers)
    pruned = replace(
        segment,
        inputs=tuple(segment.inputs[i] for i in inputs),
        nodes=tuple(renumbered(node, numbers) for _, node in reversed(needed_nodes)),
        outputs=tuple(numbers[value] for value in outputs),
    )
    return Pruned(measured(pruned), inputs)


def renumbered(node: Node, numbers: Mapping[int, int]) -> Node:
    """Return the node on the same values with their new numbers."""
    return replace(
        node,
        args=tuple(_renumbered_arg(arg, numbers) for arg in node.args),
        kwargs=tuple((name, _renumbered_arg(arg, numbers)) for name, arg in node.kwargs),
    )


def measured(segment: Segment) -> Segment:
    """Return the segment with the eager workspace that it needs now."""
    return replace(segment, workspace_bytes=(("eager", eager_workspace(segment).most_bytes),))


def _renumbered_arg(arg: NodeArg, numbers: Mapping[int, int]) -> NodeArg:
    if isinstance(arg, Ref):
        return Ref(numbers[arg.index])
    if isinstance(arg, tuple):
        return tuple(_renumbered_arg(item, numbers) for item in arg)
    return arg
