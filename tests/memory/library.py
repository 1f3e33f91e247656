"""Telling the scratch memory of libraries, which no program declares, from what the kernels make."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from zeroir.ir.segments.segment import Node, Segment
from zeroir.runtime.memory.allocations import AllocatorEvent
from zeroir.workspace.scratch.allowance import ATTENTION, allowance_bytes
from zeroir.workspace.scratch.attention import is_fused

_FUSED: Final[Mapping[str, str]] = {
    "zeroir.attention.default": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "zeroir.attention_backward.default": "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}
"""The one call of torch that attention is, between what our own operators prepare."""


def library_calls(segment: Segment) -> frozenset[str]:
    """The calls of torch within which a library may hold memory that it gives back before it returns."""
    types = segment.types()
    return frozenset(
        _FUSED[node.op] if node.op in ATTENTION and is_fused(node, types) else _called(node)
        for node in segment.nodes
        if allowance_bytes(node, types)
    )


def _called(node: Node) -> str:
    namespace, name, _ = node.op.split(".")
    return f"{namespace}::{name}"


def without_scratch(
    events: Iterable[AllocatorEvent], calls: Collection[str]
) -> list[AllocatorEvent]:
    """The events but those of blocks that were handed out and taken back within one and the same of these calls."""
    kept: list[AllocatorEvent | None] = []
    live: dict[int, int] = {}
    for event in events:
        if event.size_bytes >= 0:
            live[event.address] = len(kept)
            kept.append(event)
            continue
        at = live.pop(event.address, None)
        begun = None if at is None else kept[at]
        if at is not None and begun is not None and _meet(begun, event, calls):
            kept[at] = None
        else:
            kept.append(event)
    return [event for event in kept if event is not None]


def _meet(begun: AllocatorEvent, ended: AllocatorEvent, calls: Collection[str]) -> bool:
    return any(one.name in calls and one in ended.ranges for one in begun.ranges)
