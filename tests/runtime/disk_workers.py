"""One rank with its state on disk: ``python -m tests.runtime.disk_workers NAME PRECISION STAGE``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.runtime.support import begun, join, random_batches, write_run
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.offload.offload_to_disk import OffloadToDisk
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings

STEPS = 4
TO_DISK = (OffloadOptimizer(), OffloadParameters(), OffloadToDisk(piece_numel=4096))


def logical(precision: str) -> Program:
    return mlp(dim=96, precision=precision, clip=0.5, ema=0.9, micro_steps=2)


def plain(precision: str, stage: int, world_size: int) -> Program:
    """A program that keeps everything on the device."""
    return applied(logical(precision), for_stage(stage, world_size))


def on_disk(precision: str, stage: int, world_size: int) -> Program:
    """The same with its optimizer and parameters on disk."""
    end = (*TO_DISK, SaveState(), PlanMemory())
    return applied(logical(precision), (*for_stage(stage, world_size), *end))


def main(name: str, precision: str, stage: str) -> None:
    """Train, save, and go on with another engine."""
    folder = Path(os.environ["TEST_FOLDER"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join(f"{name}.store")
    program = on_disk(precision, int(stage), world_size)
    batches = random_batches(STEPS, world_size, micro_steps=2)
    losses: list[float] = []
    engine = begun(Engine(program, EngineSettings(disk_folder=folder / "disk")))
    losses += [engine.step(ranks[rank]).loss for ranks in batches[: STEPS // 2]]
    engine.save(folder / f"{name}.saved", wait=False)
    engine.close()
    engine = Engine(program, EngineSettings(disk_folder=folder / "disk"))
    engine.load(folder / f"{name}.saved")
    losses += [engine.step(ranks[rank]).loss for ranks in batches[STEPS // 2 :]]
    write_run(engine, losses, name)
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
