"""What a program leaves of a model after two steps on virtual ranks."""

from __future__ import annotations

import torch

from zeroir.frontend import ModelSource
from zeroir.ir.buffers import Role
from zeroir.ir.program import Program
from zeroir.runtime.execution.lockstep import Lockstep

RANKS = 3
STEPS = 2


def trained(model_file: ModelSource, program: Program, micro_steps: int) -> list[torch.Tensor]:
    """The losses, the state and each rank's module buffers, in one order for all programs of a model."""
    lockstep = Lockstep(program, seed=3, schedule_seed=1)
    lockstep.initialise(model_file.model, 3)
    tensors: list[torch.Tensor] = []
    for _ in range(STEPS):
        batches = [[model_file.batch() for _ in range(micro_steps)] for _ in range(RANKS)]
        tensors += [result.loss.clone() for result in lockstep.step(batches)]
    tensors += [value for _, value in sorted(lockstep.full_state().items())]
    names = sorted(b.name for b in program.buffers if b.role is Role.MODULE_BUFFER)
    for rank in range(RANKS):
        tensors += [lockstep.buffers(rank)[name].clone() for name in names]
    return tensors
