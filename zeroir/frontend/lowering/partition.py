"""Assigns every node of the joint graph to the forward or the backward of one call of one unit.

Consecutive forward nodes of one unit's call belong together. Nodes between two units join the call before them unless
they use parameters of their own. A backward node belongs to the call of the forward node that it differentiates, or to
an earlier call if it needs a result that only that one's backward computes: backwards run in the reverse order of
forwards, so no cycle can arise.

Where the model gathers tensors of all ranks, a call is split: the collectives are parts of their own, between what they
need and what needs them.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

from zeroir.frontend.capture.captured_graph import CapturedGraph, GraphNode, InputKind, ModuleCall
from zeroir.frontend.lowering.exchanges import split_at_exchanges
from zeroir.frontend.lowering.unit_call import UnitCall
from zeroir.frontend.lowering.units import ROOT, ROOT_MID, ROOT_POST, ROOT_PRE, UnitModules


@dataclass(slots=True)
class _ForwardRange:
    """Consecutive forward nodes of one call of a unit's module, or of none."""

    call: ModuleCall | None
    nodes: list[GraphNode]


def partition(
    joint: CapturedGraph, units: UnitModules, canonical: Mapping[str, str]
) -> list[UnitCall]:
    """Return the unit calls in the order of their forwards.

    ``canonical`` maps every name of a parameter to its first.
    """
    parents = {result: node for node in joint.nodes for result in node.results}
    names = {
        item.value: canonical[item.name]
        for item in joint.inputs
        if item.kind is InputKind.PARAMETER
    }
    ranges = _merged(_forward_ranges(joint, units), parents, names)
    unit_calls = _unit_calls(ranges, units, parents, names)
    _add_backward(joint, unit_calls)
    return [part for call in unit_calls for part in split_at_exchanges(call)]


def parameter_of(
    value: int, parents: Mapping[int, GraphNode], names: Mapping[int, str]
) -> str | None:
    """Return the parameter of which a value is a view or cast, or a chain of them; None for other values."""
    while value not in names:
        node = parents.get(value)
        if node is None or not (node.is_view or node.op == "aten._to_copy.default"):
            return None
        (value,) = node.refs()
    return names[value]


def _forward_ranges(joint: CapturedGraph, units: UnitModules) -> list[_ForwardRange]:
    """Return the forward nodes in maximal ranges of one call of a unit's module, or of none."""
    ranges: list[_ForwardRange] = []
    range_of: dict[int, int] = {}
    # Torch copies new values to the buffers of modules after the whole forward, wherever it computes them.
    new_values = {value for _, value in joint.mutations}
    for node in joint.nodes:
        if node.is_backward:
            continue
        is_copied = node.op == "aten.copy.default" and not new_values.isdisjoint(node.results)
        if (node.calls is None or is_copied) and ranges:
            # Belongs to no module: placed as early as its arguments allow.
            at = max(
                (range_of[ref] for ref in node.refs() if ref in range_of), default=len(ranges) - 1
            )
        else:
            call = units.call(node.calls or ())
            if not ranges or ranges[-1].call != call:
                ranges.append(_ForwardRange(call, []))
            at = len(ranges) - 1
        ranges[at].nodes.append(node)
        range_of.update(dict.fromkeys(node.results, at))
    return ranges


def _merged(
    ranges: list[_ForwardRange], parents: Mapping[int, GraphNode], names: Mapping[int, str]
) -> list[_ForwardRange]:
    """Merge a range between two unit calls into the call before it, unless it uses parameters of its own."""
    merged: list[_ForwardRange] = []
    for at, current in enumerate(ranges):
        is_between = current.call is None and 0 < at < len(ranges) - 1
        if is_between and not _parameters(current.nodes, parents, names):
            merged[-1].nodes.extend(current.nodes)
        else:
            merged.append(current)
    return merged


def _parameters(
    nodes: list[GraphNode], parents: Mapping[int, GraphNode], names: Mapping[int, str]
) -> list[str]:
    parameters = (parameter_of(ref, parents, names) for node in nodes for ref in node.refs())
    return list(dict.fromkeys(name for name in parameters if name is not None))


def _unit_calls(
    ranges: list[_ForwardRange],
    units: UnitModules,
    parents: Mapping[int, GraphNode],
    names: Mapping[int, str],
) -> list[UnitCall]:
    """Return a unit call for each range; ranges outside the units belong to parts of the root."""
    unit_of: dict[str, str] = {}
    counts: dict[str, int] = {}
    middle = [r for r in ranges[1:-1] if r.call is None]
    has_units = any(r.call is not None for r in ranges)
    unit_calls: list[UnitCall] = []
    if not ranges:
        return [UnitCall(ROOT, ROOT, 0)]
    for at, current in enumerate(ranges):
        used = _parameters(current.nodes, parents, names)
        if current.call is not None:
            unit, label = current.call.module, units.labels[current.call.module]
        else:
            if not has_units:
                unit = ROOT
            elif at == 0:
                unit = ROOT_PRE
            elif at == len(ranges) - 1:
                unit = ROOT_POST
            elif all(name in unit_of for name in used):
                unit = unit_of[used[0]]
            else:
                index = next(i for i, r in enumerate(middle) if r is current)
                unit = ROOT_MID if len(middle) == 1 else f"{ROOT_MID}.{index}"
            label = unit
        for name in used:
            unit_of.setdefault(name, unit)
        unit_calls.append(UnitCall(unit, label, counts.get(unit, 0), forward=current.nodes))
        counts[unit] = counts.get(unit, 0) + 1
    return unit_calls


def _add_backward(joint: CapturedGraph, unit_calls: list[UnitCall]) -> None:
    # Without forward nodes there is one unit call, whose origin does not matter.
    origins = sorted(
        (node.origin, at)
        for at, call in enumerate(unit_calls)
        for node in call.forward
        if node.origin is not None
    )
    origins = origins or [(0, 0)]
    keys = [origin for origin, _ in origins]
    call_of: dict[int, int] = {}
    unassigned: list[GraphNode] = []
    for node in joint.nodes:
        if not node.is_backward:
            continue
        latest = min(
            (call_of[ref] for ref in node.refs() if ref in call_of), default=len(unit_calls) - 1
        )
        at: int | None = None
        if node.origin is not None:
            # The nearest forward node at or before its origin, because its own may have been omitted.
            nearest = max(bisect.bisect_right(keys, node.origin) - 1, 0)
            at = min(origins[nearest][1], latest)
        elif any(ref in call_of for ref in node.refs()):
            at = latest
        if at is None:
            unassigned.append(node)
            continue
        call_of.update(dict.fromkeys(node.results, at))
    # A node that depends on no other backward node belongs to the first call that uses it.
    users = _users(joint, unassigned)
    for node in reversed(unassigned):
        user_calls = (
            call_of[user.results[0]]
            for result in node.results
            for user in users[result]
            if user.results[0] in call_of
        )
        latest = max(user_calls, default=len(unit_calls) - 1)
        call_of.update(dict.fromkeys(node.results, latest))
    for node in joint.nodes:
        if node.is_backward:
            unit_calls[call_of[node.results[0]]].backward.append(node)


def _users(joint: CapturedGraph, nodes: list[GraphNode]) -> dict[int, list[GraphNode]]:
    """Return the nodes that use each result of the given nodes."""
    users: dict[int, list[GraphNode]] = {result: [] for node in nodes for result in node.results}
    if users:
        for node in joint.nodes:
            for ref in set(node.refs()) & users.keys():
                users[ref].append(node)
    return users
