"""The memory that running a segment takes beyond its inputs and destinations."""

from __future__ import annotations

from zeroir.ir.segment import Segment
from zeroir.ir.views import is_view


def eager_bytes(segment: Segment) -> int:
    """The most memory of a node-by-node execution: results live to their last use, outputs to the end."""
    # A view keeps what it looks into alive.
    owner = list(range(len(segment.inputs)))
    last: dict[int, int] = {}
    results: list[list[int]] = []
    for at, node in enumerate(segment.nodes):
        refs = [ref.index for ref in node.refs()]
        made = list(range(len(owner), len(owner) + len(node.results)))
        results.append(made)
        owner += [owner[refs[0]] if refs and is_view(node.op) else value for value in made]
        for value in (*refs, *made):
            last[owner[value]] = at
    for value in segment.outputs:
        last[owner[value]] = len(segment.nodes)
    types = segment.types()
    live = peak = 0
    dying: dict[int, int] = {}
    for at in range(len(segment.nodes)):
        for value in results[at]:
            kind = types[value]
            if owner[value] == value and kind is not None:
                live += kind.size_bytes
                dying[last[value]] = dying.get(last[value], 0) + kind.size_bytes
        peak = max(peak, live)
        live -= dying.pop(at, 0)
    return peak
