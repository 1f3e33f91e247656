"""Splits the calls of units where ranks exchange tensors, and emits the collectives between the segments.

In a traced graph a gather and its transpose are operators. Segments are functions of one rank's values, so these
operators are outside of them, ops of the program. A call is split into parts: everything that needs no exchange, the
exchanges that need only that, everything that needs only those, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, zip_longest

from zeroir.frontend.capture.captured_graph import GraphNode
from zeroir.frontend.lowering.segment_calls import SegmentCall
from zeroir.frontend.lowering.unit_call import UnitCall
from zeroir.ir.buffers import Region
from zeroir.ir.mesh import COMPUTE, VALUES_COMM
from zeroir.ir.ops import AllGather, Op, Pair, ReduceScatter
from zeroir.ir.segments.segment import Node, Ref
from zeroir.torch_ops.ranks import GATHER, REDUCE


def is_exchange(node: GraphNode | Node) -> bool:
    """Return whether ranks exchange tensors at a node."""
    return node.op in (GATHER, REDUCE)


def split_at_exchanges(call: UnitCall) -> list[UnitCall]:
    """Return the parts of a call, of which every other one, in the forward and in the backward, has the exchanges."""
    forward, backward = _parts(call.forward), _parts(call.backward)
    if len(forward) == len(backward) == 1:
        return [call]
    # Backwards run in the reverse order of forwards.
    return [
        UnitCall(call.unit, call.label, call.index, early or [], late or [])
        for early, late in zip_longest(forward, reversed(backward))
    ]


def _parts(nodes: Sequence[GraphNode]) -> list[list[GraphNode]]:
    """Return the nodes that need no exchange, exchanges, what needs those, exchanges, and so on."""
    part_of = _part_of_values(nodes)
    parts: list[list[GraphNode]] = [[]]
    for node in nodes:
        at = part_of[node.results[0]]
        while len(parts) <= at + at % 2:
            parts.append([])
        parts[at].append(node)
    return parts


def _part_of_values(nodes: Sequence[GraphNode]) -> dict[int, int]:
    """Return the number of the part of each result: as early as possible, but what needs no value where it is used."""
    part_of: dict[int, int] = {}
    free: dict[int, GraphNode] = {}
    for node in nodes:
        # Parts of even numbers compute.
        at = max((part_of.get(ref, 0) for ref in node.refs()), default=0)
        if is_exchange(node):
            at += 1 if at % 2 == 0 else 2
        else:
            at += at % 2
            if all(ref in free for ref in node.refs()):
                free.update(dict.fromkeys(node.results, node))
        part_of.update(dict.fromkeys(node.results, at))
    used_in: dict[int, int] = {}
    for node in reversed(nodes):
        if node.results[0] in free:
            users = [used_in[result] for result in node.results if result in used_in]
            part_of.update(dict.fromkeys(node.results, min(users, default=0)))
        at = part_of[node.results[0]]
        for ref in node.refs():
            used_in[ref] = min(used_in.get(ref, at), at - at % 2)
    return part_of


def collectives(call: SegmentCall, place_of: Callable[[int], Region]) -> Iterator[Op]:
    """Yield the ops of an exchange; ``place_of`` is the region of each value of its segment."""
    segment = call.segment
    results = range(len(segment.inputs), len(segment.inputs) + len(segment.nodes))
    for op, pairs in groupby(
        sorted(zip(segment.nodes, results, strict=True), key=lambda each: each[0].op),
        key=lambda each: each[0].op,
    ):
        kind = AllGather if op == GATHER else ReduceScatter
        yield kind(pairs=tuple(_pairs(pairs, place_of)), comm=VALUES_COMM, stream=COMPUTE)


def _pairs(
    exchanges: Iterable[tuple[Node, int]], place_of: Callable[[int], Region]
) -> Iterator[Pair]:
    for node, result in exchanges:
        source = node.args[0]
        assert isinstance(source, Ref)
        yield Pair(source=place_of(source.index), destination=place_of(result))
