"""One rank of several that share a card: ``python -m tests.gpu.workers BACKEND PRECISION``."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.programs import mlp
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings

FOLDER = Path(os.environ["TEST_FOLDER"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = 10


def stages(backend: Backend, precision: str) -> None:
    """Ten AdamW steps at every stage; rank 0 writes losses and states."""
    device = torch.device("cuda", 0)
    logical = mlp(precision=precision, clip=0.5)
    batches = random_batches(STEPS, WORLD_SIZE)
    for stage in range(4):
        program = lowered(logical, stage, WORLD_SIZE)
        engine = Engine(program, EngineSettings(backend=backend), device=device)
        engine.initialise_flats(initial_flats(logical))
        losses = [engine.step(step[RANK]).loss for step in batches]
        tensors = {f"{flat}/{quantity}": t for (flat, quantity), t in engine.full_state().items()}
        found = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
        found["losses"] = torch.tensor(losses, dtype=torch.float64)
        engine.close()
        if RANK == 0:
            save_file(found, FOLDER / f"{stage}.safetensors")


def main() -> None:
    backend, precision = sys.argv[1:]
    torch.cuda.set_device(0)
    dist.init_process_group(
        backend,
        init_method=f"file://{FOLDER}/store",
        rank=RANK,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    stages(Backend(backend), precision)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
