"""One rank that trains with paged optimizer states and resumes: ``python -m tests.numerics.paged_workers``."""

from __future__ import annotations

from typing import Final

from tests.numerics.trainings import PAGES
from tests.numerics.workers import Rank
from tests.runtime.support import begun, random_batches
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.page_optimizer import PageOptimizer
from zeroir.runtime.distributed import rendezvous
from zeroir.runtime.engine.engine import Engine

STEPS: Final = 4
SAVED_AT: Final = 2
STAGE: Final = 1
"""The stage of saves: its states rest in parts of slices."""
SMALL: Final = PAGES
LARGE: Final = PageOptimizer(device_bytes=9_000, page_bytes=4096)


def logical() -> Program:
    """A program whose states take 28,672 bytes on each of three ranks."""
    return mlp(blocks=2, dim=64, clip=1.0)


def scheduled(
    program: Program, stage: int, world_size: int, paging: PageOptimizer | None
) -> Program:
    """The program at a stage, with pages or without."""
    paged = () if paging is None else (paging,)
    return applied(program, (*for_stage(stage, world_size), *paged, SaveState(), PlanMemory()))


def main() -> None:
    """Train and save in between; go on without pages, and with others."""
    rank = Rank.joined()
    batches = random_batches(STEPS, rank.world_size)
    for name, saver in (("paged", SMALL), ("unpaged", None)):
        engine = begun(Engine(scheduled(logical(), STAGE, rank.world_size, saver)))
        losses = [engine.step(step[rank.number]).loss for step in batches[:SAVED_AT]]
        engine.save(rank.folder / name, wait=name == "unpaged")
        losses += [engine.step(step[rank.number]).loss for step in batches[SAVED_AT:]]
        rank.finish(engine, losses[SAVED_AT:], f"{name}.whole")
        for other, paging in (("none", None), ("small", SMALL), ("large", LARGE)):
            engine = Engine(scheduled(logical(), STAGE, rank.world_size, paging))
            engine.load(rank.folder / name)
            losses = [engine.step(step[rank.number]).loss for step in batches[SAVED_AT:]]
            rank.finish(engine, losses, f"{name}.{other}")
    rendezvous.leave_job()


if __name__ == "__main__":
    main()
