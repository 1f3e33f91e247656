"""Value numbers of segment results: equal numbers mean equal values, whatever the buffers they pass through."""

from __future__ import annotations

from collections.abc import Hashable

from zeroir.ir.program import Program
from zeroir.ir.segment import Node, NodeArg, Ref, Segment
from zeroir.ir.verify.domain import Numbering


class Segments:
    """Numbers the outputs of calls. By segment: hash(digest, operands). By node: a hash for every value inside.

    Numbering by node is finer: it sees through a segment that was cut in two or whose outputs were chosen anew,
    and costs as much as the segment is long.
    """

    def __init__(self, program: Program, numbering: Numbering, *, by_node: bool) -> None:
        self._segments = program.segment_by_name
        self._numbering = numbering
        self._by_node = by_node
        self._digests: dict[str, str] = {}
        self._known: dict[tuple[str, int], tuple[int, ...]] = {}

    def results(self, name: str, operands: tuple[Hashable, ...]) -> tuple[int, ...]:
        """One number per output of the segment."""
        digest = self._digests.get(name)
        if digest is None:
            digest = self._digests[name] = self._segments[name].digest()
        call = self._numbering.of((digest, operands))
        found = self._known.get((digest, call))
        if found is None:
            segment = self._segments[name]
            if self._by_node:
                found = self._nodes(segment, operands)
            else:
                of = self._numbering.of
                found = tuple(of((call, i)) for i in range(len(segment.outputs)))
            self._known[digest, call] = found
        return found

    def _nodes(self, segment: Segment, operands: tuple[Hashable, ...]) -> tuple[int, ...]:
        of = self._numbering.of
        # An operand that is itself a computed value keeps its number, so that cuts leave no trace.
        values = [value if isinstance(value, int) else of(("operand", value)) for value in operands]
        for node in segment.nodes:
            key = of(_node_key(node, values))
            values += [of((key, "result", i)) for i in range(len(node.results))]
        return tuple(values[index] for index in segment.outputs)


def _node_key(node: Node, values: list[int]) -> Hashable:
    def key(arg: NodeArg) -> Hashable:
        if isinstance(arg, Ref):
            return ("value", values[arg.index])
        if isinstance(arg, tuple):
            return tuple(key(item) for item in arg)
        # 1, 1.0 and True are equal keys but different arguments.
        return (type(arg).__name__, arg)

    args = tuple(key(arg) for arg in node.args)
    kwargs = tuple((name, key(arg)) for name, arg in node.kwargs)
    return ("node", node.op, args, kwargs, node.results)
