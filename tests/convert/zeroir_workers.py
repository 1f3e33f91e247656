"""One rank that trains with zeroir, saves a checkpoint and goes on: ``python -m tests.convert.zeroir_workers``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import zeroir
from tests.convert import torch_workers


def main() -> None:
    folder, stage = Path(sys.argv[1]), int(sys.argv[2])
    torch_workers.join(folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = torch_workers.Net()
    compiled = zeroir.compile(
        module,
        torch_workers.batch(0).chunk(size)[rank],
        optimizer=torch_workers.optimizer_of(module),
        stage=stage,
        world_size=size,
    )
    engine = compiled.engine(self_check=False)
    steps = [
        torch_workers.batch(step).chunk(size)[rank] for step in range(torch_workers.AFTER.stop)
    ]
    for part in steps[: torch_workers.STEPS_BEFORE]:
        engine.step(part)
    engine.save(folder / "checkpoint")
    results = [engine.step(part) for part in steps[torch_workers.STEPS_BEFORE :]]
    losses = [result.mean_loss for result in results]
    if rank == 0:
        (folder / "zeroir.json").write_text(json.dumps(losses))
    engine.close()
    torch_workers.leave()


if __name__ == "__main__":
    main()
