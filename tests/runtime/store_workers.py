"""One rank that saves to a store and loads from it: ``python -m tests.runtime.store_workers SCENARIO URL``."""

from __future__ import annotations

import os
import sys

from tests.runtime.support import begun, join, lowered, random_batches
from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.passes.memory.save_state import SaveState
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def save(url: str) -> None:
    """Save after the first step and, in the background, after the second; the process ends at once."""
    logical = mlp(dim=200, precision="fp16", clip=0.5, ema=0.9)
    engine = begun(
        Engine(applied(lowered(logical, 2, WORLD_SIZE), (SaveState(),)), EngineSettings(seed=11))
    )
    first, second = random_batches(2, WORLD_SIZE)
    engine.step(first[RANK])
    engine.save(f"{url}/step-00000001", read_back=True)
    engine.step(second[RANK])
    engine.save(f"{url}/step-00000002", state={"rank": RANK}, wait=False)


def load(url: str) -> None:
    """Take the second step again, on other ranks and at another stage."""
    engine = Engine(lowered(mlp(dim=200, precision="fp16", clip=0.5, ema=0.9), 3, WORLD_SIZE))
    loaded = engine.load(f"{url}/step-00000002")
    assert loaded.step == engine.step_count == 2
    assert [loaded.state_of(rank) for rank in range(2)] == [{"rank": 0}, {"rank": 1}]
    engine.close()


if __name__ == "__main__":
    scenario, url = sys.argv[1:]
    join()
    {"save": save, "load": load}[scenario](url)
