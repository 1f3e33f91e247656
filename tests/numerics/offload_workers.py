"""One rank that trains with buffers outside the memory of its device: ``python -m ... OFFLOAD BACKEND``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.runtime.support import initial_flats, random_batches
from tests.support.offloads import OFFLOADS
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.passes.manager import apply
from zeroir.passes.pipelines import for_stage
from zeroir.passes.plan_memory import PlanMemory
from zeroir.runtime import rendezvous
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.engine import Engine

STEPS: Final = 4
MICRO_STEPS: Final = 2


def logical(offload: str) -> Program:
    """A program deep enough that values are away from the device; where an update is speculative, some are clipped."""
    clip = 10.0 if "speculative" in offload else None
    return mlp(blocks=4, precision="bf16", micro_steps=MICRO_STEPS, clip=clip)


def scheduled(stage: int, world_size: int, offload: str) -> Program:
    """The program at a stage, with these passes and a plan of its memory."""
    program = logical(offload)
    passes = for_stage(stage, world_size, overlap_update=True)
    for step in (*passes, *OFFLOADS[offload], PlanMemory()):
        program = apply(step, program)
    return program


def main(offload: str, backend: str) -> None:
    """Train at every stage; rank 0 writes losses and states."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(os.environ["TEST_FOLDER"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    batches = random_batches(STEPS, world_size, MICRO_STEPS)
    for stage in range(4):
        engine = Engine(scheduled(stage, world_size, offload), backend=Backend(backend))
        engine.initialise_flats(initial_flats(logical(offload)))
        losses = [engine.step(step[rank]).loss for step in batches]
        tensors = {f"{f}/{quantity}": t for (f, quantity), t in engine.full_state().items()}
        tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
        engine.close()
        if rank == 0:
            save_file(
                {key: t.contiguous() for key, t in tensors.items()},
                folder / f"{stage}.safetensors",
            )
    rendezvous.leave_job()


if __name__ == "__main__":
    main(*sys.argv[1:])
