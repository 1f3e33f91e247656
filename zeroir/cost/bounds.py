"""What no schedule of the same work can beat: times below which a simulated step never falls.

The stream ``compute`` does one segment after the other, and a wire never carries more than it can. So a step takes at
least the seconds of its segments, and at least those that its collectives ask of the busiest wire.
"""

from __future__ import annotations

from zeroir.cost.classes import rank_classes
from zeroir.cost.durations import Durations
from zeroir.cost.machine import Machine
from zeroir.cost.tasks import require_micro_steps
from zeroir.ir import ops
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE, Program


def compute_bound_s(program: Program, machine: Machine) -> float:
    """Seconds of a step's segments, one after the other."""
    durations = Durations(program, machine)
    return sum(
        count * durations.segment(op.segment).seconds
        for count, op in _counted(program)
        if isinstance(op, ops.Compute)
    )


def wire_bound_s(program: Program, machine: Machine) -> float:
    """Seconds that the busiest wire of a rank is busy at least, without latencies.

    Raises:
        UserError: where a ring leaves a node of a machine without a network.
    """
    durations = Durations(program, machine)
    most = 0.0
    for one in rank_classes(program.mesh, machine.node_ranks):
        busy: dict[str, float] = {}
        for count, op in _counted(program):
            if isinstance(op, ops.Collective):
                ring = one.rings[program.comm_by_name[op.comm].axis]
                transfer = durations.collective(op, ring)
                for wire, demand in transfer.demand_by_wire.items():
                    busy[wire] = busy.get(wire, 0.0) + count * transfer.transfer_s * demand
        most = max(most, *busy.values(), 0.0)
    return most


def _counted(program: Program) -> list[tuple[int, ops.Op]]:
    """Each op of a training step, and how often the step does it."""
    micro_steps = require_micro_steps(program, None)
    counts = {MICRO_STEP: micro_steps - 1, LAST_MICRO_STEP: 1, UPDATE: 1}
    return [
        (counts[section.name], op)
        for section in program.sections
        if counts.get(section.name)
        for op in section.body
    ]
