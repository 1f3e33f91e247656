"""The time of a model's own arithmetic at the peak of a device, which MFU is based on."""

from __future__ import annotations

from zeroir.cost.durations import segment_cost
from zeroir.cost.machine import Machine
from zeroir.ir import ops
from zeroir.ir.program import LAST_MICRO_STEP, Program


def micro_step_at_peak_s(logical: Program, machine: Machine) -> float:
    """Return the seconds that one rank's micro-step takes at the dense peak, by the program for one device.

    That program recomputes nothing, so the resulting fraction of the peak is the MFU of Chowdhery et al. 2022 (arXiv
    2204.02311), which does not count work that is done twice.
    """
    return sum(
        flops / machine.compute.peak_flops_per_s(dtype)
        for op in logical.section_by_name[LAST_MICRO_STEP].body
        if isinstance(op, ops.Compute)
        for dtype, flops in segment_cost(logical.segment_by_name[op.segment], machine).flops.items()
    )
