"""A rank of a job in which rank 1 does something else from step 3 on: ``WHAT STAGE BACKEND``."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
from torch import Tensor, nn

import zeroir
from tests.runtime.support import join
from zeroir.errors import ZeroirError
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.distributed import section_comparison
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
BATCH = torch.ones(4, 8)
READ = {"gain": 1.0}
TIMEOUT = timedelta(seconds=120)
OF_ONE_BATCH = ("program", "change")

# A fifth of what ranks wait before they compare what they do, and before those that have not spoken end.
section_comparison.GRACE_S, section_comparison._END_S = 1.0, 2.0  # type: ignore[misc]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    outputs: Tensor = model(batch)
    return outputs.square().mean() * READ["gain"]


def open_engine(stage: int, micro_steps: int, backend: str) -> Engine:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    compiled = zeroir.compile(
        net, BATCH, loss=loss, world_size=WORLD_SIZE, stage=stage, micro_steps=micro_steps
    )
    if micro_steps == 1:  # which the engine itself can change
        return compiled.engine(timeout=TIMEOUT, self_check=False)
    engine = Engine(compiled.program, EngineSettings(backend=Backend(backend), timeout=TIMEOUT))
    engine.initialise(net)
    return engine


def train(engine: Engine, what: str) -> None:
    for step in range(1, 9):
        differs = RANK == 1 and step == 3
        if what == "evaluate" and differs:
            engine.evaluate(BATCH)
        if what == "change" and differs:
            READ["gain"] = 2.0
        micro_steps = 1 if what in OF_ONE_BATCH else 2
        for _ in range(micro_steps + (differs and what in ("micro-steps", "program"))):
            engine.micro_step(BATCH)
        engine.update()


def main() -> None:
    what, stage, backend = sys.argv[1:]
    join(timeout_s=120)
    engine = open_engine(int(stage), 1 if what in OF_ONE_BATCH else 2, backend)
    try:
        train(engine, what)
    except ZeroirError as error:
        print(f"Error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    engine.close()


if __name__ == "__main__":
    main()
