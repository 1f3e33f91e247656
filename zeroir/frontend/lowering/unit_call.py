"""The nodes of the joint graph that belong to one call of a unit."""

from __future__ import annotations

from dataclasses import dataclass, field

from zeroir.frontend.capture.captured_graph import GraphNode


@dataclass(slots=True)
class UnitCall:
    """One call of a unit, or a part of it. ``label`` names its segments; ``index`` is its call index, from 0."""

    unit: str
    label: str
    index: int
    forward: list[GraphNode] = field(default_factory=list)
    backward: list[GraphNode] = field(default_factory=list)
