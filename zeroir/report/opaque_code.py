"""The code of a program that runs as it is, because it cannot be traced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, TypedDict

from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.ops import Compute
from zeroir.ir.program import Program
from zeroir.ir.segments.allowlist import OPAQUE_OPS
from zeroir.ir.segments.segment import Node, Segment
from zeroir.report.names import shortened
from zeroir.workspace.scratch.allowance import allowance_bytes


class OpaqueCode(TypedDict):
    """Modules whose code runs as it is for one ``reason``, which is empty where it is unknown or the user chose them.

    ``units`` compute them. The bytes are those of the largest call of a forward, and of a backward, beside its operands
    and results: planned ones, and the most that were measured, None if none were.
    """

    modules: list[str]
    units: list[str]
    reason: str
    forward_bytes: int
    backward_bytes: int
    measured_forward_bytes: int | None
    measured_backward_bytes: int | None


class DescribedModule(Protocol):
    """An opaque module by its name, why it cannot be traced, and the bytes of its forward and backward if measured."""

    @property
    def path(self) -> str: ...
    @property
    def reason(self) -> str: ...
    @property
    def forward_bytes(self) -> int | None: ...
    @property
    def backward_bytes(self) -> int | None: ...


KnownModules = Mapping[str, DescribedModule]
"""By the word that opaque calls name a module by."""


def has_opaque_code(program: Program) -> bool:
    """Return whether code of the model runs as it is in a program."""
    return any(node.op in OPAQUE_OPS for segment in program.segments for node in segment.nodes)


def opaque_code(program: Program, known: KnownModules) -> list[OpaqueCode]:
    """Return the code that runs as it is; of a module that is not ``known`` the unit is named instead."""
    nodes: dict[str, list[tuple[str, Segment, Node]]] = {}
    for op in program.ops():
        if isinstance(op, Compute):
            segment = program.segment_by_name[op.segment]
            for node in segment.nodes:
                if node.op in OPAQUE_OPS:
                    module = known.get(str(node.args[-1]))
                    reason = "" if module is None else module.reason
                    nodes.setdefault(reason, []).append((op.unit, segment, node))
    return [_code(reason, calls, known) for reason, calls in nodes.items()]


def traced_units(units: Iterable[str], code: Iterable[OpaqueCode]) -> list[str]:
    """Return those of the units that compute no code as it is."""
    around = {unit for each in code for unit in each["units"]}
    return [unit for unit in units if unit not in around]


def _code(reason: str, calls: list[tuple[str, Segment, Node]], known: KnownModules) -> OpaqueCode:
    planned = dict.fromkeys(OPAQUE_OPS, 0)
    names: dict[str, None] = {}
    words = {str(node.args[-1]): None for _, _, node in calls}
    for unit, segment, node in calls:
        module = known.get(str(node.args[-1]))
        names[unit if module is None else module.path] = None
        taken = node.workspace_bytes
        size = int(allowance_bytes(node, segment.types()) if taken is None else taken)
        planned[node.op] = max(planned[node.op], size)
    modules = [known[word] for word in words if word in known]
    forward, backward = OPAQUE_OPS
    return OpaqueCode(
        modules=list(names),
        units=list(dict.fromkeys(unit for unit, _, _ in calls)),
        reason=reason,
        forward_bytes=planned[forward],
        backward_bytes=planned[backward],
        measured_forward_bytes=_most(module.forward_bytes for module in modules),
        measured_backward_bytes=_most(module.backward_bytes for module in modules),
    )


def _most(sizes: Iterable[int | None]) -> int | None:
    return max((size for size in sizes if size is not None), default=None)


def lines_of(code: OpaqueCode) -> list[str]:
    """Return the modules with their memory, and the reason, which names the line to change."""
    names = [name or "the model itself" for name in code["modules"]]
    forward = _memory(code["forward_bytes"], code["measured_forward_bytes"])
    backward = _memory(code["backward_bytes"], code["measured_backward_bytes"])
    memory = f"at most {forward} in a forward and {backward} in a backward, beside operands"
    return [
        f"{' '.join(shortened(names))}: {memory}",
        *([code["reason"]] if code["reason"] else []),
    ]


def _memory(planned_bytes: int, measured_bytes: int | None) -> str:
    measured = "" if measured_bytes is None else f" (measured {format_bytes(measured_bytes)})"
    return f"{format_bytes(planned_bytes)}{measured}"
