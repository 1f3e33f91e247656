"""One rank that trains a model whose code decides by values: ``python -m tests.numerics.opaque_workers``."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

import zeroir
from tests.runtime.support import join
from tests.support import deciding_modules
from zeroir.api import CompiledProgram
from zeroir.errors import ModelWarning

STEPS, MICRO_STEPS = 4, 2


def batches_of(rank: int, options: Mapping[str, object]) -> list[list[Tensor]]:
    """Return the batches of a rank by step; with ``shapes`` their rows differ."""
    every = deciding_modules.batches(rank, 1, seed=5)
    if "shapes" in options:
        every = (batch[: 2 + (3 * rank + at) % 5] for at, batch in enumerate(every))
    return [list(islice(every, MICRO_STEPS)) for _ in range(STEPS)]


def compiled_for(world_size: int, options: Mapping[str, object]) -> CompiledProgram:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The code of", ModelWarning)
        return zeroir.compile(
            deciding_modules.__file__,
            world_size=world_size,
            lr=0.05,
            micro_steps=MICRO_STEPS,
            evaluate=False,
            **options,  # type: ignore[arg-type]
        )


def main() -> None:
    folder = Path(os.environ["TEST_FOLDER"])
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join()
    options = json.loads(os.environ["OPTIONS"])
    engine = compiled_for(world_size, options).engine()
    losses = [engine.step(batches).loss for batches in batches_of(rank, options)]
    save_file(
        {**engine.full_parameters(), "losses": torch.tensor(losses)},
        folder / f"trained{rank}.safetensors",
    )
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
