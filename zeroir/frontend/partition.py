"""Assign every node of the joint graph to a *run*: one call of one unit, its forward and its backward.

Forward nodes follow each other by unit. What lies between two blocks in no unit joins the block before it unless it
uses parameters of its own. A backward node belongs to the run of the forward node that it differentiates, or to an
earlier one if it needs a result that is computed only there: backwards run in the reverse order of forwards, so no
cycle can arise.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

from zeroir.frontend.joint import Call, InputKind, Joint, JointNode
from zeroir.frontend.units import ROOT, ROOT_MID, ROOT_POST, ROOT_PRE, Units


@dataclass(slots=True)
class Run:
    """One call of a unit. ``label`` names its segments; ``count`` tells the calls of one unit apart."""

    unit: str
    label: str
    count: int
    forward: list[JointNode] = field(default_factory=list)
    backward: list[JointNode] = field(default_factory=list)


@dataclass(slots=True)
class _Stretch:
    call: Call | None
    nodes: list[JointNode]


def partition(joint: Joint, units: Units, canonical: Mapping[str, str]) -> list[Run]:
    """The runs in the order of their forwards. ``canonical`` maps every name of a parameter to its first."""
    parents = {result: node for node in joint.nodes for result in node.results}
    names = {
        item.value: canonical[item.name]
        for item in joint.inputs
        if item.kind is InputKind.PARAMETER
    }
    stretches = _merged(_stretches(joint, units), parents, names)
    runs = _named(stretches, units, parents, names)
    _add_backward(joint, runs)
    return runs


def parameter_of(
    value: int, parents: Mapping[int, JointNode], names: Mapping[int, str]
) -> str | None:
    """The parameter of which a value is a view or cast, through any number of them; None for other values."""
    while value not in names:
        node = parents.get(value)
        if node is None or not (node.is_view or node.op == "aten._to_copy.default"):
            return None
        (value,) = node.refs()
    return names[value]


def _stretches(joint: Joint, units: Units) -> list[_Stretch]:
    """Maximal sequences of forward nodes of one unit call, or of none."""
    found: list[_Stretch] = []
    place: dict[int, int] = {}
    for node in joint.nodes:
        if node.is_backward:
            continue
        if node.calls is None and found:
            # Nobody's: as early as its arguments allow.
            at = max((place[ref] for ref in node.refs() if ref in place), default=len(found) - 1)
        else:
            call = units.call(node.calls or ())
            if not found or found[-1].call != call:
                found.append(_Stretch(call, []))
            at = len(found) - 1
        found[at].nodes.append(node)
        place.update(dict.fromkeys(node.results, at))
    return found


def _merged(
    stretches: list[_Stretch], parents: Mapping[int, JointNode], names: Mapping[int, str]
) -> list[_Stretch]:
    """Join what lies between two unit calls without parameters of its own to the call before it."""
    found: list[_Stretch] = []
    for at, stretch in enumerate(stretches):
        is_between = stretch.call is None and 0 < at < len(stretches) - 1
        if is_between and not _parameters(stretch.nodes, parents, names):
            found[-1].nodes.extend(stretch.nodes)
        else:
            found.append(stretch)
    return found


def _parameters(
    nodes: list[JointNode], parents: Mapping[int, JointNode], names: Mapping[int, str]
) -> list[str]:
    found = (parameter_of(ref, parents, names) for node in nodes for ref in node.refs())
    return list(dict.fromkeys(name for name in found if name is not None))


def _named(
    stretches: list[_Stretch],
    units: Units,
    parents: Mapping[int, JointNode],
    names: Mapping[int, str],
) -> list[Run]:
    homes: dict[str, str] = {}
    counts: dict[str, int] = {}
    middle = [s for s in stretches[1:-1] if s.call is None]
    has_units = any(stretch.call is not None for stretch in stretches)
    runs: list[Run] = []
    if not stretches:
        return [Run(ROOT, ROOT, 0)]
    for at, stretch in enumerate(stretches):
        used = _parameters(stretch.nodes, parents, names)
        if stretch.call is not None:
            unit, label = stretch.call.module, units.labels[stretch.call.module]
        else:
            if not has_units:
                unit = ROOT
            elif at == 0:
                unit = ROOT_PRE
            elif at == len(stretches) - 1:
                unit = ROOT_POST
            elif all(name in homes for name in used):
                unit = homes[used[0]]
            else:
                index = next(i for i, other in enumerate(middle) if other is stretch)
                unit = ROOT_MID if len(middle) == 1 else f"{ROOT_MID}.{index}"
            label = unit
        for name in used:
            homes.setdefault(name, unit)
        runs.append(Run(unit, label, counts.get(unit, 0), forward=stretch.nodes))
        counts[unit] = counts.get(unit, 0) + 1
    return runs


def _add_backward(joint: Joint, runs: list[Run]) -> None:
    # Without forward nodes there is one run, and its origin is any.
    origins = sorted(
        (node.origin, at)
        for at, run in enumerate(runs)
        for node in run.forward
        if node.origin is not None
    )
    origins = origins or [(0, 0)]
    keys = [origin for origin, _ in origins]
    place: dict[int, int] = {}
    unplaced: list[JointNode] = []
    for node in joint.nodes:
        if not node.is_backward:
            continue
        bound = min((place[ref] for ref in node.refs() if ref in place), default=len(runs) - 1)
        at: int | None = None
        if node.origin is not None:
            # The nearest forward node at or before it, for its own may have been left out.
            found = max(bisect.bisect_right(keys, node.origin) - 1, 0)
            at = min(origins[found][1], bound)
        elif any(ref in place for ref in node.refs()):
            at = bound
        if at is None:
            unplaced.append(node)
            continue
        place.update(dict.fromkeys(node.results, at))
    # What depends on no other backward node goes where it is first needed.
    users = _users(joint, unplaced)
    for node in reversed(unplaced):
        found_at = (
            place[user.results[0]]
            for result in node.results
            for user in users[result]
            if user.results[0] in place
        )
        place.update(dict.fromkeys(node.results, max(found_at, default=len(runs) - 1)))
    for node in joint.nodes:
        if node.is_backward:
            runs[place[node.results[0]]].backward.append(node)


def _users(joint: Joint, nodes: list[JointNode]) -> dict[int, list[JointNode]]:
    """The nodes that use each result of some nodes."""
    found: dict[int, list[JointNode]] = {result: [] for node in nodes for result in node.results}
    if found:
        for user in joint.nodes:
            for ref in set(user.refs()) & found.keys():
                found[ref].append(user)
    return found
