"""One rank that trains with its parameters in host memory: ``python -m … PRECISION BACKEND``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.numerics.test_parameters_on_the_host import passes
from tests.runtime.constructors import Mlp
from tests.runtime.support import random_batches, require_parameters
from tests.runtime.workers_cases import CASES
from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.engine import Engine
from zeroir.torch_ops.batches import Batch

FOLDER = Path(os.environ["TEST_FOLDER"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = 6


def train(name: str, backend: str) -> None:
    """A few steps at every stage, saved and resumed in the middle, with a loan of the module in between."""
    precision, clip = CASES[name]
    logical = mlp(precision=precision, clip=clip)
    batches = random_batches(STEPS, WORLD_SIZE)
    for stage in range(4):
        program = applied(logical, passes(stage, WORLD_SIZE))
        folder = FOLDER / f"saved.{stage}"

        def started(program: Program = program) -> Engine:
            engine = Engine(program, backend=Backend(backend))
            torch.manual_seed(0)
            engine.initialise(Mlp())
            return engine

        engine = started()
        losses = _losses(engine, batches[: STEPS // 2])
        engine.save(folder)
        engine.close()
        engine = started()
        engine.load(folder)
        losses += _losses(engine, batches[STEPS // 2 :])
        tensors = {f"{flat}/{kind}": t for (flat, kind), t in engine.full_state().items()}
        tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
        engine.close()
        if RANK == 0:
            path = FOLDER / f"{stage}.safetensors"
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)


def _losses(engine: Engine, batches: Sequence[Sequence[Sequence[Batch]]]) -> list[float]:
    """The losses of steps, with a loan of some modules after each of them."""
    losses: list[float] = []
    for step in batches:
        losses.append(engine.step(step[RANK]).loss)
        expected = engine.full_parameters()
        with engine.gathered("blocks", masters=True) as module:
            require_parameters(module, "blocks", expected, torch.float32)
    return losses


def main() -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{FOLDER}/store",
        rank=RANK,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    train(*sys.argv[1:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
