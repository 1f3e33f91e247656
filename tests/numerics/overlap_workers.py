"""One rank that trains by merged collectives and an update in the backward: ``python -m ... BACKEND``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.runtime.support import initial_flats, random_batches
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.passes.manager import apply
from zeroir.passes.pipelines import for_stage
from zeroir.runtime import rendezvous
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.engine import Engine

STEPS = 6
BUCKET_BYTES = 6_000
"""Two or three of the flats of the small program, and an FP32 one with a BF16 one."""


def logical() -> Program:
    """A program with flats of two dtypes in each block."""
    return mlp(blocks=3, precision="bf16", keep_fp32=True)


def scheduled(stage: int, world_size: int) -> Program:
    """The program at a stage, with both passes."""
    program = logical()
    for step in for_stage(stage, world_size, bucket=BUCKET_BYTES, overlap_update=True):
        program = apply(step, program)
    return program


def main(backend: str) -> None:
    """Train at every stage; rank 0 writes losses and states."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(os.environ["TEST_FOLDER"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    batches = random_batches(STEPS, world_size)
    for stage in range(4):
        engine = Engine(scheduled(stage, world_size), backend=Backend(backend))
        engine.initialise_flats(initial_flats(logical()))
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
