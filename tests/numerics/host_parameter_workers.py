"""One rank that trains with its parameters in host memory: ``python -m … PRECISION BACKEND``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from tests.numerics.workers import Rank
from tests.runtime.constructors import Mlp
from tests.runtime.support import random_batches, require_parameters
from tests.runtime.workers_cases import CASES
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.passes.base import Pass
from zeroir.passes.memory.plan_memory import PlanMemory
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.distributed import rendezvous
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.torch_ops.batches import Batch

STEPS = 6


def passes(stage: int, world_size: int) -> tuple[Pass, ...]:
    """The passes of a stage, with parameters at home in host memory."""
    return (*for_stage(stage, world_size), OffloadParameters(), SaveState(), PlanMemory())


def _losses(
    engine: Engine, rank: Rank, batches: Sequence[Sequence[Sequence[Batch]]]
) -> list[float]:
    """The losses of steps, with a loan of some modules after each of them."""
    losses: list[float] = []
    for step in batches:
        losses.append(engine.step(step[rank.number]).loss)
        expected = engine.full_parameters()
        with engine.gathered("blocks", masters=True) as module:
            require_parameters(module, "blocks", expected, torch.float32)
    return losses


def main(name: str, backend: str) -> None:
    """A few steps at every stage, saved and resumed in the middle, with a loan of the module in between."""
    rank = Rank.joined()
    precision, clip = CASES[name]
    logical = mlp(precision=precision, clip=clip)
    batches = random_batches(STEPS, rank.world_size)
    for stage in range(4):
        program = applied(logical, passes(stage, rank.world_size))
        folder = rank.folder / f"saved.{stage}"

        def started(program: Program = program) -> Engine:
            engine = Engine(program, EngineSettings(backend=Backend(backend)))
            torch.manual_seed(0)
            engine.initialise(Mlp())
            return engine

        engine = started()
        losses = _losses(engine, rank, batches[: STEPS // 2])
        engine.save(folder)
        engine.close()
        engine = started()
        engine.load(folder)
        losses += _losses(engine, rank, batches[STEPS // 2 :])
        rank.finish(engine, losses, str(stage))
    rendezvous.leave_job()


if __name__ == "__main__":
    main(*sys.argv[1:])
