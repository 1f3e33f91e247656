"""One rank that trains with its optimizer and its gradients on the host: ``python -m ... BACKEND``."""

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
from zeroir.passes.base import Pass
from zeroir.passes.manager import apply
from zeroir.passes.offload_gradients import OffloadGradients
from zeroir.passes.offload_optimizer import OffloadOptimizer
from zeroir.passes.pipelines import for_stage
from zeroir.passes.plan_memory import PlanMemory
from zeroir.passes.save_state import SaveState
from zeroir.runtime import rendezvous
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.engine import Engine

STEPS = 4
WAYS: dict[str, tuple[Pass, ...]] = {
    "optimizer": (OffloadOptimizer(),),
    "both": (OffloadOptimizer(), OffloadGradients()),
}


def logical(*, is_clipped: bool) -> Program:
    """A program with flats of two dtypes in each block."""
    clip = 0.5 if is_clipped else None
    return mlp(blocks=3, precision="bf16", keep_fp32=True, ema=0.9, clip=clip)


def scheduled(stage: int, world_size: int, way: str, *, is_clipped: bool) -> Program:
    """The program at a stage with its optimizer on the host; without clipping it is updated in the backward."""
    program = logical(is_clipped=is_clipped)
    passes = for_stage(stage, world_size, overlap_update=not is_clipped)
    for step in (*passes, *WAYS[way], SaveState(), PlanMemory()):
        program = apply(step, program)
    return program


def main(backend: str) -> None:
    """Train at stages 0 and 3, in every way; rank 0 writes losses and states."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(os.environ["TEST_FOLDER"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    batches = random_batches(STEPS, world_size)
    for stage in (0, 3):
        for way in WAYS:
            for is_clipped in (False, True):
                program = scheduled(stage, world_size, way, is_clipped=is_clipped)
                engine = Engine(program, backend=Backend(backend))
                engine.initialise_flats(initial_flats(logical(is_clipped=is_clipped)))
                losses = [engine.step(step[rank]).loss for step in batches]
                tensors = {f"{f}/{name}": t for (f, name), t in engine.full_state().items()}
                tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
                engine.close()
                if rank == 0:
                    path = folder / f"{stage}-{way}-{is_clipped}.safetensors"
                    save_file({key: t.contiguous() for key, t in tensors.items()}, path)
    rendezvous.leave_job()


if __name__ == "__main__":
    main(sys.argv[1])
