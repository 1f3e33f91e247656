"""One rank that trains with paged optimizer states: ``python -m ... train`` or ``... resume``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.runtime.support import initial_flats, random_batches
from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.passes.page_optimizer import PageOptimizer
from zeroir.passes.pipelines import for_stage
from zeroir.passes.plan_memory import PlanMemory
from zeroir.passes.save_state import SaveState
from zeroir.runtime import rendezvous
from zeroir.runtime.engine import Engine

STEPS = 4
SAVED_AT = 2
STAGE = 1
"""The stage of saves: its states rest in parts of slices."""
SMALL = PageOptimizer(device_bytes=17_000, page_bytes=2048)
LARGE = PageOptimizer(device_bytes=9_000, page_bytes=4096)


def logical() -> Program:
    """A program whose states take 28,672 bytes on each of three ranks."""
    return mlp(blocks=2, dim=64, clip=1.0)


def free_logical() -> Program:
    """The same without clipping, so that its update may overlap the backward."""
    return mlp(blocks=2, dim=64)


def scheduled(
    program: Program,
    stage: int,
    world_size: int,
    paging: PageOptimizer | None,
    *,
    overlap_update: bool = False,
) -> Program:
    """The program at a stage, with pages or without."""
    paged = () if paging is None else (paging,)
    passes = for_stage(stage, world_size, overlap_update=overlap_update)
    return applied(program, (*passes, *paged, SaveState(), PlanMemory()))


def write(engine: Engine, path: Path, losses: list[float]) -> None:
    """Let rank 0 write losses and states."""
    tensors = {f"{f}/{quantity}": t for (f, quantity), t in engine.full_state().items()}
    tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
    if os.environ["RANK"] == "0":
        save_file({key: t.contiguous() for key, t in tensors.items()}, path)


def train(rank: int, world_size: int, folder: Path) -> None:
    """Train at every stage, and with the update in the backward."""
    batches = random_batches(STEPS, world_size)
    for stage in range(4):
        for is_overlapped in (False, True):
            program = scheduled(
                free_logical(), stage, world_size, SMALL, overlap_update=is_overlapped
            )
            engine = Engine(program)
            engine.initialise_flats(initial_flats(program))
            losses = [engine.step(step[rank]).loss for step in batches]
            write(engine, folder / f"{stage}.{is_overlapped}.safetensors", losses)
            engine.close()


def resume(rank: int, world_size: int, folder: Path) -> None:
    """Train and save in between; go on without pages, and with others."""
    batches = random_batches(STEPS, world_size)
    for name, saver in (("paged", SMALL), ("unpaged", None)):
        engine = Engine(scheduled(logical(), STAGE, world_size, saver))
        engine.initialise_flats(initial_flats(engine.program))
        losses = [engine.step(step[rank]).loss for step in batches[:SAVED_AT]]
        engine.save(folder / name, wait=name == "unpaged")
        losses += [engine.step(step[rank]).loss for step in batches[SAVED_AT:]]
        write(engine, folder / f"{name}.whole.safetensors", losses[SAVED_AT:])
        engine.close()
        for other, paging in (("none", None), ("small", SMALL), ("large", LARGE)):
            engine = Engine(scheduled(logical(), STAGE, world_size, paging))
            engine.load(folder / name)
            losses = [engine.step(step[rank]).loss for step in batches[SAVED_AT:]]
            write(engine, folder / f"{name}.{other}.safetensors", losses)
            engine.close()


def main(scenario: str) -> None:
    """Run a scenario."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(os.environ["TEST_FOLDER"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    {"train": train, "resume": resume}[scenario](rank, world_size, folder)
    rendezvous.leave_job()


if __name__ == "__main__":
    main(*sys.argv[1:])
