"""Lower bounds of a step: times that no schedule of the same work can beat.

The stream ``compute`` runs one segment after the other, and no wire exceeds its bandwidth. So a step takes at least the
seconds of its segments, and at least the seconds that its collectives occupy the busiest wire.
"""

from __future__ import annotations

from zeroir.cost.classes import rank_classes
from zeroir.cost.durations import Durations
from zeroir.cost.machine import Machine
from zeroir.cost.tasks import require_micro_steps
from zeroir.ir import ops
from zeroir.ir.analysis.instances import at_largest
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE, Program


def compute_bound_s(program: Program, machine: Machine) -> float:
    """Return the total seconds of the segments of a step, where dims have their largest values."""
    program = at_largest(program)
    durations = Durations(program, machine)
    return sum(
        count * durations.segment(op.segment).seconds
        for count, op in _counted(program)
        if isinstance(op, ops.Compute)
    )


def wire_bound_s(program: Program, machine: Machine) -> float:
    """Return the seconds that the busiest wire of a rank is in use, without latencies.

    Raises:
        UserError: if a ring leaves a node of a machine without a network.
    """
    durations = Durations(program, machine)
    longest_s = 0.0
    for rank_class in rank_classes(program.mesh, machine.node_ranks):
        busy_s: dict[str, float] = {}
        for count, op in _counted(program):
            if isinstance(op, ops.Collective):
                ring = rank_class.rings[program.comm_by_name[op.comm].axis]
                transfer = durations.collective(op, ring)
                for wire, demand in transfer.demand_by_wire.items():
                    busy_s[wire] = busy_s.get(wire, 0.0) + count * transfer.transfer_s * demand
        longest_s = max(longest_s, *busy_s.values(), 0.0)
    return longest_s


def _counted(program: Program) -> list[tuple[int, ops.Op]]:
    """Return each op of a training step, and how often a step runs it."""
    micro_steps = require_micro_steps(program, None)
    repeats = micro_steps // program.interleaved - 1
    counts = {MICRO_STEP: repeats, LAST_MICRO_STEP: 1, UPDATE: 1}
    return [
        (counts[section.name], op)
        for section in program.sections
        if counts.get(section.name)
        for op in section.body
    ]
