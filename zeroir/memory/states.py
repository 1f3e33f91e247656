"""The bytes of model states that a program keeps on one rank.

They follow the ZeRO paper (Rajbhandari et al. 2020, §3.1): parameters, gradients, and the optimizer's master weights
and moments, counted in padded elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from zeroir.ir.buffers import Role
from zeroir.ir.program import Program

MODEL_STATE_ROLES: Final = (Role.PARAM, Role.GRAD, Role.MASTER, Role.STATE)
"""The roles of the ZeRO paper's model states."""


def model_state_bytes(program: Program) -> Mapping[str, int]:
    """Return bytes on one rank of the persistent parameters, gradients, master weights and states, by role.

    Buffers on the device, the host or a disk all count.
    """
    sizes = {role.value: 0 for role in MODEL_STATE_ROLES}
    for buffer in program.buffers:
        if buffer.is_persistent and buffer.role in MODEL_STATE_ROLES:
            sizes[buffer.role.value] += buffer.size_bytes
    return sizes


def snapshot_bytes(program: Program) -> int:
    """Return bytes of host memory on one rank that snapshots need from the first save on; 0 if nothing is saved."""
    return sum(b.size_bytes for b in program.buffers if b.role is Role.SNAPSHOT)
